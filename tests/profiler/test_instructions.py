"""Joining executions to instructions: times, timelines, overlap, and what adds up to the step."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.profiler.instructions import (
    InstructionTimes,
    body_times,
    instruction_times,
    median_run,
    scaled,
    stretch,
)
from disco_hlo.profiler.trace import Execution, RunWindow, Trace, joined, read

DATA = Path(__file__).parent / "data"


def ran(op, run, start, end, device=0):
    return Execution(op, "step", run, device, start, end)


def trace_of(*executions, windows=()):
    ordered = sorted(executions, key=lambda item: (item.start_ns, -item.end_ns))
    return Trace(tuple(ordered), tuple(windows))


def three_runs_of(*ops):
    """Of ops with their beginnings and ends, a microsecond apart."""
    runs = [1000 * run for run in range(3)]
    return trace_of(*(ran(op, at // 1000, at + a, at + b) for at in runs for op, a, b in ops))


def medians(trace, owner, **options):
    """Of one run, seen three times."""
    times = instruction_times(joined([trace] * 3), "step", owner, **options)
    return {op: time.median_ns for op, time in times.items()}


def test_median_and_spread_over_runs_and_devices():
    trace = trace_of(
        ran("a", 0, 0, 10), ran("a", 0, 0, 14, device=1),
        ran("a", 1, 100, 111), ran("a", 1, 100, 119, device=1),
        ran("a", 2, 200, 212), ran("a", 2, 200, 290, device=1),
    )  # fmt: skip
    # durations 10 14 | 11 19 | 12 90: median 13, deviations 3 1 2 6 1 77; the last device's are 10, 11, 12
    assert instruction_times(trace, "step", {}) == {"a": InstructionTimes(13, 2, 6, 11)}


OWNER = {"dot": "while", "add": "while"}


def test_a_loop_with_an_event_counts_once_with_its_body():
    trace = trace_of(
        ran("while", 0, 0, 100), ran("dot", 0, 10, 40), ran("add", 0, 40, 45),
        ran("dot", 0, 50, 80), ran("add", 0, 80, 85), ran("tail", 0, 110, 120),
    )  # fmt: skip
    assert medians(trace, OWNER) == {"while": 100, "tail": 10}


def test_several_kernels_of_one_instruction_add_up():
    assert medians(trace_of(ran("sort", 0, 0, 10), ran("sort", 0, 20, 25)), {}) == {"sort": 15}


@pytest.mark.parametrize(("launch_ns", "loop_ns"), [(None, 90), (4, 79), (100, 90)])
def test_a_gpu_loop_lasts_from_its_first_kernel_to_its_last_and_does_not_wait_for_the_host(
    launch_ns, loop_ns
):
    trace = trace_of(
        ran("dot", 0, 10, 40), ran("add", 0, 55, 60), ran("dot", 0, 64, 95), ran("add", 0, 99, 100),
        ran("tail", 0, 110, 120)
    )  # fmt: skip
    # 30 + 5 + 31 + 1 ns of kernels, three gaps
    assert medians(trace, OWNER, launch_ns=launch_ns) == {"while": loop_ns, "tail": 10}


def test_too_few_runs_and_unknown_modules_are_refused():
    trace = trace_of(ran("a", 0, 0, 10), ran("a", 1, 20, 30))
    with pytest.raises(ProfileError, match="2 runs of step, need 3"):
        instruction_times(trace, "step", {})
    with pytest.raises(ProfileError, match="no run of other; it holds step"):
        instruction_times(trace, "other", {})


def test_a_timeline_is_of_the_run_of_median_wall_time():
    trace = trace_of(
        ran("a", 0, 1000, 1090), ran("a", 1, 2000, 2050), ran("b", 1, 2060, 2070), ran("a", 2, 3000, 3020)
    )  # fmt: skip
    assert median_run(trace, "step") == {0: [ran("a", 1, 2000, 2050), ran("b", 1, 2060, 2070)]}


def test_asynchronous_all_reduces_of_a_real_gpu_trace_belong_to_their_start():
    trace = read(gzip.decompress((DATA / "h200_jax_0_11_2.xspace.gz").read_bytes()))
    owner = {f"all-reduce.{n}.0-fusion.1": f"start.{n}" for n in range(1, 7)}
    owner |= {"custom-call.5": "while.22", "wrapped_sine": "while.22"}
    times = instruction_times(trace, "jit_step", owner)
    assert times["start.3"] == InstructionTimes(24880, 2224, 8, 22672)
    assert times["wrapped_tanh"] == InstructionTimes(6816, 112, 8, 6768)
    assert times["while.22"].median_ns > 50_000
    assert "wrapped_sine" not in times


def turned(run, start, *parts):
    """Executions of a body in turn, each given as (op, length), back to back."""
    found = []
    for op, length in parts:
        found.append(ran(op, run, start, start + length))
        start += length
    return found


BODY = {"dot": "dot", "add": "add", "inner": "inner", "gather": "start", "start": "start"}


def test_what_a_loop_repeats_has_a_time_for_each_execution():
    trace = trace_of(
        *(
            item
            for run in range(3)
            for turn in range(4)
            for item in turned(run, 1000 * run + 100 * turn, ("dot", 30 + turn), ("gather", 20), ("dot", 7))
        ),
        ran("tail", 0, 900, 990),
    )
    found = body_times(trace, "step", BODY, turns=4, launch_ns=2)
    # two kernels of each dot: 37, 38, 39 and 40, and the gather goes by the instruction that starts it
    assert found.times == {"dot": InstructionTimes(38, 1, 12, 38), "start": InstructionTimes(20, 0, 12, 20)}
    assert found.executions == 4
    # turns end 57, 58, 59 after they begin, so 43, 42, 41 before the next one; 2 are its launch
    assert found.own_ns == 40
    # Half of what runs, runs twice a turn: without a count of turns the smaller one is taken.
    assert body_times(trace, "step", BODY).executions == 4
    assert body_times(trace, "step", {"other": "other"}) is None


def test_a_first_turn_that_takes_longer_is_told_apart():
    trace = trace_of(
        *(
            item
            for run in range(3)
            for turn in range(3)
            for item in turned(
                run, 1000 * run + 100 * turn, ("dot", 20 + 30 * (turn == 0)), ("add", 5 + (run == turn))
            )
        )
    )
    found = body_times(trace, "step", BODY)
    assert found.first_ns == {"dot": 50}
    assert found.times["dot"].median_ns == 20


def test_a_loop_in_a_loop_counts_as_one_instruction_of_its_body():
    inner = {"mul": "mul"}
    outer = BODY | {"mul": "inner"}
    trace = trace_of(
        *(
            item
            for run in range(3)
            for turn in range(2)
            for item in turned(run, 1000 * run + 100 * turn, ("dot", 30), *[("mul", 10 + turn)] * 3)
        )
    )
    found = body_times(trace, "step", outer, turns=2)
    # no event of its own: from its first kernel to its last, 30 and 33
    assert {op: one.median_ns for op, one in found.times.items()} == {"dot": 30, "inner": 32}
    deeper = body_times(trace, "step", inner, turns=0, around=found.executions)
    assert (deeper.executions, deeper.times["mul"].median_ns, deeper.own_ns) == (6, 10, 0)


def test_a_collective_in_a_loop_is_timed_from_its_last_arrival_in_each_turn():
    trace = trace_of(
        *(
            ran("gather", run, 1000 * run + 100 * turn + late, 1000 * run + 100 * turn + 50, device=device)
            for run in range(3)
            for turn in range(2)
            for device, late in ((0, 10 * turn), (1, 20))
        )
    )
    assert body_times(trace, "step", BODY, turns=2).times["start"].last_arrival_ns == 30


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
    assert stretch(trace, "step", {"all-reduce"}, 10, walls, {}) == pytest.approx((290 - 20) / 170)
    with pytest.raises(ProfileError, match="3 runs of step, 2 were timed"):
        stretch(trace, "step", {"all-reduce"}, 10, walls[:2], {})


def test_compute_that_runs_under_an_all_reduce_takes_no_time_of_the_step() -> None:
    trace = three_runs_of(
        ("a", 0, 100), ("all-reduce", 50, 300), ("b", 200, 330), ("c", 330, 350), ("all-reduce.2", 350, 400)
    )
    talks = {"all-reduce", "all-reduce.2"}
    alone = {op: time.median_ns for op, time in instruction_times(trace, "step", {}, blocking=talks).items()}
    assert alone == {"a": 50, "b": 30, "c": 20, "all-reduce": 250, "all-reduce.2": 50}
    assert instruction_times(trace, "step", {})["a"].median_ns == 100
    assert stretch(trace, "step", talks, 0, [400] * 3, {}) == 1.0
    assert stretch(trace, "step", talks, 0, [500] * 3, {}) == 2.0


def test_ops_are_not_free_where_launches_leave_nothing_of_the_step() -> None:
    trace = three_runs_of(("a", 0, 100), ("all-reduce", 100, 300))
    assert stretch(trace, "step", {"all-reduce"}, 10, [310] * 3, {}) == 1.0
    # Launches may be as slow as this elsewhere.
    assert stretch(trace, "step", {"all-reduce"}, 500, [310] * 3, {}) == 1.0
    assert stretch(trace, "step", {"all-reduce"}, 10, [200] * 3, {}) == 1.0
    assert stretch(trace, "step", {"all-reduce"}, 10, [320] * 3, {}) == 1.1


def test_scaled_times_keep_their_samples() -> None:
    assert scaled({"a": InstructionTimes(10, 4, 6, 9)}, 1.5) == {"a": InstructionTimes(15, 6, 6, 14)}
