"""What kernels lose during collectives, on one GPU.

DisCo's simulator lets compute run at full speed during communication. They share memory bandwidth and
multiprocessors, and a matmul whose thread blocks just fill these takes another round of them where a collective
has a few: it loses much, if the collective was there when it began, and little if the collective came later.

A collective moves data once it runs on all devices (``transfers.py``); on one that is there sooner it waits, beside
kernels that lose by it all the same. The simulator's devices are never apart. So all that kernels lost is held against
the time in which data moved beside them. Read on two traces of the same kernels: one in which every collective runs
alone, and one in which they run under the compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from disco_hlo.profiler.holds import AT_ONCE_NS
from disco_hlo.profiler.intervals import covered_ns, length_ns, merged
from disco_hlo.profiler.trace import Execution, Trace
from disco_hlo.profiler.transfers import (
    Moved,
    by_place,
    is_transfer,
    moving,
    numbered,
    span,
    unit_of,
)

_LONG_NS = 5_000
"""Kernels shorter than this are launches rather than work; their times say little."""
_SOME = 0.05
"""Of a kernel's time: of one that had a collective beside it for less, what it took longer is mostly noise."""
_DRIFT_NS = 1_000_000
"""Kernels with nothing beside them, taking less than this together, do not tell what the machine did between two
traces."""
_ENOUGH_NS = 20_000
"""Less time than this at once, all kernels of a step together, says nothing."""
MOST = 10.0
"""The largest slow-down that is believed."""
MOST_OF_PRODUCTS = 2.0
"""The largest of matmuls: one whose thread blocks fill the multiprocessors once takes two rounds where a collective has
some of them, no more, however long it lasts."""


@dataclass(frozen=True, slots=True)
class SlowDowns:
    """Time of kernels while data moves beside them, over their time alone, at least 1; None where too few did."""

    all_kernels: float | None
    products: float | None
    """Of kernels that hold a matmul and began during a collective."""
    others: float | None


@dataclass(frozen=True, slots=True)
class _Ran:
    """What a kernel took once, on one device."""

    place: tuple[str, int]
    """Unit and device."""
    length_ns: int
    beside_ns: int
    """How much of it had a collective beside it, waiting or not."""
    moved_ns: int
    """And how much had data moving."""
    began_beside: bool


def slow_downs(
    alone: Trace,
    beside: Trace,
    alone_module: str,
    beside_module: str,
    products: Container[str],
    moved: Moved,
) -> SlowDowns:
    """What kernels lose.

    Args:
        products: tokens of kernels that hold a matmul.
        moved: how long the collectives of ``beside`` move data.
    """
    was: dict[tuple[str, int], list[int]] = defaultdict(list)
    for run in _by_run(alone, alone_module, {}).values():
        for ran in run:
            was[ran.place].append(ran.length_ns)
    alone_ns = {place: ns for place, lengths in was.items() if (ns := median(lengths)) >= _LONG_NS}
    runs = [
        [ran for ran in run if ran.place in alone_ns]
        for run in _by_run(beside, beside_module, moved).values()
    ]
    drift = _drift(alone_ns, runs)

    def of(counts: Callable[[_Ran], bool], most: float = MOST) -> float | None:
        found = [_slow_down(alone_ns, drift, [ran for ran in run if counts(ran)]) for run in runs]
        known = [factor for factor in found if factor is not None]
        return min(median(known), most) if known else None

    return SlowDowns(
        of(lambda _: True),
        of(lambda ran: ran.place[0] in products and ran.began_beside, MOST_OF_PRODUCTS),
        of(lambda ran: ran.place[0] not in products),
    )


def _by_run(trace: Trace, module_name: str, moved: Moved) -> dict[int, list[_Ran]]:
    found: dict[int, list[_Ran]] = defaultdict(list)
    for (run, device), items in by_place(trace, module_name).items():
        there = merged(map(span, filter(is_transfer, items)))
        moves = merged(moving(item, (run, *name), moved) for name, item in numbered(items))
        kernels: dict[str, list[Execution]] = defaultdict(list)
        for item in items:
            if not is_transfer(item):
                kernels[unit_of(item)].append(item)
        for unit, parts in kernels.items():
            spans = [span(part) for part in parts]
            begins_ns = spans[0][0]
            found[run].append(
                _Ran(
                    (unit, device),
                    length_ns(spans),
                    sum(covered_ns(one, there) for one in spans),
                    sum(covered_ns(one, moves) for one in spans),
                    covered_ns((begins_ns - 1, begins_ns + AT_ONCE_NS), there) > 0,
                )
            )
    return found


def _drift(alone_ns: Mapping[tuple[str, int], float], runs: Iterable[Sequence[_Ran]]) -> float:
    """By how much the machine was slower in the second trace, as kernels tell that had nothing beside them: the median
    run."""
    free = [[one for one in run if not one.beside_ns] for run in runs]
    free_ns = [sum(alone_ns[one.place] for one in run) for run in free]
    if sum(free_ns) < _DRIFT_NS:
        return 1.0
    return median(
        sum(one.length_ns for one in run) / ns for run, ns in zip(free, free_ns, strict=True) if ns > 0
    )


def _slow_down(alone_ns: Mapping[tuple[str, int], float], drift: float, ran: Sequence[_Ran]) -> float | None:
    """Of all these kernels of one run together; None where too little moved beside them."""
    shared = [one for one in ran if one.beside_ns >= _SOME * one.length_ns]
    moved_ns = sum(one.moved_ns for one in shared)
    if moved_ns < _ENOUGH_NS:
        return None
    lost_ns = sum(one.length_ns - drift * alone_ns[one.place] for one in shared)
    return believed(moved_ns, moved_ns - lost_ns)


def believed(shared_ns: float, without_ns: float) -> float:
    """The slow-down of what shared so much time, and would have taken ``without_ns`` of it alone: from 1 to a limit."""
    return min(max(1.0, shared_ns / max(without_ns, shared_ns / MOST)), MOST)
