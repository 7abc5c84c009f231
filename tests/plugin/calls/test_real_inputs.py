"""Candidates compared on the arguments of a call: refused where they compute something else, and the training's state
is as it was, whatever they do."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from disco_hlo.activation.channel import LocalChannel
from disco_hlo.errors import ActivationError, UnsupportedError
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.calls.observing import Observation
from disco_hlo.plugin.calls.trial import Hold
from disco_hlo.plugin.measuring import comparing, lending, room
from disco_hlo.plugin.measuring.comparing import compile_comparison
from disco_hlo.plugin.measuring.inputs.arguments import Kept, RealInputs, coming_back_to
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.tolerances import Allowed
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.phases import search_in_training
from disco_hlo.plugin.phases.search_in_training import SearchInTraining
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles, executables, host_memory, jaxlink, own_programs
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.plugin.xla.job import device_facts
from tests.plugin.calls.dropout import following
from tests.plugin.calls.training import (
    WHOLE,
    batch,
    compiled_again,
    fresh_state,
    jitted,
    named,
    numbers,
    stock,
    trial_of,
)
from tests.plugin.driver import copied_by_driver

pytestmark = pytest.mark.product_only
_LARGE = 512
"""Weights of so many rows and columns are changed and compared on the devices."""
_CALLS = 4
_PASSES = 3
_SHARE_MEMORY = "disco_hlo.plugin.measuring.inputs.arguments.share_memory"


def compared(
    observation: Observation,
    folder: Path,
    *make: Callable[[Any], Any],
    width: int = 16,
) -> list[Trial]:
    """What became of candidates that are compared in the third call; the training around it is that of stock."""
    call = jitted("compared_step")
    found: list[Trial] = []

    def begin(watch: Any) -> None:
        candidates = [one(watch) for one in make]

        def choose(index: int) -> str:
            if index == 2:
                found.extend(compare_in_call(observation, folder, *candidates))
            return DEFAULT

        watch.swap(choose)

    state, losses = fresh_state(width), []
    for number in range(_CALLS):
        *state, loss = call(*state, batch(number, width=width))
        losses.append(float(loss))
        if number == 0:
            begin(trial_of(observation.trials, "jit_compared_step").watch)
    observation.stop()
    assert (losses, numbers(tuple(state))) == stock(_CALLS, width)
    return found


def session_of(request: CompileRequest, folder: Path) -> Session:
    settings = Settings(search=True, directory=folder, when="training")
    return Session(request, settings, device_facts(request), LocalChannel())


def search_of(calls: Any, folder: Path, holds: bool = True) -> SearchInTraining:
    """That for the step of these calls, of which it may hold one."""
    request = calls.watch.request
    session = session_of(request, folder)
    search = SearchInTraining(
        weakref.ref(calls), session.settings, threading.current_thread(), threading.Event()
    )
    search._request, search._session = request, session
    search._hold = Hold("comparing", nullcontext) if holds else None
    return search


def in_a_call(calls: Any, call: Callable[..., Any], state: Any, work: Callable[[], Any]) -> list[Any]:
    """Work in the next call of a step, which runs XLA's default: what it returns."""
    found: list[Any] = []

    def choose(_: int) -> str:
        found.append(work())
        return DEFAULT

    calls.watch.swap(choose)
    call(*state, batch(1))[2].block_until_ready()
    return found


def compare_in_call(observation: Observation, folder: Path, *candidates: Any) -> list[Trial]:
    calls = trial_of(observation.trials, "jit_compared_step")
    search = search_of(calls, folder)
    request, session = search._request, search._session
    default, *others = (Trial(name, None, 0) for name in (DEFAULT, *map(str, range(len(candidates)))))
    default.executable = request.call_default()
    for trial, candidate in zip(others, candidates, strict=True):
        trial.executable = candidate
    with jaxlink.ours():
        search._compare(session, default, others)
    return others


