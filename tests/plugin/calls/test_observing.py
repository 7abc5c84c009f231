"""Which module is the step, of scripts as people write them: the right one each time."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.calls import trial as trials
from disco_hlo.plugin.calls.observing import (
    _MOST_SEARCHES,
    CALLS_BEFORE_SEARCH,
    Observation,
    keeps_state,
    steps,
)
from disco_hlo.plugin.calls.trial import Trial
from disco_hlo.plugin.calls.watch import Seen
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.plugin.xla.jaxlink.calls import ArrayType
from tests.plugin.calls.training import (
    SPLIT,
    WHOLE,
    Weights,
    batch,
    compiled_again,
    counted_python_calls,
    fresh_state,
    jitted,
    loss_of,
    named,
    reworded_state,
    step,
    train,
    trial_of,
)

OURS = pytest.mark.product_only
"""For what we decide once calls are seen; how they are seen goes by JAX's private names."""


def names(observation: Observation) -> list[str]:
    """Modules of the steps that were found, by share."""
    observation.drain()
    return [trial.watch.module_name for trial in observation.steps()]


def state_of(mebibytes: int) -> ArrayType:
    return ArrayType((mebibytes << 18,), "float32", mebibytes << 20)


NUMBER = ArrayType((), "float32", 4)


@pytest.mark.parametrize(
    ("takes", "returns", "keeps"),
    [
        ([state_of(1), state_of(2)], [state_of(1), NUMBER], True),  # a step with its loss
        ([state_of(1), state_of(2)], [NUMBER, NUMBER], False),  # loss and accuracy
        ([NUMBER, state_of(1)], [NUMBER], False),  # a count
        ([state_of(1), state_of(2)], [state_of(8)], False),  # predictions
        ([state_of(1), state_of(2)], [state_of(1), state_of(8)], False),  # predictions, and what it was given
        ([NUMBER], [state_of(4)], False),  # an initialization
        ([state_of(1)], [state_of(1), state_of(1), state_of(1)], False),  # copies of one
    ],
)
def test_a_step_returns_what_it_takes(takes: list[ArrayType], returns: list[ArrayType], keeps: bool) -> None:
    assert keeps_state(takes, returns) is keeps


def test_steps_come_by_their_share_of_the_devices_time() -> None:
    shares = [(9, 300), (4, 900), (50, 20), (5, 600), (5, 300), (8, 0)]
    # The second was called too rarely, the third takes a hundredth of the time.
    assert steps([Seen(calls, device_ns, 2120) for calls, device_ns in shares]) == [3, 0, 4]
    assert steps([Seen(9, 0, 0)]) == []
    assert steps([Seen(1000, 10_000, 10_100), Seen(9, 100, 100)]) == [1, 0], "one that came late"


def test_evaluation_first(observation: Observation) -> None:
    evaluate = jax.jit(named("evaluate", lambda weights, x: loss_of(weights, x, jax.random.key(0))))
    predict = jax.jit(
        named("predict", lambda weights, x: jnp.tanh(x @ weights["in"]) @ weights["out"][:, :3])
    )
    weights = fresh_state()[0]
    for number in range(20):
        evaluate(weights, batch(number, rows=64)).block_until_ready()
        predict(weights, batch(number, rows=64)).block_until_ready()
    assert names(observation) == []
    train(jitted("after_evaluation"), 6)
    assert names(observation) == ["jit_after_evaluation"]


