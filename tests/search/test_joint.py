"""The joint search: legal, no worse than its start, what it predicts, and the same wherever it runs."""

from __future__ import annotations

import logging
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.cost_model import CostModel, LinearPieces
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.legal import check_order, check_strategy
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import unfused
from disco_hlo.search import child, joint, restart
from disco_hlo.search.api import Finalist, OnBest, SearchResult, SearchSettings, Stop
from disco_hlo.search.climb import Climber
from disco_hlo.search.restart import KERNEL_MOVES, Report, Restart
from disco_hlo.search.run import search
from disco_hlo.search.strategies import Starts, prepare
from disco_hlo.simulator.bound import bound_of_kernels
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.timeline import simulate
from tests.cost_models import listed
from tests.graphs import graph_of
from tests.machines import CPU, GPU
from tests.search.cost_models import ResultCosts
from tests.search.exhaustive import least_ns, small_steps
from tests.search.steps import random_step
from tests.simulator.random_steps import random_step as small_random_step

SLOW_LAUNCH = replace(GPU, launch_ns=3000)
SMALL = SearchSettings(evaluations=2000, seeds=2)
STEP = random_step(Random(5), 60, backend="gpu")
NOTHING_TO_CHOOSE = graph_of("param\ndot 0\ntuple 1")


def run(
    graph: Graph = STEP,
    machine: MachineModel = SLOW_LAUNCH,
    costs: CostModel | None = None,
    *,
    start: Strategy | None = None,
    on_best: OnBest | None = None,
    stop: Stop | None = None,
    **changes: object,
) -> SearchResult:
    return search(
        graph, costs or ResultCosts(), machine, start=start or unfused(graph), settings=replace(SMALL, **changes),
        on_best=on_best, stop=stop,
    )  # fmt: skip


@pytest.mark.parametrize("seed", [18_446_688_734_216, 2**63 - 1])
def test_the_largest_seed_that_a_user_may_give_is_one(seed: int) -> None:
    """Above 1.8e13 the search ended in an OverflowError."""
    graph, costs = small_random_step(Random(1), 12)
    again = [run(graph, costs=costs, seed=seed, evaluations=200).finalists for _ in range(2)]
    assert again[0] == again[1]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), speeds=st.sampled_from([(1.0, 1.0), (0.7, 1.0), (0.85, 0.6), (0.7, 0.9)]))
def test_not_even_what_it_finds_is_below_the_bound(seed: int, speeds: tuple[float, float]) -> None:
    graph, costs = small_random_step(Random(seed), 20)
    machine = replace(
        GPU,
        compute_speed_ppm=int(1e6 * speeds[0]),
        transfer_speed_ppm=int(1e6 * speeds[1]),
        product_speed_ppm=seed % 3 * 300_000,
    )
    pieces = LinearPieces.of((0, 0.4, 0.3), (50, 3.3, 20.0)) if seed % 2 else LinearPieces.of((0, 1.0, 5.0))
    costs = replace(costs, line=pieces)
    try:
        result = run(graph, machine, costs, seed=seed)
    except IllegalStrategyError:  # in the terms of the search its units wait for each other
        assume(False)
    for found in result.finalists:
        least = bound_of_kernels(graph, found.strategy.groups, costs, machine)
        assert least.makespan_ns <= found.predicted_ns


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), machine=st.sampled_from([CPU, SLOW_LAUNCH]))
def test_what_it_finds_is_legal_and_takes_what_it_says(seed: int, machine: MachineModel) -> None:
    graph = random_step(Random(seed), 50, backend=machine.name)
    result = run(graph, machine, seed=seed)
    assert result.predicted_ns <= result.start_ns
    assert [one.predicted_ns for one in result.finalists] == sorted(
        one.predicted_ns for one in result.finalists
    )
    for found in result.finalists:
        units = unit_graph(graph, found.strategy)
        check_order(units, found.strategy.order, machine.asynchronous)
        check_strategy(graph, found.strategy, units, ())
        assert (
            simulate(build(graph, found.strategy, ResultCosts(), machine).problem).makespan_ns
            == found.predicted_ns
        )


def found_by(result: SearchResult) -> tuple[object, ...]:
    steps = [(step.evaluation, step.cost_ns) for step in result.trace]
    return steps, result.finalists, result.evaluations, result.distinct_evaluations, result.stopped


