"""How much of a kernel must be done before a collective can begin during it.

DisCo's simulator starts a collective as soon as its channel is free (section 4.4). On a GPU it is a kernel like others
and needs multiprocessors for its thread blocks. Where a matmul begins at the same moment, whose thread blocks
are in line already, the collective comes behind the last of them: the matmul's last wave leaves multiprocessors free
(docs/simulator.md, "Delays", has what two H200s showed). A collective issued before such a matmul runs
behind it, not beside it.

Read on a trace in which kernels run under collectives, in a known order: when a collective could have begun follows
from that, and what ran when it did.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from disco_hlo.profiler.intervals import Interval
from disco_hlo.profiler.trace import Execution, Trace
from disco_hlo.profiler.transfers import ENTRY_UNIT, by_place, is_transfer

LEAST_NS = 20_000
"""Kernels shorter than this hold a collective for less than it takes to launch it."""
AT_ONCE_NS = 10_000
"""A collective that waited no longer was not held: so long takes its launch, or that of the kernel. Taken for a hold,
it made matmuls come first that delay no collective, and the search looked for these."""
_LAUNCH_NS = 5_000
"""A kernel that begins so shortly behind the moment at which a collective could was in line with it."""
_AT_THE_END_NS = 500
"""One that ends so shortly behind that moment held nothing."""
_BEGINNING = 0.02
"""Of a kernel's time: where a collective could have begun by then, it shows the whole of what the kernel holds."""
_HALF = 0.5


@dataclass(frozen=True, slots=True)
class _Seen:
    """A collective on one device, by the time of the kernel that ran when it could have begun."""

    could: float
    """When that was, 0 at the kernel's beginning, 1 at its end."""
    began: float
    waited_ns: int


def holds(beside: Trace, module_name: str, order: Sequence[str]) -> dict[str, float]:
    """By unit, the share of its time that must be done before a collective begins during it: 0, or most of it.

    Of kernels during which the trace shows no collective's beginning nothing is known, and they are left out.

    Args:
        beside: a trace of a module whose order lets kernels overlap with collectives.
        order: that order, as a strategy has it: units, and ``b2.start`` and ``b2.done``.
    """
    found: dict[str, dict[tuple[int, str], list[_Seen]]] = defaultdict(lambda: defaultdict(list))
    for (run, _), executions in by_place(beside, module_name).items():
        for bucket, unit, seen in _beginnings(executions, order):
            found[unit][run, bucket].append(seen)
    shares = {unit: _share(list(by_transfer.values())) for unit, by_transfer in found.items()}
    return {unit: share for unit, share in sorted(shares.items()) if share is not None}


def _beginnings(executions: Sequence[Execution], order: Sequence[str]) -> list[tuple[str, str, _Seen]]:
    """Of one run on one device: collectives, and the kernel that ran, or was in line, when each could have begun."""
    spans = _spans(executions)
    kernels = sorted((*span, unit) for unit, span in spans.items() if unit[0] != "b")
    found: list[tuple[str, str, _Seen]] = []
    could_ns = at = 0
    for token in order:
        unit, _, event = token.partition(".")
        if unit not in spans or event == "done":
            continue
        start_ns, end_ns = spans[unit]
        if event == "start" and could_ns:
            while at < len(kernels) and kernels[at][1] <= could_ns + _AT_THE_END_NS:
                at += 1
            if at < len(kernels):
                begins_ns, ends_ns, kernel = kernels[at]
                long_ns = ends_ns - begins_ns
                if begins_ns < could_ns + _LAUNCH_NS and long_ns >= LEAST_NS:
                    could, began = ((moment - begins_ns) / long_ns for moment in (could_ns, start_ns))
                    found.append((unit, kernel, _Seen(could, began, start_ns - could_ns)))
        could_ns = max(could_ns, end_ns)
    return found


def _spans(executions: Sequence[Execution]) -> Mapping[str, Interval]:
    """From the beginning of each unit to its end; of a bucket, its collective."""
    spans: dict[str, Interval] = {}
    for one in executions:
        named = ENTRY_UNIT.match(one.op)
        if named is None or (named[0][0] == "b") != is_transfer(one):
            continue
        start_ns, end_ns = spans.get(named[0], (one.start_ns, one.end_ns))
        spans[named[0]] = min(start_ns, one.start_ns), max(end_ns, one.end_ns)
    return spans


def _share(transfers: Sequence[Sequence[_Seen]]) -> float | None:
    """From how each collective fared on all devices: it begins on the device that lets it in last."""
    held: list[float] = []
    free: list[float] = []
    for seen in transfers:
        if all(one.could < _BEGINNING for one in seen):
            held.append(max(one.began if one.waited_ns > AT_ONCE_NS else 0.0 for one in seen))
            continue
        held += [one.began for one in seen if one.waited_ns > AT_ONCE_NS]
        free += [one.began for one in seen if one.waited_ns <= AT_ONCE_NS]
    if held:
        return min(max(0.0, median(held)), 1.0)
    # What begins at once late in a kernel may do so behind its hold.
    return 0.0 if free and min(free) < _HALF else None
