"""One rank of a job that measures how well its simulator predicts it (see ``scripts/benchmark.py``)."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from disco_hlo.errors import DiscoError, IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.optimize.ablations import NO_FUSION
from disco_hlo.plan.plan import DEFAULT, Strategy
from disco_hlo.plan.plan import SEARCHED as PLAN
from disco_hlo.plan.read import read
from disco_hlo.plan.variants import in_the_order_of, unfused
from disco_hlo.plugin.logs import configure, one_line
from disco_hlo.plugin.measuring.candidates import (
    compare_with_default,
    compile_trials,
    measure,
    steps_in_a_row,
)
from disco_hlo.plugin.measuring.profiling import Kept, profile_step
from disco_hlo.plugin.measuring.runner import Runner, time_once
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.session import Session, join
from disco_hlo.plugin.settings import Settings
from disco_hlo.printable import counted
from disco_hlo.profiler.profile import Profile, merge
from evaluation import step
from evaluation.commands import GLOO
from evaluation.measure import times_of
from evaluation.predicting import Ran, predicted, xla_ran
from evaluation.record import FAILED, CellName, Record
from evaluation.strategies import check, combined_up_to, random_strategy

THRESHOLDS_KIB = (64, 512)
RANDOM_PLANS = 3
FINALISTS = 1
AGAIN_S = 40.0
"""Longest that a batch takes whose executables are there; the first one compiles some."""
COMPILES_S = 900.0
"""Longest that compiling the search's code takes, the first time on a machine."""
UNFUSED = "nothing fused"
BATCHES = 6
"""That count."""
MOST_OTHERS = 0.15
"""Share of the cores that other programs may use in a quiet batch."""
MOST = 3
"""On a machine that is never quiet the quietest third of the batches counts."""


