"""Structures within the memory that devices have: which have no room, and what is kept where all would have none.

A structure's memory is predicted of what XLA makes of it; where that comes near the limit, it is compiled, and XLA's
buffer assignment tells.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.collectives import collective_bytes, collective_kind
from disco_hlo.optimize.costs import Costs
from disco_hlo.optimize.pipeline import Case
from disco_hlo.optimize.regions import calls_by_caller, regions_callees_first
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.measuring.compiling import compile_default
from disco_hlo.plugin.measuring.room import most_needed_bytes, over_limit, whole_mib
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.structure import KEEPS, Early, Restructured
from disco_hlo.printable import counted
from disco_hlo.structure.choose import Prices
from disco_hlo.structure.moves import to_json
from disco_hlo.structure.propose_loops import KEPT_IN_PART, InPart, kept_in_part

_HOLD = (KEEPS, "gather-once")
"""With these begin the names of schedules that hold what others make again."""
_PREDICTED_WITHIN = 0.1
"""A structure that is predicted to need so much less than the limit, as a share of it, needs no more than that. The aim
of the prediction is 5 %."""
_DRAFTED_WITHIN = 0.015
"""So much more, as a share of the limit, a structure may need than its draft, by other picks of the autotuner: two of
15,150 MiB needed 142 and 152 more (2 x H200)."""
_TRIES = 3
"""How often less is kept, where XLA needs more for it than was predicted."""
_TAKES_S = 300.0
Schedules = Mapping[str, Sequence[dict[str, Any]]]
Made = Mapping[str, "Future[Restructured]"]


class Ranked(NamedTuple):
    """A structure as it is predicted before it is profiled."""

    predicted_ns: int
    name: str
    lacking: bool
    """Whether it has kernels that no trace has shown."""
    peak_bytes: int
    """On each device."""


def most_bytes(session: Session, case: Case, free_bytes: int | None) -> int | None:
    """Most memory that a structure may need on each device; None where nobody knows. Before a training begins it runs
    on inputs of its own, for which there must be room beside the step's.

    Args:
        free_bytes: usable of each device.
    """
    known = [case.limit_bytes, free_bytes if session.on_calls is None else None]
    return min((one for one in known if one is not None), default=None)


def most_drafted_bytes(most: int | None) -> int | None:
    """What the draft of a structure may need that may need ``most`` bytes."""
    return None if most is None else int((1 - _DRAFTED_WITHIN) * most)


def with_room(session: Session, ranked: Sequence[Ranked], most: int | None) -> list[Ranked]:
    """Structures without those that hold what others make again and are predicted to need more than ``most`` bytes; one
    line says which. What is asked for by name stays."""
    if most is None or session.settings.forced_structure is not None:
        return list(ranked)
    over = [one for one in ranked if one.name.startswith(_HOLD) and one.peak_bytes > most]
    if over:
        listed = ", ".join(f"{one.name} ({whole_mib(one.peak_bytes)} MiB)" for one in over)
        session.say("not tried, as each device has room for %d MiB: %s", most >> 20, listed)
    return [one for one in ranked if one not in over]


def is_near(one: Ranked, most: int | None) -> bool:
    """Whether XLA is asked what a structure needs that holds what others make again."""
    return most is not None and one.name.startswith(_HOLD) and one.peak_bytes > (1 - _PREDICTED_WITHIN) * most


def in_part(
    session: Session,
    early: Early,
    case: Case | None,
    most: int | None,
    make: Callable[[Schedules], Made],
) -> Made:
    """The step with as much kept as there is room for, made on all ranks alike: rank 0 chooses. One line says what is
    kept; where XLA needs more for it than ``most`` bytes, another says so, and less is kept.

    Args:
        case: the step as it is, on rank 0.
        make: makes schedules on this rank; none where they are not worth it.
    """
    room_bytes = 0
    if case is not None:
        usable = most_drafted_bytes(most)
        room_bytes = 1 << 62 if usable is None else usable - case.default.peak_bytes
    for _ in range(_TRIES):
        with session.stage("what to keep", takes_s=_TAKES_S):
            part = None if case is None else _chosen(session, early, case, room_bytes)
        own = {} if part is None else {name: to_json(moves) for name, moves in part.schedules.items()}
        told: Schedules = session.tell(own, "what to keep")
        if not told:
            return {}
        made = make(told)
        if not made:
            return {}
        needed = {name: needed_bytes(session, name, one, most) for name, one in made.items()}
        fits = {name: made[name] for name, (bytes_, lack) in needed.items() if not lack and bytes_}
        least = min((bytes_ for bytes_, _ in needed.values() if bytes_), default=0)
        if fits or most is None or not least:
            return fits
        if part is not None:
            # One value may cost far more than its bytes, where XLA then orders ops otherwise: that is no reason to give
            # up all.
            held_bytes, over_bytes = part.chosen.held_bytes, least - most
            room_bytes = max(held_bytes // 2, held_bytes - max(1, over_bytes))
    return {}


def needed_bytes(
    session: Session, name: str, made: Future[Restructured], most: int | None
) -> tuple[int, str]:
    """What XLA needs for a structure on each device, the most of all ranks, 0 where it is not made; and that this is
    more than ``most``, empty where it is not. One line says so."""
    try:
        with session.stage(f"{name} is made", takes_s=_TAKES_S):
            early = made.result().early
        executable = compile_default(session, f"memory of {name}", early)
    except Exception as error:
        LOGGER.debug("%s: %s", name, one_line(error))
        return 0, ""
    needed = most_needed_bytes(session, name, executable)
    if lack := over_limit(needed, most):
        session.say("%s is not tried: %s", name, lack)
    return needed, lack


def _chosen(session: Session, early: Early, case: Case, room_bytes: int) -> InPart:
    prices = functools.partial(prices_of, case.costs)
    allowed = {"copies": early.copies, "in_float32": early.in_float32}
    part = early.run(kept_in_part, early.module, prices, room_bytes, **allowed)
    left = max(0, room_bytes) / 2**20
    if not part.schedules:
        session.say(
            "nothing that is computed twice is kept: none of it is predicted to save time in the %.0f MiB left on each "
            "device", left,
        )  # fmt: skip
    else:
        session.say(
            "%s keeps %s computed twice, in up to %.0f of the %.0f MiB left on each device",
            KEPT_IN_PART, counted(len(part.chosen.values), "value"), part.chosen.held_bytes / 2**20, left,
        )  # fmt: skip
    return part


def prices_of(costs: Costs, module: bytes) -> Prices:
    """What the ops of an early module cost: times of all by themselves, as far as ``costs`` knows them measured, else
    estimated; of collectives by the line of their kind, of loops the ops inside as often as they turn.

    Raises:
        ModuleError: the module cannot be read.
        ProfileError: nothing is known of the time of a collective.
    """
    source = canonicalize(module)
    called = calls_by_caller(source)
    ns: dict[str, dict[str, float]] = {}
    taken_ns: dict[str, float] = {}
    for name, region in regions_callees_first(source):
        graph = region.graph
        times = [float(one) for one in costs.op_ns(graph)]
        for node in graph.collectives:
            kind = collective_kind(graph.nodes[node])
            times[node] = float(costs.collective(kind)(collective_bytes(graph, node)))
        for callee, call in called[name]:
            times[call.node] += (call.trips or 1) * taken_ns[callee]
        taken_ns[name] = sum(times)
        sources = next((one.sources for one in source.regions if one.name == name), (source,))
        for alike in sources:
            inside = alike.index.computation(alike.computation).name
            ns[inside] = {node.name: times[node.id] for node in alike.graph.nodes}
    return Prices(ns, 1e9 / costs.profile.memory_bandwidth)