def test_an_op_on_an_array_of_explicit_sharding_is_no_step(observation: Observation) -> None:
    """One line called `jit_multiply` a training step, and a warning took that back."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(batch(0), jax.NamedSharding(mesh, jax.P("data", None)))
    for _ in range(8):
        x = x * 2
    assert observation.trials == []


def test_a_step_that_returns_more_than_its_state(observation: Observation) -> None:
    """Where a step returned its activations, too, no training step was found."""

    def telling_much(weights: Weights, key: jax.Array, x: jax.Array) -> Any:
        seen = jnp.stack([jnp.tanh(x @ weights["in"]) * number for number in range(9)])
        return *step(weights, key, x), seen

    call = jax.jit(named("telling_much", telling_much), donate_argnums=(0, 1))
    predict = jax.jit(named("drawn", lambda w, key, x: (key, jnp.tanh(x @ w["in"])[:, :3])), donate_argnums=1)
    weights, key = fresh_state()
    for number in range(8):
        weights, key, _, _ = call(weights, key, batch(number))
        key, _ = predict(weights, key, batch(number))
    assert names(observation) == ["jit_telling_much"]


@OURS
def test_partial_batches_and_alternating_sizes(observation: Observation) -> None:
    """JAX compiles the step for each size; the one of the last batch of an epoch is called too rarely."""
    call = jitted("sizes")
    state = fresh_state()
    for _ in range(3):
        _, state = train(call, 4, state, rows=256)
        _, state = train(call, 1, state, rows=6)
    assert names(observation) == ["jit_sizes"]
    [found] = observation.steps()
    assert found.watch.calls == 12
    for _ in range(6):
        _, state = train(call, 1, state, rows=512)
        _, state = train(call, 1, state, rows=256)
    observation.drain()
    assert len(observation.steps()) == 2


def test_arrays_that_lie_on_no_device_yet(observation: Observation) -> None:
    """JAX compiles the step for what the script makes, and again for what the step returns."""
    call = jax.jit(named("placed"), in_shardings=(None, None, SPLIT), out_shardings=(WHOLE, WHOLE, None))
    weights, _ = fresh_state()
    train(call, 7, (jax.tree.map(np.asarray, weights), jax.random.key(7)))
    assert names(observation) == ["jit_placed"]
    loaded = [t.watch.calls for t in observation.trials if t.watch.module_name == "jit_placed"]
    assert loaded == [1, 6]


def test_arrays_whose_sharding_is_said_in_other_words(observation: Observation) -> None:
    """JAX compiles once, and loads what came of it for the script's arrays and again for what the step returns."""
    call = jitted("reworded")
    train(call, 7, reworded_state(None, None))
    assert names(observation) == ["jit_reworded"]
    assert [trial.watch.calls for trial in observation.trials] == [1, 6]
    watch = observation.steps()[0].watch
    watch.offer("again", compiled_again(watch))
    watch.settle("again")
    winner = watch._executables["again"]
    for state in (fresh_state(), reworded_state(None)):
        assert call.lower(*state, batch(0)).compile().runtime_executable() is winner


@OURS
def test_both_steps_of_a_gan(observation: Observation) -> None:
    generator, discriminator = jitted("generator"), jitted("discriminator")
    states = [fresh_state(64), fresh_state(64)]
    rows = 1024
    for number in range(8):
        x = jnp.asarray(batch(number, rows, 64))
        for which, call in enumerate((generator, discriminator)):
            *states[which], loss = call(*states[which], x)
            loss.block_until_ready()
    assert sorted(names(observation)) == ["jit_discriminator", "jit_generator"]


