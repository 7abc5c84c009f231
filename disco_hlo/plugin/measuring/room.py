"""What is left for what runs beside the training that waits, memory and cores: on all ranks the same answer.

On a GPU memory is the device's own. On CPU all devices of all processes of a host share what the host has, and a
process that takes more is killed.

Each module that is compiled takes a core and some gigabytes, and ranks of a host share its cores. Ranks go through the
same modules in the same order, so many at a time. Where XLA:GPU's autotuner shares its work among them, a rank waits
inside a compile for what the others find; in the first module that some rank has not compiled nobody waits for a later
one, so they cannot wait for each other.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from disco_hlo.activation.channel import name_ranks
from disco_hlo.backends import BACKENDS
from disco_hlo.cores import own_cores
from disco_hlo.elsewhere import Run, elsewhere, here
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.tolerances import kept_bytes
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla.executables import (
    LoadedExecutable,
    memory,
    read_executable,
    results,
    tuning_bytes,
)
from disco_hlo.plugin.xla.job import (
    free_device_bytes,
    free_host_bytes,
    may_rise_at_peak_bytes,
    may_rise_bytes,
)
from disco_hlo.search.joint import WORTH_A_PROCESS
from disco_hlo.simulator.build import resident_bytes

_USABLE = 0.9
"""Part of the free memory that may be taken: what is free lies in pieces."""
PASSES = 3
"""In which results are compared where the host has no room to keep all of them: each runs everything again."""
_TIMES_THE_ROOM = 2
"""All are kept where a host has so many times what that takes."""
_LITTLE_BYTES = 256 << 20
"""Of the host a device, which devices reach in a quarter of a second."""
Module = TypeVar("Module")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What is free where a rank runs; None where that is not said."""

    host: str
    devices: int
    device_bytes: int | None
    """On each of its devices, where these have memory of their own."""
    host_bytes: int | None


def room_bytes(session: Session, *, on_host: bool = False) -> int | None:
    """Usable memory of each device, the least of all ranks; None where nobody says. ``on_host``: what the host has
    for each device, where devices have memory of their own, too. Beside a training no more of a device than it may rise
    by. Raises ActivationError: ranks were silent."""
    request = session.request
    own = None if on_host else free_device_bytes(request)
    on_this_host = free_host_bytes() if own is None else None
    if own is not None and session.on_calls is not None:
        rise = may_rise_bytes(request)
        own = own if rise is None else min(own, int(max(0, rise) / _USABLE))
    mine = socket.gethostname(), len(request.local_devices), own, on_this_host
    least = least_bytes(RankMemory(*one) for one in session.gathered(mine, "room"))
    return None if least is None else int(_USABLE * least)


def limited_bytes(settings: Settings, room: int | None, graph: Graph) -> int | None:
    """What a plan may take of each device beside a step's arguments and results: of the ``room`` (:func:`room_bytes`)
    no more than the user's limit leaves."""
    if settings.memory_bytes is None:
        return room
    left = max(0, settings.memory_bytes - resident_bytes(graph))
    return left if room is None else min(room, left)


def passes_on_host(default: LoadedExecutable, room: int) -> int:
    """In how many passes candidates are compared with XLA's ``default`` on real inputs, where hosts have so much room
    for each device."""
    return 1 if _TIMES_THE_ROOM * needed_on_host_bytes(default, 1) <= room else PASSES


def in_passes(kept_bytes: Sequence[int], most: int) -> list[frozenset[int]]:
    """The results, of which so much is kept on the host, that are compared in one pass each: in at most so many passes
    of about the same size, or all in one where that takes little."""
    passes: list[set[int]] = [set() for _ in range(most if sum(kept_bytes) > _LITTLE_BYTES else 1)]
    taken = [0] * len(passes)
    for number in sorted(range(len(kept_bytes)), key=lambda one: -kept_bytes[one]):
        least = taken.index(min(taken))
        passes[least].add(number)
        taken[least] += kept_bytes[number]
    return [frozenset(numbers) for numbers in passes if numbers] or [frozenset()]


def needed_on_host_bytes(default: LoadedExecutable, passes: int) -> int:
    """Host memory for each device while candidates are compared with XLA's ``default`` on real inputs, beside what runs
    take: a copy of its arguments, and what it computed of them and how far each number may be off, of one of so many
    ``passes`` (:func:`in_passes`)."""
    kept = [kept_bytes(*one) for one in results(default)]
    largest = max(sum(kept[number] for number in one) for one in in_passes(kept, passes))
    return memory(default).arguments_bytes + largest


