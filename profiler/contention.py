"""What kernels and transfers cost each other on one GPU, and what lies between two kernels.

DisCo's simulator lets compute and communication run beside each other at full speed. They share
memory bandwidth and multiprocessors, so neither does. Two traces of the same kernels tell by how
much: one in which every transfer runs alone, and one in which they run under the compute. Read on
GPU traces, where an execution is one kernel and transfers are NCCL's. A kernel whose thread blocks just fill the
multiprocessors takes another round of them where a transfer holds a few: it loses more than the transfer's time.

A transfer that begins beside kernels also waits until multiprocessors are free for its thread blocks, which takes it
the same whatever its size: beside compute it takes wait + factor x its time alone. Transfers of many sizes tell the
two apart; from few, or from sizes alike, only a factor can be read, and the wait is in it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

import numpy as np
from disco_hlo.profiler.profile import Contention
from disco_hlo.profiler.trace import Execution, Trace
from numpy.typing import NDArray

from disco_hlo.errors import ProfileError

_LONG_NS = 5_000
"""Kernels shorter than this are launches rather than work; their times say little."""
_MUCH = 0.5
"""Of a transfer's time: one that shared less says little of what it takes beside kernels."""
_SOME = 0.05
"""Of a kernel's: of one that shared less, what it took longer is mostly noise."""
_DRIFT_NS = 1_000_000
"""Kernels that shared nothing, taking less than this together, do not tell what the machine did between two traces."""
_ENOUGH_NS = 20_000
"""Less time than this at once, all kernels of a step together, says nothing."""
_MOST = 10.0
"""The largest slow-down that is believed."""
_MOST_WAIT_NS = 1_000_000
"""And the longest wait."""
_FEW = 8
"""Fewer transfers than this do not tell a wait from a factor."""
_APART = 2.0
"""Nor do those of which the quarter that takes longest alone does not take this many times as long as the quarter
that takes least; and only pairs so far apart are looked at for the factor."""
_BETTER = 0.75
"""Nor those from which a wait and a factor miss, in the median, more than this share of what the factor alone does."""
_WAIT_NS = 20_000
"""A longer gap between two kernels is a wait for something, not the launch of the second one."""
HOST_IS_AHEAD_NS = 20_000
"""While a kernel this long runs, the host has started the next one, under a profiler too."""

UNIT = re.compile(r"[bgn]\d+(?=[._])")
"""How the rewriter's names begin. XLA may add a number to the rest, in one module and not in the other."""

Interval = tuple[int, int]


def is_transfer(execution: Execution) -> bool:
    """Whether this kernel moves data between devices."""
    return execution.kernel.lower().startswith("nccl")


def contention(
    alone: Trace,
    beside: Trace,
    alone_module: str,
    beside_module: str | None = None,
    products: Container[str] = (),
) -> Contention | None:
    """Slow-down of compute beside transfers and of transfers beside compute, each at least 1, and the wait of
    transfers that begin beside compute, 0 where it cannot be told from their slow-down.

    Args:
        alone: a trace of the module whose order lets no kernel run beside a transfer.
        beside: a trace of the same kernels, by the same names, in an order that does.
        alone_module: the name of the first module.
        beside_module: the name of the second; by default the same.
        products: tokens of kernels that hold a product; what these and what others lose is told apart where both share
            enough time with transfers.

    Returns:
        None where too little ran at the same time to tell (a fast link).
    """
    beside_module = alone_module if beside_module is None else beside_module
    was, has = _work(alone, alone_module, False), _work(beside, beside_module, False)
    compute = _compute_beside(was, has, has)
    transfers = _transfers_beside(_work(alone, alone_module, True), _work(beside, beside_module, True))
    if compute is None and transfers is None:
        return None
    factor, wait_ns = (1.0, 0.0) if transfers is None else _wait_and_factor(*transfers)
    of_all = 1.0 if compute is None else _slow_down(*compute)
    kinds = [{unit for unit in has if (unit in products) is wanted} for wanted in (True, False)]
    by_kind = [_compute_beside(was, has, kind) for kind in kinds]
    known = [_slow_down(*one) for one in by_kind if one is not None]
    return Contention(of_all, factor, round(wait_ns), *(known if len(known) == len(by_kind) else ()))


