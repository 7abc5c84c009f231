"""Candidates on the devices: what computes something else, or cannot run, is left out; the rest is timed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from disco_hlo.elsewhere import elsewhere
from disco_hlo.errors import ActivationError, ProfileError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin import hangs
from disco_hlo.plugin.calls.schedule import FEWEST_ROUNDS, MOST_ROUNDS
from disco_hlo.plugin.measuring import candidates, comparing
from disco_hlo.plugin.measuring.candidates import (
    FEWEST_TO_DROP,
    begin_to_compile,
    compare_with_default,
    compile_trials,
    measure,
)
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.phases.finalists import chosen
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla import compiles, executables
from tests.plugin.calls.hanging import end_where_it_hangs
from tests.plugin.handled import in_session


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Session, list[Trial]]:
    """XLA's default, the unfused step and a wrong program."""

    def look(session: Session, source: CanonicalModule) -> tuple[Session, list[Trial]]:
        plain = unfused(source.graph)
        trials = [Trial("XLA default", None, 0), Trial("no fusion", plain, 0), Trial("wrong", plain, 0)]
        compile_trials(session, source, trials[:2], tag="candidate")
        wrong = exchange_opcode(trials[1].module, "tanh", "cosine")
        trials[2].executable = compiles.compile_module(session.request, wrong)
        return session, trials

    found: tuple[Session, list[Trial]] = in_session(tmp_path_factory.mktemp("plans"), look)
    return found


Measured = Callable[..., tuple[list[Trial], bool]]


@pytest.fixture
def measured(compiled: tuple[Session, list[Trial]]) -> Measured:
    """Measures the three until the answers say stop."""
    session, trials = compiled
    fresh = [replace(trial, times_ns=[]) for trial in trials]

    def of(answers: Sequence[bool] = (False,) * MOST_ROUNDS, s: float = 0.1) -> tuple[list[Trial], bool]:
        left = list(answers)
        return fresh, measure(session, fresh, budget_s=s, stop=lambda: left.pop(0))

    return of


