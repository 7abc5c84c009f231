"""The search while a step trains: found, profiled, searched beside, tried on real calls, saved, and enacted."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import ActivationError, DiscoError, XlaRefusalError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan import plan as plans
from disco_hlo.plan.plan import DEFAULT, SEARCHED, Plan, Strategy
from disco_hlo.plan.store import PROFILE_NAME, PlanStore
from disco_hlo.plugin.calls import schedule
from disco_hlo.plugin.calls import trial as trials
from disco_hlo.plugin.calls.observing import CALLS_BEFORE_SEARCH, Observation
from disco_hlo.plugin.calls.schedule import FEWEST_ROUNDS, Verdict
from disco_hlo.plugin.calls.trial import Hold
from disco_hlo.plugin.measuring import compiling, lending, room
from disco_hlo.plugin.measuring.known_times import STORE_NAME
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.phases import (
    enact_phase,
    finding,
    making_structures,
    search_in_training,
    training_phase,
)
from disco_hlo.plugin.phases.finding import FoundPlans, search_apart
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import why_none
from disco_hlo.plugin.xla import compiles, executables, jaxlink
from disco_hlo.profiler.keys import GROUP_PREFIX
from disco_hlo.profiler.profile import Profile, load
from tests.known_times import know_all
from tests.plugin.calls.dropout import following
from tests.plugin.calls.training import (
    WHOLE,
    batch,
    fresh_state,
    jitted,
    loss_of,
    named,
    numbers,
    step,
    telling,
)
from tests.plugin.calls.verdicts import once_it_ran_often

pytestmark = [pytest.mark.product_only, pytest.mark.usefixtures("compiled_search")]
_LONGEST_S = 120.0
_TOLD = 5
"""Lines that a call of the step that prints has."""
_STEP_S = 0.03
"""The cores are the search's, too; and a training of thousands of steps would have to be repeated."""
_found: dict[str, FoundPlans] = {}
"""What the searches of these tests found, by the step's fingerprint."""


def fingerprint(module: bytes) -> str:
    """Alike for the same step under another name."""
    return canonicalize(module).graph.fingerprint


def found_before(*arguments: Any, **named: Any) -> FoundPlans:
    """What a test before this one found for the same step; else what is found now."""
    known = _found.get(fingerprint(arguments[1]))
    return known or noted(*arguments, **named)


def noted(*arguments: Any, **named: Any) -> FoundPlans:
    """Search, and keep what is found."""
    found = _found[fingerprint(arguments[1])] = search_apart(*arguments, **named)
    return found


@dataclass
class Training:
    """A training whose calls are watched, and that is searched for."""

    settings: Settings
    observation: Observation
    processes: list[subprocess.Popen[bytes]]
    """Of the searches that were begun."""

    def train(self, call: Callable[..., Any], done: Callable[[], bool]) -> tuple[list[float], Any]:
        """Losses until ``done`` says so and the search is over, and the state then."""
        (weights, key), losses, end = fresh_state(), [], time.monotonic() + _LONGEST_S
        while not (done() and not searches()):
            assert time.monotonic() < end, "the search goes on and on"
            weights, key, loss = call(weights, key, batch(len(losses)))
            losses.append(float(loss))
            time.sleep(_STEP_S)
        return losses, (weights, key)

    def stock(self, count: int, function: Callable[..., Any] = step) -> tuple[list[float], Any]:
        """The same training without us, who see no more calls."""
        self.observation.stop()
        call, state, losses = jitted("stock", function), fresh_state(), []
        for number in range(count):
            *state, loss = call(*state, batch(number))
            losses.append(float(loss))
        return losses, state

    def until_over(self, call: Callable[..., Any]) -> tuple[list[float], Any]:
        """Train until a search has come and gone, and the calls were given back."""
        return self.train(call, lambda: self.observation.searched and not self.observation.trials)

    def goes_on_as_stock(self, name: str) -> None:
        """A step of this name trains until its search is over, with the losses that it has without us."""
        losses, _ = self.until_over(jitted(name))
        assert losses == self.stock(len(losses))[0]

    def wait_for_search(self) -> None:
        """See the last calls, and join the searches that are under way."""
        self.observation.stop()
        for thread in searches():
            thread.join(60)
        assert searches() == []

    def saved(self) -> Plan:
        """The only one."""
        [listed] = PlanStore(self.settings.directory).list_plans()
        assert listed.problem == ""
        return plans.decode(listed.plan_json, "")


