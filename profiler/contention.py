"""What kernels and collectives cost each other on one GPU, and what lies between two kernels.

DisCo's simulator lets compute and communication overlap with each other at full speed. They share
memory bandwidth and multiprocessors, so neither does. Two traces of the same kernels tell by how
much: one in which every collective runs alone, and one in which they run under the compute. What kernels lose is read
in ``losses.py``, what collectives do here.

A collective that begins during kernels also waits until multiprocessors are free for its thread blocks, which takes it
the same whatever its size: during compute it takes wait + factor x its time alone. Collectives of many sizes tell the
two apart; from few, or from sizes alike, only a factor can be read, and the wait is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from statistics import mean, median
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import ProfileError
from disco_hlo.profiler.evenness import computed_ns, uneven
from disco_hlo.profiler.intervals import Interval, covered_ns, length_ns, merged
from disco_hlo.profiler.losses import MOST, MOST_OF_PRODUCTS, believed, slow_downs
from disco_hlo.profiler.profile import Contention
from disco_hlo.profiler.trace import Execution, Trace
from disco_hlo.profiler.transfers import Moved, by_place, is_transfer, moved_ns, moving, numbered, span

_LONG_NS = 5_000
"""Kernels shorter than this are launches rather than work; their times say little."""
_MUCH = 0.5
"""Of a collective's time: one that shared less says little of what it takes during kernels."""
_ENOUGH_NS = 20_000
"""Less time than this at once, all collectives of a step together, says nothing."""
_MOST_WAIT_NS = 1_000_000
"""The longest wait that is believed."""
_FEW = 8
"""Fewer collectives than this do not tell a wait from a factor."""
_APART = 2.0
"""Nor do those of which the quarter that takes longest alone does not take this many times as long as the quarter
that takes least; and only pairs so far apart are looked at for the factor."""
_BETTER = 0.75
"""Nor those from which a wait and a factor miss, in the median, more than this share of what the factor alone does."""
_WAIT_NS = 20_000
"""A longer gap between two kernels is a wait for something, not the launch of the second one."""
MUCH_MOVED = 1 / 3
"""Of a step: where collectives take more, what they take longer in one run than in another hides launches, and what
collectives cost kernels."""


def contention(
    alone: Trace,
    beside: Trace,
    alone_module: str,
    beside_module: str | None = None,
    products: Collection[str] = (),
    moved: tuple[Moved, Moved] | None = None,
) -> Contention | None:
    """Slow-down of compute during collectives and of collectives during compute, each at least 1, and the wait of
    collectives that begin during compute, 0 where it cannot be told from their slow-down.

    Args:
        alone: a trace of the module whose order lets no kernel overlap with a collective.
        beside: a trace of the same kernels, by the same names, in an order that does.
        alone_module: the name of the first module.
        beside_module: the name of the second; by default the same.
        products: tokens of kernels that hold a matmul; what these and what others lose is told apart. The kind that
            shares too little time with collectives goes by all kernels together, at most at twice its time.
        moved: how long the collectives of either trace move data, where other processes have devices, too.

    Returns:
        None where too little ran at the same time to tell (a fast link).
    """
    beside_module = alone_module if beside_module is None else beside_module
    moved = moved or (moved_ns(alone, alone_module), moved_ns(beside, beside_module))
    lost = slow_downs(alone, beside, alone_module, beside_module, products, moved[1])
    transfers = _beside(
        _transfers(alone, alone_module, moved[0]), _transfers(beside, beside_module, moved[1])
    )
    if lost.all_kernels is None and transfers is None:
        return None
    factor, wait_ns = (1.0, 0.0) if transfers is None else _wait_and_factor(*transfers)
    all_kernels = lost.all_kernels or 1.0
    if not products:
        return Contention(all_kernels, factor, round(wait_ns))
    # All together lose no more than the kind that loses most: matmuls were seen to lose more than they can.
    of_products, of_others = (
        min(all_kernels, MOST_OF_PRODUCTS) if one is None else one for one in (lost.products, lost.others)
    )
    return Contention(
        min(all_kernels, max(of_products, of_others)), factor, round(wait_ns), of_products, of_others
    )


def gap_in_step_ns(
    trace: Trace, module_name: str, step_ns: int, owners: Mapping[str, str] = MappingProxyType({})
) -> int | None:
    """What a step takes beyond its kernels and collectives, for each kernel that the launch cost is added to; at
    least 0.

    A profiler writes down when every kernel begins and ends, which takes time between them. So the kernels' own times
    are taken from the trace, and the step's from runs that were not traced.

    Args:
        trace: of a module in which nothing overlaps with anything else.
        step_ns: what it took untraced.
        owners: by instruction inside a loop the entry instruction that runs it (``keys.owners``). An entry instruction
            has one launch, whatever kernels it has; a loop one for each of its kernels.

    Returns:
        None where that says little of launches: collectives, which never take the same, are much of the step, what is
        left is more than a launch can be, or a device was slower at times, and the untraced step may be one of these.

    Raises:
        ProfileError: the trace holds nothing of the module.
    """
    by_run: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for (run, _), items in by_place(trace, module_name).items():
        kernels = [item for item in items if not is_transfer(item)]
        looped = sum(item.op in owners for item in kernels)
        entries = len({item.op for item in kernels if item.op not in owners})
        moved_ns = length_ns(span(item) for item in items if is_transfer(item))
        by_run[run].append((length_ns(map(span, items)), moved_ns, looped + entries))
    if not by_run:
        raise ProfileError(f"the trace holds nothing of {module_name}")
    slowest = [max(devices) for devices in by_run.values()]
    if median(moved_ns for _, moved_ns, _ in slowest) > MUCH_MOVED * step_ns:
        return None
    if uneven(computed_ns(trace, module_name)) is not None:
        return None
    gap_ns = round(median((step_ns - all_ns) / max(1, launches) for all_ns, _, launches in slowest))
    return max(0, gap_ns) if gap_ns <= _WAIT_NS else None


