"""Candidates on the devices: what computes something else, or cannot run, is left out; the rest is timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.baselines import unfused
from disco_hlo.plugin.measuring import candidates, comparing
from disco_hlo.plugin.measuring.candidates import Trial, compile_trials, measure
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.session import Session, join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.steps import models
from tests.steps.intercept import intercept


def measured(
    request: CompileRequest, answers: list[bool], tmp_path: Path
) -> tuple[list[Trial], bool, Session]:
    """XLA's default, the unfused step and a wrong program, measured until ``answers`` say stop."""
    session = join(request, Settings(search=True, directory=tmp_path))
    source = canonicalize(compiles.capture(request))
    trials = [
        Trial("XLA default", None, 0),
        Trial("no fusion", unfused(source.graph), 0),
        Trial("wrong", None, 0),
    ]
    compile_trials(session, source, trials[:2], tag="candidate")
    trials[2].strategy = unfused(source.graph)
    wrong = exchange_opcode(trials[1].module, "tanh", "cosine")
    trials[2].executable = compiles.compile_module(request, wrong)
    return trials, measure(session, trials, budget_s=0.1, stop=lambda: answers.pop(0)), session


def test_a_wrong_program_is_left_out_and_the_others_are_timed_alike(tmp_path: Path) -> None:
    step, arguments = models.mlp()
    trials, complete, _ = intercept(step, arguments, lambda r: measured(r, [False] * 25, tmp_path))
    default, plain, wrong = trials
    assert complete is True
    assert (default.error, plain.error) == ("", "")
    assert len(default.times_ns) == len(plain.times_ns) >= 5
    assert "differs from XLA's default at" in wrong.error
    assert wrong.times_ns == []


def test_a_measurement_ends_between_rounds_when_asked(tmp_path: Path) -> None:
    step, arguments = models.mlp()
    trials, complete, _ = intercept(step, arguments, lambda r: measured(r, [False, False, True], tmp_path))
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
    step, arguments = models.mlp()
    trials, _, _ = intercept(step, arguments, lambda r: measured(r, [False] * 25, tmp_path))
    assert trials[1].error == "MemoryError: no room"
    assert trials[1].times_ns == []
    assert len(trials[0].times_ns) >= 5


def test_on_gpu_several_steps_are_timed_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        candidates, "at_once_of", lambda _runner, step_ns, _free_bytes: 3 if step_ns > 0 else 0
    )

    def timed(request: CompileRequest) -> None:
        session = join(request, Settings(search=True, directory=tmp_path))
        default = Trial("XLA default", None, 0)
        compile_trials(session, canonicalize(compiles.capture(request)), [default], tag="candidate")
        runner = candidates.Runner(request, default.executable, 0)
        asked.append(candidates.steps_in_a_row(session, runner))
        on_gpu = replace(session, facts=replace(session.facts, backend="gpu"))
        asked.append(candidates.steps_in_a_row(on_gpu, runner))
        assert candidates.time_once(runner, asked[-1]) > 0

    intercept(*models.mlp(), timed)
    assert asked == [1, 3]