def test_what_compares_is_compiled_beside_the_candidates(
    compiled: tuple[Session, list[Trial]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = create_autospec(comparing.compile_comparison, side_effect=RuntimeError("no room"))
    monkeypatch.setattr(candidates, "compile_comparison", prepared)
    [default] = again = [Trial("XLA default", None, 0)]
    compile_trials(compiled[0], None, again, tag="default")  # type: ignore[arg-type]
    [call] = prepared.call_args_list
    assert call.args[1] is default.executable
    assert call.kwargs == {"real_inputs": False}
    assert default.error == "", "it fails again where something is compared"


def test_all_are_timed_alike_and_a_wrong_one_is_out_with_its_times_once_it_is_compared(
    measured: Measured, compiled: tuple[Session, list[Trial]]
) -> None:
    trials, complete = measured()
    default, plain, wrong = trials
    assert complete is True
    assert [trial.error for trial in trials] == ["", "", ""]
    assert min(len(trial.times_ns) for trial in trials) >= FEWEST_TO_DROP
    assert [trial.compared for trial in trials] == [False] * 3, "nobody has looked"
    assert [trial.runner for trial in trials] == [None] * 3, "their inputs take memory"
    compare_with_default(compiled[0], default, [plain, wrong])
    assert (plain.error, plain.compared) == ("", True)
    assert len(plain.times_ns) >= FEWEST_TO_DROP
    assert "differs from XLA's default at" in wrong.error
    assert (wrong.compared, wrong.times_ns) == (False, [])


def test_what_differs_in_its_options_alone_is_written_and_verified_once_and_compiled_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(candidates, name)
        return lambda *given: (done.append(name), real(*given))[1]

    def look(session: Session, source: CanonicalModule) -> list[Trial]:
        plain = unfused(source.graph)
        trials = [Trial("unfused", plain, 0), Trial("by name", plain, 0), Trial("another", replace(plain), 0)]
        compile_trials(session, source, trials, tag="candidate")
        return trials

    for name in ("apply", "verify"):
        monkeypatch.setattr(candidates, name, counted(name))
    trials: list[Trial] = in_session(tmp_path, look)
    assert sorted(done) == ["apply", "apply", "verify", "verify"]
    assert len({id(trial.executable) for trial in trials} - {id(None)}) == len(trials)


def test_several_modules_of_many_ops_are_verified_at_once_by_other_interpreters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, really = threading.Barrier(2), candidates.apply

    def at_once(*given: Any) -> None:
        both.wait(60)
        elsewhere(*given)

    def look(session: Session, source: CanonicalModule) -> list[Trial]:
        plain = unfused(source.graph)
        wrong = replace(plain)
        trials = [Trial("unfused", plain, 0), Trial("by name", plain, 0), Trial("wrong", wrong, 0)]

        def written(strategy: Strategy, whole: CanonicalModule) -> bytes:
            module = really(strategy, whole)
            return exchange_opcode(module, "tanh", "cosine") if strategy is wrong else module

        monkeypatch.setattr(candidates, "apply", written)
        compile_trials(session, source, trials, tag="candidate")
        return trials

    monkeypatch.setattr(candidates, "interpreter", lambda _: at_once)
    monkeypatch.setattr(candidates, "compiles_at_once", lambda _: 3)
    trials: list[Trial] = in_session(tmp_path, look)
    assert [trial.error for trial in trials[:2]] == ["", ""]
    assert [trial.executable is None for trial in trials[:2]] == [False, False]
    assert "computes something else" in trials[2].error


def test_what_is_begun_is_compiled_meanwhile_and_fails_at_the_end(tmp_path: Path) -> None:
    """So does what is done with a compiled module."""
    goes_on = threading.Event()

    def then(trial: Trial) -> None:
        assert goes_on.wait(60), "the caller has not come back"
        trial.executed = executables.read_executable(trial.executable)
        if trial.name == "wrong":
            raise ProfileError("unread")

    def look(session: Session, source: CanonicalModule) -> list[Trial]:
        trials = [Trial("unfused", unfused(source.graph), 0), Trial("wrong", unfused(source.graph), 0)]
        compiling = begin_to_compile(session, source, trials, tag="candidate", then=then)
        goes_on.set()
        compiling.wait()
        assert all(trial.executable is not None for trial in trials)
        assert [trial.error for trial in trials] == ["", ""], "on all ranks at once"
        compiling.finish()
        return trials

    trials: list[Trial] = in_session(tmp_path, look)
    assert [(trial.error, bool(trial.executed)) for trial in trials] == [("", True), ("unread", True)]


def test_what_ends_with_the_training_beside_it_is_not_the_candidates_fault(tmp_path: Path) -> None:
    """A rank that has ended does not answer, and the search's plan was called of no use, and not saved."""

    def then(trial: Trial) -> None:
        raise ActivationError("rank 1 of 2 did not answer")

    def look(session: Session, source: CanonicalModule) -> Trial:
        candidate, between = Trial("plan", unfused(source.graph), 0), lambda _: contextlib.nullcontext()
        ended = replace(session, between_steps=between, over=lambda: True)
        with pytest.raises(ActivationError, match="did not answer"):
            compile_trials(ended, source, [candidate], tag="candidate", then=then)
        assert candidate.error == ""
        goes_on = replace(ended, over=lambda: False)
        compile_trials(goes_on, source, [candidate], tag="candidate", then=then)
        return candidate

    candidate: Trial = in_session(tmp_path, look)
    assert "did not answer" in candidate.error


def test_what_cannot_win_is_not_timed_to_the_end(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second takes longer than the default; the third is faster, which five rounds do not show."""
    drawn = random.Random(1)
    thirds = [round(drawn.gauss(992, 40)) for _ in range(1 + MOST_ROUNDS)]
    rounds = [
        (1000, 1200, ns) if number <= FEWEST_TO_DROP else (1000, ns) for number, ns in enumerate(thirds)
    ]
    times_ns = itertools.chain.from_iterable(rounds)

    def time_once(*_: Any) -> int:
        return next(times_ns)

    monkeypatch.setattr(candidates, "time_once", time_once)
    monkeypatch.setattr(candidates.time, "monotonic", lambda: 0.0)
    (default, slower, third), complete = measured()
    assert complete is True
    assert len(slower.times_ns) == FEWEST_TO_DROP
    assert len(default.times_ns) == len(third.times_ns) > FEWEST_ROUNDS
    assert chosen([default, slower, third], None) == 2


def test_a_candidate_that_fails_while_it_is_timed_is_out_and_the_others_are_timed(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, numbers = candidates.time_once, itertools.count(1)

    def time_once(*arguments: Any) -> int:
        if next(numbers) == 5:  # the second of three, in the second round
            raise RuntimeError("illegal memory access")
        return really(*arguments)

    monkeypatch.setattr(candidates, "time_once", time_once)
    (default, plain, wrong), complete = measured()
    assert complete is True
    assert (plain.error, plain.times_ns) == ("RuntimeError: illegal memory access", [])
    assert min(len(default.times_ns), len(wrong.times_ns)) >= FEWEST_TO_DROP


@pytest.mark.filterwarnings(
    "ignore:Exception in thread disco-endless"
)  # which ends in the place of the process
@pytest.mark.parametrize("number", [1, 3], ids=["first run", "one that is timed"])
def test_a_candidate_that_hangs_before_the_first_step_ends_the_job_by_what_the_default_takes(
    number: int, measured: Measured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It held the job for ten minutes."""
    monkeypatch.setattr(logging.getLogger("disco_hlo"), "propagate", True)
    ended = end_where_it_hangs(monkeypatch)
    monkeypatch.setattr(hangs, "_HANGS_S", 1.0)
    (_, plain, _), _ = measured([True])
    runs, really = itertools.count(1), executables.execute

    def execute(executable: Any, arguments: Any) -> Any:
        if executable is plain.executable and next(runs) == number:
            assert ended.wait(60)
        return really(executable, arguments)

    monkeypatch.setattr(executables, "execute", execute)
    measured([False] * 2 + [True])
    assert ended.is_set()
    assert "a run of jit_mlp_step has not ended after 1 s: it hangs; " in caplog.text


def test_a_candidate_is_marked_from_its_first_run_to_the_first_that_counts(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends the process in one of these runs is not tried again and again."""
    ran: list[str] = []
    really_marked, under = candidates.marked, [""]

    @contextlib.contextmanager
    def marked(session: Session, trial: Trial, stage: str) -> Iterator[None]:
        under.append(f"{stage} of {trial.name}")
        with really_marked(session, trial, stage):  # type: ignore[arg-type]
            yield
        under.pop()

    def run(runner: Runner) -> int:
        ran.append(under[-1])
        return 1

    monkeypatch.setattr(candidates, "marked", marked)
    monkeypatch.setattr(Runner, "run", run)
    measured([False] * 2 + [True])
    names = ["XLA default", "no fusion", "wrong"]
    # The default's first run is one whose results are looked at. Then come a warm-up and two rounds.
    assert ran == [f"run of {name}" for name in (*names[1:], *names, *names)] + [""] * 3


def test_a_measurement_ends_between_rounds_when_asked(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the machine says who is far behind after two rounds.
    monkeypatch.setattr(Runner, "run", lambda _: 1)
    trials, complete = measured([False, False, True], 600.0)
    assert complete is False
    assert [len(trial.times_ns) for trial in trials] == [2, 2, 2]


def test_a_candidate_without_room_for_its_inputs_is_left_out(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = comparing.Runner, []

    def runner(*args: Any, **more: Any) -> Any:
        made.append(args)
        if len(made) == 2:
            raise MemoryError("no room")
        return real(*args, **more)

    monkeypatch.setattr(comparing, "Runner", runner)
    trials, _ = measured()
    assert trials[1].error == "MemoryError: no room"
    assert trials[1].times_ns == []
    assert len(trials[0].times_ns) >= FEWEST_TO_DROP


def test_on_gpu_several_steps_are_timed_in_a_row(
    compiled: tuple[Session, list[Trial]], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, (default, *_) = compiled
    rule = lambda _runner, step_ns, _bytes, within_ns: within_ns // 10**6 * (step_ns > 0)  # noqa: E731
    monkeypatch.setattr(candidates, "at_once_of", rule)
    runner = Runner(session.request, default.executable, 0)
    on_gpu = replace(session, facts=replace(session.facts, backend="gpu"))
    beside = replace(on_gpu, between_steps=lambda _: contextlib.nullcontext())
    asked = [candidates.steps_in_a_row(one, runner) for one in (session, on_gpu, beside)]
    assert asked[:2] == [1, 300]
    assert asked[2] >= 50, "a slice, or two steps that take longer"
    assert candidates.time_once(runner, 3) > 0
