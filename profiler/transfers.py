"""Collectives and kernels in a trace; on GPU an execution is one kernel, and collectives are NCCL's.

A collective begins on the device that is there first and waits for the others; it moves data once it runs on all, and
ends on all together. So it moves for as long as it takes on the device that comes last. Where devices are of several
processes, whose traces have clocks of their own, that is the shortest of its times on any of them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from disco_hlo.profiler.intervals import Interval
from disco_hlo.profiler.trace import Execution, Trace

ENTRY_UNIT = re.compile(r"[bgn]\d+(?=[._])")
"""How the names of what the rewriter wrote begin in the entry. XLA may add a number to the rest, in one module and not
in the other."""
UNIT = re.compile(rf"(?:(?:loop|branch|call)\d+_(?:\d+_)?)?{ENTRY_UNIT.pattern}")
"""And in any region."""


def is_transfer(execution: Execution) -> bool:
    """Whether this kernel moves data between devices."""
    return execution.kernel.lower().startswith("nccl")


def unit_of(execution: Execution) -> str:
    """What two modules of the same units have in common of an execution's name."""
    return unit_of_name(execution.op)


def unit_of_name(op: str) -> str:
    """The same of an instruction's name."""
    found = UNIT.match(op)
    return found[0] if found else op


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


Moved = Mapping[tuple[int, str, int], int]
"""How long collectives move data, ns, by run, unit, and how often the unit was transferred before in that run."""


def moved_ns(trace: Trace, module_name: str, among: Container[str] = ()) -> Moved:
    """As the devices of this trace have it.

    Args:
        among: instructions that communicate, for traces that do not show which kernels do (CPU).
    """
    found: dict[tuple[int, str, int], int] = {}
    for (run, _), items in by_place(trace, module_name).items():
        for (unit, number), item in numbered(items, among):
            length_ns = item.end_ns - item.start_ns
            found[run, unit, number] = min(found.get((run, unit, number), length_ns), length_ns)
    return found


def least(of_all: Sequence[Moved]) -> Moved:
    """As all devices have it, told by the traces of each process; what one does not show is left out."""
    common = set(of_all[0]).intersection(*of_all[1:])
    return {key: min(one[key] for one in of_all) for key in sorted(common)}


def numbered(
    items: Iterable[Execution], among: Container[str] = ()
) -> Iterator[tuple[tuple[str, int], Execution]]:
    """Collectives of one run on one device, each by its unit and how often that was there before."""
    seen: Counter[str] = Counter()
    for item in items:
        if not is_transfer(item) and item.op not in among:
            continue
        unit = unit_of(item)
        yield (unit, seen[unit]), item
        seen[unit] += 1


def moving(item: Execution, key: tuple[int, str, int], moved: Moved) -> Interval:
    """The part of a collective in which it moves data; all of it where nobody knows better."""
    length_ns = item.end_ns - item.start_ns
    return item.end_ns - min(length_ns, moved.get(key, length_ns)), item.end_ns