def launch_gap_ns(trace: Trace, module_name: str) -> int:
    """Time between the end of one kernel and the start of the next on the same device, the mean.

    Gaps in which the device waited are left out, and those during a collective.

    Raises:
        ProfileError: the trace holds no two kernels in a row.
    """
    gaps: list[int] = []
    for kernels in by_place(trace, module_name).values():
        ends = 0
        for before, after in pairwise(kernels):
            ends = max(ends, before.end_ns)
            if is_transfer(before) or is_transfer(after):
                continue
            if 0 <= after.start_ns - ends < _WAIT_NS:
                gaps.append(after.start_ns - ends)
    if not gaps:
        raise ProfileError(f"the trace holds no two kernels of {module_name} in a row")
    return round(mean(gaps))


@dataclass(frozen=True, slots=True)
class _Work:
    """What a collective took in one place and run, less its waiting for other devices."""

    length_ns: int
    shared_ns: int
    """How much of it had kernels beside it."""


def _transfers(trace: Trace, module_name: str, moved: Moved) -> dict[str, _Work]:
    """Of each collective the median over the runs of the time in which it moves data, as the device has it that comes
    last."""
    found: dict[str, dict[int, list[tuple[int, _Work]]]] = defaultdict(lambda: defaultdict(list))
    for (run, _), items in by_place(trace, module_name).items():
        kernels = merged(span(item) for item in items if not is_transfer(item))
        own: dict[str, list[tuple[Execution, Interval]]] = defaultdict(list)
        for name, item in numbered(items):
            own[name[0]].append((item, moving(item, (run, *name), moved)))
        for unit, parts in own.items():
            moves = [part for _, part in parts]
            work = _Work(length_ns(moves), sum(covered_ns(part, kernels) for part in moves))
            found[unit][run].append((length_ns(span(item) for item, _ in parts), work))
    last = ([min(at, key=itemgetter(0))[1] for at in by_run.values()] for by_run in found.values())
    return {
        unit: sorted(works, key=_length)[len(works) // 2] for unit, works in zip(found, last, strict=True)
    }


def _length(work: _Work) -> int:
    return work.length_ns


Beside = tuple[NDArray[np.float64], NDArray[np.float64]]
"""The time that each shared with something of the other kind, and what it would have been without."""


def _beside(alone: Mapping[str, _Work], beside: Mapping[str, _Work]) -> Beside | None:
    """Of the collectives; None where they shared too little time to tell anything."""
    long = [unit for unit in beside if unit in alone and alone[unit].length_ns >= _LONG_NS]
    common = [unit for unit in long if beside[unit].shared_ns >= _MUCH * beside[unit].length_ns]
    shared = np.array([beside[unit].shared_ns for unit in common], np.float64)
    excess = np.array([beside[unit].length_ns - alone[unit].length_ns for unit in common], np.float64)
    return (shared, shared - excess) if shared.sum() >= _ENOUGH_NS else None


def _slow_down(shared: NDArray[np.float64], without: NDArray[np.float64]) -> float:
    """Of all together."""
    return believed(float(shared.sum()), float(without.sum()))


def _wait_and_factor(shared: NDArray[np.float64], without: NDArray[np.float64]) -> tuple[float, float]:
    """The factor, and the wait in ns, with which ``wait + factor x without`` is nearest to ``shared``.

    The factor is the median slope over pairs of collectives that lie far apart, which a few disturbed ones cannot move;
    the wait is what makes the sum right. Where that is negative, or the two are not told apart, it is 0 and the
    factor is that of the sum.
    """
    alike = _slow_down(shared, without), 0.0
    least, most = np.quantile(without, (0.25, 0.75))
    if shared.size < _FEW or least <= 0 or most < _APART * least:
        return alike
    far = without[None, :] >= _APART * np.maximum(without, 1.0)[:, None]
    slopes = (shared[None, :] - shared[:, None])[far] / (without[None, :] - without[:, None])[far]
    factor = min(max(1.0, float(np.median(slopes))), MOST)
    wait_ns = float(shared.mean() - factor * without.mean())
    missed, missed_alike = (
        float(np.median(np.abs(shared - wait - slow_down * without)))
        for slow_down, wait in ((factor, wait_ns), alike)
    )
    if wait_ns <= 0 or missed > _BETTER * missed_alike:
        return alike
    return factor, min(wait_ns, _MOST_WAIT_NS)