def in_passes_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where devices have memory of their own that a large state takes."""
    monkeypatch.setattr(_SHARE_MEMORY, lambda _: False)
    monkeypatch.setattr(search_in_training, "may_rise_bytes", lambda *_: 0)
    monkeypatch.setattr(room, "_LITTLE_BYTES", 0)


@pytest.fixture(params=["beside the state", "as on a GPU", "in its place", "in its place, in one pass"])
def leaves(
    request: pytest.FixtureRequest, observation: Observation, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Where devices have memory of their own, results are compared there, and where they have no room beside the state
    the first run of each pass takes that over."""
    gives_way = request.param.startswith("in its place")
    if request.param != "beside the state":
        monkeypatch.setattr(_SHARE_MEMORY, lambda _: False)
    if gives_way:
        in_passes_without_room(monkeypatch)
    if request.param.endswith("one pass"):
        monkeypatch.setattr(search_in_training, "PASSES", 1)
    really, gone = Runner.output_arrays, []

    def output_arrays(runner: Runner, *given: Any) -> Any:
        watch = trial_of(observation.trials, "jit_compared_step").watch
        gone.append([one.is_deleted() for one in watch.arguments])
        return really(runner, *given)

    monkeypatch.setattr(Runner, "output_arrays", output_arrays)
    yield
    assert len(gone) >= 2
    if gives_way:
        first = gone.pop(0)
        assert first == [False] * 4
        assert gone.count(first) <= _PASSES - 1
        gone = [one for one in gone if one != first]
        assert gone
    assert all(one == [gives_way] * 3 + [False] for one in gone)


def changed(watch: Any) -> Any:
    """The step with another function in the place of its tanh."""
    module = executables.read_executable(watch.request.call_default())
    with jaxlink.ours():
        return compiles.compile_module(watch.request, exchange_opcode(module, "tanh", "negate"))


@pytest.mark.parametrize(("width", "by_driver"), [(16, False), (_LARGE, False), (_LARGE, True)])
def test_the_same_program_is_found_the_same_another_is_refused_and_the_training_goes_on(
    observation: Observation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    leaves: None,
    width: int,
    by_driver: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "disco_hlo")
    driver = copied_by_driver(monkeypatch) if by_driver else None
    same, other = compared(observation, tmp_path, compiled_again, changed, width=width)
    assert (same.error, same.compared) == ("", True)
    assert "differs from XLA's default at" in other.error
    assert "made-up" not in caplog.text
    if driver is not None:
        assert {("to the host", 4 * _LARGE**2), ("to the GPU", 4 * _LARGE**2)} <= set(driver.copied)


@pytest.mark.parametrize("has_room", [True, False])
def test_nothing_is_compiled_while_a_call_is_held_to_compare(
    observation: Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    own_programs._compiled.cache_clear()
    in_passes_without_room(monkeypatch)  # as on a GPU
    if has_room:
        monkeypatch.setattr(search_in_training, "may_rise_bytes", lambda *_: 1 << 40)
    before: list[int] = []

    def make(watch: Any) -> Any:
        compile_comparison(watch.request.local_devices, watch.request.call_default())
        before.append(own_programs._compiled.cache_info().misses)
        return compiled_again(watch)

    assert compared(observation, tmp_path, make, width=_LARGE)[0].compared
    assert before == [own_programs._compiled.cache_info().misses] != [0]


class Raising:
    """An executable that takes its arguments over and raises, as one without memory may."""

    def __init__(self, executable: Any) -> None:
        self._executable = executable

    def execute_sharded(self, arguments: Any, with_tokens: bool) -> Any:
        for one in arguments:
            one.delete()
        raise RuntimeError("RESOURCE_EXHAUSTED: no memory")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)


def test_a_candidate_that_raises_leaves_the_state_as_it_was(
    observation: Observation, tmp_path: Path, leaves: None
) -> None:
    [trial] = compared(observation, tmp_path, lambda watch: Raising(compiled_again(watch)))
    assert "RESOURCE_EXHAUSTED" in trial.error


