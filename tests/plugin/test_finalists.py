"""What is said before a search, which candidates are compiled and win, and what an interrupted search leaves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET

from disco_hlo.errors import DiscoError, IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.optimize.ablations import NO_FUSION, ONE_BUCKET, OUR_ORDER, PLAN_BUCKETS, Candidate
from disco_hlo.optimize.pipeline import RegionFound
from disco_hlo.optimize.select import ratio_noise, ratio_to
from disco_hlo.plan.plan import DEFAULT, Strategy
from disco_hlo.plan.plan import SEARCHED as PLAN
from disco_hlo.plan.store import PlanSlot, PlanStore
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.measuring import candidates
from disco_hlo.plugin.measuring.candidates import compile_trials
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.phases import finalists, finding
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.session import Interruption, Session
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles
from tests.graphs import graph_of
from tests.plugin.handled import in_session
from tests.plugin.sessions import fake_session, session_of

STEP = graph_of("param\nwhile 0\nexp 1\nall-reduce 2\ntuple 3")


class Costs:
    def op_ns(self, step: Any) -> Any:
        return np.array([{"while": 6_000_000}.get(node.opcode, 1_000_000) for node in step.nodes])


def said(
    monkeypatch: pytest.MonkeyPatch, *, default_ns: int, bound_ns: int, backend: str, cached: bool
) -> str:
    monkeypatch.setattr(finding, "is_cached", lambda _: cached)
    monkeypatch.setattr(finding, "lower_bound", lambda *_: SimpleNamespace(makespan_ns=bound_ns))
    settings = Settings(search=True, directory=Path(), budget_s=90)
    case = SimpleNamespace(
        source=SimpleNamespace(graph=replace(STEP, backend=backend), regions=()),
        xla=None,
        costs=Costs(),
        default=SimpleNamespace(makespan_ns=default_ns),
    )
    return finding.outlook(settings, case)  # type: ignore[arg-type]


def test_a_step_in_a_loop_is_told_how_little_can_change(monkeypatch: pytest.MonkeyPatch) -> None:
    line = said(monkeypatch, default_ns=8_000_000, bound_ns=6_400_000, backend="cpu", cached=True)
    assert line == (
        "a step is predicted to take 8 ms; a plan can change 25% of it, the rest lies in loops and branches that "
        "stay as XLA compiled them; another order and other buckets can make it 1.25x faster at best, other kernels "
        "perhaps more; next: search for up to 90 s (DISCO_BUDGET_S), then compile and measure the best plans "
        "for up to 110 s"
    )


def test_a_first_search_on_a_gpu_compiles_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    line = said(monkeypatch, default_ns=8_000_000, bound_ns=7_990_000, backend="gpu", cached=False)
    assert "can make it no faster, other kernels" in line
    assert "next: compile the search's code (some minutes, once on this machine), " in line
    assert "search for up to 90 s" in line


@pytest.mark.parametrize(
    ("cached", "whole", "said"),
    [
        (set(), False, True),
        ({"disco_hlo.simulator.timeline"}, True, True),
        ({"disco_hlo.simulator.timeline", "disco_hlo.estimator.analytic"}, False, True),
        ({"disco_hlo.simulator.timeline", "disco_hlo.estimator.analytic"}, True, False),
    ],
)
def test_nobody_waits_without_a_word_for_the_code_that_predicts(
    monkeypatch: pytest.MonkeyPatch, cached: set[str], whole: bool, said: bool
) -> None:
    """On a machine's first search 50 s went by between the profiling and the next line; and where an earlier job had
    ended while it was compiled, the rest of it took the whole budget."""
    monkeypatch.setattr(finding, "is_cached", lambda module: module in cached)
    monkeypatch.setattr(finding, "is_ready", lambda *_: whole)
    lines: list[str] = []
    assert finding.say_what_predicting_takes(lines.append) is said
    assert [line.split(",")[0] for line in lines] == ["compiling the code that predicts step times"] * said


@pytest.mark.parametrize(("level", "found"), [("debug", "debug"), ("info", "warning"), ("error", "error")])
def test_searches_of_structures_do_not_say_the_steps_lines_again(level: str, found: str) -> None:
    """Each said anew what a step is predicted to take, and "search for up to 3.4531 s"."""
    settings = Settings(search=True, directory=Path(), log_level=level, finalists=5)
    asked = finding.for_a_structure(settings, 3.4531)
    assert (asked.log_level, asked.finalists, asked.budget_s) == (found, 1, 3.4531)


def test_loops_for_which_nothing_was_found_have_no_lines() -> None:
    """Five loops had a line each, which said twice what one of them takes as XLA compiled it."""
    regions = (
        RegionFound("loop2", 8, 9_000, 9_000, 43, None),
        RegionFound("loop1", 2, 9_000, 8_000, 100, Strategy()),
    )
    found = SimpleNamespace(
        notes=(), regions=regions, evaluations=200, search_s=1.5, best=SimpleNamespace(predicted_ns=2_000_000),
        case=SimpleNamespace(default=SimpleNamespace(makespan_ns=3_000_000)),
    )  # fmt: skip
    lines: list[str] = []
    finding.say_what_was_found(lambda line, *what: lines.append(line % what), found)  # type: ignore[arg-type]
    assert lines == [
        "searched 100 candidates for loop1, which runs 2 times a step: the best is predicted to take 8 µs, XLA's "
        "default 9 µs",
        "searched 200 candidates in 1.5 s: the best is predicted to take 2.00 ms a step, XLA's default 3.00 ms",
    ]


@pytest.mark.parametrize(
    ("where", "begins"),
    [
        ("a fresh machine", True),
        ("a machine that has it", False),
        ("a machine that keeps nothing", False),
        ("a machine of one core", False),
        ("another rank", False),
        ("a host without GPUs", False),
    ],
)
def test_the_searchs_code_is_compiled_beside_profiling_where_the_search_then_finds_it(
    monkeypatch: pytest.MonkeyPatch, where: str, begins: bool
) -> None:
    """Where nothing can be written, the search waited up to ten minutes for code that it did not get."""
    begun: list[float] = []

    def apart(*_: object, longest_s: float, stop: Callable[[], bool]) -> None:
        begun.append(longest_s)
        raise DiscoError("it found nothing")

    on_machine(monkeypatch, apart, where)
    backend = "cpu" if where == "a host without GPUs" else "gpu"
    facts = SimpleNamespace(backend=backend, device_kind="NVIDIA H100")
    session = fake_session(leads=where != "another rank", facts=facts)
    with finding.code_compiled_beside(session, b"", lambda: False) as finish:
        finish()
    assert len(begun) == begins
    settings = Settings(search=True, directory=Path(), budget_s=90)
    with pytest.raises(DiscoError):
        finding.search_apart(settings, b"", None, None, Interruption())  # type: ignore[arg-type]
    assert sum(begun) <= finding.longest_s(settings), "for so long the other ranks wait"


def test_what_compiles_the_searchs_code_is_ended_with_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def apart(*_: object, longest_s: float, stop: Callable[[], bool]) -> None:
        begun.set()
        while not stop():
            time.sleep(0.01)
        ended.set()

    on_machine(monkeypatch, apart, "a fresh machine")
    with finding.code_compiled_beside(fake_session(), b"", lambda: False):
        assert begun.wait(10)
        assert not ended.is_set()
    assert ended.is_set()


def on_machine(monkeypatch: pytest.MonkeyPatch, apart: Callable[..., None], where: str) -> None:
    monkeypatch.setattr(finding, "apart", apart)
    monkeypatch.setattr(finding, "is_cached", lambda _: where == "a machine that has it")
    monkeypatch.setattr(finding, "can_be_ready", lambda _: where != "a machine that keeps nothing")
    monkeypatch.setattr(finding, "own_cores", lambda: [0] if where == "a machine of one core" else [0, 1])


NAMES = (DEFAULT, NO_FUSION, ONE_BUCKET, PLAN_BUCKETS, PLAN, "plan 2", "plan 3")
Compiled = list[list[str]]
Compile = Callable[..., tuple[Compiled, list[str], bool]]


FINER = "XLA's default with sums in float32"


class Clock:
    """Time that passes while something compiles, and then only."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compile:
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
        session = session_of(tmp_path, budget_s=120.0)
        trials = [Trial(name, None if name == DEFAULT else Strategy(), 0) for name in names]
        ended = finalists.compile_finalists(session, None, trials, stop)  # type: ignore[arg-type]
        return waves, [trial.name for trial in trials], ended

    return run