def searched_for(observation: Observation, monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Steps for which a search began, in turn; none ends by itself."""
    begun: list[Trial] = []
    observation._search = begun.append
    monkeypatch.setattr(trials, "_LONGEST_PAUSE", 8)
    return begun


@OURS
def test_a_search_for_a_step_that_the_script_left_makes_room_for_the_next(
    observation: Observation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer sequence makes another module of the same function, and the first one is called no more."""
    begun, call = searched_for(observation, monkeypatch), jitted("lengthened")
    losses, state = train(call, 2 * CALLS_BEFORE_SEARCH)
    [first] = begun
    while len(begun) == 1:
        more, state = train(call, 8, state, rows=64)
        losses += more
        assert len(losses) < 100 * CALLS_BEFORE_SEARCH, "the search for the first waits on and on"
    assert begun[1].watch.request.digest != first.watch.request.digest
    assert [one.is_over for one in begun] == [True, False]
    train(call, 8, state)  # an epoch's last batch, say
    assert first.outcome == DEFAULT


@OURS
def test_of_two_steps_in_turn_the_second_waits_for_the_search_for_the_first(
    observation: Observation, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, call, state = searched_for(observation, monkeypatch), jitted("in_turn"), fresh_state()
    for _ in range(4 * CALLS_BEFORE_SEARCH):
        _, state = train(call, 1, state)
        _, state = train(call, 3, state, rows=64)
    [only] = begun
    assert not only.is_over


@pytest.mark.parametrize("anew", ["clear_caches", pytest.param("another function", marks=OURS)])
def test_a_step_that_jax_loads_anew_is_searched_for_again_but_not_each_time(
    observation: Observation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, anew: str
) -> None:
    caplog.set_level("INFO", "disco_hlo")
    monkeypatch.setattr(trials, "_LONGEST_PAUSE", 8)
    digests: list[str] = []
    observation._search = lambda trial: digests.append(trial.watch.request.digest)
    call = jitted("loaded_anew")
    for _ in range(_MOST_SEARCHES + 2):
        train(call, 3 * CALLS_BEFORE_SEARCH)
        if anew == "clear_caches":
            jax.clear_caches()
        else:
            call = jitted("loaded_anew")
        gc.collect()
    assert len(digests) == _MOST_SEARCHES
    assert len(set(digests)) == 1
    with counted_python_calls() as taken:
        train(call, 20)
    assert taken() < 10, "the last one is watched"
    assert [one.split(",")[0] for one in caplog.messages if "JAX loaded it anew" in one] == [
        f"jit_loaded_anew: JAX loaded it anew in each of {_MOST_SEARCHES} searches"
    ], "nobody said why no more began"


@OURS
def test_what_was_decided_is_forgotten_of_a_module_that_holds_addresses(
    observation: Observation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded anew it may have the same ones on one rank and others on another, or another function there."""
    call = jitted("partitioned")
    for holds in (True, False):
        monkeypatch.setattr(CompileRequest, "holds_addresses", holds)
        train(call, 2)
        for trial in observation.trials:
            trial.watch.settle(DEFAULT)
        assert observation.trials == []
        jax.clear_caches()
        train(call, 2)
        assert bool(observation.trials) == holds


def test_another_function_of_the_same_step_has_its_own_python_called(observation: Observation) -> None:
    """What was decided for the first one calls that one's, in a module that reads the same."""
    said: list[str] = []

    def telling(what: str) -> Any:
        def told(weights: Any, key: Any, x: Any) -> Any:
            jax.debug.callback(lambda: said.append(what))
            return step(weights, key, x)

        return told

    for what in ("one", "other"):
        call = jitted("told", telling(what))
        train(call, 1)
        trial = trial_of(observation.trials, "jit_told")
        trial.watch.offer("plan", compiled_again(trial.watch))
        trial.watch.settle("plan")
        train(call, 2)
    jax.effects_barrier()
    assert said == ["one"] * 3 + ["other"] * 3


def test_ops_outside_of_any_jit_are_left_alone(observation: Observation) -> None:
    x = jax.device_put(np.ones((8, 8), np.float32), WHOLE)
    for _ in range(10):
        x = jnp.tanh(x + 1) @ x
    assert observation.trials == []


def test_an_inner_function_is_part_of_the_outer_one(observation: Observation) -> None:
    inner = jitted("inner")

    def outer(weights: Any, key: Any, x: Any) -> Any:
        return inner(weights, key, x * 2)

    train(jax.jit(named("outer", outer)), 6)
    assert names(observation) == ["jit_outer"]
    assert [trial.watch.module_name for trial in observation.trials if trial.watch.calls] == ["jit_outer"]