def test_the_result_does_not_depend_on_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes the second runs four restarts in turn, of three the others run two each."""
    start = run(seeds=1, evaluations=100).strategy
    assert start != unfused(STEP)

    def found_with(processes: int) -> tuple[object, ...]:
        return found_by(run(start=start, seeds=5, processes=processes))

    here = found_with(1)
    monkeypatch.setattr(joint, "WORTH_A_PROCESS", 0)
    assert found_with(2) == here
    assert found_with(3) == here


def ended(one: Restart) -> Report:
    """What a restart that found nothing says at its end."""
    return Report(one.number, 1, 1, 0.0, 1, None, stopped="unchanged")


@pytest.mark.parametrize("seeds", [1, 2, 3, 4, 9])
def test_every_fourth_restart_begins_with_the_unfused_step(
    monkeypatch: pytest.MonkeyPatch, seeds: int
) -> None:
    given, plain = run(seeds=1, evaluations=100).strategy, unfused(STEP)
    begun: list[Strategy] = []

    def record(one: Restart, starts: Starts, _halted: object, **_: object) -> Iterator[Report]:
        assert len(starts.states) == len(one.strategies) == (1 if seeds < 4 or start == plain else 2)
        begun.append(one.strategies[one.start])
        yield ended(one)

    monkeypatch.setattr(joint, "reports", record)
    for start in (given, plain):
        begun.clear()
        run(start=start, seeds=seeds)
        assert begun == [start, start, start, plain, start, start, start, plain, start][:seeds]


def test_an_restart_climbs_from_the_start_that_it_is_given() -> None:
    strategies = (run(seeds=1, evaluations=100).strategy, unfused(STEP))
    settings = replace(SMALL, evaluations=0)
    for start, strategy in enumerate(strategies):
        one = Restart(STEP, ResultCosts(), SLOW_LAUNCH, strategies, start, settings, 0, 0, None)
        climber = restart._Run(one, prepare(STEP, strategies), lambda: False).climber
        assert set(climber.strategy(climber.state).groups) == set(strategy.groups)


def test_time_that_an_early_restart_does_not_need_goes_to_the_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, given_s = 100.0, []
    needs_s = [1.0, 30.0, 2.0, 30.0]
    monkeypatch.setattr(joint, "time", SimpleNamespace(perf_counter=lambda: now_s, sleep=time.sleep))

    def take(one: Restart, _starts: Starts, halted: Callable[[], bool], **_: object) -> Iterator[Report]:
        nonlocal now_s
        given_s.append(one.seconds)
        now_s += min(one.seconds, needs_s[one.number])
        yield ended(one)

    monkeypatch.setattr(joint, "reports", take)
    run(NOTHING_TO_CHOOSE, CPU, seeds=4, seconds=16.0, evaluations=None)
    assert given_s == [16 / 4, 15 / 3, 10 / 2, 8 / 1]


CHILD = """
import os, sys, time
folder, takes_s, reply = sys.argv[1:]
task, began = sys.stdin.buffer.read(), time.monotonic()
time.sleep(float(takes_s))
unfinished = os.path.join(folder, str(os.getpid()))
with open(unfinished, "wb") as file:
    file.write(task)
