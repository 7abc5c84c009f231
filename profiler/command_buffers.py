"""A trace of the step as training runs it, with a name for every kernel.

DisCo measures ops in the step itself (section 4.2). A GPU's step runs its kernels in command buffers (CUDA graphs),
and there a trace tells the buffer's name, not the instruction's. Started one by one, kernels have their names, but
short ones take about a microsecond longer, what lies between two is another time, and what they lose during
collectives, too. So a module is compiled and traced twice, with command buffers for the times and without for the
names: on each device its kernels run in the same order in both, and so do its collectives, its copies and its memsets.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import Match, SequenceMatcher
from functools import lru_cache
from itertools import takewhile

from disco_hlo.errors import ProfileError
from disco_hlo.printable import time_text
from disco_hlo.profiler.trace import Execution, Trace, by_place, is_transfer, length_ns, span

KERNELS, TRANSFERS, MEMSETS = "kernels", "transfers", "memsets"
_LEAST_NAMED = 0.98
"""Of the time of all kernels, and of all collectives; a trace that leaves more without a name is of something else."""
_MOST_BESIDE = 0.02
"""As much of the kernels' time may pass with memsets that have no name, and with copies of each direction. The module
without command buffers may have more of them or fewer: libraries clear what they work on in other ways, and the host
reads whether a loop goes on."""
_FEW_NS = 20_000
"""In a run: so much without a name does not matter in any lane."""
_NUMBER = re.compile(r"[._]\d+$")
"""What XLA may add to the name of a kernel that it generates, in one compile and not in the other."""
_MEMORY = re.compile(r"mem(?:set|cpy *([hdp]2[hdp])?)", re.IGNORECASE)
"""Copies and memsets may be kernels of CUDA's in a command buffer (``memcpy32_post``), between arrays of the device,
and are events of a kind of their own outside (``MemcpyD2D``, ``MemcpyD2H``, ``Memset 3``)."""

Pair = tuple[Execution, Execution]
"""What was timed, and what has its name."""


@dataclass(frozen=True)
class Lane:
    """What runs in one order with its like: kernels, collectives, memsets, copies of one direction."""

    total_ns: int
    """On all devices in all runs, where several at once count once."""
    named_ns: int
    """And of those that have a name."""
    unnamed: Mapping[str, int]
    """Of the others each kernel by name, ns, the longest first."""


@dataclass(frozen=True)
class WithNames:
    """A trace in command buffers, in which every execution has a name."""

    trace: Trace
    unnamed_ns: int
    """What is left out of it for want of one, of a run on a device."""
    lanes: Mapping[str, Lane]
    """How much of each lane has a name."""


def with_names(timed: Trace, timed_module: str, named: Trace, named_module: str) -> WithNames:
    """What ran in ``timed``, under the instruction names that ``named`` has for it, and as its module.

    Args:
        timed: a trace of a module that runs in command buffers.
        named: a trace of the same module, compiled without.

    Raises:
        ProfileError: too little of the one is found in the other, by the names of kernels and their order.
    """
    known = {device: _lanes(items) for (_, device), items in by_place(named, named_module).items()}
    executions: list[Execution] = []
    all_ns: Counter[str] = Counter()
    named_ns: Counter[str] = Counter()
    unnamed: dict[str, Counter[str]] = defaultdict(Counter)
    places = by_place(timed, timed_module)
    for (_, device), items in places.items():
        lanes = _lanes(items)
        for lane, pairs in _named_lanes(lanes, known.get(device, {})).items():
            executions += [replace(one, op=name.op, module=named_module) for one, name in pairs]
            all_ns[lane] += length_ns(map(span, lanes[lane]))
            named_ns[lane] += length_ns(span(one) for one, _ in pairs)
            for one in set(lanes[lane]).difference(one for one, _ in pairs):
                unnamed[lane][one.kernel] += one.end_ns - one.start_ns
    ordered = tuple(sorted(executions, key=lambda one: (one.start_ns, -one.end_ns)))
    unnamed_ns = round((all_ns.total() - named_ns.total()) / max(len(places), 1))
    lanes_found = {
        lane: Lane(all_ns[lane], named_ns[lane], dict(unnamed[lane].most_common())) for lane in all_ns
    }
    found = WithNames(Trace(ordered, timed.windows), unnamed_ns, lanes_found)
    _check(found, timed_module, named_module)
    return found


def _check(found: WithNames, timed_module: str, named_module: str) -> None:
    """Refuse a trace with too few names. Each lane is judged by its own: over slow links
    collectives take most of the time, and must not stand for kernels."""
    runs = len({(one.run, one.device) for one in found.trace.executions})
    kernels = found.lanes.get(KERNELS, Lane(0, 0, {}))
    for name, lane in found.lanes.items():
        of_itself = name in (KERNELS, TRANSFERS)
        allowed_ns = (1 - _LEAST_NAMED) * lane.total_ns if of_itself else _MOST_BESIDE * kernels.total_ns
        if lane.total_ns - lane.named_ns > max(allowed_ns, _FEW_NS * runs):
            need = f"{_LEAST_NAMED:.0%}" if of_itself else (
                f"all but {_MOST_BESIDE:.0%} of the kernels' {time_text(kernels.total_ns)}"
            )  # fmt: skip
            longest = next(iter(lane.unnamed), "")
            raise ProfileError(
                f"{time_text(lane.named_ns)} of {time_text(lane.total_ns)} of {timed_module}, {name}, have a name in "
                f"the trace of {named_module} without command buffers, need {need}; most of the rest is {longest[:60]}"
            )
    if not found.trace.executions:
        raise ProfileError(f"nothing of {timed_module} has a name in the trace of {named_module}")


def _lanes(items: Iterable[Execution]) -> dict[str, list[Execution]]:
    """By what runs in one order with its like. Outside of command buffers a loop's copies have streams of their own."""
    found: dict[str, list[Execution]] = defaultdict(list)
    for item in items:
        found[_lane_of(item)].append(item)
    return found


