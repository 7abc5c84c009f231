"""Transfers and kernels in the trace of a GPU, where an execution is one kernel and transfers are NCCL's."""

from __future__ import annotations

import re
from collections import defaultdict

from disco_hlo.profiler.intervals import Interval
from disco_hlo.profiler.trace import Execution, Trace

UNIT = re.compile(r"[bgn]\d+(?=[._])")
"""How the rewriter's names begin. XLA may add a number to the rest, in one module and not in the other."""


def is_transfer(execution: Execution) -> bool:
    """Whether this kernel moves data between devices."""
    return execution.kernel.lower().startswith("nccl")


def unit_of(execution: Execution) -> str:
    """What two modules of the same units have in common of an execution's name."""
    found = UNIT.match(execution.op)
    return found[0] if found else execution.op


def span(execution: Execution) -> Interval:
    """From start to end."""
    return execution.start_ns, execution.end_ns


def by_place(trace: Trace, module_name: str) -> dict[tuple[int, int], list[Execution]]:
    """Kernels by run and device, in order of their start."""
    found: dict[tuple[int, int], list[Execution]] = defaultdict(list)
    for item in trace.executions:
        if item.module == module_name:
            found[item.run, item.device].append(item)
    return found
