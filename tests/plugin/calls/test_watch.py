"""Calls of a compiled step, timed, run by other executables and given back to JAX: the training must not notice."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from disco_hlo.errors import UnsupportedError
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.calls.observing import Observation
from disco_hlo.plugin.calls.watch import DeviceTimes, FromScript, Sample, device_ns
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.xla import compiles, jaxlink
from tests.plugin.calls.training import (
    MESH,
    SPLIT,
    WHOLE,
    batch,
    compiled_again,
    counted_python_calls,
    fresh_state,
    jitted,
    named,
    numbers,
    step,
    stock,
    train,
    trial_of,
)


def alternate(observation: Observation, name: str) -> list[str]:
    """Let XLA's default and the same, compiled again, take turns; the names of what ran, by call, are in the list."""
    watch = trial_of(observation.trials, name).watch
    watch.offer("again", compiled_again(watch))
    ran: list[str] = []

    def choose(index: int) -> str:
        ran.append(("again", DEFAULT)[index % 2])
        return ran[-1]

    watch.swap(choose)
    return ran


def test_a_module_traced_while_calls_are_watched_names_no_function_of_ours(observation: Observation) -> None:
    """It was another module than stock JAX's, by the places in its metadata."""
    train(jitted("traced_step"), 1)
    module = trial_of(observation.trials, "jit_traced_step").watch.request.mlir_module
    text = module.operation.get_asm(enable_debug_info=True)
    assert "tests/plugin/calls/training.py" in text
    assert "jaxlink" not in text


def test_fifty_calls_in_turn_equal_stock(observation: Observation) -> None:
    call = jitted("swapped")
    first, begun = train(call, 1)
    ran = alternate(observation, "jit_swapped")
    observation.drain()
    samples: list[Sample] = []
    trial_of(observation.trials, "jit_swapped").watch.on_sample = samples.append
    weights, key = begun
    losses = list(first)
    for number in range(1, 51):
        given = (weights, key)
        weights, key, loss = call(*given, batch(number))
        losses.append(float(loss))
        assert all(one.is_deleted() for one in jax.tree.leaves(given))
    assert ran.count("again") == ran.count(DEFAULT) == 25
    assert (losses, numbers((weights, key))) == stock(51)
    observation.drain()
    assert [(sample.index, sample.name) for sample in samples] == list(enumerate(ran, 1))
    assert min(sample.device_ns for sample in samples) > 0


def ahead_of_time(name: str) -> Any:
    return jitted(name).lower(*fresh_state(), batch(0)).compile()


def sharded_by_hand(name: str) -> Any:
    def inner(weights: Any, key: Any, x: Any) -> Any:
        weights, key, loss = step(weights, key, x)
        weights = jax.tree.map(lambda one: jax.lax.pmean(one, "data"), weights)
        return weights, key, jax.lax.pmean(loss, "data")

    none = PartitionSpec()
    specs = {"in_specs": (none, none, SPLIT.spec), "out_specs": none}
    return jax.jit(
        named(name, jax.shard_map(inner, mesh=MESH, check_vma=False, **specs)), donate_argnums=(0, 1)
    )


def with_a_constant(name: str) -> Any:
    captured = jax.device_put(np.full((8, 16), 0.5, np.float32), SPLIT)
    return jax.jit(
        named(name, lambda weights, key, x: step(weights, key, x + captured)), donate_argnums=(0, 1)
    )


def a_method(name: str) -> Any:
    class Trainer:
        rate = 0.05

        def run(self, weights: Any, key: Any, x: Any) -> Any:
            return step(weights, key, x, self.rate)

    return jax.jit(named(name, Trainer().run))


def with_a_static_argument(name: str) -> Any:
    def scaled(weights: Any, key: Any, x: Any, rate: float) -> Any:
        return step(weights, key, x, rate)

    call = jax.jit(named(name, scaled), static_argnums=3, donate_argnums=(0,))
    return lambda weights, key, x: call(weights, key, x, 0.2)


