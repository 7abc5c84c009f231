"""Running what was compiled for a cell: first runs with their numbers, rounds in turn, traces, the choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from disco_hlo.optimize.select import ratio_to
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.plan import SEARCHED as PLAN
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.measuring.candidates import Trial
from disco_hlo.plugin.measuring.runner import Runner, time_once
from disco_hlo.plugin.phases.finalists import chosen
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from evaluation import measure
from evaluation.compiling import Compiled
from evaluation.record import FAILED, Record
from evaluation.rows import PLANNED


@dataclass(frozen=True, slots=True)
class _Running:
    """A row whose first run went well."""

    compiled: Compiled
    runner: Runner
    trial: Trial
    awaited: Trial
    """Each step awaited before the next."""


@dataclass
class Rounds:
    """The rows of a cell, run in turn."""

    request: CompileRequest
    compiled: Sequence[Compiled]
    """XLA's default first."""
    record: Record
    seed: int
    """Of the inputs."""
    inputs_of: Runner | None
    """A runner that made them before, where there is one."""
    in_a_row: bool
    """Whether a measurement takes several steps in a row, where these are short."""
    of_form: bool
    """Whether steps are also timed one by one, each awaited before the next as in a training that waits, and only
    small outputs compared."""
    say: Callable[[str], None]
    promised_ns: Mapping[str, int] = field(default_factory=dict)
    """By row, what the search expects of its own."""
    _alive: list[_Running] = field(default_factory=list, init=False)
    _at_once: int = field(default=1, init=False)

    def begin(self) -> None:
        """First runs with their numbers, and the first round."""
        record, request = self.record, self.request
        default = Runner(request, self.compiled[0].executable, self.seed, inputs_of=self.inputs_of)
        default.run()
        self._at_once = measure.at_once(record, default) if self.in_a_row else 1
        record.note("measured_from", time.strftime("%H:%M:%S", time.gmtime()))
        expected = self._outputs(self.compiled[0], default)
        for one in self.compiled:
            try:
                record.update(one.name, first_run_began=time.time())
                own = Runner(request, one.executable, self.seed, inputs_of=default)
                own.run()
                numbers = measure.compared(expected, self._outputs(one, own))
            except Exception as error:
                if one is self.compiled[0]:
                    raise
                record.update(one.name, status=FAILED, reason=one_line(error)[:2000], first_run_began=None)
                continue
            record.update(one.name, numbers=numbers, first_run_began=None)
            self._alive.append(_Running(one, own, Trial(one.name, None, 0), Trial(one.name, None, 0)))
            if self.of_form:
                record.update(one.name, device_peak=self._device_peak(one, own))
        del expected
        if self.in_a_row:  # a GPU that was idle computes faster than in a training
            self._time_all()
            for running in self._alive:
                running.trial.times_ns.clear()
                running.awaited.times_ns.clear()
        self.run_one()

    def run_one(self) -> None:
        """One more round. A row that fails is in no other one."""
        self._time_all()
        default = self._alive[0]
        changes = {one.trial.name: measure.times_of(one.trial, default.trial) for one in self._alive}
        for one in self._alive if self.of_form else ():
            changes[one.trial.name]["awaited"] = measure.times_of(one.awaited, default.awaited)
        self.record.update_all(changes)

    def _time_all(self) -> None:
        for running in list(self._alive):
            try:
                self._time(running)
            except Exception as error:
                if running is self._alive[0]:
                    raise
                self._alive.remove(running)
                self.record.update(running.trial.name, status=FAILED, reason=one_line(error)[:2000])

    def _time(self, running: _Running) -> None:
        runner, count = running.runner, self._at_once
        if not self.of_form:
            running.trial.times_ns.append(time_once(runner, count))
            return
        # In a row even if that is one, which then starts while the step before it runs.
        running.trial.times_ns.append(runner.run_in_a_row(count) if self.in_a_row else runner.run())
        running.awaited.times_ns.append(runner.run_in_a_row(max(1, count // 2), awaited=True))

    def _outputs(self, one: Compiled, runner: Runner) -> list[Any]:
        return measure.outputs_on_device(one.executable, runner, small=self.of_form)

    def _device_peak(self, one: Compiled, runner: Runner) -> dict[str, Any]:
        try:
            peak_bytes = measure.device_peak_bytes(one.executable, runner)
        except Exception as error:
            return {"error": one_line(error)[:500]}
        return {"bytes": peak_bytes}

    def choose(self) -> None:
        """Note what the tool would take, by its own rule, out of XLA's default and the search's finalists."""
        trials = [one.trial for one in self._alive]
        if any(trial.name == PLAN for trial in trials):
            found = [
                one.trial for one in self._alive
                if one.trial.name == DEFAULT or one.compiled.kind == PLANNED
            ]  # fmt: skip
            for trial in found:
                trial.predicted_ns = self.promised_ns.get(trial.name, 0)
            self.record.note("chosen", found[chosen(found, None)].name)
        self.say(f"{self.record.cell.stem}:")
        for trial in trials:
            ratio = ratio_to(trial.times_ns, trials[0].times_ns)
            self.say(f"  {trial.name}: {trial.median_ns / 1e6:.2f} ms, {ratio:.3f} of default")

    def traces(self) -> Iterator[None]:
        """Trace one row after the other, and keep what that shows; yields behind each."""
        chosen = self.record.fact("chosen")
        for one in self._alive:
            name = one.trial.name
            if not (one.compiled.traced or name == chosen):
                continue
            try:
                found: dict[str, Any] = measure.breakdown(measure.traced(one.runner), one.compiled.executable)
            except Exception as error:
                found = {"error": one_line(error)[:500]}
            self.record.update(name, trace=found)
            yield