def _unit(execution: Execution) -> str:
    """What the two modules have in common of an execution's name."""
    found = UNIT.match(execution.op)
    return found[0] if found else execution.op


def launch_gap_ns(trace: Trace, module_name: str, behind_ns: int = 0) -> int:
    """Time between the end of one kernel and the start of the next on the same device.

    Gaps in which the device waited are left out, and those beside a transfer.

    Args:
        behind_ns: only gaps behind kernels that take at least this long count, their median; 0 for the mean of all.
            Under a profiler the host starts kernels one by one (GPU), and short ones end before it has started the
            next, which they do not in a training step (:data:`HOST_IS_AHEAD_NS`).

    Raises:
        ProfileError: the trace holds no two kernels in a row, or few behind such long ones.
    """
    gaps: list[int] = []
    for kernels in by_place(trace, module_name).values():
        ends = 0
        for before, after in pairwise(kernels):
            ends = max(ends, before.end_ns)
            if is_transfer(before) or is_transfer(after):
                continue
            if 0 <= after.start_ns - ends < _WAIT_NS and before.end_ns - before.start_ns >= behind_ns:
                gaps.append(after.start_ns - ends)
    needed = _FEW if behind_ns else 1
    if len(gaps) < needed:
        raise ProfileError(
            f"the trace holds {len(gaps)} gaps of {module_name} behind kernels of {behind_ns} ns and more, "
            f"need {needed}"
        )
    return round(median(gaps) if behind_ns else mean(gaps))