def searches() -> list[threading.Thread]:
    """Searches under way."""
    return [one for one in threading.enumerate() if one.name == "disco-search"]


@pytest.fixture
def structure() -> str:
    """``DISCO_STRUCTURE``."""
    return "auto"


@pytest.fixture
def training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, structure: str
) -> Iterator[Training]:
    caplog.set_level(logging.INFO, "disco_hlo")
    know_all(tmp_path, devices=2, processes=1)
    settings = Settings(
        search=True, directory=tmp_path, when="training", budget_s=60, patience=50, finalists=1, share=1.0,
        structure=structure,
    )  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(search_in_training, "search_apart", noted)
    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(trials, "_LONGEST_PAUSE", 8)
    jaxlink.install(lambda request: training_phase.handle(request, settings))
    own = Training(settings, training_phase.observe(settings), processes)
    try:
        yield own
    finally:
        own.observation.stop()
        jaxlink.uninstall()
        training_phase.observe.cache_clear()
        own.wait_for_search()
        assert all(process.poll() is not None for process in processes)


def let_win(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(schedule, "verdict", once_it_ran_often(name))


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    """With which searches were to begin; none does."""
    found: list[Profile] = []

    def search_apart(_settings: Any, _module: Any, profile: Profile, *_: Any, **__: Any) -> FoundPlans:
        found.append(profile)
        raise DiscoError("enough")

    monkeypatch.setattr(search_in_training, "search_apart", search_apart)
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.slow
def test_a_step_is_searched_while_it_trains_and_goes_on_with_its_plan(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_win(monkeypatch, SEARCHED)
    evaluate = jax.jit(lambda weights, x: jnp.sum((x @ weights["in"]) ** 2))
    for number in range(2 * CALLS_BEFORE_SEARCH):
        evaluate(fresh_state()[0], batch(number)).block_until_ready()
    assert searches() == []

    losses, state = training.until_over(jitted("searched_step"))
    expected, expected_state = training.stock(len(losses))
    # A candidate may round otherwise, the sums are as far off as those of another order of adding.
    assert losses == pytest.approx(expected, rel=1e-5)
    for own, other in zip(numbers(state), numbers(expected_state), strict=True):
        assert own == pytest.approx(other, rel=1e-4, abs=1e-5)
    text = caplog.text
    assert "jit_searched_step is the training step by its calls" in text
    assert "the training was held for" in text
    assert f"jit_searched_step: {SEARCHED} from call" in text

    plan = training.saved()
    assert plan.chosen == SEARCHED
    assert plan.measured is not None
    timed = {one.name: one for one in plan.measured.candidates}
    assert timed[SEARCHED].samples == timed[DEFAULT].samples >= FEWEST_ROUNDS
    [profile] = training.settings.directory.rglob(PROFILE_NAME)
    assert load(profile).ops

    # The next job enacts it.
    enacting = replace(training.settings, search=False)
    jaxlink.install(lambda request: enact_phase.handle(request, enacting))
    call = jitted("searched_step")
    again, (weights, key) = [], fresh_state()
    for number in range(5):
        weights, key, loss = call(weights, key, batch(number))
        again.append(float(loss))
    assert again == pytest.approx(expected[:5], rel=1e-5)
    assert "enacts the plan of jit_searched_step" in caplog.text


@pytest.mark.slow
def test_a_step_that_prints_is_searched_and_prints_each_line_once_and_in_order(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    """Runs that are profiled, timed or compared are no calls of the training; tried candidates are."""
    let_win(monkeypatch, SEARCHED)

    def told(count: int) -> list[list[str]]:
        """What each of so many calls printed, in the stock training."""
        jax.effects_barrier()
        lines = capfd.readouterr().out.splitlines()
        assert len(lines) == _TOLD * count
        return [lines[first : first + _TOLD] for first in range(0, len(lines), _TOLD)]

    def say(lines: list[list[str]]) -> list[list[str]]:
        return [[one.split()[0] for one in call] for call in lines]

    def values(lines: list[list[str]]) -> list[float]:
        return [float(one.split()[1]) for call in lines for one in call]

    losses, _ = training.until_over(jitted("telling_step", telling))
    own = told(len(losses))
    assert f"jit_telling_step: {SEARCHED} from call" in caplog.text
    expected, _ = training.stock(len(losses), telling)
    stock = told(len(losses))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert say(own) == say(stock) == [["loss", "inside", "inside", "inside", "behind"]] * len(losses)
    assert values(own) == pytest.approx(values(stock), rel=1e-4)

    # In another process its callbacks lie elsewhere.
    command = (sys.executable, "-m", "tests.plugin.searched_training", "enact")
    environment = {**os.environ, "ENABLE_SEARCH": "0", "DISCO_DIR": str(training.settings.directory)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100)
    assert "disco: enacts the plan of jit_telling_step" in done.stderr
    again = done.stdout.splitlines()
    assert [one.split()[0] for one in again] == ["loss", "inside", "inside", "inside", "behind"] * 5
    assert [float(one.split()[1]) for one in again] == pytest.approx(values(stock)[: 5 * _TOLD], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["chunk-2"])
def test_another_structure_is_profiled_searched_compared_and_tried_as_real_steps(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, structure: str
) -> None:
    let_win(monkeypatch, structure)
    losses, _ = training.until_over(jitted("chunked_step"))
    expected, _ = training.stock(len(losses))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert f"jit_chunked_step: {structure} from call" in caplog.text
    plan = training.saved()
    assert plan.chosen == plan.structure.name == structure
    assert len(training.processes) == 2


def test_of_a_step_on_one_device_it_is_said_that_a_search_before_it_needs_its_name(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """``DISCO_WHEN=compile``, which the line advised, finds no step on one device."""

    def alone(weights: jax.Array, x: jax.Array) -> jax.Array:
        return weights - 0.1 * jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) @ w.T - x) ** 2))(weights)

    call, weights = jax.jit(named("short_alone", alone)), jnp.eye(16)
    for _ in range(3):
        weights = call(weights, jnp.ones((8, 16)))
    training_phase.say_if_not_begun(training.settings)
    [line] = [line for line in caplog.messages if "the script ended after" in line]
    assert line.endswith(
        ", DISCO_WHEN=compile with DISCO_MODULE=jit_short_alone searches before the first step"
    )