def that_prints(name: str) -> Any:
    def printing(weights: Any, key: Any, x: Any) -> Any:
        jax.debug.print("{}", x.sum(), ordered=False)
        return step(weights, key, x)

    return jax.jit(named(name, printing))


def without_donation(name: str) -> Any:
    return jax.jit(named(name))


@pytest.mark.parametrize(
    "made",
    [ahead_of_time, sharded_by_hand, with_a_constant, a_method, with_a_static_argument, that_prints, without_donation],
)  # fmt: skip
def test_every_way_to_call_a_step_is_seen_and_given_back(
    observation: Observation, made: Callable[[str], Any]
) -> None:
    expected = stock(12)
    if made not in (ahead_of_time, that_prints, without_donation):  # another step
        losses, state = train(made(f"stock_{made.__name__}"), 12)
        expected = losses, numbers(state)
    call = made(made.__name__)
    losses, state = train(call, 1)
    weights, key = state
    ran = alternate(observation, f"jit_{made.__name__}")
    watch = trial_of(observation.trials, f"jit_{made.__name__}").watch
    for number in range(1, 12):
        if number == 8:
            watch.settle("again")
        weights, key, loss = call(weights, key, batch(number))
        losses.append(float(loss))
    assert (losses, numbers((weights, key))) == expected
    assert len(ran) == 7
    assert watch.calls == 8
    assert watch.settled == "again"


