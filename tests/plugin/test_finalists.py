"""Finalists are compiled while there is time: which first, which not at all, who says so, and which is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.activation.local import LocalChannel
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.optimize.ablations import NO_FUSION, ONE_BUCKET, OUR_ORDER, PLAN_BUCKETS
from disco_hlo.plan.plan import DEFAULT, Strategy
from disco_hlo.plan.plan import SEARCHED as PLAN
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.interruption import Interruption
from disco_hlo.plugin.measuring import candidates
from disco_hlo.plugin.measuring.candidates import Trial, compile_trials
from disco_hlo.plugin.measuring.reference import Program
from disco_hlo.plugin.phases import finalists
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles
from tests.plugin.sessions import in_session

NAMES = (DEFAULT, NO_FUSION, ONE_BUCKET, PLAN_BUCKETS, PLAN, "plan 2", "plan 3")
Compiled = list[list[str]]


class Clock:
    """Time that passes while something compiles, and then only."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Compiled, list[str], bool]]:
    """Compile trials of these names, each so many seconds long: what was compiled when, what is left, and whether it
    went to its end."""

    def run(
        tmp_path: Path, each_s: float, at_once: int = 1, names: Sequence[str] = NAMES, stop_after: int = 100
    ) -> tuple[Compiled, list[str], bool]:
        clock, stop, waves = Clock(), Interruption(), []

        def compile_trials(_session: Session, _source: Any, trials: Sequence[Trial], *, tag: str) -> None:
            waves.append([trial.name for trial in trials])
            assert tag
            clock.now_s += each_s
            stop.wanted = len(waves) >= stop_after

        monkeypatch.setattr(finalists, "compile_trials", compile_trials)
        monkeypatch.setattr(finalists, "compiles_at_once", lambda _: at_once)
        monkeypatch.setattr(finalists, "time", clock)
        settings = Settings(search=True, directory=tmp_path, budget_s=120.0)
        session = Session(None, settings, None, LocalChannel())  # type: ignore[arg-type]
        trials = [Trial(name, None if name == DEFAULT else Strategy(), 0) for name in names]
        ended = finalists.compile_finalists(session, None, trials, stop)  # type: ignore[arg-type]
        return waves, [trial.name for trial in trials], ended

    return run