def test_what_is_wrong_for_the_trainings_numbers_alone_is_refused(
    observation: Observation, tmp_path: Path
) -> None:
    """Made-up inputs are of a size around one: none of them is above 100."""

    def step_with(above: float) -> Callable[..., Any]:
        def step(weights: Any, key: jax.Array, x: jax.Array) -> Any:
            raised = jax.tree.map(lambda w: jnp.where(w > 100, w + above, w * 0.9), weights)
            return raised, following(key), jnp.mean(x @ weights["in"])

        return step

    def with_a_large_number() -> Any:
        weights, key = fresh_state()
        weights["in"] = jax.device_put(np.asarray(weights["in"]) + 200 * np.eye(16, dtype=np.float32), WHOLE)
        return weights, key

    def made(name: str, above: float) -> Any:
        return jax.jit(
            named(name, step_with(above)), donate_argnums=(0, 1), out_shardings=(WHOLE, WHOLE, None)
        )

    taken: list[Any] = []
    jaxlink.install(lambda request: taken.append(compiles.compile_module(request, None)))
    made("other_step", 2.0)(*fresh_state(), batch(0))
    jaxlink.install(lambda _: None)
    call = made("compared_step", 1.0)
    *state, _ = call(*with_a_large_number(), batch(0))
    calls = trial_of(observation.trials, "jit_compared_step")
    [[found]] = in_a_call(calls, call, state, lambda: compare_in_call(observation, tmp_path, taken[-1]))
    assert "differs from XLA's default at" in found.error


def test_a_training_of_nans_compares_nothing(observation: Observation, tmp_path: Path) -> None:
    """All candidates compute the same NaNs, a wrong one too."""
    call, (weights, key) = jitted("compared_step"), fresh_state()
    *state, _ = call(jax.tree.map(lambda w: w * jnp.nan, weights), key, batch(0))
    calls = trial_of(observation.trials, "jit_compared_step")
    candidate = changed(calls.watch)

    def work() -> None:
        with pytest.raises(UnsupportedError, match="infinities and NaNs"):
            compare_in_call(observation, tmp_path, candidate)

    assert len(in_a_call(calls, call, state, work)) == 1
    assert calls.watch.settled is None


def test_where_the_host_has_no_room_inputs_are_made_up_and_a_line_says_so(
    observation: Observation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "disco_hlo")
    room_bytes = lending.room_bytes
    monkeypatch.setattr(
        lending, "room_bytes", lambda session, on_host=False: 0 if on_host else room_bytes(session)
    )
    [trial] = compared(observation, tmp_path, compiled_again)
    assert (trial.error, trial.compared) == ("", True)
    assert "compared on made-up inputs: the host has no room" in caplog.text


def inputs_of(
    observation: Observation, width: int = 16, interrupted: bool = False
) -> tuple[RealInputs, list[Any]]:
    """Those that a call lends, and its arguments."""
    call = jitted("compared_step")
    call(*fresh_state(width), batch(0, width=width))
    request = trial_of(observation.trials, "jit_compared_step").watch.request
    (weights, key), x = fresh_state(width), batch(1, width=width)
    arguments = [weights["in"], weights["out"], jax.random.key_data(key), x]
    taken = executables.parameters(request.call_default())
    inputs = RealInputs(request, taken, 0, nullcontext, lambda: interrupted)
    inputs.take(arguments)
    return inputs, arguments


@pytest.mark.parametrize("by_host", [True, False])
def test_inputs_are_raised_and_lowered_alike_by_host_and_devices(
    observation: Observation, monkeypatch: pytest.MonkeyPatch, by_host: bool
) -> None:
    monkeypatch.setattr(_SHARE_MEMORY, lambda _: by_host)
    inputs, (weights, _, key, x) = inputs_of(observation, _LARGE)
    inputs.nudge(1e-3, 2)
    (was, large), (_, small) = (tuple(np.asarray(one[1]) for one in inputs.both(index)) for index in (0, 3))
    before = np.asarray(weights)
    assert was.tolist() == before.tolist()
    assert np.asarray(inputs.like(0).addressable_data(1)).tolist() == large.tolist()
    assert set(np.round(large / before, 5).reshape(-1)) == {np.float32(1.001), np.float32(0.999)}
    given = inputs.floats(0, 1, np.arange(_LARGE * _LARGE))
    assert large.reshape(-1).tolist() == inputs._changed(given, 0, 1e-3, 2).tolist()
    assert not np.array_equal(small, np.asarray(x.addressable_data(1)))
    assert np.asarray(inputs.both(2)[1][0]).tolist() == np.asarray(key).tolist()
    inputs.nudge(0.0)
    assert np.asarray(inputs.both(0)[1][1]).tolist() == before.tolist()


