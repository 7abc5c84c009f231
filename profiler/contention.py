"""What kernels and transfers cost each other on one GPU, and what lies between two kernels.

DisCo's simulator lets compute and communication run beside each other at full speed. They share
memory bandwidth and multiprocessors, so neither does. Two traces of the same kernels tell by how
much: one in which every transfer runs alone, and one in which they run under the compute. Read on
GPU traces, where an execution is one kernel and transfers are NCCL's.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from disco_hlo.profiler.profile import Contention
from disco_hlo.profiler.trace import Execution, Trace

from disco_hlo.errors import ProfileError

_LONG_NS = 5_000
"""Kernels shorter than this are launches rather than work; their times say little."""
_MUCH = 0.5
_ENOUGH_NS = 20_000
"""Less time than this at once, all kernels of a step together, says nothing."""
_MOST = 10.0
"""The largest slow-down that is believed."""
_WAIT_NS = 20_000
"""A longer gap between two kernels is a wait for something, not the launch of the second one."""

_UNIT = re.compile(r"[bgn]\d+(?=[._])")
"""How the rewriter's names begin. XLA may add a number to the rest, in one module and not in the other."""

Interval = tuple[int, int]


def is_transfer(execution: Execution) -> bool:
    """Whether this kernel moves data between devices."""
    return execution.kernel.lower().startswith("nccl")


def contention(
    alone: Trace, beside: Trace, alone_module: str, beside_module: str | None = None
) -> Contention | None:
    """Slow-down of compute beside transfers and of transfers beside compute, each at least 1.

    Args:
        alone: a trace of the module whose order lets no kernel run beside a transfer.
        beside: a trace of the same kernels, by the same names, in an order that does.
        alone_module: the name of the first module.
        beside_module: the name of the second; by default the same.

    Returns:
        None where too little ran at the same time to tell (a fast link).
    """
    beside_module = alone_module if beside_module is None else beside_module
    compute = _slow_down(_work(alone, alone_module, False), _work(beside, beside_module, False))
    communication = _slow_down(_work(alone, alone_module, True), _work(beside, beside_module, True))
    if compute is None and communication is None:
        return None
    return Contention(compute or 1.0, communication or 1.0)


def _unit(execution: Execution) -> str:
    """What the two modules have in common of an execution's name."""
    found = _UNIT.match(execution.op)
    return found[0] if found else execution.op


def launch_gap_ns(trace: Trace, module_name: str) -> int:
    """Mean time between the end of one kernel and the start of the next on the same device.

    Gaps in which the device waited are left out, and those beside a transfer. Raises :class:`ProfileError` for a
    trace without two kernels in a row.
    """
    gaps: list[int] = []
    for kernels in _by_place(trace, module_name).values():
        ends = 0
        for before, after in pairwise(kernels):
            ends = max(ends, before.end_ns)
            if is_transfer(before) or is_transfer(after):
                continue
            gaps += [after.start_ns - ends] if 0 <= after.start_ns - ends < _WAIT_NS else []
    if not gaps:
        raise ProfileError(f"the trace holds no two kernels of {module_name} in a row")
    return round(sum(gaps) / len(gaps))


def bucket_totals_ns(trace: Trace, module_name: str, buckets: int) -> list[int]:
    """What the buckets of each run take together, each on the device that arrives last; runs that do not show all
    ``buckets`` are left out."""
    found: dict[int, dict[str, dict[int, int]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    for (run, device), items in _by_place(trace, module_name).items():
        for item in items:
            if is_transfer(item) and _unit(item).startswith("b"):
                found[run][_unit(item)][device] += item.end_ns - item.start_ns
    whole = [by_unit for _, by_unit in sorted(found.items()) if len(by_unit) == buckets]
    return [sum(min(by_device.values()) for by_device in by_unit.values()) for by_unit in whole]


def _by_place(trace: Trace, module_name: str) -> dict[tuple[int, int], list[Execution]]:
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
    for (run, _), items in _by_place(trace, module_name).items():
        others = _union([item for item in items if is_transfer(item) != transfers])
        own: dict[str, list[Execution]] = defaultdict(list)
        for item in items:
            if is_transfer(item) == transfers:
                own[_unit(item)].append(item)
        for unit, parts in own.items():
            length = sum(item.end_ns - item.start_ns for item in parts)
            found[unit][run].append(_Work(length, sum(_covered_ns(item, others) for item in parts)))
    if transfers:
        shortest = ([min(at, key=_length) for at in by_run.values()] for by_run in found.values())
        return {unit: _middle(works) for unit, works in zip(found, shortest, strict=True)}
    return {unit: _middle([work for at in by_run.values() for work in at]) for unit, by_run in found.items()}


def _length(work: _Work) -> int:
    return work.length_ns


def _middle(works: Sequence[_Work]) -> _Work:
    return sorted(works, key=_length)[len(works) // 2]


def _slow_down(alone: Mapping[str, _Work], beside: Mapping[str, _Work]) -> float | None:
    """The time that these shared with something, over what it would have been without. What shared little
    of its time tells more of its own noise."""
    long = [unit for unit in beside if unit in alone and alone[unit].length_ns >= _LONG_NS]
    common = [unit for unit in long if beside[unit].shared_ns >= _MUCH * beside[unit].length_ns]
    shared = sum(beside[unit].shared_ns for unit in common)
    excess = sum(beside[unit].length_ns - alone[unit].length_ns for unit in common)
    if shared < _ENOUGH_NS:
        return None
    return max(1.0, shared / max(shared - excess, shared / _MOST))


def _union(items: Iterable[Execution]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted((item.start_ns, item.end_ns) for item in items):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _covered_ns(item: Execution, intervals: Sequence[Interval]) -> int:
    """How much of ``item`` lies in the (disjoint, ascending) intervals."""
    covered = 0
    place = max(bisect_right(intervals, (item.start_ns, item.start_ns)) - 1, 0)
    while place < len(intervals) and intervals[place][0] < item.end_ns:
        covered += max(0, min(item.end_ns, intervals[place][1]) - max(item.start_ns, intervals[place][0]))
        place += 1
    return covered
