"""Running what was compiled for a cell: first runs with their numbers, rounds in turn, traces, the choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disco_hlo.errors import DiscoError
from disco_hlo.plan.plan import SEARCHED as PLAN
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.measuring.candidates import DEFAULT, Trial, ratio_to
from disco_hlo.plugin.measuring.comparing import Reference, thinned
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.step_time import time_once
from disco_hlo.plugin.phases.winner import winning
from disco_hlo.plugin.session import Session
from evaluation import measure
from evaluation.compiling import Compiled
from evaluation.record import FAILED, Record
from evaluation.rows import PLANNED

CHECK_S = 20.0
"""What the plugin's comparison takes, which makes all inputs anew, changed by a rounding."""


@dataclass(frozen=True)
class Rounds:
    """What is to be run, and how."""

    session: Session
    compiled: Sequence[Compiled]
    """XLA's default first."""
    record: Record
    count: int
    """Of rounds."""
    seed: int
    """Of the inputs."""
    inputs_of: Runner | None
    """A runner that made them before, where there is one."""
    on_gpu: bool
    promised_ns: Mapping[str, int]
    """By row, what the search expects of its own."""
    comparison: measure.Comparison
    say: Callable[[str], None]
    left_s: Callable[[], float]
    """What is left of the time for them."""


def run_all(rounds: Rounds) -> None:
    """First runs with their numbers, rounds in turn, and traces."""
    record, compiled, seed = rounds.record, rounds.compiled, rounds.seed
    request = rounds.session.request
    default = measure.runner_of(request, compiled[0].executable, seed, rounds.inputs_of)
    default.run()
    at_once = measure.at_once(record, default) if rounds.on_gpu else 1
    expected = measure.outputs_on_device(compiled[0].executable, default)
    alive: list[tuple[Compiled, Runner, Trial]] = []
    for one in compiled:
        try:
            record.update(one.row.name, first_run_began=time.time())
            own = measure.runner_of(request, one.executable, seed, default)
            own.run()
            numbers = rounds.comparison.compare(expected, measure.outputs_on_device(one.executable, own))
        except Exception as error:
            record.update(one.row.name, status=FAILED, reason=one_line(error)[:2000])
            continue
        record.update(one.row.name, numbers=numbers, first_run_began=None)
        alive.append((one, own, Trial(one.row.name, None, 0)))
    del expected
    _in_turn(rounds, alive, at_once)
    _choose(record, alive, rounds.promised_ns)
    _traces(rounds, alive)
    if rounds.left_s() > CHECK_S:
        _check(rounds, alive)
    rounds.say(f"{record.cell.stem}:")
    for _, _, trial in alive:
        ratio = ratio_to(trial, alive[0][2])
        rounds.say(f"  {trial.name}: {trial.median_ns / 1e6:.2f} ms, {ratio:.3f} of default")


def _check(rounds: Rounds, alive: Sequence[tuple[Compiled, Runner, Trial]]) -> None:
    """What the plugin's own comparison has against the plan; nothing where it is empty."""
    plan = next((runner for one, runner, _ in alive if one.row.name == PLAN), None)
    if plan is None:
        return
    default, runner, _ = alive[0]
    reference = Reference(rounds.session, default.executable, runner, thinned(runner.outputs()))
    refused = ""
    try:
        reference.check(thinned(plan.outputs()))
    except DiscoError as error:
        refused = one_line(error)
    rounds.record.update(PLAN, refused=refused)


def _in_turn(rounds: Rounds, alive: Sequence[tuple[Compiled, Runner, Trial]], at_once: int) -> None:
    for _, own, _ in alive if rounds.on_gpu else ():  # a GPU that was idle computes faster than in a training
        time_once(own, at_once)
    for _ in range(rounds.count):
        started = time.monotonic()
        for _, own, trial in alive:
            trial.times_ns.append(time_once(own, at_once))
        rounds.record.update_all({trial.name: measure.times_of(trial, alive[0][2]) for _, _, trial in alive})
        if rounds.left_s() < 2 * (time.monotonic() - started) + 3:
            return


def _traces(rounds: Rounds, alive: Sequence[tuple[Compiled, Runner, Trial]]) -> None:
    chosen = rounds.record.fact("chosen")
    for one, own, trial in alive:
        if not (one.row.traced or trial.name == chosen) or rounds.left_s() < 10:
            continue
        try:
            found: dict[str, Any] = measure.overlap(own, one.executable)
        except Exception as error:
            found = {"error": one_line(error)[:500]}
        rounds.record.update(trial.name, trace=found)


def _choose(
    record: Record, alive: Sequence[tuple[Compiled, Runner, Trial]], promised_ns: Mapping[str, int]
) -> None:
    """What the tool would take: by its own rule, out of XLA's default and the search's finalists."""
    if not any(trial.name == PLAN for _, _, trial in alive):
        return
    found = [trial for one, _, trial in alive if trial.name == DEFAULT or one.row.kind == PLANNED]
    for trial in found:
        trial.predicted_ns = promised_ns.get(trial.name, 0)
    record.note("chosen", found[winning(found)].name)