def bucket_totals_ns(trace: Trace, module_name: str, buckets: int) -> list[int]:
    """What the buckets of each run take together, each on the device that arrives last; runs that do not show all
    ``buckets`` are left out."""
    found: dict[int, dict[str, dict[int, int]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    for (run, device), items in by_place(trace, module_name).items():
        for item in items:
            if is_transfer(item) and _unit(item).startswith("b"):
                found[run][_unit(item)][device] += item.end_ns - item.start_ns
    whole = [by_unit for _, by_unit in sorted(found.items()) if len(by_unit) == buckets]
    return [sum(min(by_device.values()) for by_device in by_unit.values()) for by_unit in whole]


def by_place(trace: Trace, module_name: str) -> dict[tuple[int, int], list[Execution]]:
    """Kernels by run and device, in order of their start."""
    found: dict[tuple[int, int], list[Execution]] = defaultdict(list)
    for item in trace.executions:
        if item.module == module_name:
            found[item.run, item.device].append(item)
    return found


@dataclass(frozen=True, slots=True)
class _Work:
    """What a kernel or a transfer took in one place and run."""

    length_ns: int
    shared_ns: int
    """How much of it had something of the other kind beside it."""


def _work(trace: Trace, module_name: str, transfers: bool) -> dict[str, _Work]:
    """Of each kernel its median over runs and devices; of each transfer, which begins on the device that is
    there first, the median over the runs of its time on the one that arrives last."""
    found: dict[str, dict[int, list[_Work]]] = defaultdict(lambda: defaultdict(list))
    for (run, _), items in by_place(trace, module_name).items():
        others = _union([item for item in items if is_transfer(item) != transfers])
        own: dict[str, list[Execution]] = defaultdict(list)
        for item in items:
            if is_transfer(item) == transfers:
                own[_unit(item)].append(item)
        for unit, parts in own.items():
            length = sum(item.end_ns - item.start_ns for item in parts)
            found[unit][run].append(
                _Work(length, sum(covered_ns((item.start_ns, item.end_ns), others) for item in parts))
            )
    if transfers:
        shortest = ([min(at, key=_length) for at in by_run.values()] for by_run in found.values())
        return {unit: _middle(works) for unit, works in zip(found, shortest, strict=True)}
    return {unit: _middle([work for at in by_run.values() for work in at]) for unit, by_run in found.items()}


def _length(work: _Work) -> int:
    return work.length_ns


def _middle(works: Sequence[_Work]) -> _Work:
    return sorted(works, key=_length)[len(works) // 2]


Beside = tuple[NDArray[np.float64], NDArray[np.float64]]
"""The time that each shared with something of the other kind, and what it would have been without."""


def _compute_beside(
    alone: Mapping[str, _Work], beside: Mapping[str, _Work], counts: Container[str]
) -> Beside | None:
    """Of the kernels that count. Over a fast link transfers are shorter than kernels, so those are taken that shared a
    small part of their time; and as that part drowns in what the machine's clock did between two traces, kernels that
    shared nothing tell by how much all are to be corrected."""
    long = [unit for unit in beside if unit in alone and alone[unit].length_ns >= _LONG_NS]
    free = [unit for unit in long if not beside[unit].shared_ns]
    free_ns = sum(alone[unit].length_ns for unit in free)
    drift = sum(beside[unit].length_ns for unit in free) / free_ns if free_ns >= _DRIFT_NS else 1.0
    common = [
        unit for unit in long if unit in counts and beside[unit].shared_ns >= _SOME * beside[unit].length_ns
    ]
    return _shared(alone, beside, common, drift)


def _transfers_beside(alone: Mapping[str, _Work], beside: Mapping[str, _Work]) -> Beside | None:
    """Of the transfers."""
    long = [unit for unit in beside if unit in alone and alone[unit].length_ns >= _LONG_NS]
    common = [unit for unit in long if beside[unit].shared_ns >= _MUCH * beside[unit].length_ns]
    return _shared(alone, beside, common, 1.0)


def _shared(
    alone: Mapping[str, _Work], beside: Mapping[str, _Work], units: Sequence[str], drift: float
) -> Beside | None:
    """Of these units; None where they shared too little time to tell anything."""
    shared = np.array([beside[unit].shared_ns for unit in units], np.float64)
    excess = np.array([beside[unit].length_ns - drift * alone[unit].length_ns for unit in units], np.float64)
    return (shared, shared - excess) if shared.sum() >= _ENOUGH_NS else None


def _slow_down(shared: NDArray[np.float64], without: NDArray[np.float64]) -> float:
    """Of all together."""
    total = float(shared.sum())
    return min(max(1.0, total / max(float(without.sum()), total / _MOST)), _MOST)


def _wait_and_factor(shared: NDArray[np.float64], without: NDArray[np.float64]) -> tuple[float, float]:
    """The factor, and the wait in ns, with which ``wait + factor x without`` is nearest to ``shared``.

    The factor is the median slope over pairs of transfers that lie far apart, which a few disturbed ones cannot move;
    the wait is what makes the sum right. Where that is negative, or the two are not told apart, it is 0 and the
    factor is that of the sum.
    """
    alike = _slow_down(shared, without), 0.0
    least, most = np.quantile(without, (0.25, 0.75))
    if shared.size < _FEW or least <= 0 or most < _APART * least:
        return alike
    far = without[None, :] >= _APART * np.maximum(without, 1.0)[:, None]
    slopes = (shared[None, :] - shared[:, None])[far] / (without[None, :] - without[:, None])[far]
    factor = min(max(1.0, float(np.median(slopes))), _MOST)
    wait_ns = float(shared.mean() - factor * without.mean())
    missed, missed_alike = (
        float(np.median(np.abs(shared - wait - slow_down * without)))
        for slow_down, wait in ((factor, wait_ns), alike)
    )
    if wait_ns <= 0 or missed > _BETTER * missed_alike:
        return alike
    return factor, min(wait_ns, _MOST_WAIT_NS)


def _union(items: Iterable[Execution]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted((item.start_ns, item.end_ns) for item in items):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def covered_ns(own: Interval, intervals: Sequence[Interval]) -> int:
    """How much of an interval lies in the others, which are disjoint and ascending."""
    covered = 0
    place = max(bisect_right(intervals, (own[0], own[0])) - 1, 0)
    while place < len(intervals) and intervals[place][0] < own[1]:
        covered += max(0, min(own[1], intervals[place][1]) - max(own[0], intervals[place][0]))
        place += 1
    return covered
