"""Calls of a training under the profiler, and the script's own profiler."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import jax
import pytest

from disco_hlo.errors import ActivationError
from disco_hlo.plugin.calls import traced as calls_traced
from disco_hlo.plugin.calls.observing import Observation
from disco_hlo.plugin.calls.traced import TracedCalls
from disco_hlo.plugin.xla import executables
from disco_hlo.plugin.xla.hook import module_name
from disco_hlo.profiler import trace as tracing
from tests.plugin.calls.training import batch, fresh_state, jitted, named, stock, trial_of

pytestmark = pytest.mark.product_only
_MOST = 60


def train(observation: Observation, traced: TracedCalls, at: dict[int, object]) -> list[float]:
    """Losses until the calls were traced; ``traced`` is asked for from the second call on."""
    call, state, losses = jitted("traced_step"), fresh_state(), []
    while not traced._ended.is_set() and len(losses) < _MOST:
        if (what := at.get(len(losses))) is not None:
            what()  # type: ignore[operator]
        *state, loss = call(*state, batch(len(losses)))
        losses.append(float(loss))
        if len(losses) == 1:
            trial = trial_of(observation.trials, "jit_traced_step")
            trial.hold, trial.begun = traced, True
    return losses


def test_real_calls_are_traced_and_the_training_is_what_it_was(observation: Observation) -> None:
    traced = TracedCalls("profiling", 3, lambda: True)
    losses = train(observation, traced, {})
    assert traced.error == ""
    trial = trial_of(observation.trials, "jit_traced_step")
    name = module_name(executables.read_executable(trial.watch.request.call_default()))
    seen = tracing.read(traced.trace)
    assert len({one.run for one in seen.executions if one.module == name}) == 3
    assert len(seen.windows) == len(traced.device_ns) == 3
    assert min(traced.device_ns) > 0
    assert trial.call_ns > 0
    observation.stop()
    assert losses == stock(len(losses))[0]


@pytest.mark.parametrize("watched", [True, False])
def test_a_module_of_the_same_name_between_two_calls_is_not_of_them(
    observation: Observation, watched: bool
) -> None:
    """One function makes two where sequences or batches differ."""
    traced = TracedCalls("profiling", 3, lambda: True)
    call, state = jitted("traced_step"), fresh_state()
    other = call if watched else jax.jit(named("traced_step", lambda w, k, x: (x @ w["in"]).sum()))
    for number in range(_MOST):
        *state, loss = call(*state, batch(number))
        ran = other(*state, batch(number, rows=512))
        if watched:
            *state, loss = ran
        loss.block_until_ready()
        if number == 0:
            trial = observation.trials[0]
            trial.hold, trial.begun = traced, True
        if traced._ended.is_set():
            break
    [module, *_] = observation.trials
    name = module_name(executables.read_executable(module.watch.request.call_default()))
    seen = tracing.read(traced.trace)
    own = [one for one in seen.executions if one.module == name]
    assert len({one.run for one in own}) == 3
    ops = {one.op for one in own if one.run == own[0].run}
    assert all({one.op for one in own if one.run == run} == ops for run in {one.run for one in own})


def test_a_trace_is_given_up_where_the_step_is_not_called_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the script does instead would be under the profiler."""
    monkeypatch.setattr(calls_traced, "_LONGEST_CALL_S", 0.0)
    traced = TracedCalls("profiling", 2, lambda: True)
    traced.wait()
    thread = threading.Thread(target=traced.taken, args=(lambda: False,))
    thread.start()
    end = time.monotonic() + 60
    while traced._profiler._session is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert [traced.after_call(), traced.after_call()] == [False, True]
    thread.join()
    assert traced.trace == b""
    assert "did not call the step" in traced.error


def test_no_call_is_traced_while_the_script_has_a_trace_of_its_own(
    observation: Observation, tmp_path: Path
) -> None:
    traced = TracedCalls("profiling", 3, lambda: True)
    at = {0: lambda: jax.profiler.start_trace(str(tmp_path)), 40: jax.profiler.stop_trace}
    losses = train(observation, traced, at)
    assert 43 < len(losses) < _MOST
    assert traced.trace
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_trace_gives_way_to_one_of_the_scripts(observation: Observation, tmp_path: Path) -> None:
    traced = TracedCalls("profiling", 10, lambda: True)
    begun: list[int] = []

    def begin() -> None:
        assert traced._profiler._session is not None
        jax.profiler.start_trace(str(tmp_path))
        begun.append(1)

    train(observation, traced, {12: begin})
    jax.profiler.stop_trace()
    assert begun
    assert traced.trace == b""
    assert traced.error == "the script began a profiler trace of its own"
    [written] = tmp_path.rglob("*.xplane.pb")
    assert tracing.read(written.read_bytes()).executions
    with jax.profiler.trace(str(tmp_path)):
        pass


def test_a_trace_ends_though_ctrl_c_came_as_it_was_stopped_and_the_script_went_on(
    observation: Observation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a notebook. All later calls would be under the profiler, whose events fill the memory."""
    traced, sleep, interrupted = TracedCalls("profiling", 3, lambda: True), time.sleep, list[int]()

    def interrupted_once(seconds: float) -> None:
        if not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(calls_traced.time, "sleep", interrupted_once)
    call, state = jitted("traced_step"), fresh_state()
    for number in range(_MOST):
        try:
            *state, loss = call(*state, batch(number))
        except KeyboardInterrupt:
            continue
        loss.block_until_ready()
        if number == 0:
            trial = trial_of(observation.trials, "jit_traced_step")
            trial.hold, trial.begun = traced, True
    assert interrupted
    assert traced._ended.is_set()
    assert tracing.read(traced.trace).executions
    with jax.profiler.trace(str(tmp_path)):
        pass


def test_a_step_that_is_called_no_more_leaves_no_trace_under_way(tmp_path: Path) -> None:
    traced = TracedCalls("profiling", 3, lambda: True)
    traced.wait()
    over = threading.Event()
    over.set()
    with pytest.raises(ActivationError, match="not called any more"):
        traced.taken(over.is_set)
    with jax.profiler.trace(str(tmp_path)):
        pass
