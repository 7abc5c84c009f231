"""What kernels and transfers cost each other on one GPU, and what lies between two kernels.

DisCo's simulator lets compute and communication run beside each other at full speed. They share
memory bandwidth and multiprocessors, so neither does. Two traces of the same kernels tell by how
much: one in which every transfer runs alone, and one in which they run under the compute. Read on
GPU traces, where an execution is one kernel and transfers are NCCL's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from disco_hlo.profiler.profile import Contention
from disco_hlo.profiler.trace import Execution, Trace

from disco_hlo.errors import ProfileError

_LONG_NS = 5_000
"""Kernels shorter than this are launches rather than work; their times say little."""
_INSIDE = 0.98
"""Share of a kernel that lies beside transfers for it to count as contended."""
_WAIT_NS = 20_000
"""A longer gap between two kernels is a wait for something, not the launch of the second one."""

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
    compute = _ratio(_compute_ns(beside, beside_module, True), _compute_ns(alone, alone_module, False))
    communication = _ratio(_transfer_ns(beside, beside_module), _transfer_ns(alone, alone_module))
    if compute is None or communication is None:
        return None
    return Contention(compute, communication)


def launch_gap_ns(trace: Trace, module_name: str) -> int:
    """Mean time between the end of one kernel and the start of the next on the same device.

    Gaps in which the device waited are left out. Raises :class:`ProfileError` for a trace without two
    kernels in a row.
    """
    gaps: list[int] = []
    for kernels in _by_place(trace, module_name).values():
        compute = [item for item in kernels if not is_transfer(item)]
        ends = 0
        for before, after in pairwise(compute):
            ends = max(ends, before.end_ns)
            gaps += [after.start_ns - ends] if 0 <= after.start_ns - ends < _WAIT_NS else []
    if not gaps:
        raise ProfileError(f"the trace holds no two kernels of {module_name} in a row")
    return round(sum(gaps) / len(gaps))


def _by_place(trace: Trace, module_name: str) -> dict[tuple[int, int], list[Execution]]:
    """Kernels by run and device, in order of their start."""
    found: dict[tuple[int, int], list[Execution]] = defaultdict(list)
    for item in trace.executions:
        if item.module == module_name:
            found[item.run, item.device].append(item)
    return found


def _compute_ns(trace: Trace, module_name: str, beside: bool) -> dict[str, float]:
    """Median time of each instruction over the runs and devices in which all of it ran beside transfers
    (or, for ``beside=False``, none of it)."""
    times: dict[str, list[int]] = defaultdict(list)
    for kernels in _by_place(trace, module_name).values():
        transfers = _union([item for item in kernels if is_transfer(item)])
        total: dict[str, int] = defaultdict(int)
        shared: dict[str, int] = defaultdict(int)
        for item in kernels:
            if not is_transfer(item):
                total[item.op] += item.end_ns - item.start_ns
                shared[item.op] += _covered_ns(item, transfers)
        for op, length in total.items():
            if (shared[op] >= _INSIDE * length) if beside else shared[op] == 0:
                times[op].append(length)
    return {op: float(median(values)) for op, values in times.items()}


def _transfer_ns(trace: Trace, module_name: str) -> dict[str, float]:
    """Median over the runs of each transfer's time on the device that arrived last."""
    shortest: dict[str, dict[int, int]] = defaultdict(dict)
    for (run, _), kernels in _by_place(trace, module_name).items():
        own: dict[str, int] = defaultdict(int)
        for item in kernels:
            if is_transfer(item):
                own[item.op] += item.end_ns - item.start_ns
        for op, length in own.items():
            shortest[op][run] = min(length, shortest[op].get(run, length))
    return {op: float(median(by_run.values())) for op, by_run in shortest.items()}


def _ratio(slowed: Mapping[str, float], usual: Mapping[str, float]) -> float | None:
    common = [op for op in slowed if usual.get(op, 0.0) >= _LONG_NS]
    if not common:
        return None
    return max(1.0, sum(slowed[op] for op in common) / sum(usual[op] for op in common))


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