def test_pmap_is_seen(observation: Observation) -> None:
    def inner(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, slope = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(weights)
        return weights - 0.1 * jax.lax.pmean(slope, "data"), loss

    def losses(call: Any, count: int, weights: Any) -> tuple[list[list[float]], Any]:
        found = []
        for number in range(count):
            x = np.random.default_rng(number).normal(size=(2, 4, 16)).astype(np.float32)
            weights, loss = call(weights, x)
            found.append(loss.tolist())
        return found, weights

    weights = np.stack([np.eye(16, dtype=np.float32)] * 2)
    devices = jax.devices()[:2]
    stock, _ = losses(jax.pmap(named("stock", inner), "data", devices=devices), 8, weights)
    call = jax.pmap(named("mapped", inner), "data", devices=devices)
    found, weights = losses(call, 8, weights)
    assert found == stock
    assert [trial.watch.calls for trial in observation.trials if trial.watch.calls > 5] != []


def test_a_candidate_of_another_signature_is_refused(observation: Observation) -> None:
    call = jitted("refusing")
    train(call, 1)
    watch = trial_of(observation.trials, "jit_refusing").watch
    with jaxlink.ours():
        other = jax.jit(named("other"), out_shardings=(WHOLE, WHOLE, None)).lower(*fresh_state(), batch(0))
        without_donated = other.compile().runtime_executable()
        larger = jitted("larger").lower(*fresh_state(), batch(0, rows=32)).compile().runtime_executable()
    with pytest.raises(UnsupportedError, match="donated storage"):
        watch.offer("keeps its arguments", without_donated)
    with pytest.raises(UnsupportedError, match=r"expected parameters .*f32\[4,16\].* got .*f32\[16,16\]"):
        watch.offer("larger", larger)
    with pytest.raises(UnsupportedError, match="has XLA default already"):
        watch.offer(DEFAULT, larger)
    assert watch.names == (DEFAULT,)


def test_a_module_of_the_hook_runs_where_it_keeps_donation(observation: Observation) -> None:
    """jax 0.10.2 loses it: there the module is refused."""
    call = jitted("hooked")
    state = train(call, 1)[1]
    watch = trial_of(observation.trials, "jit_hooked").watch
    with jaxlink.ours():
        module = compiles.capture(watch.request)
        flipped = compiles.compile_module(watch.request, exchange_opcode(module, "tanh", "negate"))
    if not jaxlink.keeps_donation():
        with pytest.raises(UnsupportedError, match="donated storage"):
            watch.offer("flipped", flipped)
        return
    watch.offer("flipped", flipped)
    watch.swap(lambda index: "flipped" if index == 1 else DEFAULT)
    weights, key, loss = call(*state, batch(1))
    _, (stock_weights, stock_key) = train(jitted("unhooked"), 1)
    assert float(loss) != float(jitted("again")(stock_weights, stock_key, batch(1))[2])
    train(call, 2, (weights, key))


def test_an_exception_in_a_watched_call_is_the_scripts(observation: Observation) -> None:
    """And the calls after it go on, and are given back."""

    def dividing(weights: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        return jax.tree.map(lambda one: one / x.sum(), weights), jnp.log(x.sum())

    call = jax.jit(named("dividing", dividing))
    weights = {
        "a": jax.device_put(np.ones((4, 4), np.float32), WHOLE),
        "b": jax.device_put(np.ones(4, np.float32), WHOLE),
    }
    good, bad = batch(0) ** 2, batch(0) * 0
    stock = call(weights, good)
    watch = trial_of(observation.trials, "jit_dividing").watch
    with jax.debug_nans(True):
        call(weights, good)
        with pytest.raises(FloatingPointError):
            call(weights, bad - batch(0) ** 2)
    for _ in range(3):
        assert float(call(weights, good)[1]) == float(stock[1])
    watch.settle(DEFAULT)
    assert float(call(weights, good)[1]) == float(stock[1])


def test_a_candidate_that_raises_is_replaced_where_its_arguments_are_there(observation: Observation) -> None:
    class Raises:
        def execute_sharded(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("out of memory")

    call = jitted("surviving")
    losses, state = train(call, 1)
    watch = trial_of(observation.trials, "jit_surviving").watch
    watch._executables["bad"] = Raises()
    watch.swap(lambda _: "bad")
    for number in (1, 2):
        *state, loss = call(*state, batch(number))
        losses.append(float(loss))
    assert losses == stock(3)[0]
    assert watch.failures == {"bad": "RuntimeError: out of memory"}


def test_threads_may_call_at_once(observation: Observation) -> None:
    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(x @ x.T @ x) * 2 - 1 + jnp.cos(x) * jnp.sin(x), x.sum(0)

    call, device = jax.jit(named("threaded", step)), jax.devices()[0]
    drawn = [np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32) for i in range(8)]
    data = [jax.device_put(one, device) for one in drawn]
    stock = [np.asarray(call(one)[0]) for one in data]
    observation._wanted = lambda request: request.module_name == "jit_threads"
    call = jax.jit(named("threads", step))
    call(data[0])
    ran = alternate(observation, "jit_threads")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: np.asarray(call(one)[0]), data * 8))
    assert all(np.array_equal(a, b) for a, b in zip(found, stock * 8, strict=True))
    assert sorted(set(ran)) == [DEFAULT, "again"]
    watch = trial_of(observation.trials, "jit_threads").watch
    assert watch.calls == 65


@pytest.mark.filterwarnings("ignore:PGLE collected an empty trace")  # a CPU's trace has no kernels
def test_jax_profile_guided_recompiles_are_left_alone(observation: Observation) -> None:
    state = fresh_state(), batch(0)
    jax.config.update("jax_enable_pgle", True)
    try:
        jitted("guided")(*state[0], state[1])
    finally:
        jax.config.update("jax_enable_pgle", False)
    assert [trial for trial in observation.trials if trial.watch.module_name == "jit_guided"] == []


def given_in_turn(call: Any, ways: list[Callable[[int], Any]], steps: int) -> list[float]:
    """Losses of steps whose batches come in one way after the other, and whose rate is a number of Python's."""
    weights, key = fresh_state()
    losses = []
    for number in range(steps):
        weights, key, loss = call(weights, key, ways[number % len(ways)](number), 0.1)
        losses.append(float(loss))
    return losses


