"""Times that add up to the step."""

from __future__ import annotations

import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.profiler.instructions import InstructionTimes, instruction_times, scaled, stretch, time_in
from disco_hlo.profiler.trace import Execution, RunWindow, Trace


def ran(op: str, run: int, start: int, end: int, track: str = "worker 1") -> Execution:
    return Execution(op, "step", run, 0, start, end, track, end)


def trace_of(*executions: Execution, windows: tuple[RunWindow, ...] = ()) -> Trace:
    ordered = sorted(executions, key=lambda item: (item.start_ns, -item.end_ns))
    return Trace(tuple(ordered), windows)


def test_what_others_take_of_a_step_is_spread_over_its_instructions() -> None:
    """Each instruction was interrupted once, in another run: no median shows it."""
    starts = {"a": 0, "b": 100, "all-reduce": 200}
    lengths = ({"a": 180}, {"b": 190}, {"all-reduce": 900})
    executions, walls = [], []
    for run, slow in enumerate(lengths):
        now = 10_000 * run
        walls.append(sum({"a": 80, "b": 90, "all-reduce": 50, **slow}.values()) + 20)
        for op in starts:
            took = {"a": 80, "b": 90, "all-reduce": 50, **slow}[op]
            executions.append(ran(op, run, now, now + took))
            now += took
    calls = [RunWindow(10_000 * run - 500, 10_000 * run + 5000) for run in range(3)]
    trace = trace_of(*executions, windows=tuple(calls))  # which copy inputs, too
    # Walls less the all-reduce: 290, 290, 190. Two launches of 10 and medians of 80 and 90 are in it.
    assert stretch(trace, "step", {"all-reduce"}, 10, walls) == pytest.approx((290 - 20) / 170)
    with pytest.raises(ProfileError, match="3 runs of step, 2 were timed"):
        stretch(trace, "step", {"all-reduce"}, 10, walls[:2])


def test_compute_that_runs_under_an_all_reduce_takes_no_time_of_the_step() -> None:
    trace = trace_of(*(
        execution
        for run in range(3)
        for execution in (
            ran("a", run, 1000 * run, 1000 * run + 100),
            ran("all-reduce", run, 1000 * run + 50, 1000 * run + 300, track="worker 2"),
            ran("b", run, 1000 * run + 200, 1000 * run + 330),
            ran("c", run, 1000 * run + 330, 1000 * run + 350),
            ran("all-reduce.2", run, 1000 * run + 350, 1000 * run + 400),
        )
    ))  # fmt: skip
    talks = {"all-reduce", "all-reduce.2"}
    alone = {op: time.median_ns for op, time in instruction_times(trace, "step", blocking=talks).items()}
    assert alone == {"a": 50, "b": 30, "c": 20, "all-reduce": 250, "all-reduce.2": 50}
    assert instruction_times(trace, "step")["a"].median_ns == 100
    assert time_in(trace, "step", talks) == {(0, 0): 300, (1, 0): 300, (2, 0): 300}
    assert stretch(trace, "step", talks, 0, [400] * 3) == 1.0
    assert stretch(trace, "step", talks, 0, [500] * 3) == 2.0


def test_ops_are_not_free_where_launches_leave_nothing_of_the_step() -> None:
    trace = trace_of(*(
        execution
        for run in range(3)
        for execution in (
            ran("a", run, 1000 * run, 1000 * run + 100),
            ran("all-reduce", run, 1000 * run + 100, 1000 * run + 300),
        )
    ))  # fmt: skip
    assert stretch(trace, "step", {"all-reduce"}, 10, [310] * 3) == 1.0
    assert (
        stretch(trace, "step", {"all-reduce"}, 500, [310] * 3) == 1.0
    )  # as slow as launches may be elsewhere
    assert stretch(trace, "step", {"all-reduce"}, 10, [200] * 3) == 1.0
    assert stretch(trace, "step", {"all-reduce"}, 10, [320] * 3) == 1.1


def test_scaled_times_keep_their_samples() -> None:
    assert scaled({"a": InstructionTimes(10, 4, 6, 9)}, 1.5) == {"a": InstructionTimes(15, 6, 6, 14)}