def run(args: argparse.Namespace) -> int:
    """Measure until there are enough quiet batches or the time is up; the exit status."""
    started = time.monotonic()
    configure("warning")
    sys.path.insert(0, str(step.EXAMPLES))
    import parallel

    parallel.initialize(parallel.parser(None).parse_args(["--distributed"]))
    settings = Settings(
        search=True, directory=args.out, budget_s=args.search_seconds, seed=args.seed, finalists=FINALISTS
    )
    request = step.request_of(args.models[0], args.size)
    step.keep_tuner_results(request, args.out)
    session = join(request, settings)
    cell = CellName(args.models[0], args.size, GLOO, len(request.devices))
    try:
        _Benchmark(session, cell, args).run(lambda: args.seconds - (time.monotonic() - started))
    except DiscoError as error:
        print(f"benchmark.py: {cell.stem}: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


@dataclass
class _Batch:
    """What one batch measured."""

    others: float
    """Share of the cores that other programs used meanwhile."""
    times_ns: dict[str, list[int]]
    profile: Profile | None = field(default=None, repr=False)


class _Benchmark:
    """One model's plans. Rank 0 keeps the files, all ranks run everything."""

    def __init__(self, session: Session, cell: CellName, args: argparse.Namespace) -> None:
        self.session, self.cell, self.args = session, cell, args
        self.step = step.captured(session.request)
        self.source: CanonicalModule = self.step.source
        self.xla = read(self.source)
        self.kept = Kept()

    def run(self, left_s: Any) -> None:
        session = self.session
        batches: list[_Batch] = []
        rows = self._rows()
        trials = [Trial(name, strategy, 0) for name, strategy in rows]
        self._say(f"compiling {counted(len(trials), 'plan')}")
        compile_trials(session, self.source, trials, tag="plans")
        last_s, count = 0.0, 0
        while session.tell(
            session.leads and self._lacks(batches, left_s() - min(last_s, AGAIN_S)), "goes on"
        ):
            started = time.monotonic()
            batch = self._batch(trials, checked=count > 0)
            count, last_s = count + 1, time.monotonic() - started
            if session.leads:
                batches.append(batch)
                self._say(f"batch {len(batches)}: others used {100 * batch.others:.0f} % of the cores")
                self._record(batches, trials)

    def _rows(self) -> list[tuple[str, Strategy | None]]:
        """Names and strategies of what is measured; rank 0 searches by a first profile."""
        found = None
        self._say("profiling")
        first = profile_step(self.session, self.source, self.xla, None, kept=self.kept)
        with self.session.stage("search", takes_s=COMPILES_S + self.args.search_seconds):
            if first is not None:
                plans = step.search(self.step, first.profile, self.session.settings)
                made = self._strategies(plans, first.profile)
                found = [[name, msgspec.to_builtins(strategy)] for name, strategy in made]
        told = self.session.tell(found, "rows")
        rows = [(name, msgspec.convert(strategy, Strategy)) for name, strategy in told]
        return [(DEFAULT, None), *rows]

    def _strategies(self, plans: step.FoundPlans, profile: Profile) -> Iterator[tuple[str, Strategy]]:
        graph, xla = self.source.graph, self.xla
        yield UNFUSED, unfused(graph)
        for name, strategy in plans.named.items():
            few = not name.startswith(PLAN + " ") or int(name.split()[-1]) <= FINALISTS
            if few and name != NO_FUSION:  # nothing fused, in another order
                yield name, strategy
        for kib in THRESHOLDS_KIB:
            buckets = combined_up_to(graph, xla, kib << 10)
            with suppress(IllegalStrategyError):
                strategy = in_the_order_of(graph, Strategy(xla.groups, buckets), xla, False)
                yield f"threshold {kib} KiB", check(self.source, strategy)
        costs = step.costs(profile, self.step)
        bases = [xla, *plans.named.values()]
        for number in range(1, RANDOM_PLANS + 1):
            with suppress(IllegalStrategyError):
                seed = 1000 * self.args.seed + number
                strategy = random_strategy(self.source, seed, bases, costs, costs.machine)
                yield f"random plan {number}", strategy

    def _batch(self, trials: Sequence[Trial], *, checked: bool) -> _Batch:
        """Run what was compiled, then profile; before the first time see that all compute the same."""
        before = _Use.now()
        if checked:
            self._run(trials)
        else:
            measure(self.session, trials, budget_s=1.0)
            compare_with_default(self.session, trials[0], [one for one in trials[1:] if not one.error])
        found = profile_step(self.session, self.source, self.xla, None, kept=self.kept)
        own = before.of_this_process_since()
        every = self.session.channel.all_gather(
            json.dumps(own).encode(), tag="use", timeout_s=self.session.timeout_s
        )
        others = before.of_others_since(sum(json.loads(one) for one in every))
        times = {trial.name: list(trial.times_ns) for trial in trials if trial.times_ns}
        return _Batch(others, times, None if found is None else found.profile)

    def _run(self, trials: Sequence[Trial]) -> None:
        alive = [trial for trial in trials if trial.executable is not None and not trial.error]
        runners: list[Runner] = []
        for trial in alive:
            trial.times_ns.clear()
            first = runners[0] if runners else None
            runners.append(Runner(self.session.request, trial.executable, self.args.seed, inputs_of=first))
        for runner in runners:
            runner.run()
        at_once = steps_in_a_row(self.session, runners[0])
        for _ in range(self.args.rounds):
            for trial, runner in zip(alive, runners, strict=True):
                trial.times_ns.append(time_once(runner, at_once))

    def _lacks(self, batches: Sequence[_Batch], left_s: float) -> bool:
        quiet, wanted = sum(batch.others <= MOST_OTHERS for batch in batches), BATCHES
        return not batches or (quiet < wanted and len(batches) < MOST * wanted and left_s > 0)

    def _say(self, text: str) -> None:
        if self.session.leads:
            print(f"{time.strftime('%H:%M:%S')} {self.cell.stem}: {text}", flush=True)

    def _record(self, batches: Sequence[_Batch], trials: Sequence[Trial]) -> None:
        """The cell's record from the quietest batches: times of all of them, predictions of their profiles."""
        counted = sorted(batches, key=lambda batch: batch.others)[:BATCHES]
        profile = merge([batch.profile for batch in counted if batch.profile is not None])
        record = Record.open(self.args.out, self.cell)
        record.note(
            versions=step.versions(), device=profile.platform.device_kind, backend=self.session.facts.backend,
            date=time.strftime("%Y-%m-%d", time.gmtime()), fingerprint=self.source.graph.fingerprint,
            batches=len(counted), batches_measured=len(batches),
            others=[round(batch.others, 3) for batch in counted], noise=profile.noise,
        )  # fmt: skip
        costs = step.costs(profile, self.step)
        times = {trial.name: Trial(trial.name, trial.strategy, 0) for trial in trials}
        for name, trial in times.items():
            trial.times_ns += [ns for batch in counted for ns in batch.times_ns.get(name, [])]
        changes: dict[str, dict[str, Any]] = {}
        for trial in trials:
            ran = Ran(self.source, trial.strategy) if trial.strategy else xla_ran(self.source)
            changes[trial.name] = {"kind": "between ranks"} | (
                {"status": FAILED, "reason": trial.error[:2000]} if trial.error
                else {"predicted": predicted(costs, ran), **times_of(times[trial.name], times[DEFAULT])}
            )  # fmt: skip
        record.update_all(changes)


# --- who used the cores ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Use:
    """Seconds of processor time used up to a moment: by everything on this machine, by this process."""

    at_s: float
    machine_s: float
    own_s: float

    @classmethod
    def now(cls) -> _Use:
        columns = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _idle, _waiting, irq, softirq, steal = map(int, columns)
        ticks = user + nice + system + irq + softirq + steal
        return cls(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())

    def of_this_process_since(self) -> float:
        return time.process_time() - self.own_s

    def of_others_since(self, job_s: float) -> float:
        """Share of the cores used by what is not the job, which used ``job_s``."""
        now = _Use.now()
        cores = os.cpu_count() or 1
        return max(0.0, now.machine_s - self.machine_s - job_s) / ((now.at_s - self.at_s) * cores)
