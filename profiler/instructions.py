"""What a trace says about one module: time per instruction, and the timeline of a run.

The measured op times of DisCo's cost model (section 4.2) come from here. A time is what one
instruction of the module's entry took in one run on one device: a loop counts as one instruction,
body included; several kernels of one instruction add up. What runs in a loop's body has a time for each
of its executions (:func:`body_times`), since one run shows it as often as the loop turns.

An instruction's median is what it takes undisturbed. A step is made of what they take all told: interruptions that
hit another instruction each time, and collectives, in which a rank waits. Where collectives block the rank (CPU),
:func:`stretch` says by how much times must grow to add up to the step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from disco_hlo.errors import ProfileError
from disco_hlo.printable import counted
from disco_hlo.profiler.trace import Execution, Interval, Trace, by_place, covered_ns, length_ns, merged, span

MINIMUM_RUNS = 3
"""Fewer runs give no spread worth the name."""

_CLEARLY = 3
"""How many median deviations of first and later turns apart they must lie to be told apart."""


@dataclass(frozen=True, slots=True)
class InstructionTimes:
    """Time of one instruction over all runs and local devices of a trace."""

    median_ns: int
    spread_ns: int
    """Median absolute deviation from the median."""
    samples: int
    """Runs times devices that executed it."""
    last_arrival_ns: int
    """Median over the runs of the shortest time on any local device. For a collective this is its
    time on the device that arrived last, so the collective without the waiting for it."""


def instruction_times(
    trace: Trace,
    module_name: str,
    owner: Mapping[str, str],
    *,
    blocking: Container[str] = (),
    launch_ns: int | None = None,
) -> dict[str, InstructionTimes]:
    """Times of the module's entry instructions that ran, by instruction name, ascending.

    Args:
        owner: names, for every instruction inside a loop or another called computation, the entry instruction that
            runs it.
        blocking: while one of these runs, the others take no time of the step: a convolution that a thread pool was
            still at when the collective behind it began takes what it took before that.
        launch_ns: what lies between two kernels that the host is ahead of. A loop without an event of its own (GPU)
            takes at most what its kernels take and that between them: in a trace more lies between short ones, which
            the host starts one by one where command buffers are off, and of which the profiler writes down each.
            Where it is not given, such a loop lasts from its first kernel to its last.

    Raises:
        ProfileError: the trace has too few runs of the module.
    """
    placed = _of_module(trace, module_name)
    runs = len({run for run, _ in placed})
    if runs < MINIMUM_RUNS:
        raise ProfileError(
            f"the trace holds {counted(runs, 'run')} of {module_name}, need {MINIMUM_RUNS}; repeat more often"
        )
    samples: dict[str, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for (run, device), items in placed.items():
        for op, ns in _durations(items, owner, blocking, launch_ns).items():
            samples[op][run][device] = ns
    return {op: _summary(by_run) for op, by_run in sorted(samples.items())}


@dataclass(frozen=True, slots=True)
class BodyTimes:
    """What runs in a loop's body, or in a branch."""

    times: Mapping[str, InstructionTimes]
    """By instruction of the body, of one execution each; an inner loop counts as one."""
    executions: int
    """Of the body in one run, all loops around it counted (median over runs and devices)."""
    first_ns: Mapping[str, int]
    """What instructions took each time the loop began, of those that then took longer or shorter, by more than noise,
    than in later turns (medians)."""
    own_ns: int
    """What lies between the end of one turn and the beginning of the next beyond a launch: the loop's own cost."""