def test_where_there_is_time_all_are_compiled_and_stay_in_their_order(
    compiled: Compile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "disco_hlo"):
        waves, left, ended = compiled(tmp_path, 15.0)
    assert [name for wave in waves for name in wave] == [
        DEFAULT, PLAN, PLAN_BUCKETS, "plan 2", "plan 3", ONE_BUCKET, NO_FUSION
    ]  # fmt: skip
    assert left == list(NAMES)
    assert ended is True
    assert caplog.text == ""


@pytest.mark.parametrize(("at_once", "beside"), [(2, []), (3, [FINER]), (8, [FINER])])
def test_what_a_structure_is_compared_with_is_compiled_beside_it_where_cores_are_idle(
    at_once: int, beside: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waves: list[list[str]] = []

    def compile_trials(_session: Session, _source: Any, trials: Sequence[Trial], *, tag: str) -> None:
        waves.append([trial.name for trial in trials])

    monkeypatch.setattr(finalists, "compile_trials", compile_trials)
    monkeypatch.setattr(finalists, "compiles_at_once", lambda _: at_once)
    made: Any = SimpleNamespace(with_finer_sums=lambda: b"early")
    structures = [Trial(name, Strategy(), 0, restructured=made) for name in ("float32-sums", "keep")]
    assert finalists.compile_finalists(session_of(tmp_path), None, structures, Interruption())  # type: ignore[arg-type]
    assert waves == [["float32-sums", "keep", *beside]]


def test_what_would_not_be_done_in_time_is_left_out_and_one_line_says_so(
    compiled: Compile, tmp_path: Path, caplog: pytest.LogCaptureFixture
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
    compiled: Compile, tmp_path: Path
) -> None:
    names = (DEFAULT, OUR_ORDER, ONE_BUCKET, PLAN, "plan 2")
    waves, left, ended = compiled(tmp_path, 1000.0, names=names)
    assert waves == [[DEFAULT], [PLAN], [OUR_ORDER]]
    assert left == [DEFAULT, OUR_ORDER, PLAN]
    assert ended is True


def test_ctrl_c_ends_it_between_two_modules(compiled: Compile, tmp_path: Path) -> None:
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


# --- parts of the plan ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "predicted_ns", "measured_ns", "structure_ns", "waves"),
    [
        ({}, 850, 80, 100, [[DEFAULT, PLAN, "chunk-2"]]),
        ({}, 850, 94, 100, [[DEFAULT, PLAN, "chunk-2"], [DEFAULT, PLAN, "chunk-2", OUR_ORDER]]),
        ({}, 850, 104, 100, [[DEFAULT, PLAN, "chunk-2"], [DEFAULT, PLAN, "chunk-2", PLAN_BUCKETS, OUR_ORDER]]),
        ({}, 850, 104, 85, [[DEFAULT, PLAN, "chunk-2"]]),
        ({"structure": "chunk-2"}, 850, 104, 100, [[DEFAULT, PLAN, "chunk-2"]]),
        ({"explain": True}, 850, 94, 100, [[DEFAULT, PLAN, "chunk-2"]]),
    ],
    ids=["as predicted", "falls short", "gains nothing", "a structure gains", "forced", "had parts before"],
)  # fmt: skip
def test_parts_of_a_plan_are_measured_that_would_beat_the_winner_if_they_took_what_is_predicted(
    asked: dict[str, Any],
    predicted_ns: int,
    measured_ns: int,
    structure_ns: int,
    waves: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XLA's default is predicted to take 1000 and takes 100."""
    seen: list[list[str]] = []
    takes_ns = {PLAN: measured_ns, "chunk-2": structure_ns}

    def timed(_session: Session, _source: Any, trials: Sequence[Trial], _stop: Interruption) -> bool:
        seen.append([trial.name for trial in trials])
        for trial in trials:
            trial.times_ns = [takes_ns.get(trial.name, 100)] * 5
        return True

    def parts() -> list[Candidate]:
        assert measured_ns > 80, "not even the plan is predicted to beat that"
        return [Candidate(PLAN_BUCKETS, Strategy(), 950), Candidate(OUR_ORDER, Strategy(), 900)]

    monkeypatch.setattr(finalists, "compile_and_measure", timed)
    monkeypatch.setattr(finalists, "compare_with_default", lambda *one: setattr(one[2][0], "compared", True))
    session = session_of(tmp_path, **asked)
    restructured: Any = object()
    trials = [
        Trial(DEFAULT, None, 1000),
        Trial(PLAN, Strategy(), predicted_ns),
        Trial("chunk-2", Strategy(), 1000, restructured=restructured),
    ]
    winner = _winner(session, trials, tmp_path, parts)
    assert winner is not None
    best = min({DEFAULT: 100, **takes_ns}.items(), key=lambda one: one[1])[0]
    assert winner.name == asked.get("structure", best)
    assert seen == waves
    assert [trial.name for trial in trials] == waves[-1]


def test_parts_that_cannot_be_made_cost_no_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One was measured and compared by then: without it the training went on with XLA's default, and no plan."""

    def timed(_session: Session, _source: Any, trials: Sequence[Trial], _stop: Interruption) -> bool:
        for trial, ns in zip(trials, (100, 94), strict=True):
            trial.times_ns, trial.compared = [ns] * 5, True
        return True

    def parts() -> list[Candidate]:
        raise IllegalStrategyError("no order")

    monkeypatch.setattr(finalists, "compile_and_measure", timed)
    session = session_of(tmp_path)
    winner = _winner(session, [Trial(DEFAULT, None, 100), Trial(PLAN, Strategy(), 85)], tmp_path, parts)
    assert winner is not None
    assert winner.name == PLAN


def _winner(
    session: Session, trials: list[Trial], path: Path, parts: Callable[[], list[Candidate]]
) -> Trial | None:
    source: Any = None
    return finalists.measured_winner(session, source, trials, Interruption(), PlanSlot(path, path), parts)


def test_a_second_batch_does_not_say_again_what_cannot_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(_session: Session, _source: Any, trials: Sequence[Trial], _stop: Interruption) -> bool:
        for trial in trials:
            trial.error = {PLAN: "it is banned", OUR_ORDER: "too large"}.get(trial.name, "")
        return True

    def timed(_session: Session, trials: Sequence[Trial], **_: Any) -> bool:
        for trial in trials:
            trial.times_ns = [100] * 5
        return True

    monkeypatch.setattr(finalists, "compile_finalists", compiled)
    monkeypatch.setattr(finalists, "measure", timed)
    session = session_of(tmp_path)
    trials = [Trial(DEFAULT, None, 100), Trial(PLAN, Strategy(), 85)]
    with caplog.at_level(logging.INFO, "disco_hlo"):
        _winner(session, trials, tmp_path, lambda: [Candidate(OUR_ORDER, Strategy(), 95)])
    assert [trial.name for trial in trials] == [DEFAULT, PLAN, OUR_ORDER]
    assert [line for line in caplog.messages if "not measured" in line] == [
        f"{PLAN}: not measured: it is banned", f"{OUR_ORDER}: not measured: too large"
    ]  # fmt: skip


def test_a_plan_is_saved_with_the_noise_of_its_ratio_and_not_of_the_machine() -> None:
    """A step that takes twice as long in some rounds does so with both."""
    default, plan, failed = (
        Trial(DEFAULT, None, 100),
        Trial(PLAN, Strategy(), 85),
        Trial(OUR_ORDER, Strategy(), 95),
    )
    default.times_ns, plan.times_ns = [100, 200, 100, 200, 100, 200], [90, 180, 90, 180, 90]
    of_rounds = finalists._of_rounds
    assert of_rounds(ratio_to, plan, default) == 0.9
    assert of_rounds(ratio_noise, plan, default) == 0
    assert of_rounds(ratio_to, failed, default) is UNSET


# --- only what would win is compared ----------------------------------------------------------------

TIMES = {DEFAULT: 100, "plan 2": 60, "plan 3": 70, NO_FUSION: 130}
CASES = {
    "only the winner is compared": ([NO_FUSION], 100, "plan 2", ["plan 2"]),
    "where the fastest is wrong the next becomes the plan": (["plan 2"], 100, "plan 3", ["plan 2", "plan 3"]),
    "where all that are faster are wrong the default stays": (
        ["plan 2", "plan 3"], 100, DEFAULT, ["plan 2", "plan 3"],
    ),
    "ctrl-c between two comparisons leaves no winner": (["plan 2"], 1, None, ["plan 2"]),
    "what was compared before ctrl-c is the winner": ([], 1, "plan 2", ["plan 2"]),
}  # fmt: skip
"""Which modules compute something else, after how many comparisons somebody interrupts; the winner, and what was
compared."""


@pytest.fixture(scope="module")
def confirmed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str | None, list[str], list[str]]]:
    """Of each case the winner, what was compared one after the other, and what the user was told. The step's modules
    are compiled once; their times are given."""

    def look(session: Session, source: CanonicalModule) -> dict[str, tuple[str | None, list[str], list[str]]]:
        plain = unfused(source.graph)
        made = [Trial(name, None if name == DEFAULT else plain, 0) for name in TIMES]
        compile_trials(session, source, made[:2], tag="candidate")
        cosine = exchange_opcode(made[1].module, "tanh", "cosine")
        right, spoiled = made[1].executable, compiles.compile_module(session.request, cosine)
        found = {}
        for case, (wrong, stop_after, _, _) in CASES.items():
            trials = [Trial(one.name, one.strategy, 0, times_ns=[TIMES[one.name]] * 5) for one in made]
            for trial in trials:
                trial.executable = spoiled if trial.name in wrong else right
            trials[0].executable = made[0].executable
            found[case] = won(session, trials, stop_after)
        return found

    return in_session(tmp_path_factory.mktemp("plans"), look)  # type: ignore[no-any-return]


