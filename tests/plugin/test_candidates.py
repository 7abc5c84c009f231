"""Candidates on the devices: what computes something else, or cannot run, is left out; the rest is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.plan.baselines import unfused
from disco_hlo.plugin.measuring import candidates, comparing
from disco_hlo.plugin.measuring.candidates import Trial, compile_trials, measure
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla import compiles
from tests.plugin.sessions import in_session


def measured(tmp_path: Path, answers: Sequence[bool] = (False,) * 25) -> tuple[list[Trial], bool]:
    """XLA's default, the unfused step and a wrong program, measured until ``answers`` say stop."""
    left = list(answers)

    def look(session: Session, source: CanonicalModule) -> tuple[list[Trial], bool]:
        plain = unfused(source.graph)
        trials = [Trial("XLA default", None, 0), Trial("no fusion", plain, 0), Trial("wrong", plain, 0)]
        compile_trials(session, source, trials[:2], tag="candidate")
        wrong = exchange_opcode(trials[1].module, "tanh", "cosine")
        trials[2].executable = compiles.compile_module(session.request, wrong)
        return trials, measure(session, trials, budget_s=0.1, stop=lambda: left.pop(0))

    found: tuple[list[Trial], bool] = in_session(tmp_path, look)
    return found


def test_a_wrong_program_is_left_out_and_the_others_are_timed_alike(tmp_path: Path) -> None:
    trials, complete = measured(tmp_path)
    default, plain, wrong = trials
    assert complete is True
    assert (default.error, plain.error) == ("", "")
    assert len(default.times_ns) == len(plain.times_ns) >= 5
    assert "differs from XLA's default at" in wrong.error
    assert wrong.times_ns == []


def test_a_measurement_ends_between_rounds_when_asked(tmp_path: Path) -> None:
    trials, complete = measured(tmp_path, [False, False, True])
    assert complete is False
    assert [len(trial.times_ns) for trial in trials] == [2, 2, 0]


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
        candidates, "at_once_of", lambda _runner, step_ns, _free_bytes: 3 if step_ns > 0 else 0
    )

    def timed(session: Session, source: CanonicalModule) -> None:
        default = Trial("XLA default", None, 0)
        compile_trials(session, source, [default], tag="candidate")
        runner = candidates.Runner(session.request, default.executable, 0)
        asked.append(candidates.steps_in_a_row(session, runner))
        on_gpu = replace(session, facts=replace(session.facts, backend="gpu"))
        asked.append(candidates.steps_in_a_row(on_gpu, runner))
        assert candidates.time_once(runner, asked[-1]) > 0

    in_session(tmp_path, timed)
    assert asked == [1, 3]