def body_times(
    trace: Trace,
    module_name: str,
    owner: Mapping[str, str],
    turns: int = 0,
    around: int = 1,
    blocking: Container[str] = (),
    launch_ns: int | None = None,
) -> BodyTimes | None:
    """Times of what a body runs; None where the trace shows nothing of it.

    The k-th event of an instruction is of the k-th execution of the body; one that has several events in each
    execution has as many more of them.

    Args:
        owner: names, for every instruction that the body runs, its own ones included, the body's own that runs it.
        turns: of the loop, each time it runs; 0 where nobody knows: then most instructions are taken to run once a
            turn.
        around: how often the loop runs in one run of the module.
        blocking: as for :func:`instruction_times`, as is ``launch_ns``.
    """
    inside = Trace(tuple(one for one in trace.executions if one.op in owner), ())
    placed = by_place(inside, module_name)
    if not placed:
        return None
    own_owners = {op: by for op, by in owner.items() if op != by}
    samples: dict[str, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    gaps: list[int] = []
    counts = [turns * around or _usual_count(items, own_owners) for items in placed.values()]
    executions = round(median(counts))
    for ((run, device), items), count in zip(placed.items(), counts, strict=True):
        ends_ns: int | None = None
        for turn, parts in enumerate(_turns(items, count)):
            for op, ns in _durations(parts, own_owners, blocking, launch_ns).items():
                samples[op][run * executions + turn][device] = ns
            if parts and ends_ns is not None and turn % max(1, count // around):
                gaps.append(parts[0].start_ns - ends_ns)
            ends_ns = max((part.end_ns for part in parts), default=ends_ns)
    turns = max(1, executions // around)
    own_ns = max(0, round(median(gaps)) - (launch_ns or 0)) if gaps else 0
    told_apart = ((op, _first_ns(by, turns)) for op, by in samples.items())
    first_ns = {op: first for op, first in told_apart if first is not None}
    return BodyTimes({op: _summary(by) for op, by in sorted(samples.items())}, executions, first_ns, own_ns)


def _usual_count(items: Iterable[Execution], owners: Mapping[str, str]) -> int:
    """How often most of a body's instructions ran: of counts as usual the least, since one may have several kernels."""
    least: dict[str, int] = {}
    for op, count in Counter(item.op for item in items).items():
        own = owners.get(op, op)
        least[own] = min(count, least.get(own, count))
    counts = Counter(least.values())
    return max(counts, key=lambda count: (counts[count], -count))


def _turns(items: Sequence[Execution], count: int) -> list[list[Execution]]:
    """Executions of a body, by start time, told apart by how often each of its instructions ran before."""
    total = Counter(item.op for item in items)
    seen: Counter[str] = Counter()
    found: list[list[Execution]] = [[] for _ in range(count)]
    for item in items:
        found[seen[item.op] * count // total[item.op]].append(item)
        seen[item.op] += 1
    return found


def _first_ns(by_execution: Mapping[int, Mapping[int, int]], turns: int) -> int | None:
    """What an instruction took in first turns, where that differs from later ones; ``None`` where it does not."""
    first, later = (
        [
            ns
            for turn, by_device in by_execution.items()
            if (turn % turns == 0) is is_first
            for ns in by_device.values()
        ]
        for is_first in (True, False)
    )
    if min(len(first), len(later)) < MINIMUM_RUNS:
        return None
    middle, usual = median(first), median(later)
    noise = median(abs(ns - middle) for ns in first) + median(abs(ns - usual) for ns in later)
    return round(middle) if abs(middle - usual) > _CLEARLY * max(1, noise) else None


def median_run(trace: Trace, module_name: str) -> dict[int, list[Execution]]:
    """The run of median wall time: by local device what ran, bodies of loops included, by start time.

    Raises:
        ProfileError: the trace does not hold the module.
    """
    placed = _of_module(trace, module_name)
    walls = _wall_ns(trace, placed)
    by_wall = sorted(walls, key=lambda number: (walls[number], number))
    chosen = by_wall[(len(by_wall) - 1) // 2]
    return {device: items for (run, device), items in placed.items() if run == chosen}


def outermost(items: Sequence[Execution], owner: Mapping[str, str]) -> list[Execution]:
    """A loop or call that has an event of its own stands for what runs inside it."""
    present = {item.op for item in items}
    return [item for item in items if item.op not in owner or owner[item.op] not in present]


def _of_module(trace: Trace, module_name: str) -> dict[tuple[int, int], list[Execution]]:
    found = by_place(trace, module_name)
    if not found:
        seen = ", ".join(sorted({execution.module for execution in trace.executions}))
        raise ProfileError(f"the trace holds no run of {module_name}; it holds {seen}")
    return found


def _durations(
    items: Sequence[Execution],
    owners: Mapping[str, str],
    blocking: Container[str],
    launch_ns: int | None,
) -> dict[str, int]:
    durations: Counter[str] = Counter()
    blocked = _union([item for item in items if item.op in blocking])
    bodies: dict[str, list[Execution]] = defaultdict(list)
    for item in outermost(items, owners):
        if item.op in owners:
            bodies[owners[item.op]].append(item)
        else:
            hidden_ns = 0 if item.op in blocking else covered_ns(span(item), blocked)
            durations[item.op] += item.end_ns - item.start_ns - hidden_ns
    for loop, parts in bodies.items():
        start_ns, end_ns = min(part.start_ns for part in parts), max(part.end_ns for part in parts)
        hidden_ns = 0 if loop in blocking else covered_ns((start_ns, end_ns), blocked)
        durations[loop] = end_ns - start_ns - hidden_ns
        if launch_ns is not None:
            back_to_back_ns = length_ns(_union(parts)) + (len(parts) - 1) * launch_ns
            durations[loop] = min(durations[loop], back_to_back_ns)
    return durations


def _summary(by_run: Mapping[int, Mapping[int, int]]) -> InstructionTimes:
    values = [value for by_device in by_run.values() for value in by_device.values()]
    middle = median(values)
    spread = median(abs(value - middle) for value in values)
    last = median(min(by_device.values()) for by_device in by_run.values())
    return InstructionTimes(round(middle), round(spread), len(values), round(last))


def _wall_ns(trace: Trace, placed: Mapping[tuple[int, int], Sequence[Execution]]) -> dict[int, int]:
    """Run -> wall time: of its profiled call, unless the call made several runs or has no mark."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for (run, _), items in placed.items():
        for item in items:
            first[run] = min(first.get(run, item.start_ns), item.start_ns)
            last[run] = max(last.get(run, item.end_ns), item.end_ns)
    walls = {run: max(last[run] - first[run], 1) for run in first}
    for window in trace.windows:
        inside = [run for run in first if window.start_ns <= first[run] and last[run] <= window.end_ns]
        if len(inside) == 1:
            walls[inside[0]] = max(window.end_ns - window.start_ns, 1)
    return walls


def _union(items: Iterable[Execution]) -> list[Interval]:
    return merged(map(span, items))


def stretch(
    trace: Trace,
    module_name: str,
    collectives: Container[str],
    launch_ns: int,
    walls_ns: Sequence[int],
    owner: Mapping[str, str],
) -> float:
    """By how much a step's compute takes longer than its instructions' medians and launches add up to.

    On a CPU that others use too, an instruction is rarely interrupted, but then for milliseconds: its median
    does not show that, the step does. The step is its wall time less the time in which a collective runs
    (where collectives block, little else counts); median over runs and devices. Scaled by this factor, times of
    instructions add up to it. Raises like :func:`instruction_times`.

    Where launches and collectives leave nothing of the step, the instructions took their time nevertheless: then
    the factor is 1. At 0, every op would be free.

    Args:
        walls_ns: wall time of each run in the trace, in turn. The calls that the trace marks will not do: in them
            inputs are copied too, which for a small step takes as long as the step.
    """
    times = instruction_times(trace, module_name, owner, blocking=collectives)
    computing = [time.median_ns for op, time in times.items() if op not in collectives]
    blocked_ns = {
        place: length_ns(_union(item for item in items if item.op in collectives))
        for place, items in _of_module(trace, module_name).items()
    }
    runs = sorted({run for run, _ in blocked_ns})
    if len(runs) != len(walls_ns):
        raise ProfileError(
            f"the trace holds {counted(len(runs), 'run')} of {module_name}, {len(walls_ns)} were timed"
        )
    walls = dict(zip(runs, walls_ns, strict=True))
    left_ns = median(walls[run] - ns for (run, _), ns in blocked_ns.items())
    computed_ns, alone_ns = left_ns - launch_ns * len(computing), sum(computing)
    return computed_ns / alone_ns if computed_ns > 0 and alone_ns > 0 else 1.0


def scaled(times: Mapping[str, InstructionTimes], factor: float) -> dict[str, InstructionTimes]:
    """Every time multiplied by ``factor``."""
    return {
        op: InstructionTimes(
            round(factor * one.median_ns), round(factor * one.spread_ns), one.samples,
            round(factor * one.last_arrival_ns),
        )
        for op, one in times.items()
    }  # fmt: skip
