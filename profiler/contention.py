"""What kernels and collectives cost each other on one GPU, what lies between two kernels, and whether devices compute
alike.

DisCo's simulator lets compute and communication overlap with each other at full speed, starts a collective as soon as
its channel is free (section 4.4), and plays one worker for all (section 4.2). Two traces of the same kernels tell how
far that is wrong: one in which every collective runs alone, and one in which they run under the compute.

* Kernels lose memory bandwidth and multiprocessors (:func:`slow_downs`). A matmul whose thread blocks just fill these
  takes another round of them where a collective has a few: it loses much, if the collective was there when it began,
  and little if the collective came later. A collective that waits for other devices costs kernels as well, and the
  simulator's devices are never apart. So all that kernels lost is held against the time in which data moved.
* Collectives take longer, and wait until multiprocessors are free for their thread blocks, the same whatever their
  size: during compute one takes wait + factor x its time alone. Collectives of many sizes tell the two apart; from few,
  or from sizes alike, only a factor can be read, and the wait is in it.
* A collective that becomes ready when a matmul does, whose thread blocks are in line already, comes behind the last of
  them: the matmul's last wave leaves multiprocessors free (docs/simulator.md, "Delays", has what two H200s showed). It
  runs behind the matmul, not beside it. :func:`holds` reads this on a trace of kernels under collectives in a known
  order: when a collective could have begun follows from that, and what ran when it did.
* In calls of a training kernels run beside collectives as XLA ordered them. Where it is known what they lose, so is
  what they take alone (:func:`undisturbed`).
* A step waits for the slowest device (:func:`uneven`). A GPU that is hot or short of power lowers its clock, and
  another program may use it, too: on two H100s the kernels of one step took 45.4 ms on one device in every run, and 47
  to 80 on the other. What is measured meanwhile is true of that state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter, itemgetter
from statistics import mean, median, mode
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import ProfileError
from disco_hlo.printable import time_text
from disco_hlo.profiler.profile import Contention
from disco_hlo.profiler.trace import (
    ENTRY_UNIT,
    Execution,
    Interval,
    Moved,
    Trace,
    by_place,
    covered_ns,
    is_transfer,
    length_ns,
    merged,
    moved_ns,
    moving,
    numbered,
    span,
    unit_of_name,
)

_LONG_NS = 5_000
"""Kernels shorter than this are launches rather than work; their times say little."""
_MUCH = 0.5
"""Of a collective's time: one that shared less says little of what it takes during kernels."""
_ENOUGH_NS = 20_000
"""Less time than this at once, all kernels, or all collectives, of a step together, says nothing."""
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
_SOME = 0.05
"""Of a kernel's time: of one that had a collective beside it for less, what it took longer is mostly noise."""
_DRIFT_NS = 1_000_000
"""Kernels with nothing beside them, taking less than this together, do not tell what the machine did between two
traces."""
MOST = 10.0
"""The largest slow-down that is believed."""
MOST_OF_PRODUCTS = 2.0
"""The largest of matmuls: one whose thread blocks fill the multiprocessors once takes two rounds where a collective has
some of them, no more, however long it lasts."""
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
_SLOWER = 1.05
"""Of the fastest device's time. Two that are well differ by up to 1 %."""
_UNSTEADY = 1.2
"""The longest over the shortest of a device's runs."""
_NOISE_NS = 100_000
"""A difference that a step's own noise does not make: some kernels of a few us, more or less."""
Computed = Mapping[str, Sequence[int]]
"""By device, how long its kernels ran in each run, ns; collectives, in which it waits for others, left out."""


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
    launch_ns = transfer_launch_ns(beside, beside_module)
    if not products:
        return Contention(all_kernels, factor, round(wait_ns), transfer_launch_ns=launch_ns)
    # All together lose no more than the kind that loses most: matmuls were seen to lose more than they can.
    of_products, of_others = (
        min(all_kernels, MOST_OF_PRODUCTS) if one is None else one for one in (lost.products, lost.others)
    )
    return Contention(
        min(all_kernels, max(of_products, of_others)), factor, round(wait_ns), of_products, of_others,
        transfer_launch_ns=launch_ns,
    )  # fmt: skip


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
    by_length = (sorted(works, key=attrgetter("length_ns")) for works in last)
    return {unit: works[len(works) // 2] for unit, works in zip(found, by_length, strict=True)}


def _beside(
    alone: Mapping[str, _Work], beside: Mapping[str, _Work]
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """The time that each collective shared with kernels, and what it would have been without; None where all shared
    too little to tell anything."""
    long = [unit for unit in beside if unit in alone and alone[unit].length_ns >= _LONG_NS]
    common = [unit for unit in long if beside[unit].shared_ns >= _MUCH * beside[unit].length_ns]
    shared = np.array([beside[unit].shared_ns for unit in common], np.float64)
    excess = np.array([beside[unit].length_ns - alone[unit].length_ns for unit in common], np.float64)
    return (shared, shared - excess) if shared.sum() >= _ENOUGH_NS else None


def _wait_and_factor(shared: NDArray[np.float64], without: NDArray[np.float64]) -> tuple[float, float]:
    """The factor, and the wait in ns, with which ``wait + factor x without`` is nearest to ``shared``.

    The factor is the median slope over pairs of collectives that lie far apart, which a few disturbed ones cannot move;
    the wait is what makes the sum right. Where that is negative, or the two are not told apart, it is 0 and the
    factor is that of the sum.
    """
    alike = _believed(float(shared.sum()), float(without.sum())), 0.0
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
                kernels[unit_of_name(item.op)].append(item)
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
    return _believed(moved_ns, moved_ns - lost_ns)


def _believed(shared_ns: float, without_ns: float) -> float:
    """The slow-down of what shared so much time, and would have taken ``without_ns`` of it alone: from 1 to a limit."""
    return min(max(1.0, shared_ns / max(without_ns, shared_ns / MOST)), MOST)


def holds(beside: Trace, module_name: str, order: Sequence[str], prefix: str = "") -> dict[str, float]:
    """By unit, the share of its time that must be done before a collective begins during it: 0, or most of it.

    Of kernels during which the trace shows no collective's beginning nothing is known, and they are left out.

    Args:
        beside: a trace of a module whose order lets kernels overlap with collectives.
        order: that order, as a strategy has it: units, and ``b2.start`` and ``b2.done``.
        prefix: how names of the region begin that has this order (:data:`~disco_hlo.profiler.trace.UNIT`).
    """
    found: dict[str, dict[tuple[int, int, str], list[_Seen]]] = defaultdict(lambda: defaultdict(list))
    units = {token.partition(".")[0] for token in order}
    for (run, _), executions in by_place(beside, module_name).items():
        for turn, spans in enumerate(_turns(executions, units, prefix)):
            for bucket, unit, seen in _beginnings(spans, order):
                found[unit][run, turn, bucket].append(seen)
    shares = {unit: _share(list(by_transfer.values())) for unit, by_transfer in found.items()}
    return {unit: share for unit, share in sorted(shares.items()) if share is not None}


@dataclass(frozen=True, slots=True)
class _Seen:
    """A collective on one device, by the time of the kernel that ran when it could have begun."""

    could: float
    """When that was, 0 at the kernel's beginning, 1 at its end."""
    began: float
    waited_ns: int


def _beginnings(spans: Mapping[str, Interval], order: Sequence[str]) -> list[tuple[str, str, _Seen]]:
    """Of one run on one device, or of one turn of a loop: collectives, and the kernel that ran, or was in line, when
    each could have begun."""
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


def _turns(executions: Sequence[Execution], units: Collection[str], prefix: str) -> list[dict[str, Interval]]:
    """From the beginning of each unit to its end, in each turn of a loop; of a bucket, its collective. What packs a
    bucket and unpacks it has names of its own and is no unit.

    A unit may be several kernels, as many in every turn; most are one. So there are as many turns as most units have
    kernels, and a unit whose kernels do not divide by them is left out. The entry has one turn.
    """
    parts: dict[str, list[Interval]] = defaultdict(list)
    for one in executions:
        named = ENTRY_UNIT.match(one.op.removeprefix(prefix)) if one.op.startswith(prefix) else None
        if named is not None and named[0] in units and (named[0][0] == "b") == is_transfer(one):
            parts[named[0]].append(span(one))
    turns = mode(map(len, parts.values())) if prefix and parts else 1
    found: list[dict[str, Interval]] = [{} for _ in range(turns)]
    for unit, own in parts.items():
        each, left = divmod(len(own), turns)
        for turn in range(0 if left else turns):
            starts, ends = zip(*own[turn * each : (turn + 1) * each], strict=True)
            found[turn][unit] = min(starts), max(ends)
    return found


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


def undisturbed(trace: Trace, module_name: str, moved: Moved, slowed: Contention) -> Trace:
    """The trace with each kernel as short as it would be if no collective had moved data beside it.

    Args:
        moved: how long the collectives move data.
        slowed: what kernels lose to them.
    """
    gained = 1 - 1 / slowed.compute
    shorter: dict[int, Execution] = {}
    for (run, _), items in by_place(trace, module_name).items():
        moves = merged(moving(item, (run, *name), moved) for name, item in numbered(items))
        for item in items:
            if not is_transfer(item) and (shared_ns := covered_ns(span(item), moves)):
                shorter[id(item)] = replace(item, end_ns=item.end_ns - round(gained * shared_ns))
    return replace(trace, executions=tuple(shorter.get(id(item), item) for item in trace.executions))


def uneven(computed: Computed) -> Uneven | None:
    """The device that is much slower than another, or than itself in another run; None where all are alike."""
    if not computed:
        return None
    slow = max(computed, key=lambda device: (median(computed[device]), max(computed[device])))
    fast = min(computed, key=lambda device: median(computed[device]))
    if _alike(median(computed[slow]), median(computed[fast]), _SLOWER):
        slow = max(computed, key=lambda device: max(computed[device]) / max(1, min(computed[device])))
        if _alike(max(computed[slow]), min(computed[slow]), _UNSTEADY):
            return None
    return Uneven(slow, tuple(computed[slow]), fast, tuple(computed[fast]))


@dataclass(frozen=True, slots=True)
class Uneven:
    """A device that holds up the step, and the one that is fastest, with the times of their runs, ns."""

    slow: str
    slow_ns: tuple[int, ...]
    fast: str
    fast_ns: tuple[int, ...]

    def __str__(self) -> str:
        if self.slow == self.fast:
            return f"the step's kernels take {_range(self.slow_ns)} on {self.slow}"
        return f"the step's kernels take {_range(self.slow_ns)} on {self.slow}, {_range(self.fast_ns)} on {self.fast}"


def _alike(longer_ns: float, shorter_ns: float, limit: float) -> bool:
    return longer_ns <= max(limit * shorter_ns, shorter_ns + _NOISE_NS)


def _range(times_ns: Sequence[int]) -> str:
    return f"{time_text(min(times_ns))} to {time_text(max(times_ns))}"


def computed_ns(trace: Trace, module_name: str) -> dict[str, list[int]]:
    """As :data:`Computed`, by the devices that a trace shows."""
    found: dict[str, list[int]] = defaultdict(list)
    for (_, device), items in sorted(by_place(trace, module_name).items()):
        kernels = [span(item) for item in items if not is_transfer(item)]
        found[f"device {device}"].append(length_ns(kernels))
    return dict(found)


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


def transfer_launch_ns(trace: Trace, module_name: str) -> int:
    """Between the end of a collective and the beginning of the next on the same device with nothing meanwhile, the
    median; 0 where there are no such two. Where kernels are in line more lies between them, which is their hold."""
    gaps: list[int] = []
    for items in by_place(trace, module_name).values():
        kernels = merged(span(item) for item in items if not is_transfer(item))
        for before, after in pairwise(filter(is_transfer, items)):
            between = before.end_ns, after.start_ns
            if 0 <= after.start_ns - before.end_ns < _WAIT_NS and not covered_ns(between, kernels):
                gaps.append(after.start_ns - before.end_ns)
    return round(median(gaps)) if gaps else 0


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