def test_where_there_is_time_all_are_compiled_and_stay_in_their_order(
    compiled: Callable[..., tuple[Compiled, list[str], bool]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "disco_hlo"):
        waves, left, ended = compiled(tmp_path, 15.0)
    assert [name for wave in waves for name in wave] == [
        DEFAULT, PLAN, PLAN_BUCKETS, "plan 2", "plan 3", ONE_BUCKET, NO_FUSION
    ]  # fmt: skip
    assert left == list(NAMES)
    assert ended is True
    assert caplog.text == ""


def test_what_would_not_be_done_in_time_is_left_out_and_one_line_says_so(
    compiled: Callable[..., tuple[Compiled, list[str], bool]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "disco_hlo"):
        waves, left, _ = compiled(tmp_path, 40.0, at_once=2)
    # The fourth pair would end 160 s after the beginning.
    assert waves == [[DEFAULT, PLAN], [PLAN_BUCKETS, "plan 2"], ["plan 3", ONE_BUCKET]]
    assert left == [name for name in NAMES if name != NO_FUSION]
    assert [record.getMessage() for record in caplog.records] == [
        "not compiled, as there is no time left for it (DISCO_BUDGET_S; one takes 40 s): no fusion"
    ]


def test_the_default_the_plan_and_the_next_best_are_compiled_however_long_it_takes(
    compiled: Callable[..., tuple[Compiled, list[str], bool]], tmp_path: Path
) -> None:
    names = (DEFAULT, OUR_ORDER, ONE_BUCKET, PLAN, "plan 2")
    waves, left, ended = compiled(tmp_path, 1000.0, names=names)
    assert waves == [[DEFAULT], [PLAN], [OUR_ORDER]]
    assert left == [DEFAULT, OUR_ORDER, PLAN]
    assert ended is True


def test_ctrl_c_ends_it_between_two_modules(
    compiled: Callable[..., tuple[Compiled, list[str], bool]], tmp_path: Path
) -> None:
    waves, _, ended = compiled(tmp_path, 1.0, stop_after=2)
    assert waves == [[DEFAULT], [PLAN]]
    assert ended is False


def test_what_failed_is_not_chosen_and_what_is_forced_is() -> None:
    default = Trial(DEFAULT, None, 120, times_ns=[100, 100, 100])
    failed = Trial(PLAN, Strategy(), 60, times_ns=[50, 50, 50], error="differs")
    slower = Trial("chunk-2", Strategy(), 60, times_ns=[110, 110, 110])
    trials = [default, failed, slower]
    assert finalists.chosen(trials, None) == 0
    assert finalists.chosen(trials, "chunk-2") == 2
    assert finalists.chosen(trials, PLAN) == 0


# --- only what would win is compared ----------------------------------------------------------------

TIMES = {DEFAULT: 100, "plan 2": 60, "plan 3": 70, NO_FUSION: 130}


def confirmed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: Sequence[str], stop_after: int = 100
) -> tuple[str | None, list[str], dict[str, str]]:
    """The winner of a step's modules, of which some compute something else, by times that are given: its name, what was
    compared one after the other, and what is said against each."""
    stop, asked = Interruption(), list[str]()

    def look(session: Session, source: CanonicalModule) -> tuple[str | None, list[str], dict[str, str]]:
        plain = unfused(source.graph)
        trials = [Trial(name, None if name == DEFAULT else plain, 0) for name in TIMES]
        compile_trials(session, source, trials[:2], tag="candidate")
        cosine = exchange_opcode(trials[1].module, "tanh", "cosine")
        right, spoiled = trials[1].executable, compiles.compile_module(session.request, cosine)
        for trial in trials[1:]:
            trial.executable = spoiled if trial.name in wrong else right
        for trial in trials:
            trial.times_ns = [TIMES[trial.name]] * 5
        really = candidates.compare

        def compare(session: Session, programs: Sequence[Program], _inputs: None) -> None:
            asked.extend(program.name for program in programs[1:])
            stop.wanted = len(asked) >= stop_after
            really(session, programs)

        monkeypatch.setattr(candidates, "compare", compare)
        winner = finalists.winner_of(session, trials, stop)
        assert winner is None or winner.strategy is None or winner.compared
        return winner and winner.name, asked, {trial.name: trial.error for trial in trials if trial.error}

    found: tuple[str | None, list[str], dict[str, str]] = in_session(folder, look)
    return found


def test_only_the_winner_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert confirmed(tmp_path, monkeypatch, [NO_FUSION]) == ("plan 2", ["plan 2"], {})


def test_where_the_fastest_is_wrong_it_is_out_and_the_next_becomes_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "disco_hlo"):
        winner, asked, errors = confirmed(tmp_path, monkeypatch, ["plan 2"])
    assert (winner, asked, list(errors)) == ("plan 3", ["plan 2", "plan 3"], ["plan 2"])
    assert "differs from XLA's default at" in errors["plan 2"]
    assert f"plan 2: timed, and then left out: {errors['plan 2']}" in caplog.text


def test_where_all_that_are_faster_are_wrong_xlas_default_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner, asked, _ = confirmed(tmp_path, monkeypatch, ["plan 2", "plan 3"])
    assert (winner, asked) == (DEFAULT, ["plan 2", "plan 3"])


def test_ctrl_c_between_two_comparisons_leaves_no_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert confirmed(tmp_path, monkeypatch, ["plan 2"], stop_after=1)[:2] == (None, ["plan 2"])


def test_what_was_compared_before_ctrl_c_is_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert confirmed(tmp_path, monkeypatch, [], stop_after=1)[0] == "plan 2"