@pytest.mark.slow
def test_a_step_on_one_device_is_searched_and_enacted_without_its_name(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On one H200 a step took 0.83 of XLA's default, but its name had to be given."""
    let_win(monkeypatch, SEARCHED)
    know_all(training.settings.directory, devices=1, processes=1)

    def alone(weights: jax.Array, x: jax.Array) -> jax.Array:
        return weights - 0.1 * jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) @ w.T - x) ** 2))(weights)

    x, call = jnp.ones((8, 16)), jax.jit(named("step_alone", alone))
    weights, end = jnp.eye(16), time.monotonic() + _LONGEST_S
    while not (training.observation.searched and not training.observation.trials and not searches()):
        assert time.monotonic() < end, "the search goes on and on"
        weights = call(weights, x)
        time.sleep(_STEP_S)
    assert f"jit_step_alone: {SEARCHED} from call" in caplog.text
    assert training.saved().target.device_count == 1
    training.observation.stop()

    enacting = replace(training.settings, search=False)
    jaxlink.install(lambda request: enact_phase.handle(request, enacting))
    jax.jit(named("step_alone", alone))(weights, x)
    assert "enacts the plan of jit_step_alone" in caplog.text
    assert why_none(enacting) == ""


@pytest.mark.slow
def test_what_nobody_knows_is_profiled_and_runs_over_devices_only_while_a_call_is_held(
    training: Training, profiles: list[Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program over several devices beside a step may begin on one before the step, on another after it."""
    (training.settings.directory / STORE_NAME).unlink()
    held = threading.Event()
    ran: list[bool] = []
    wait, execute, trains = Hold.wait, executables.execute, threading.current_thread()

    def waiting(hold: Hold) -> None:
        held.set()
        wait(hold)
        held.clear()

    def executed(*arguments: Any) -> Any:
        if threading.current_thread() is not trains:
            ran.append(held.is_set())
        return execute(*arguments)

    monkeypatch.setattr(Hold, "wait", waiting)
    monkeypatch.setattr(executables, "execute", executed)
    training.goes_on_as_stock("unknown_step")
    [profile] = profiles
    assert profile.ops
    assert profile.transfers is not None
    assert profile.memory_bandwidth > 0
    assert len(ran) > 50
    assert all(ran)


def test_a_module_without_room_is_left_out_and_the_search_goes_on_with_what_calls_tell(
    training: Training,
    profiles: list[Profile],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lacks = "it needs 900 MiB a device, 20 MiB of what is free are usable"
    monkeypatch.setattr(lending, "lack_of_memory", lambda *_, **__: lacks)
    training.goes_on_as_stock("large_step")
    assert f"unfused step: not profiled: {lacks}" in caplog.text
    [profile] = profiles
    assert any(key.startswith(GROUP_PREFIX) for key in profile.ops)


def test_a_training_goes_on_when_its_search_is_killed(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apart = finding.apart

    def killed(*arguments: Any, **options: Any) -> Any:
        def kill() -> None:
            while not training.processes:
                time.sleep(0.01)
            training.processes[0].send_signal(signal.SIGKILL)

        threading.Thread(target=kill).start()
        return apart(*arguments, **options)

    monkeypatch.setattr(finding, "apart", killed)
    training.goes_on_as_stock("killed_step")
    assert warnings(caplog) == [
        "the search for jit_killed_step has ended, and the training goes on: the search's process ended with -9 and "
        "found nothing"
    ]
    assert PlanStore(training.settings.directory).list_plans() == []
    # What was measured is known to the next job.
    assert (training.settings.directory / STORE_NAME).exists()


def test_a_candidate_that_computes_something_else_never_runs_a_call(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = other_executable(training)

    def compile_wrongly(_session: Any, _source: Any, trials: Any, *, tag: str) -> None:
        for trial in trials:
            trial.executable = other

    monkeypatch.setattr(search_in_training, "compile_trials", compile_wrongly)
    monkeypatch.setattr(search_in_training, "search_apart", found_before)
    training.goes_on_as_stock("right_step")
    assert f"{SEARCHED} is not tried: output 0 differs from XLA's default" in caplog.text
    assert training.saved().chosen == DEFAULT


def test_a_training_that_ends_before_a_candidate_has_won_saves_it_unmeasured(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(schedule, "verdict", lambda *_: Verdict((SEARCHED,), None, FEWEST_ROUNDS))
    monkeypatch.setattr(search_in_training, "search_apart", found_before)
    call, (weights, key), number = jitted("unfinished_step"), fresh_state(), 0
    end = time.monotonic() + _LONGEST_S
    while not any(trial.rounds for trial in training.observation.trials):
        assert time.monotonic() < end
        weights, key, loss = call(weights, key, batch(number))
        loss.block_until_ready()
        number += 1
        time.sleep(_STEP_S)
    training.wait_for_search()
    plan = training.saved()
    assert plan.chosen == SEARCHED
    assert plan.measured is not None
    assert not any(one.samples for one in plan.measured.candidates)
    assert "interrupted: the best plan so far is in" in caplog.text
    assert warnings(caplog) == []


def test_ctrl_c_while_a_call_is_held_ends_the_search_and_not_the_training(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(session: Session, *_: Any, **__: Any) -> None:
        with session.alone("profiling"):
            os.kill(os.getpid(), signal.SIGINT)
            end = time.monotonic() + _LONGEST_S
            while "interrupted: the search is ended" not in caplog.text and time.monotonic() < end:
                time.sleep(0.01)

    monkeypatch.setattr(search_in_training, "profile_step", interrupted)
    before, switches_s = signal.getsignal(signal.SIGINT), sys.getswitchinterval()
    training.goes_on_as_stock("interrupted_step")
    assert signal.getsignal(signal.SIGINT) is before
    assert sys.getswitchinterval() == switches_s
    assert warnings(caplog) == []
    assert training.processes == []


@pytest.mark.parametrize(("calls", "told"), [(1, "1 call"), (12, "12 calls")])
def test_a_script_too_short_for_a_search_is_told_so(
    calls: int, told: str, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training_phase.say_if_not_begun(training.settings)
    call, state = jitted("short_step"), fresh_state()
    for number in range(calls):
        *state, _ = call(*state, batch(number))
    training_phase.say_if_not_begun(training.settings)
    assert caplog.messages == [
        "no training step was found: nothing that ran returns the state that it takes; "
        "DISCO_WHEN=compile goes by collectives, or by DISCO_MODULE, instead",
        f"the script ended after {told} of jit_short_step, before a search for it began: nothing is saved; a longer "
        "job is searched while it trains, DISCO_WHEN=compile searches before the first step",
    ]


def test_a_script_that_makes_its_jit_anew_is_told_so_and_not_to_train_for_longer(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 3056 calls, 50 by each jit, none came late enough for a search to begin."""
    state = fresh_state()
    for number in range(48):
        if number % 12 == 0:
            call = jitted("new_step")
        *state, _ = call(*state, batch(number))
    training_phase.say_if_not_begun(training.settings)
    assert caplog.messages == [
        "the script ended after 48 calls of jit_new_step, before a search for it began: nothing is saved; JAX loaded "
        "it 4 times, as it does for each new jit: one that is kept is searched while it trains, DISCO_WHEN=compile "
        "searches before the first step"
    ]


def test_a_script_whose_modules_are_no_steps_is_not_told_to_train_for_longer(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    call, state = jitted("rare_step"), fresh_state()
    *state, loss = call(*state, batch(0))
    [trial] = training.observation.trials
    trial.least_share = 2.0  # than which it can take no more
    for number in range(2 * CALLS_BEFORE_SEARCH):
        loss.block_until_ready()
        *state, loss = call(*state, batch(number))
    training_phase.say_if_not_begun(training.settings)
    assert caplog.messages == [
        "no training step was found: calls of jit_rare_step are left alone (it takes 100% of the devices' time); "
        "DISCO_WHEN=compile goes by collectives, or by DISCO_MODULE, instead"
    ]


def test_a_script_whose_ranks_differ_is_told_no_other_reason(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told to search at compile time, where ranks must not differ either."""

    def differ(*_: Any) -> Any:
        raise ActivationError("the ranks differ in DISCO_SEED")

    monkeypatch.setattr(training_phase, "join", differ)
    jitted("differing_step")(*fresh_state(), batch(0))
    training_phase.say_if_not_begun(training.settings)
    assert caplog.messages == [
        "calls of jit_differing_step are not watched: the ranks differ in DISCO_SEED",
        "no training step was found: calls of jit_differing_step are left alone (the ranks differ in DISCO_SEED)",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["chunk-2"])
@pytest.mark.parametrize("new", [True, False], ids=["of new kernels", "of kernels tried before"])
def test_a_step_that_leaves_no_room_to_compile_beside_it_is_held_for_compiles_of_new_kernels(
    training: Training,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    structure: str,
    new: bool,
) -> None:
    """XLA:GPU's autotuner runs kernels on arrays of its own: beside a step it may find no memory, or the step none. For
    the step itself it has done so, and what it found holds for other structures, too."""
    caplog.set_level(logging.DEBUG, "disco_hlo")
    known = {"xla_gpu_require_complete_aot_autotune_results": True}
    let_win(monkeypatch, structure)
    monkeypatch.setattr(search_in_training, "search_apart", found_before)
    tuning = {"cpu": replace(BACKENDS["cpu"], autotunes=True, by_known_picks=known)}
    monkeypatch.setattr(room, "BACKENDS", tuning)
    monkeypatch.setattr(compiling, "BACKENDS", tuning)
    monkeypatch.setattr(room, "may_rise_at_peak_bytes", lambda *_: 0)
    monkeypatch.setattr(making_structures, "is_tuned", lambda *_: not new)
    held: dict[str, list[tuple[bool, bool]]] = {"capture": [], "compile_module": []}

    def noted(name: str) -> None:
        original = getattr(compiles, name)
        bound = inspect.signature(original).bind

        def noting(*arguments: Any, **options: Any) -> Any:
            [search] = search_in_training._under_way
            asked = bound(*arguments, **options).arguments
            if new and asked.get("extra_options") == known:
                raise XlaRefusalError("a kernel is new")
            held[name].append((asked.get("structure") is not None, search._hold is not None))
            return original(*arguments, **options)

        monkeypatch.setattr(compiles, name, noting)

    for name in held:
        noted(name)
    losses, _ = training.until_over(jitted("large_step"))
    assert losses == pytest.approx(training.stock(len(losses))[0], rel=1e-5)
    assert f"jit_large_step: {structure} from call" in caplog.text
    # The step and its structure; then, profiled or tried, modules of theirs.
    assert held["capture"] == [(False, False), (True, new)]
    assert {(False, False), (True, new)} == set(held["compile_module"])
    assert "there is room for 0 beside a step" in caplog.text
    assert ("candidates, compiled while a call is held: " in caplog.text) == new


@pytest.mark.parametrize("reads", ["peaks_bytes", "lasts_alike"])
def test_a_device_or_a_module_that_cannot_be_read_is_one_line_and_the_calls_are_given_back(
    reads: str, training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unread(_: Any) -> tuple[int, ...]:
        raise RuntimeError("it cannot be read")

    monkeypatch.setattr(search_in_training, reads, unread)
    training.until_over(jitted("unread_step"))
    assert warnings(caplog) == [
        "the search for jit_unread_step has ended, and the training goes on: RuntimeError: it cannot be read"
    ]


def test_another_ctrl_c_does_not_leave_a_search_to_a_dying_interpreter(tmp_path: Path) -> None:
    """Which found its thread inside of XLA, and the process ended by SIGABRT."""
    made: list[search_in_training.SearchInTraining] = []
    begun = threading.Event()

    def work() -> None:
        settings = Settings(search=True, directory=tmp_path)
        nothing: Any = lambda: None  # noqa: E731
        made.append(
            search_in_training.SearchInTraining(
                nothing, settings, threading.current_thread(), threading.Event()
            )
        )
        begun.set()
        time.sleep(0.5)

    searches = threading.Thread(target=work)
    searches.start()
    begun.wait()
    main = threading.get_ident()
    for after_s in (0.1, 0.2):
        threading.Timer(after_s, signal.pthread_kill, (main, signal.SIGINT)).start()
    made[0].end()
    assert not searches.is_alive()


@pytest.mark.parametrize(("failed", "expected"), [(True, "interrupted"), (False, DEFAULT)])
def test_a_search_that_failed_on_another_rank_does_not_save_that_the_default_won(
    failed: bool, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All ranks then go on with XLA's default, which nobody has compared with anything."""
    saved: list[str] = []
    monkeypatch.setattr(search_in_training, "save_interrupted", lambda _: saved.append("interrupted"))
    monkeypatch.setattr(search_in_training, "save", lambda _, winner: saved.append(winner.name))
    given_up: Any = lambda: SimpleNamespace(is_over=True)  # noqa: E731
    settings = Settings(search=True, directory=tmp_path)
    search = search_in_training.SearchInTraining(
        given_up, settings, threading.current_thread(), threading.Event()
    )
    search._note(DEFAULT, [])
    outcome: Any = SimpleNamespace(trials=[SimpleNamespace(name=DEFAULT, times_ns=[])])
    search._save(outcome, failed)
    assert saved == [expected]


def test_searches_come_one_after_the_other_and_leave_python_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of a generator may still save what it found when that of the discriminator begins."""
    switches_s, goes_on, began = sys.getswitchinterval(), threading.Event(), threading.Semaphore(0)

    class Search:
        def __init__(self, *_: Any) -> None:
            pass

        def run(self) -> None:
            began.release()
            goes_on.wait(60)

    monkeypatch.setattr(search_in_training, "SearchInTraining", Search)
    both = [threading.Thread(target=training_phase._search, args=(None, None, None)) for _ in range(2)]
    for thread in both:
        thread.start()
    assert began.acquire(timeout=60)
    assert not began.acquire(timeout=0.2)
    goes_on.set()
    for thread in both:
        thread.join()
    assert began.acquire(timeout=0)
    assert sys.getswitchinterval() == switches_s


def test_a_jax_that_loses_donation_is_told_how_to_search(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jaxlink, "keeps_donation", lambda: False)
    training.goes_on_as_stock("donating_step")
    [line] = warnings(caplog)
    assert "DISCO_WHEN=compile searches it" in line
    assert training.processes == []


def other_executable(training: Training) -> Any:
    """Of a step with the same signature, that learns ten times as fast."""
    made: list[Any] = []

    def take(request: Any) -> None:
        made.append(compiles.compile_module(request, None))

    def step(weights: Any, key: jax.Array, x: jax.Array) -> Any:
        loss, slope = jax.value_and_grad(loss_of)(weights, x, key)
        return jax.tree.map(lambda w, g: w - g, weights, slope), following(key), loss

    call = jax.jit(named("other_step", step), donate_argnums=(0, 1), out_shardings=(WHOLE, WHOLE, None))
    jaxlink.install(take)
    call(*fresh_state(), batch(0))
    jaxlink.install(lambda request: training_phase.handle(request, training.settings))
    for trial in training.observation.trials:
        trial.watch.settle(DEFAULT)  # else a search for it may begin until the collector happens to come by
    return made[-1]


def test_a_search_ends_when_the_step_is_called_no_more(training: Training) -> None:
    call, (weights, key), number = jitted("dropped_step"), fresh_state(), 0
    while not searches():
        weights, key, _ = call(weights, key, batch(number))
        weights["in"].block_until_ready()
        number += 1
    training.wait_for_search()
    with suppress(IndexError):
        assert training.processes[0].poll() is not None


@pytest.mark.parametrize(("room_bytes", "ready"), [(1000, [200]), (299, [])])
def test_memory_for_copies_leaves_what_runs_on_the_host_its_own(
    room_bytes: int, ready: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates that had room on made-up inputs lacked it once copies that did not fit beside them had memory."""
    got: list[int] = []

    def get_ready(size_bytes: int, *_: object) -> int:
        got.append(size_bytes)
        return size_bytes

    own = search_in_training
    needs, parameter = (
        SimpleNamespace(total_bytes=200),
        SimpleNamespace(shape=(100,), dtype=jnp.dtype("int8")),
    )
    monkeypatch.setattr(own, "MEMORY", SimpleNamespace(get_ready=get_ready))
    monkeypatch.setattr(own, "memory", lambda _: needs)
    monkeypatch.setattr(own, "parameters", lambda _: [parameter])
    monkeypatch.setattr(own, "share_memory", lambda _: True)
    monkeypatch.setattr(own, "room_bytes", lambda *_, **__: room_bytes)
    request = SimpleNamespace(call_default=lambda: None, local_devices=jax.devices()[:2])
    search: Any = SimpleNamespace(_request=request, _over=lambda: False)
    own.SearchInTraining._wait_for_memory(search, SimpleNamespace())  # type: ignore[arg-type]
    assert got == ready


@pytest.mark.parametrize(
    ("structures_ns", "forced", "tried"),
    [
        ((), None, ["plan", "plan 2"]),
        ((140,), None, ["plan", "structure 0"]),
        ((130, 138), None, ["structure 0", "structure 1"]),
        ((130, 144, 139), None, ["structure 0"]),
        ((170,), "structure 0", ["plan", "structure 0"]),
    ],
)
def test_what_is_far_behind_a_structure_is_not_compared(
    structures_ns: tuple[int, ...], forced: str | None, tried: list[str]
) -> None:
    """Comparing three candidates held a training of 454 s for 12.5 of them."""
    other: Any = object()
    some = [Trial(name, Strategy(), ns) for name, ns in (("plan", 150), ("plan 2", 151), ("plan 3", 152))]
    some += [
        Trial(f"structure {i}", Strategy(), ns, restructured=other) for i, ns in enumerate(structures_ns)
    ]
    found = search_in_training.likely_winners([Trial(DEFAULT, None, 190), *some], forced)
    assert [one.name for one in found] == tried