os.rename(unfinished, os.path.join(folder, f"{began} {time.monotonic()}"))
sys.stdout.buffer.write(bytes.fromhex(reply))
"""


@dataclass
class Children:
    """Processes that only leave behind from when to when they ran, and with what."""

    folder: Path

    def command(self, takes_s: float) -> tuple[str, ...]:
        reply = Report(1, 1, 1, 0.0, 1, None, stopped="unchanged")
        return sys.executable, "-S", "-c", CHILD, str(self.folder), str(takes_s), pickle.dumps(reply).hex()

    def ran(self) -> list[tuple[float, float, Restart]]:
        found = []
        for file in self.folder.glob("* *"):
            began, ended = map(float, file.name.split())
            restart, _ = pickle.loads(file.read_bytes())  # noqa: S301  our own
            found.append((began, ended, restart))
        return sorted(found, key=lambda one: one[:2])

    def most_at_once(self) -> int:
        ran = self.ran()
        return max(sum(began <= at < ended for began, ended, _ in ran) for at, _, _ in ran)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Children:
    """All restarts but the first run in such processes, 0.1 s each."""
    found = Children(tmp_path)
    monkeypatch.setattr(joint, "WORTH_A_PROCESS", 0)
    monkeypatch.setattr(child, "command", lambda _: found.command(0.1))
    return found


def first_restart(monkeypatch: pytest.MonkeyPatch, goes_on: Callable[[], bool]) -> None:
    """Let the first restart do nothing but look at the clock, until it is halted or need not go on."""

    def looks(one: Restart, _starts: Starts, halted: Callable[[], bool], **_: object) -> Iterator[Report]:
        while not halted() and goes_on():
            time.sleep(0.01)
        yield ended(one)

    monkeypatch.setattr(joint, "reports", looks)


@pytest.mark.parametrize("processes", [2, 3])
def test_restarts_that_wait_begin_as_others_end(
    monkeypatch: pytest.MonkeyPatch, children: Children, processes: int
) -> None:
    """While the first runs, in the processes that it leaves."""
    first_restart(monkeypatch, lambda: len(children.ran()) < 4)
    run(seeds=5, processes=processes)
    assert sorted(one.number for _, _, one in children.ran()) == [1, 2, 3, 4]
    assert children.most_at_once() == processes - 1


def test_restarts_that_wait_begin_after_the_first_has_ended(
    monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    """And then in as many processes as there may be, with the time that is left."""
    first_restart(monkeypatch, lambda: False)
    result = run(seeds=6, processes=2, seconds=100.0, evaluations=None)
    assert result.stopped == "unchanged"
    ran = children.ran()
    assert sorted(one.number for _, _, one in ran) == [1, 2, 3, 4, 5]
    assert children.most_at_once() == 2
    by_number = sorted(ran, key=lambda one: one[2].number)
    assert all(one.seconds <= 100 - 0.1 * ((one.number - 1) // 2) for _, _, one in by_number)
    left_s = [one.seconds for _, _, one in by_number]
    assert left_s == sorted(left_s, reverse=True)


@pytest.mark.parametrize("how", ["stop", "seconds", "interrupted"])
def test_no_restart_begins_after_the_search_has_to_end(
    monkeypatch: pytest.MonkeyPatch, children: Children, how: str
) -> None:
    def interrupt(_seconds: float) -> None:
        while not children.ran():
            time.sleep(0.01)
        raise KeyboardInterrupt

    first_restart(monkeypatch, lambda: False)
    if how == "interrupted":
        clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=interrupt)
        monkeypatch.setattr(joint, "time", clock)
    result = run(
        NOTHING_TO_CHOOSE, CPU, seeds=64, processes=2, evaluations=None, seconds=1.0 if how == "seconds" else None,
        stop=(lambda: bool(children.ran())) if how == "stop" else None,
    )  # fmt: skip
    assert result.stopped == how
    assert len(children.ran()) < 64


def test_restarts_that_cannot_be_started_later_run_here(
    monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    started: list[object] = []
    popen = child.subprocess.Popen

    def start(*arguments: object, **how: object) -> object:
        if len(started) == 2:
            raise OSError("too many processes")
        started.append(popen(*arguments, **how))
        return started[-1]

    ran_here: list[int] = []

    def record(one: Restart, _starts: Starts, halted: Callable[[], bool], **_: object) -> Iterator[Report]:
        ran_here.append(one.number)
        halted()
        yield ended(one)

    monkeypatch.setattr(child, "subprocess", SimpleNamespace(Popen=start, PIPE=child.subprocess.PIPE))
    monkeypatch.setattr(joint, "reports", record)
    run(NOTHING_TO_CHOOSE, CPU, seeds=5, processes=2)
    assert ran_here == [0, 3, 4]
    assert sorted(one.number for _, _, one in children.ran()) == [1, 2]


def test_a_child_that_dies_costs_its_share_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joint, "WORTH_A_PROCESS", 0)
    code = "import sys; sys.exit('out of luck')"
    monkeypatch.setattr(child, "command", lambda _: interpreter(code))
    with caplog.at_level(logging.WARNING):
        result = run(processes=2)
    assert "search seed 1 ended early: out of luck" in caplog.text
    assert result.finalists == run(seeds=1, evaluations=1000).finalists


def interpreter(code: str) -> tuple[str, ...]:
    """The command of one that finds modules where this one does, and does something else than a child does."""
    return (sys.executable, "-P", "-c", f"import sys; sys.path += {sys.path!r}\n{code}")


def run_beside(monkeypatch: pytest.MonkeyPatch, code: str, **changes: object) -> SearchResult:
    """A search whose second seed runs this in a process of its own."""
    monkeypatch.setattr(joint, "WORTH_A_PROCESS", 0)
    monkeypatch.setattr(child, "command", lambda _: interpreter(code))
    return run(processes=2, **changes)


def test_a_child_that_is_killed_leaves_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a system that is out of memory: it has no last words."""
    run_beside(monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert "search seed 1 ended early: signal 9" in caplog.text


@pytest.mark.parametrize(
    "said",
    ["print('x' * 1_000_000, file=sys.stderr)", "print('a line', flush=True)"],
    ids=["more-than-a-pipe-holds", "to-standard-output"],
)
def test_what_a_child_says_besides_its_reports_is_no_matter(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    here = run(processes=1)
    code = f"""
import sys
from disco_hlo.search import child
def talk(*arguments, reports=child.reports):
    {said}
    return reports(*arguments)
child.reports = talk
child.main()
"""
    assert found_by(run_beside(monkeypatch, code)) == found_by(here)


def test_a_child_whose_words_are_no_reports_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    result = run_beside(
        monkeypatch, "import time; print('hello, this is no report', flush=True); time.sleep(600)"
    )
    assert "search seed 1 ended early: it said what is no report" in caplog.text
    assert result.evaluations == SMALL.evaluations // 2


def test_children_end_where_sigterm_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """They inherit that from the process that searches."""
    first_restart(monkeypatch, lambda: False)
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **how: Any) -> None:
            super().__init__(*arguments, **how)
            started.append(self)

    monkeypatch.setattr(child, "subprocess", SimpleNamespace(Popen=Noted, PIPE=subprocess.PIPE))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        result = run_beside(monkeypatch, "import time; time.sleep(900)", stop=lambda: bool(started))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.stopped == "stop"
    assert [one.returncode for one in started] == [-signal.SIGKILL]


SLOW_TO_END = """
import sys, time  # and nothing that takes long to import
sys.stdin.buffer.read()
time.sleep({says_first_s})
for report in {reports!r}:
    sys.stdout.buffer.write(bytes.fromhex(report))
    sys.stdout.flush()
    time.sleep({seconds} + 0.3)
"""


@pytest.mark.parametrize("says_first_s", [0.0, 600.0])
def test_at_its_deadline_a_search_waits_for_what_children_found_last(
    monkeypatch: pytest.MonkeyPatch, says_first_s: float
) -> None:
    """What they noted since their last check was lost. For one that has found nothing yet nobody waits."""
    report = Report(1, 7, 7, 0.0, 1, None)
    both = [pickle.dumps(one).hex() for one in (report, replace(report, evaluations=77, stopped="seconds"))]
    first_restart(monkeypatch, lambda: True)
    code = SLOW_TO_END.format(says_first_s=says_first_s, reports=both, seconds=1.0)
    result = run_beside(monkeypatch, code, seconds=1.0, evaluations=None)
    assert result.stopped == "seconds"
    assert result.evaluations == 1 + (77 if says_first_s == 0 else 0)


def test_what_a_child_takes_to_begin_is_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import time
from disco_hlo.search import child
time.sleep(0.5)
child.reports = lambda one, *_: [child.Report(one.number, 1, 1, one.seconds, 1, None, stopped="seconds")]
child.main()
"""
    graph = NOTHING_TO_CHOOSE
    one = Restart(graph, ResultCosts(), CPU, (unfused(graph),), 0, SMALL, 1, None, None)
    monkeypatch.setattr(child, "command", lambda _: interpreter(code))
    children = child.Children([one])
    children.begin(1, 100.0)
    while children.unfinished():
        time.sleep(0.01)
    children.end()
    assert children.arrived()[0].seconds < 99.5


def test_a_cost_model_that_cannot_travel_is_searched_here(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(ResultCosts):
        pass

    monkeypatch.setattr(joint, "WORTH_A_PROCESS", 0)
    assert found_by(run(costs=Local(), processes=2)) == found_by(run(processes=1))


@dataclass(frozen=True)
class CountingCosts(ResultCosts):
    asked: Counter = field(default_factory=Counter)

    def kernels_ns(self, graph, kernels):
        self.asked.update((tuple(sorted(inside)), tuple(results)) for inside, results in listed(kernels))
        return super().kernels_ns(graph, kernels)


def test_no_kernel_is_asked_for_twice_by_a_climb() -> None:
    graph, costs = random_step(Random(9), 50), CountingCosts()
    strategies = (unfused(graph),)
    climber = Climber(graph, costs, CPU, prepare(graph, strategies), 0, 0)
    for _ in range(3):
        climber.climb(KERNEL_MOVES, 2000, 1000, ordered=False)
    assert set(costs.asked.values()) == {1}
    assert 0 < climber.distinct < climber.evaluations


def test_the_first_plan_does_not_wait_for_a_simulation_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    simulated, rescheduled = joint.simulate, Climber.reschedule
    monkeypatch.setattr(joint, "simulate", lambda problem: events.append("start") or simulated(problem))
    monkeypatch.setattr(
        Climber, "reschedule", lambda self, **how: events.append("plan") or rescheduled(self, **how)
    )
    found = run(seeds=1)
    assert events.index("plan") < events.index("start")
    assert events.count("start") == 1
    built = build(STEP, unfused(STEP), ResultCosts(), SLOW_LAUNCH)
    assert found.start_ns == simulated(built.problem).makespan_ns


def test_the_first_climb_of_orders_is_made_again_while_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = object.__new__(restart._Run)
    begun.stopped, begun.best, begun.noted = "", None, [(None, 1_000_000)]
    found_ns = iter([990_000, 989_000, 988_900, 900_000])

    def climb(self: restart._Run, *_: object, ordered: bool) -> None:
        assert ordered
        self.noted = [(None, next(found_ns))]

    monkeypatch.setattr(restart._Run, "_climb", climb)
    assert len(list(begun._while_it_pays(KERNEL_MOVES))) == 3
    assert begun.best_ns == 988_900


def test_a_memory_limit_holds_for_everything_that_is_returned() -> None:
    def peak_bytes(strategy: Strategy) -> int:
        return simulate(build(STEP, strategy, ResultCosts(), SLOW_LAUNCH).problem).peak_bytes

    limit_bytes = peak_bytes(unfused(STEP))
    assert peak_bytes(run(seeds=1).strategy) > limit_bytes
    bests: list[Finalist] = []
    limited = run(on_best=bests.append, seeds=1, memory_limit_bytes=limit_bytes)
    assert limited.predicted_ns < limited.start_ns
    assert max(peak_bytes(one.strategy) for one in (*limited.finalists, *bests)) <= limit_bytes


def test_a_search_ends_though_everything_it_finds_is_refused() -> None:
    """It came to one bucket again and again, each time as if to something new."""
    graph = graph_of("param\nall-reduce 0\nall-reduce 0\nnegate 1\ntuple 2 3")
    result = run(graph, CPU, seeds=1, evaluations=None, memory_limit_bytes=1)
    assert result.stopped == "unchanged"
    assert result.strategy.buckets == unfused(graph).buckets


@pytest.mark.parametrize("machine", [CPU, SLOW_LAUNCH], ids=lambda machine: machine.name)
def test_a_search_before_its_deadline_does_not_depend_on_the_clock(
    monkeypatch: pytest.MonkeyPatch, machine: MachineModel
) -> None:
    """States are refused here, so when they are checked decides where the search goes on."""
    graph = random_step(Random(5), 60, backend=machine.name)
    limit = simulate(build(graph, unfused(graph), ResultCosts(), machine).problem).peak_bytes
    wanted = {
        "memory_limit_bytes": limit,
        "evaluations": 8000,
        "seconds": 1e9,
        "finalists": 3,
        "processes": 1,
    }

    def found_by_a_clock(tick_s: float) -> tuple[object, ...]:
        ticks = count()
        clock = SimpleNamespace(perf_counter=lambda: tick_s * next(ticks), sleep=time.sleep)
        monkeypatch.setattr(restart, "time", clock)
        return found_by(run(graph, machine, **wanted))

    steady = found_by_a_clock(1e-9)
    assert steady == found_by_a_clock(10.0)
    monkeypatch.setattr(restart, "time", SimpleNamespace(perf_counter=_hurried(Random(1)), sleep=time.sleep))
    assert steady == found_by(run(graph, machine, **wanted))


def _hurried(random: Random) -> Callable[[], float]:
    """A clock on which some spells take no time and others seconds."""
    now = 0.0

    def read() -> float:
        nonlocal now
        now += random.choice([0.0, 0.0, 0.0, 1.0, 20.0])
        return now

    return read


def test_the_best_so_far_is_told_as_it_is_found() -> None:
    bests: list[Finalist] = []
    result = run(on_best=bests.append)
    times = [one.predicted_ns for one in bests]
    assert times == sorted(times, reverse=True)
    assert bests[-1].predicted_ns == result.predicted_ns


def test_it_ends_when_asked_with_the_best_so_far() -> None:
    asked = iter([False] * 6 + [True] * 1000)
    result = run(evaluations=None, stop=lambda: next(asked))
    assert result.stopped == "stop"
    assert result.predicted_ns <= result.start_ns


def test_a_step_with_nothing_to_choose_keeps_its_start() -> None:
    result = run(NOTHING_TO_CHOOSE, CPU)
    assert result.predicted_ns == result.start_ns


def test_small_steps_come_within_one_per_cent_of_the_optimum() -> None:
    reached = 0
    for seed, graph in enumerate(small_steps(6, "gpu")):
        best_ns = least_ns(graph, ResultCosts(), SLOW_LAUNCH)
        found_ns = run(graph, seed=seed, seeds=1).predicted_ns
        assert found_ns >= best_ns
        reached += found_ns <= 1.01 * best_ns
    assert reached == 6