def won(session: Session, trials: list[Trial], stop_after: int) -> tuple[str | None, list[str], list[str]]:
    stop, asked, said = Interruption(), list[str](), list[str]()
    really = candidates.compare

    def compare(session: Session, programs: Sequence[Trial], *_: None) -> None:
        asked.extend(program.name for program in programs[1:])
        stop.wanted = len(asked) >= stop_after
        really(session, programs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "compare", compare)
        patch.setattr(Session, "say", lambda _, message, *values: said.append(message % values))
        winner = finalists.winner_of(session, trials, stop)
    assert winner is None or winner.strategy is None or winner.compared
    return winner and winner.name, asked, said


@pytest.mark.parametrize("case", CASES)
def test_what_would_win_is_compared_first(
    case: str, confirmed: dict[str, tuple[str | None, list[str], list[str]]]
) -> None:
    _, _, winner, compared = CASES[case]
    assert confirmed[case][:2] == (winner, compared)
    left_out = [line for line in confirmed[case][2] if "timed, and then left out: " in line]
    assert all("differs from XLA's default at" in line for line in left_out)
    assert len(left_out) == sum(name in CASES[case][0] for name in compared)


@pytest.mark.parametrize("error", ["", "output 0 differs from XLA's default at [0]"])
def test_a_plan_that_was_found_wrong_before_ctrl_c_is_not_saved(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[str] = []
    monkeypatch.setattr(finalists, "_write", lambda _outcome, trial: written.append(trial.name))
    session = session_of(tmp_path)
    slot = PlanStore(tmp_path).slot("0" * 64, "cpu", "cpu", 2, 1)
    found: Any = SimpleNamespace(prediction=SimpleNamespace(plan_ns=1, default_ns=2))
    trials = [Trial(DEFAULT, None, 2), Trial(PLAN, Strategy(), 1, times_ns=[1, 1], error=error)]
    step: Any = None
    profile: Any = None
    with caplog.at_level(logging.INFO, "disco_hlo"):
        outcome = finalists.Outcome(session, step, slot, found, profile, trials, 0.0, 0.0)
        finalists.save_interrupted(outcome, "the training ended", "the next job goes on from there")
    assert written == ([] if error else [PLAN])
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"the training ended: the best plan so far is {'of no use' if error else 'in '}")
    assert line.endswith("; the next job goes on from there")
    assert "wins" not in line, "it was only timed"


