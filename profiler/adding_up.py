"""Times that add up to the step, where collectives block the rank (CPU).

An instruction's median is what it takes undisturbed. A step is made of what they take all told: interruptions that
hit another instruction each time, and all-reduces, in which a rank waits.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from statistics import median

from disco_hlo.errors import ProfileError
from disco_hlo.profiler.instructions import InstructionTimes, instruction_times, time_in
from disco_hlo.profiler.trace import Trace


def stretch(
    trace: Trace,
    module_name: str,
    collectives: Container[str],
    launch_ns: int,
    walls_ns: Sequence[int],
    owner: Mapping[str, str] | None = None,
) -> float:
    """By how much a step's compute takes longer than its instructions' medians and launches add up to.

    On a CPU that others use too, an instruction is rarely interrupted, but then for milliseconds: its median
    does not show that, the step does. The step is its wall time less the time in which a collective runs
    (where collectives block, little else counts); median over runs and devices. Scaled by this factor, times of
    instructions add up to it. Raises like :func:`instruction_times`.

    Where launches and all-reduces leave nothing of the step, the instructions took their time nevertheless: then
    the factor is 1. At 0, every op would be free.

    Args:
        walls_ns: wall time of each run in the trace, in turn. The calls that the trace marks will not do: in them
            inputs are copied too, which for a small step takes as long as the step.
    """
    times = instruction_times(trace, module_name, owner, blocking=collectives)
    computing = [time.median_ns for op, time in times.items() if op not in collectives]
    blocked_ns = time_in(trace, module_name, collectives)
    runs = sorted({run for run, _ in blocked_ns})
    if len(runs) != len(walls_ns):
        raise ProfileError(f"the trace holds {len(runs)} runs of {module_name}, {len(walls_ns)} were timed")
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