def least_bytes(ranks: Iterable[RankMemory]) -> int | None:
    """What is free for each device, where those of one host share what it has."""
    found: list[int] = []
    hosts: dict[str, list[RankMemory]] = defaultdict(list)
    for rank in ranks:
        if rank.device_bytes is not None:
            found.append(rank.device_bytes)
        elif rank.host_bytes is not None:
            hosts[rank.host].append(rank)
    for sharing in hosts.values():
        free = min(rank.host_bytes or 0 for rank in sharing)
        found.append(free // max(1, sum(rank.devices for rank in sharing)))
    return min(found, default=None)


def lack_of_memory(
    session: Session,
    name: str,
    executable: LoadedExecutable,
    inputs_of: Runner | None = None,
    given_back_bytes: int = 0,
) -> str:
    """On which ranks a module, by its name in words, has too little room to be run, the same on all; empty where it has
    enough.

    Args:
        inputs_of: whose inputs it runs on; those that it does not take over need no room of their own.
        given_back_bytes: what will be free on each device by then, besides.

    Raises:
        ActivationError: a rank failed, or ranks were silent.
    """
    with session.stage(f"room for the {name}"):
        needs = memory(executable)
        needed = needs.total_bytes - given_back_bytes
        if inputs_of is not None:
            needed -= max(0, needs.arguments_bytes - inputs_of.donated_bytes())
    usable = room_bytes(session)
    lack = ""
    if usable is not None and needed > usable:
        lack = f"it needs {whole_mib(needed)} MiB a device, {usable >> 20} MiB of what is free are usable"
    answers = session.gathered(lack, "memory")
    lacking = [rank for rank, answer in enumerate(answers) if answer]
    return f"{name_ranks(lacking)}: {answers[lacking[0]]}" if lacking else ""


def most_needed_bytes(session: Session, name: str, executable: LoadedExecutable) -> int:
    """What a module, by its name in words, needs on each device, the most of all ranks. Raises ActivationError as
    :func:`lack_of_memory`."""
    with session.stage(f"memory of the {name}"):
        needed = memory(executable).total_bytes
    return int(max(session.gathered(needed, "memory needed")))


def over_limit(needed_bytes: int, most_bytes: int | None) -> str:
    """That this is more than a plan may need, as one line; empty where it is not, or there is no limit."""
    if most_bytes is None or needed_bytes <= most_bytes:
        return ""
    return f"it needs {whole_mib(needed_bytes)} MiB a device, {most_bytes >> 20} MiB are the most that it may need"


def whole_mib(needed_bytes: int) -> int:
    """What is needed in MiB, rounded up: room is rounded down, and what lacks it shall not be said to fit."""
    return -(-needed_bytes >> 20)


def beyond_setting(session: Session, name: str, executable: LoadedExecutable) -> str:
    """As :func:`over_limit` of a module, where the user's setting is the limit, the same on all ranks."""
    needed = most_needed_bytes(session, name, executable)
    told: str = session.tell(over_limit(needed, session.settings.memory_bytes), "limit")
    return told


def compiles_at_once(session: Session) -> int:
    """How many modules every rank compiles at once; the same number on all. A training that goes on keeps a core.
    Raises ActivationError: ranks were silent."""
    fewest = fewest_cores(session.gathered((socket.gethostname(), own_cores()), "cores"))
    beside = session.between_steps is not None and not session.compiles_between_steps
    return min(session.compiles_at_once, max(1, fewest - 1) if beside else fewest)


def interpreter(source: CanonicalModule) -> Run:
    """Where Python runs that takes long on a step of many ops: not here, where all threads would wait for it."""
    return elsewhere if len(source.graph) >= WORTH_A_PROCESS and len(own_cores()) > 1 else here


def with_room_to_compile(session: Session) -> Session:
    """A session that compiles, beside a training and on all ranks alike, only what memory has room for.

    XLA:GPU's autotuner runs a kernel on arrays of its own. Where a step leaves too little for these, modules are
    compiled between two calls: what a step takes for temporaries is free then, as it was when JAX compiled the step.
    Raises UnsupportedError: XLA's default cannot be read; ActivationError: ranks were silent.
    """
    request, most = session.request, session.compiles_at_once
    if not BACKENDS[session.facts.backend].autotunes:
        return session
    with session.stage("room to compile"):
        default = request.call_default()
        asked = tuning_bytes(read_executable(default))
        mine = may_rise_at_peak_bytes(request), memory(default).temporaries_bytes, asked
    every = session.gathered(mine, "room to compile")
    asked = max(1, *(needs for _, _, needs in every))
    rises = [
        (_USABLE * rise // asked, _USABLE * (rise + more) // asked)
        for rise, more, _ in every
        if rise is not None
    ]
    if not rises:
        return session
    beside, between = (int(min(counts)) for counts in zip(*rises, strict=True))
    LOGGER.debug(
        "a compile may take %d MiB of a device; there is room for %d beside a step, for %d between two",
        asked >> 20, beside, between,
    )  # fmt: skip
    return replace(
        session, compiles_at_once=min(most, max(1, beside or between)), compiles_between_steps=not beside
    )


def in_turn(session: Session, modules: Sequence[Module], at_once: int) -> list[Sequence[Module]]:
    """``modules`` in the parts for which :meth:`Session.compiling` is entered, so many each where that holds a call."""
    size = at_once if session.compiles_between_steps else max(1, len(modules))
    return [modules[first : first + size] for first in range(0, len(modules), size)]


def fewest_cores(ranks: Iterable[tuple[str, list[int]]]) -> int:
    """The least number of cores that a rank has to itself, at least 1. For each of the ``ranks`` its host and the
    cores it may run on: those of one host share what they may all run on."""
    hosts: dict[str, list[list[int]]] = defaultdict(list)
    for host, cores in ranks:
        hosts[host].append(cores)
    shares = [
        min(len(cores), len(set().union(*every)) // len(every)) for every in hosts.values() for cores in every
    ]
    return max(1, min(shares))