def test_arguments_may_come_in_any_way(observation: Observation) -> None:
    """Those of one call say nothing about where those of the next one lie."""
    none = PartitionSpec()
    ways: list[Callable[[int], Any]] = [
        batch,
        lambda number: np.asarray(batch(number)),
        lambda number: np.asarray(batch(number)),
        lambda number: jnp.asarray(np.asarray(batch(number))),
        lambda number: jax.device_put(batch(number), WHOLE),
        batch,
        lambda number: jax.device_put(batch(number), jax.sharding.NamedSharding(MESH, none)),
        batch,
    ]
    made = {"donate_argnums": (0, 1), "out_shardings": (WHOLE, WHOLE, None)}
    stock = given_in_turn(jax.jit(named("stock"), **made), ways, 40)
    observation.stop()
    assert given_in_turn(jax.jit(named("unwatched"), **made), ways, 40) == stock


def test_what_a_call_is_traced_under_counts(observation: Observation) -> None:
    """A setting of JAX's that changes the module changes what is called, with the same arguments."""

    def promoting(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        drawn = jax.random.uniform(jax.random.key(x.size), x.shape)
        return jnp.tanh(x) * drawn + jnp.cos(x) * 2 - jnp.sin(x), x.sum()

    x = batch(0)

    def numbers_of(call: Any) -> list[list[float]]:
        found = []
        for partitionable in (True, True, False, True, False):
            with jax.threefry_partitionable(partitionable):
                found.append(np.ravel(call(x)[0]).tolist())
        return found

    watched = numbers_of(jax.jit(named("promoting", promoting)))
    assert len([one for one in observation.trials if one.watch.module_name == "jit_promoting"]) == 2
    observation.stop()
    assert numbers_of(jax.jit(named("unwatched", promoting))) == watched
    assert watched[0] != watched[2]


def test_an_argument_that_was_donated_is_an_error_as_in_stock(observation: Observation) -> None:
    call = jitted("twice")
    weights, key = fresh_state()
    x = batch(0)
    call(weights, key, x)
    with pytest.raises((RuntimeError, ValueError), match=r"deleted"):
        call(weights, key, x)
    train(call, 2)


def test_prints_keep_their_order(observation: Observation, capsys: pytest.CaptureFixture[str]) -> None:
    """JAX threads tokens of its own through such a step."""

    def printing(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        jax.debug.print("{}", x[0, 0], ordered=True)
        return jnp.tanh(x) * 2 + jnp.cos(x) * jnp.sin(x) + 1, x.sum(0)

    observation._wanted = lambda request: request.module_name == "jit_ordered"
    call = jax.jit(named("ordered", printing))
    x = jax.device_put(np.zeros((4, 4), np.float32), jax.devices()[0])
    call(x)
    ran = alternate(observation, "jit_ordered")
    for number in range(6):
        call(jnp.full_like(x, number))
    jax.effects_barrier()
    assert capsys.readouterr().out.split() == ["0.0", "0.0", "1.0", "2.0", "3.0", "4.0", "5.0"]
    assert len(ran) == 6


def test_time_begins_with_the_dispatch_or_with_the_end_of_the_one_before() -> None:
    assert device_ns(500, 300, {}, [0, 1]) == 200
    assert device_ns(500, 300, {0: 100, 1: 200}, [0, 1]) == 200
    assert device_ns(500, 300, {0: 400, 1: 350}, [0, 1]) == 100
    assert device_ns(500, 300, {0: 400, 1: 350}, [1]) == 150


class Token:
    """Ready when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ended = threading.Event()
        self.error = error

    def block_until_ready(self) -> None:
        assert self.ended.wait(60)
        if self.error is not None:
            raise self.error


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_of_the_training_ends_though_the_queue_was_in_use_as_it_began() -> None:
    times, token = DeviceTimes(), SimpleNamespace(block_until_ready=lambda: None)
    times.note(token, 0, [0], lambda _: None)
    times.drain()
    with times._executions.mutex:
        if (child := os.fork()) == 0:
            signal.alarm(10)
            times.close()
            os._exit(0)
        _, status = os.waitpid(child, 0)
    times.close()
    assert status == 0


def test_executions_are_reported_in_order_and_a_failed_one_as_such() -> None:
    times = DeviceTimes()
    reported: list[tuple[str, bool]] = []
    tokens = [Token(), Token(ValueError("died")), Token()]
    for name, token in zip("abc", tokens, strict=True):
        times.note(token, 0, [0], lambda ns, name=name: reported.append((name, ns is not None)))
    for token in reversed(tokens):
        assert reported == []
        token.ended.set()
    times.drain()
    assert reported == [("a", True), ("b", False), ("c", True)]
    assert times.total_ns > 0
    times.close()
    times.close()


def assert_given_back(observation: Observation, call: Any, state: Any, count: Callable[[], int]) -> None:
    """No call takes Python any more once JAX has noted how to call it: with arrays made in Python, and its own."""
    for number in range(8):
        if number == 3:
            noted = count()
        *state, _ = call(*state, batch(number))
    assert count() == noted
    assert observation.trials == []


@pytest.mark.parametrize("winner", [DEFAULT, "again"])
def test_no_call_takes_python_after_a_module_is_settled(observation: Observation, winner: str) -> None:
    call = jitted("given_back")
    _, state = train(call, 3)
    watch = trial_of(observation.trials, "jit_given_back").watch
    watch.offer("again", compiled_again(watch))
    with counted_python_calls() as count:
        _, state = train(call, 2, state)
        assert count() == 2
        watch.settle(winner)
        assert_given_back(observation, call, state, count)
    assert watch.calls == 5


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
    observation.stop()
    with counted_python_calls() as count:
        assert_given_back(observation, call, state, count)


def test_a_jax_that_calls_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jaxlink.calls._CALL_NAMES, "pxla.MeshExecutable", ("create_rust_call",))
    with pytest.raises(UnsupportedError, match=r"pxla.MeshExecutable.create_rust_call is missing"):
        jaxlink.watch_calls(lambda _: None)
    monkeypatch.undo()
    assert jaxlink.calls._wrapped == []


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


def settled_where_a_call_raises(
    observation: Observation, choose: Callable[[int], str], restored: bool = False
) -> str | None:
    """What a step is settled on where its second call raises the script's own error, and is made again as in stock."""
    call, state = jitted("interrupted_step"), fresh_state()
    *state, _ = call(*state, batch(0))
    watch = trial_of(observation.trials, "jit_interrupted_step").watch
    watch.swap(choose)
    with pytest.raises(TimeoutError, match="own"):
        call(*state, batch(1))
    if restored:
        watch.swap(None)
    *state, loss = call(*state, batch(1))
    settled: str | None = watch.settled
    observation.stop()
    assert float(loss) == stock(2)[0][1]
    return settled


def test_what_a_handler_of_the_scripts_raises_in_a_call_that_waits_reaches_the_script(
    observation: Observation,
) -> None:
    """It was logged, and the alarm of a script that wanted to end its training was lost."""

    def alarmed(_: int) -> str:
        raise FromScript(TimeoutError("the script's own"))

    assert settled_where_a_call_raises(observation, alarmed, restored=True) is None


class Alarm:
    def ring(self, *_: object) -> None:
        raise TimeoutError("the script's own")

    __call__ = ring


@pytest.mark.parametrize(
    "handler",
    [Alarm().ring, Alarm(), functools.partial(Alarm().ring, 1)],
    ids=["a function", "an object", "a partial"],
)
def test_what_a_handler_raises_anywhere_in_a_call_reaches_the_script(
    handler: Callable[..., None], observation: Observation
) -> None:
    """For instance where ranks wait for each other; they go on with XLA's default, as they may be apart."""

    def interrupted(_: int) -> str:
        signal.raise_signal(signal.SIGUSR1)
        return DEFAULT

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert settled_where_a_call_raises(observation, interrupted) == DEFAULT
    finally:
        signal.signal(signal.SIGUSR1, before)