def test_the_gain_that_is_told_is_of_the_rounds_by_which_the_plan_won() -> None:
    """A plan that won rounds by a tenth was told as "wins: no faster": the medians were of different rounds."""
    default = Trial(DEFAULT, None, 0, times_ns=[100, 100, 100, 100, 180, 200, 200, 200, 200])
    plan = Trial(PLAN, None, 0, times_ns=[90, 90, 90, 90, 179, 180, 180, 180, 180])
    assert (plan.median_ns, default.median_ns) == (179, 180)
    assert finalists._victory(plan, default) == "plan wins: 1.11x faster than XLA's default"


def test_a_plan_that_cannot_be_saved_is_told_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_outcome: finalists.Outcome, _trial: Trial) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(finalists, "_write", full)
    slot = PlanStore(tmp_path).slot("0" * 64, "cpu", "cpu", 2, 1)
    trials = [
        Trial(DEFAULT, None, 2, times_ns=[200] * 5),
        Trial(PLAN, Strategy(), 1, times_ns=[100] * 5, compared=True),
    ]
    nothing: Any = None
    outcome = finalists.Outcome(session_of(tmp_path), nothing, slot, nothing, nothing, trials, 0.0, 0.0)
    with caplog.at_level(logging.INFO, "disco_hlo"):
        assert not finalists.save(outcome, trials[1])
        assert not finalists.save(outcome, trials[0])
    assert caplog.messages == [
        "the plan cannot be saved: OSError: No space left on device",
        f"{PLAN} wins: 2.00x faster than XLA's default; this training alone goes on with it",
        "the plan cannot be saved: OSError: No space left on device",
    ]


def test_the_line_of_a_candidate_says_what_it_takes_of_the_default_in_the_same_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rounds of a noisy machine can give a faster plan the larger median."""
    monkeypatch.setattr(finalists, "compile_finalists", lambda *_: True)
    monkeypatch.setattr(finalists, "measure", lambda *_, **__: True)
    times_ms = {DEFAULT: (100, 120, 160), "plan": (90, 125, 130), "left early": (150, 180), "none": ()}
    trials = [Trial(name, None, 10**8, times_ns=[ms * 10**6 for ms in of]) for name, of in times_ms.items()]
    lines: list[str] = []
    session: Any = SimpleNamespace(tell=lambda value, _: value, say=lambda text, *of: lines.append(text % of))
    assert finalists.compile_and_measure(session, None, trials, False)  # type: ignore[arg-type]
    assert lines[2:] == [
        "XLA default: 120.00 ms (predicted 100.00)",
        "plan: 125.00 ms (predicted 100.00), 0.900 of XLA's default in the same rounds",
        "left early: 165.00 ms (predicted 100.00), 1.500 of XLA's default in the same rounds",
        "none: 0.00 ms (predicted 100.00)",
    ]
