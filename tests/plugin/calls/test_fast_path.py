"""After a module is settled JAX calls what won by itself: no call takes Python, and nothing of ours is left."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import pytest

from disco_hlo.errors import UnsupportedError
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.calls.observing import Observation
from disco_hlo.plugin.xla import jaxlink
from tests.plugin.calls.training import (
    SPLIT,
    batch,
    compiled_again,
    counted_python_calls,
    fresh_state,
    jitted,
    named,
    step,
    train,
    trial_of,
)


@pytest.mark.parametrize("winner", [DEFAULT, "again"])
def test_no_call_takes_python_after_a_module_is_settled(observation: Observation, winner: str) -> None:
    call = jitted("given_back")
    _, state = train(call, 3)
    watch = trial_of(observation.trials, "jit_given_back").watch
    watch.offer("again", compiled_again(watch))
    xs = [batch(number) for number in range(8)]
    with counted_python_calls() as count:
        for x in xs[:2]:
            *state, _ = call(*state, x)
        assert count() == 2
        watch.settle(winner)
        for x in xs[:3]:  # in which JAX notes how to call it: with arrays made in Python, and its own
            *state, _ = call(*state, x)
        noted = count()
        for x in xs[3:]:
            *state, _ = call(*state, x)
        assert count() == noted
    assert watch.calls == 5
    assert observation.trials == []


def test_a_step_compiled_ahead_of_time_is_called_by_jax_itself_again(observation: Observation) -> None:
    compiled = jitted("ahead").lower(*fresh_state(), batch(0)).compile()
    _, state = train(compiled, 3)
    watch = trial_of(observation.trials, "jit_ahead").watch
    winner = compiled_again(watch)
    watch.offer("again", winner)
    watch.settle("again")
    train(compiled, 2, state)
    assert type(compiled._call).__name__ == "PjitFunction"
    assert compiled.runtime_executable() is winner


def test_a_call_that_raised_does_not_keep_a_step_in_python(observation: Observation) -> None:
    def halving(weights: Any, x: jax.Array) -> Any:
        return step(weights, jax.random.key(0), x)[0], x / x.sum()

    call = jax.jit(named("raising", halving))
    weights = fresh_state()[0]
    good, bad = batch(1), jax.device_put(batch(1) * 0, SPLIT)
    with jax.debug_nans(True):
        call(weights, good)
        with pytest.raises(FloatingPointError):
            call(weights, bad)
        call(weights, good)
    call(weights, good)
    for trial in observation.trials:
        trial.watch.settle(DEFAULT)
    with counted_python_calls() as count:
        for _ in range(5):
            call(weights, good)
        assert count() <= 1


def test_functions_and_executables_are_freed(observation: Observation) -> None:
    call = jitted("freed")
    train(call, 2)
    watch = weakref.ref(trial_of(observation.trials, "jit_freed").watch)
    module = weakref.ref(watch()._module)  # type: ignore[union-attr]
    del call
    observation.drain()
    jax.clear_caches()
    gc.collect()
    assert watch() is None
    assert module() is None


def test_what_was_decided_outlives_jaxs_caches(observation: Observation) -> None:
    call = jitted("cleared")
    stock, _ = train(call, 3)
    watch = trial_of(observation.trials, "jit_cleared").watch
    watch.offer("again", compiled_again(watch))
    watch.settle("again")
    winner = watch._executables["again"]
    jax.clear_caches()
    assert train(call, 3)[0] == stock
    assert observation.trials == []
    assert call.lower(*fresh_state(), batch(0)).compile().runtime_executable() is winner


def test_a_trial_begins_anew_with_jaxs_caches(observation: Observation) -> None:
    call = jitted("anew")
    train(call, 3)
    observation.drain()  # the thread that times a call holds the call's watch
    jax.clear_caches()
    gc.collect()
    train(call, 2)
    assert trial_of(observation.trials, "jit_anew").watch.calls == 2


def test_nothing_is_wrapped_before_and_after() -> None:
    from jax._src import pjit, stages
    from jax._src.interpreters import pxla

    def found() -> list[object]:
        return [
            pxla.UnloadedMeshExecutable.load,
            pxla.MeshExecutable.create_cpp_call,
            pjit._pjit_call_impl_python,
            stages.Compiled.__init__,
        ]

    before = found()
    jaxlink.watch_calls(lambda _: None)
    assert all(one is not other for one, other in zip(before, found(), strict=True))
    jaxlink.unwatch_calls()
    assert found() == before


def test_stopping_gives_back_what_is_still_watched(observation: Observation) -> None:
    call = jitted("stopped")
    _, state = train(call, 2)
    xs = [batch(number) for number in range(8)]
    observation.stop()
    with counted_python_calls() as count:
        for x in xs[:3]:
            *state, _ = call(*state, x)
        noted = count()
        for x in xs[3:]:
            *state, _ = call(*state, x)
        assert count() == noted
    assert observation.trials == []


def test_a_jax_that_calls_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jaxlink.calls._CALL_NAMES, "pxla.MeshExecutable", ("create_rust_call",))
    with pytest.raises(UnsupportedError, match=r"pxla.MeshExecutable.create_rust_call is missing"):
        jaxlink.watch_calls(lambda _: None)
    monkeypatch.undo()
    assert not hasattr(jax._src.pjit._pjit_call_impl_python, jaxlink.requests.WRAPPED)  # type: ignore[attr-defined]


def test_what_fails_while_it_looks_at_a_module_leaves_it_alone(caplog: pytest.LogCaptureFixture) -> None:
    def looking(_: object) -> None:
        raise RuntimeError("no such luck")

    jaxlink.install(lambda _: None)
    jaxlink.watch_calls(looking)
    try:
        stock = train(jitted("left"), 2)[0]
    finally:
        jaxlink.unwatch_calls()
        jaxlink.uninstall()
    assert len(stock) == 2
    assert "calls of jit_left are not watched: RuntimeError: no such luck" in caplog.messages


def test_nothing_is_offered_for_a_step_that_is_settled(observation: Observation) -> None:
    call = jitted("late")
    train(call, 2)
    trial = trial_of(observation.trials, "jit_late")
    executable = compiled_again(trial.watch)
    trial.offer("again", executable)
    trial.watch.settle("again")
    with pytest.raises(UnsupportedError, match=r"not watched any more: it runs again"):
        trial.watch.offer("another", executable)