@pytest.mark.parametrize("error", [MemoryError("no memory"), None])
def test_memory_of_the_host_is_got_once_and_the_search_goes_on_without(
    observation: Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    asked: list[int] = []

    def get_ready(size_bytes: int, *_: Any) -> int:
        asked.append(size_bytes)
        if error is not None:
            raise error
        return size_bytes

    call, state = jitted("memory_step"), fresh_state()
    call(*state, batch(0))
    calls = trial_of(observation.trials, "jit_memory_step")
    search = search_of(calls, tmp_path, holds=False)
    monkeypatch.setattr(host_memory.MEMORY, "get_ready", get_ready)
    for _ in range(2):
        search._get_memory(search._session)
    [size_bytes] = asked
    assert search._ready_bytes == (error is None) * size_bytes // len(search._request.local_devices)


def test_no_run_begins_once_the_user_has_interrupted(observation: Observation) -> None:
    inputs, _ = inputs_of(observation, interrupted=True)
    with pytest.raises(ActivationError, match="interrupted"):
        inputs.fresh()


def runs_lent(
    observation: Observation,
    folder: Path,
    arrange: Callable[[SearchInTraining, lending.Loan], object] = lambda *_: None,
    refused: str = "",
) -> int:
    """How many runs a search makes in a call on what that lends, or none where it is refused in these words."""
    call, state = jitted("lending_step"), fresh_state()
    *state, _ = call(*state, batch(0))
    calls, ran = trial_of(observation.trials, "jit_lending_step"), []
    search, default = search_of(calls, folder), calls.watch.request.call_default()
    loan = lending.Loan.of(default, [default])
    arrange(search, loan)

    def work() -> None:
        fits = pytest.raises(UnsupportedError, match=refused) if refused else nullcontext()
        with jaxlink.ours(), fits, search.lend(loan) as inputs:
            ran.append(Runner(calls.watch.request, default, inputs=inputs).run())

    assert len(in_a_call(calls, call, state, work)) == 1
    return len(ran)


def test_runs_on_lent_arguments_begin_on_a_rank_that_was_interrupted_as_on_the_others(
    observation: Observation, tmp_path: Path
) -> None:
    """Ranks do not meet before each of them: the others would wait for it in a collective."""

    def interrupt(search: SearchInTraining, _: lending.Loan) -> None:
        search._stop.wanted = True

    assert runs_lent(observation, tmp_path, interrupt) == 1


@pytest.mark.parametrize("within", [True, False])
def test_before_arguments_come_back_what_failed_has_given_its_memory_back(within: bool) -> None:
    made: list[weakref.ref[Any]] = []

    class Back:
        asked = 0

        def given(self, index: int) -> str:
            self.asked += 1
            assert made[0]() is None
            if self.asked == 1:
                raise RuntimeError("RESOURCE_EXHAUSTED: other garbage is in the way")
            return f"argument {index}"

    def run() -> None:
        outputs = jnp.zeros(8)
        made.append(weakref.ref(outputs))
        raise RuntimeError("RESOURCE_EXHAUSTED: no memory")

    def run_again() -> None:
        again = RuntimeError("RESOURCE_EXHAUSTED: no memory, again")
        try:
            run()
        except RuntimeError as error:
            failure = error
            if within:
                raise again from error
        failure.__context__ = again  # raised once more, in another thread
        raise again from failure  # as where ranks were silent after a run that failed

    arguments: list[Any] = ["given", "taken", "taken"]
    back: Any = Back()
    with pytest.raises(RuntimeError, match="no memory, again"), coming_back_to(arguments, back, [1, 2]):
        run_again()
    assert arguments == ["given", "argument 1", "argument 2"]


@pytest.mark.parametrize("fails", ["_Inputs._not_finite", "Reference._keep", "survey_of"])
def test_before_a_calls_arguments_come_back_nothing_is_left_of_the_first_run(
    observation: Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Devices without room for a second state could not take the training's own back."""
    in_passes_without_room(monkeypatch)
    outputs: list[weakref.ref[Any]] = []
    left: list[int] = []
    output_arrays, given = Runner.output_arrays, Kept.given

    def ran(*arguments: Any) -> list[list[Any]]:
        arrays = output_arrays(*arguments)
        outputs.extend(weakref.ref(one) for own in arrays for one in own)
        return arrays

    def counted(kept: Kept, index: int) -> Any:
        left.append(sum(one() is not None for one in outputs))
        return given(kept, index)

    def failing(*_: Any) -> Any:
        raise ActivationError("it was interrupted")

    monkeypatch.setattr(Runner, "output_arrays", ran)
    monkeypatch.setattr(Kept, "given", counted)
    monkeypatch.setattr(f"{comparing.__name__}.{fails}", failing)
    call, state, losses = jitted("compared_step"), fresh_state(), []

    def choose(_: int) -> str:
        with pytest.raises(ActivationError, match="interrupted"):
            compare_in_call(observation, tmp_path, candidate)
        return DEFAULT

    for number in range(2):
        *state, loss = call(*state, batch(number))
        losses.append(float(loss))
        watch = trial_of(observation.trials, "jit_compared_step").watch
        candidate = compiled_again(watch)
        watch.swap(choose)
    assert len(outputs) == 4 * len(WHOLE.device_set)
    assert left == [0] * 3
    observation.stop()
    assert (losses, numbers(tuple(state))) == stock(2)


def test_no_call_is_held_once_all_candidates_are_refused(
    observation: Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_passes_without_room(monkeypatch)
    take, takes = RealInputs.take, []

    def counted(*given: Any) -> None:
        takes.append(1)
        take(*given)

    monkeypatch.setattr(RealInputs, "take", counted)
    assert "differs from XLA's default at" in compared(observation, tmp_path, changed)[0].error
    assert len(takes) == 1


@pytest.mark.parametrize("ready", [True, False])
def test_a_copy_needs_no_room_where_memory_was_made_ready_for_it(
    observation: Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    """What was made ready is not free any more: a host with room for one copy was said to have none."""

    def make_ready(search: SearchInTraining, loan: lending.Loan) -> None:
        search._ready_bytes = loan.taken_bytes * ready

    monkeypatch.setattr(lending, "room_bytes", lambda *_, **__: 0)
    refused = "" if ready else "the host has no room"
    assert runs_lent(observation, tmp_path, make_ready, refused) == ready


@pytest.mark.parametrize("rise_bytes", [1 << 40, 0])
def test_what_is_profiled_may_raise_memory_by_no_more_than_is_allowed(
    observation: Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rise_bytes: int
) -> None:
    """It was held against all that is free, so a search could raise the peak of a training by more than it may."""
    monkeypatch.setattr(room, "free_device_bytes", lambda _: 1 << 50)
    monkeypatch.setattr(room, "may_rise_bytes", lambda _: rise_bytes)
    refused = "" if rise_bytes else "0 MiB of what is free"
    assert runs_lent(observation, tmp_path, refused=refused) == bool(rise_bytes)


@pytest.mark.parametrize(("fails", "by_driver"), [(False, False), (True, False), (False, True)])
def test_what_a_call_lends_comes_back_whatever_runs_on_it_and_no_second_state_is_there(
    observation: Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool, by_driver: bool
) -> None:
    if by_driver:  # as on a GPU
        copied_by_driver(monkeypatch)
    call, state, losses, live = jitted("lending_step"), fresh_state(_LARGE), [], []
    large = [one.nbytes for one in jax.live_arrays() if one.nbytes >= 4 * _LARGE**2]

    def run_on(watch: Any) -> None:
        request, arguments = watch.request, watch.arguments
        session = session_of(request, tmp_path)
        default, given = request.call_default(), list(arguments)
        loan = lending.Loan.of(default, [default])
        with lending.lent(session, loan, arguments) as inputs:
            runner = Runner(request, default, inputs=inputs)
            assert runner.run() > 0
            assert [one.is_deleted() for one in given] == [True] * 3 + [False]
            if fails:
                raise ActivationError("a run failed")
            runner.run_in_a_row(3)
            live.append([one for one in jax.live_arrays() if one.nbytes >= 4 * _LARGE**2])

    def choose(index: int) -> str:
        if index == 2:
            with jaxlink.ours(), suppress(ActivationError):
                run_on(trial_of(observation.trials, "jit_lending_step").watch)
        return DEFAULT

    for number in range(_CALLS):
        *state, loss = call(*state, batch(number, width=_LARGE))
        losses.append(float(loss))
        if number == 0:
            trial_of(observation.trials, "jit_lending_step").watch.swap(choose)
    assert len(live) == (not fails)
    assert all(len(one) <= len(large) for one in live)
    observation.stop()
    assert (losses, numbers(tuple(state))) == stock(_CALLS, _LARGE)


def test_a_state_that_each_call_changes_in_place_is_lent_again_and_again(
    observation: Observation, tmp_path: Path
) -> None:
    """A ``jax.Ref``'s array keeps a list of its shards that is out of date after the next call."""
    drawn = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)

    def train(name: str, choose: Callable[[int], str] | None) -> tuple[list[float], list[Any]]:
        weights = jax.device_put(drawn, WHOLE)
        mean = jax.new_ref(jax.device_put(drawn, WHOLE))

        def step(weights: jax.Array, mean: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            loss, slope = jax.value_and_grad(lambda one: jnp.mean((jnp.tanh(x @ one) - x) ** 2))(weights)
            mean[...] = 0.5 * mean[...] + weights - slope
            return weights - slope, loss

        call, losses = jax.jit(named(name, step), donate_argnums=0), []
        for number in range(_CALLS):
            weights, loss = call(weights, mean, batch(number))
            losses.append(float(loss))
            if number == 0 and choose is not None:
                trial_of(observation.trials, f"jit_{name}").watch.swap(choose)
        return losses, [np.asarray(one.data) for one in jax.freeze(mean).addressable_shards]

    ran = []

    def choose(index: int) -> str:
        if index in (2, 3):
            watch = trial_of(observation.trials, "jit_in_place").watch
            session, default = session_of(watch.request, tmp_path), watch.request.call_default()
            loan = lending.Loan.of(default, [default])
            with jaxlink.ours(), lending.lent(session, loan, watch.arguments) as inputs:
                ran.append(Runner(watch.request, default, inputs=inputs).run())
            RealInputs(watch.request, loan.parameters, 0, nullcontext, lambda: False).take(watch.arguments)
        return DEFAULT

    found = train("in_place", choose)
    assert len(ran) == 2
    observation.stop()
    expected = train("in_place_stock", None)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


def test_what_has_no_room_is_not_run(
    observation: Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = jitted("lending_step")
    call(*fresh_state(), batch(0))
    request = trial_of(observation.trials, "jit_lending_step").watch.request
    session = session_of(request, tmp_path)
    arguments: list[Any] = list(fresh_state()[0].values())
    monkeypatch.setattr(
        lending, "lack_of_memory", lambda *_, **__: "it needs 5 MiB a device, 3 MiB are usable"
    )
    default = request.call_default()
    with pytest.raises(UnsupportedError, match="needs 5 MiB"), \
            lending.lent(session, lending.Loan.of(default, [default]), arguments):  # fmt: skip
        raise AssertionError
    assert not any(one.is_deleted() for one in arguments)


def many_arrays(last: float) -> Callable[..., Any]:
    """A step whose state has twelve weights; the last element of the last one is moved by ``last``, besides."""

    def step(weights: Any, key: jax.Array, x: jax.Array) -> Any:
        def loss_of(weights: Any) -> Any:
            return jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), weights.values(), x) ** 2)

        loss, slope = jax.value_and_grad(loss_of)(weights)
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, slope)
        final = max(weights)
        return {**weights, final: weights[final].at[-1, -1].add(last)}, following(key), loss

    name = f"last_{last:g}".replace(".", "_")
    return jax.jit(named(name, step), donate_argnums=(0, 1), out_shardings=(WHOLE, WHOLE, None))


def state_of_many() -> Any:
    drawn = np.random.default_rng(3).normal(size=(12, 16, 16)).astype(np.float32) / 4
    weights = {f"w{number:02}": one for number, one in enumerate(drawn)}
    return jax.device_put((weights, jax.random.key(5)), WHOLE)


@pytest.mark.parametrize("device_memory", ["the host's", "its own, full"])
def test_each_run_or_each_pass_holds_a_call_and_a_wrong_last_element_of_many_arrays_is_seen(
    observation: Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_memory: str
) -> None:
    full = device_memory != "the host's"
    if full:
        in_passes_without_room(monkeypatch)
    taken: list[Any] = []
    jaxlink.install(lambda request: taken.append(compiles.compile_module(request, None)))
    many_arrays(0.01)(*state_of_many(), batch(0))
    jaxlink.install(lambda _: None)
    call, state, losses = many_arrays(0.0), state_of_many(), []
    *state, loss = call(*state, batch(0))
    losses.append(float(loss))
    calls = trial_of(observation.trials, "jit_last_0")
    calls.begun = True
    request, trains = calls.watch.request, threading.current_thread()

    said: list[str] = []
    copies: list[int] = []
    held, execute, output_arrays, unlike = (
        SearchInTraining._held, executables.execute, Runner.output_arrays, Allowed.unlike,
    )  # fmt: skip

    @contextmanager
    def holding(*given: Any) -> Iterator[Hold]:
        begins = search._hold is None
        with held(*given) as hold:
            said.extend(["held"] * begins)
            yield hold
        said.extend(["goes on"] * begins)

    def executed(*given: Any) -> Any:
        if threading.current_thread() is not trains:
            said.append("ran")
        return execute(*given)

    def run(runner: Runner, *given: Any) -> Any:
        said.append("away" if calls.watch.arguments[0].is_deleted() else "there")
        return output_arrays(runner, *given)

    def copied(*given: Any) -> Any:
        copies.append(len(given[0]))
        return host_memory.copied(*given)

    def looked(allowed: Allowed, got: Any) -> Any:
        said.append("looked")
        return unlike(allowed, got)

    monkeypatch.setattr("disco_hlo.plugin.measuring.inputs.arguments.copied", copied)
    monkeypatch.setattr(SearchInTraining, "_held", holding)
    monkeypatch.setattr(executables, "execute", executed)
    monkeypatch.setattr(Runner, "output_arrays", run)
    monkeypatch.setattr(Allowed, "unlike", looked)

    search = search_of(calls, tmp_path, holds=False)
    session = search._session
    default, same, wrong = Trial(DEFAULT, None, 0), Trial("same", None, 0), Trial("wrong", None, 0)
    default.executable, wrong.executable = request.call_default(), taken[-1]
    same.executable = compiled_again(calls.watch)

    def compare() -> None:
        with jaxlink.ours():
            search._compare(session, default, [same, wrong])

    thread = threading.Thread(target=compare)
    thread.start()
    while thread.is_alive():
        *state, loss = call(*state, batch(len(losses)))
        losses.append(float(loss))
    assert same.compared
    assert "output 11 differs from XLA's default at [15, 15] of float32[16, 16]" in wrong.error

    # Twelve weights, a key and a batch on two devices: nothing is copied besides for a run.
    assert copies == [2 * 14] * (_PASSES if full else 1)
    pieces = [piece.split("goes on") for piece in " ".join(said).split("held")[1:]]
    assert len(pieces) == len(search._held_s)
    (copying, _), *runs = [(inside.split(), beside.split()) for inside, beside in pieces]
    assert copying == []
    assert all(inside[:2] == ["there", "ran"] for inside, _ in runs)
    if full:  # the first run of a pass takes the call's own arguments over
        assert len(runs) == _PASSES
        assert all(inside.count("there") == 1 < inside.count("away") for inside, _ in runs)
        assert all("looked" in inside and not beside for inside, beside in runs)
    else:
        assert len(runs) >= 5
        assert all(inside == ["there", "ran"] for inside, _ in runs)
        assert {word for _, beside in runs for word in beside} == {"looked"}

    observation.stop()
    expected, other = state_of_many(), many_arrays(0.0)
    for number, own in enumerate(losses):
        *expected, loss = other(*expected, batch(number))
        assert float(loss) == own
    assert numbers(tuple(state)) == numbers(tuple(expected))