def _lane_of(item: Execution) -> str:
    """Kernels, collectives, memsets, or copies of one direction."""
    if is_transfer(item):
        return TRANSFERS
    memory = _MEMORY.match(item.kernel)
    if memory is None:
        return KERNELS
    return MEMSETS if memory[0].lower() == "memset" else f"copies {(memory[1] or 'D2D').upper()}"


def _named_lanes(
    timed: Mapping[str, Sequence[Execution]], named: Mapping[str, Sequence[Execution]]
) -> dict[str, list[Pair]]:
    """The names of one run on one device."""
    found = {
        lane: list(_aligned(ones, named.get(lane, ())))
        for lane, ones in timed.items()
        if lane in (KERNELS, TRANSFERS)
    }
    kernels = found.get(KERNELS, [])
    for lane, ones in timed.items():
        if lane not in found:
            found[lane] = list(_of_memory(ones, named.get(lane, ()), kernels))
    return found


def _of_memory(
    timed: Sequence[Execution], named: Sequence[Execution], kernels: Sequence[Pair]
) -> Iterator[Pair]:
    """Pairs of memsets, or of copies, which are all alike. Where one trace has more than the other, those that lie
    between the same two kernels; and what lies between two kernels of one instruction is its own."""
    if len(timed) == len(named):
        yield from zip(timed, named, strict=True)
        return
    starts = [[pair[side].start_ns for pair in kernels] for side in (0, 1)]
    between: dict[int, tuple[list[Execution], list[Execution]]] = defaultdict(lambda: ([], []))
    for side, ones in enumerate((timed, named)):
        for one in ones:
            between[bisect_right(starts[side], one.start_ns)][side].append(one)
    for place, (ours, theirs) in between.items():
        if len(ours) == len(theirs):
            yield from zip(ours, theirs, strict=True)
            continue
        around = [name for _, name in kernels[place - 1 : place + 1]] if 0 < place < len(kernels) else []
        if len({one.op for one in theirs or around}) == 1:
            yield from ((one, (theirs or around)[0]) for one in ours)


def _aligned(timed: Sequence[Execution], named: Sequence[Execution]) -> Iterator[Pair]:
    """Pairs of the same kernel. Where one trace has more than the other: those from the beginning on and from the end
    back, as far as both are alike, and of what lies between the longest runs that both have."""
    ours, theirs = ([_NUMBER.sub("", one.kernel) for one in side] for side in (timed, named))
    first = _alike(ours, theirs)
    last = _alike(ours[first:][::-1], theirs[first:][::-1])
    middle = _both_have(tuple(ours[first : len(ours) - last]), tuple(theirs[first : len(theirs) - last]))
    yield from zip(timed[:first], named[:first], strict=True)
    for block in middle:
        yield from zip(
            timed[first + block.a :][: block.size], named[first + block.b :][: block.size], strict=True
        )
    yield from zip(timed[len(ours) - last :], named[len(theirs) - last :], strict=True)


@lru_cache(maxsize=8)
def _both_have(ours: tuple[str, ...], theirs: tuple[str, ...]) -> list[Match]:
    """The longest runs of both. It is the same in every run of a device, and takes the square of their number."""
    return SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()


def _alike(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """How many are the same from the beginning on."""
    both = zip(ours, theirs, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
