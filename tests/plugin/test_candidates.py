"""Candidates on the devices: what computes something else, or cannot run, is left out; the rest is timed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.measuring import candidates, comparing
from disco_hlo.plugin.measuring.candidates import Trial, compare_with_default, compile_trials, measure
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla import compiles
from tests.plugin.handled import in_session


def measured(
    tmp_path: Path,
    answers: Sequence[bool] = (False,) * 25,
    then: Callable[[Session, Trial, Sequence[Trial]], None] = lambda *_: None,
) -> tuple[list[Trial], bool]:
    """XLA's default, the unfused step and a wrong program, measured until ``answers`` say stop."""
    left = list(answers)

    def look(session: Session, source: CanonicalModule) -> tuple[list[Trial], bool]:
        plain = unfused(source.graph)
        trials = [Trial("XLA default", None, 0), Trial("no fusion", plain, 0), Trial("wrong", plain, 0)]
        compile_trials(session, source, trials[:2], tag="candidate")
        wrong = exchange_opcode(trials[1].module, "tanh", "cosine")
        trials[2].executable = compiles.compile_module(session.request, wrong)
        complete = measure(session, trials, budget_s=0.1, stop=lambda: left.pop(0))
        then(session, trials[0], trials[1:])
        return trials, complete

    found: tuple[list[Trial], bool] = in_session(tmp_path, look)
    return found


def test_a_wrong_program_is_left_out_and_the_others_are_timed_alike(tmp_path: Path) -> None:
    trials, complete = measured(tmp_path)
    default, plain, wrong = trials
    assert complete is True
    assert [trial.error for trial in trials] == ["", "", ""]
    assert len(default.times_ns) == len(plain.times_ns) == len(wrong.times_ns) >= 5
    assert [trial.compared for trial in trials] == [False] * 3, "nobody has looked"
    assert [trial.runner for trial in trials] == [None] * 3, "their inputs take memory"


def test_a_wrong_program_is_out_with_its_times_and_a_right_one_is_compared(tmp_path: Path) -> None:
    def compare(session: Session, default: Trial, others: Sequence[Trial]) -> None:
        compare_with_default(session, default, others)

    (default, plain, wrong), _ = measured(tmp_path, then=compare)
    assert (plain.error, plain.compared) == ("", True)
    assert len(plain.times_ns) == len(default.times_ns) >= 5
    assert "differs from XLA's default at" in wrong.error
    assert (wrong.compared, wrong.times_ns) == (False, [])


def test_a_candidate_that_fails_while_it_is_timed_is_out_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, numbers = candidates.time_once, itertools.count(1)

    def time_once(*arguments: Any) -> int:
        if next(numbers) == 5:  # the second of three, in the second round
            raise RuntimeError("illegal memory access")
        return really(*arguments)

    monkeypatch.setattr(candidates, "time_once", time_once)
    (default, plain, wrong), complete = measured(tmp_path)
    assert complete is True
    assert (plain.error, plain.times_ns) == ("RuntimeError: illegal memory access", [])
    assert len(default.times_ns) == len(wrong.times_ns) >= 5


def test_a_candidate_is_marked_from_its_first_run_to_the_first_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    measured(tmp_path, [False] * 2 + [True])
    names = ["XLA default", "no fusion", "wrong"]
    # The default's first run is one whose results are looked at. Then come a warm-up and two rounds.
    assert ran == [f"run of {name}" for name in (*names[1:], *names, *names)] + [""] * 3


def test_a_measurement_ends_between_rounds_when_asked(tmp_path: Path) -> None:
    trials, complete = measured(tmp_path, [False, False, True])
    assert complete is False
    assert [len(trial.times_ns) for trial in trials] == [2, 2, 2]


def test_a_candidate_without_room_for_its_inputs_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = comparing.Runner, []

    def runner(*args: Any, **more: Any) -> Any:
        made.append(args)
        if len(made) == 2:
            raise MemoryError("no room")
        return real(*args, **more)

    monkeypatch.setattr(comparing, "Runner", runner)
    trials, _ = measured(tmp_path)
    assert trials[1].error == "MemoryError: no room"
    assert trials[1].times_ns == []
    assert len(trials[0].times_ns) >= 5


def test_on_gpu_several_steps_are_timed_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        candidates,
        "at_once_of",
        lambda _runner, step_ns, _free_bytes, within_ns: within_ns // 10**8 * (step_ns > 0),
    )

    def timed(session: Session, source: CanonicalModule) -> None:
        default = Trial("XLA default", None, 0)
        compile_trials(session, source, [default], tag="candidate")
        runner = candidates.Runner(session.request, default.executable, 0)
        asked.append(candidates.steps_in_a_row(session, runner))
        on_gpu = replace(session, facts=replace(session.facts, backend="gpu"))
        asked.append(candidates.steps_in_a_row(on_gpu, runner))
        assert candidates.time_once(runner, asked[-1]) > 0
        beside = replace(on_gpu, between_steps=lambda _: contextlib.nullcontext())
        monkeypatch.setattr(
            candidates, "at_once_of", lambda _runner, _step_ns, _free_bytes, within_ns: within_ns // 10**6
        )
        asked.append(candidates.steps_in_a_row(beside, runner))

    in_session(tmp_path, timed)
    assert asked[:2] == [1, 3]
    assert asked[2] >= 50, "a slice, or two steps that take longer"
