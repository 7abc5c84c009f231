"""Running what was compiled: first runs with their numbers, rounds in turn, traces, and the choice."""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from disco_hlo.errors import ProfileError
from disco_hlo.hlo import proto
from disco_hlo.hlo.opcodes import MOVED_COLLECTIVES
from disco_hlo.optimize.select import ratio_noise, ratio_to
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.plan import SEARCHED as PLAN
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.measuring.runner import LOOKS, Runner, at_once_of, time_once
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.phases.finalists import chosen
from disco_hlo.plugin.xla import executables
from disco_hlo.plugin.xla.executables import LoadedExecutable, memory
from disco_hlo.plugin.xla.jaxlink import CompileRequest, OwnTrace
from disco_hlo.profiler import trace as tracing
from disco_hlo.profiler.trace import Execution, by_place, length_ns, merged, span
from evaluation.record import FAILED, OK, Record
from evaluation.rows import PLANNED

TRACED_RUNS = 3
_SMALL_ELEMENTS = 1 << 16
_EXPECTED_SHARE = 0.95
_MOVED = tuple(sorted(MOVED_COLLECTIVES))


@dataclass(frozen=True)
class Compiled:
    """A row that can be run."""

    name: str
    kind: str
    executable: LoadedExecutable
    traced: bool = False
    """Whether its trace is kept, time allowing."""


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
    promised_ns: Mapping[str, int] = field(default_factory=dict)
    """By row, what the search expects of its own."""
    _alive: list[_Running] = field(default_factory=list, init=False)
    _at_once: int = field(default=1, init=False)

    def begin(self) -> None:
        """First runs with their numbers, and the first round."""
        record, request = self.record, self.request
        default = Runner(request, self.compiled[0].executable, self.seed, inputs_of=self.inputs_of)
        default.run()
        self._at_once = at_once(record, default) if self.in_a_row else 1
        record.note(measured_from=time.strftime("%H:%M:%S", time.gmtime()))
        expected = self._outputs(self.compiled[0], default)
        for one in self.compiled:
            try:
                record.update(one.name, first_run_began=time.time())
                own = Runner(request, one.executable, self.seed, inputs_of=default)
                own.run()
                numbers = compared(expected, self._outputs(one, own))
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
        changes = {one.trial.name: times_of(one.trial, default.trial) for one in self._alive}
        for one in self._alive if self.of_form else ():
            changes[one.trial.name]["awaited"] = times_of(one.awaited, default.awaited)
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
        return outputs_on_device(one.executable, runner, small=self.of_form)

    def _device_peak(self, one: Compiled, runner: Runner) -> dict[str, Any]:
        try:
            peak_bytes = device_peak_bytes(one.executable, runner)
            return {"bytes": peak_bytes, "unasked_bytes": unasked_bytes(runner)}
        except Exception as error:
            return {"error": one_line(error)[:500]}

    def choose(self) -> None:
        """Note what the tool would take, by its own rule, out of XLA's default and the search's finalists."""
        trials = [one.trial for one in self._alive]
        if any(trial.name == PLAN for trial in trials):
            rows = [
                one for one in self._alive if one.compiled.name == DEFAULT or one.compiled.kind == PLANNED
            ]
            found = [one.trial for one in rows]
            for trial in found:
                trial.predicted_ns = self.promised_ns.get(trial.name, 0)
            self.record.note(chosen=found[chosen(found, None)].name)
        print(f"{self.record.cell.stem}:", flush=True)
        for trial in trials:
            ratio = ratio_to(trial.times_ns, trials[0].times_ns)
            print(f"  {trial.name}: {trial.median_ns / 1e6:.2f} ms, {ratio:.3f} of default", flush=True)

    def traces(self) -> Iterator[None]:
        """Trace one row after the other, and keep what that shows; yields behind each."""
        for one in self._alive:
            name = one.trial.name
            if not one.compiled.traced and name != self.record.fact("chosen"):
                continue
            try:
                found: dict[str, Any] = breakdown(traced(one.runner), one.compiled.executable)
            except Exception as error:
                found = {"error": one_line(error)[:500]}
            self.record.update(name, trace=found)
            yield


def memory_of(executable: LoadedExecutable) -> dict[str, int]:
    """Device memory of one execution, as XLA's buffer assignment says."""
    needed = memory(executable)
    stats = executable.get_compiled_memory_stats()
    return {
        "total_bytes": needed.total_bytes,
        "temporaries_bytes": needed.temporaries_bytes,
        "peak_bytes": int(getattr(stats, "peak_memory_in_bytes", 0)),
    }


def at_once(record: Record, default: Runner) -> int:
    """How many runs each measurement takes: the same for all rows, those of earlier runs of the script too."""
    noted = record.fact("steps_at_once")
    noted = noted or at_once_of(default, min(default.run() for _ in range(LOOKS)))
    record.note(steps_at_once=noted)
    return int(noted)


def device_peak_bytes(executable: LoadedExecutable, runner: Runner) -> int | None:
    """What the first device says that one execution takes, arguments included; None where devices say nothing of
    their memory. The runner must have run before.

    A device only tells the most that was ever in use. So it is filled up first, until the run must exceed that if it
    takes but little less than XLA's buffer assignment says.

    Raises:
        RuntimeError: it takes still less.
    """
    import jax
    import jax.numpy as jnp

    device = jax.local_devices()[0]
    before = device.memory_stats()
    if not before:
        return None
    needed = memory(executable)
    held_bytes = needed.arguments_bytes - needed.aliased_bytes  # the runner's own, in use all the time
    expected = int(_EXPECTED_SHARE * (needed.total_bytes - held_bytes))
    missing = max(0, before["peak_bytes_in_use"] - before["bytes_in_use"] - expected)
    filler = jnp.zeros(missing, jnp.uint8, device=device).block_until_ready()
    in_use = device.memory_stats()["bytes_in_use"]
    known = device.memory_stats()["peak_bytes_in_use"]
    runner.run()
    filler.delete()
    peak = device.memory_stats()["peak_bytes_in_use"]
    if peak <= known:
        raise RuntimeError(
            f"a run takes at most {known - in_use + held_bytes} bytes, the device says no more"
        )
    return int(peak - in_use + held_bytes)


def unasked_bytes(runner: Runner) -> int | None:
    """How much more the first device has in use for what one execution takes over than was asked for: its allocator
    hands out a free block of up to 128 MiB too much undivided, and counts all of it. None where devices say nothing
    of their memory. The runner must have run before.

    Source: XLA's ``bfc_allocator.cc``, kMaxInternalFragmentation.
    """
    import jax

    device = jax.local_devices()[0]
    before = device.memory_stats()
    if not before:
        return None
    arguments = runner.inputs()
    in_use = device.memory_stats()["bytes_in_use"] - before["bytes_in_use"]
    del arguments
    return int(in_use - runner.runs_on.donated_bytes())


# --- numbers --------------------------------------------------------------------------------------


def outputs_on_device(executable: LoadedExecutable, runner: Runner, *, small: bool = False) -> list[Any]:
    """What one run leaves on the first device; nothing is fetched. The runner must have run before.

    Args:
        small: only outputs of up to 65,536 elements and the last, the loss: of a Transformer the norms and their
            moments, which every layer's backward pass has a part in.
    """
    arguments = runner.inputs()
    result = executables.execute(executable, arguments)
    executables.wait(result)
    outputs = [output[0] for output in executables.result_arrays(result)]
    return [one for one in outputs if not small or one.size <= _SMALL_ELEMENTS or one is outputs[-1]]


def compared(expected: Sequence[Any], got: Sequence[Any]) -> dict[str, float]:
    """How far outputs lie apart: the largest difference of any, relative to that output's largest value; and where the
    last output is a number, the loss, that and how far it is off."""
    import jax

    with jax.transfer_guard("allow"):
        values = [float(value) for value in jax.device_get(_all_apart()(list(expected), list(got)))]
        found = {"max_relative_difference": max(values)}
        if got[-1].shape == ():
            found |= {"loss_relative_difference": values[-1], "loss": float(jax.device_get(got[-1]))}
    return found


@functools.cache
def _all_apart() -> Any:
    """One program for all outputs of a step: nothing of them is fetched."""
    import jax

    return jax.jit(lambda expected, got: list(map(_apart, expected, got)))


def _apart(a: Any, b: Any) -> Any:
    import jax.numpy as jnp

    left, right = a.astype(jnp.float32), b.astype(jnp.float32)
    scale = jnp.max(jnp.abs(left), initial=0.0)
    both_nan = jnp.isnan(left) & jnp.isnan(right)
    difference = jnp.where((left == right) | both_nan, 0.0, jnp.abs(left - right))
    return jnp.max(difference, initial=0.0) / jnp.maximum(scale, 1e-30)


def times_of(trial: Trial, default: Trial) -> dict[str, Any]:
    """What a record keeps of a row that ran: its times, ms, and their ratio to XLA's default's of the same rounds."""
    return {
        "status": OK,
        "median_ms": trial.median_ns / 1e6,
        "spread_ms": trial.spread_ns / 1e6,
        "of_default": ratio_to(trial.times_ns, default.times_ns),
        "of_default_noise": ratio_noise(trial.times_ns, default.times_ns),
        "default_median_ms": default.median_ns / 1e6,
        "times_ms": [round(ns / 1e6, 4) for ns in trial.times_ns],
    }


# --- traces ---------------------------------------------------------------------------------------


def traced(runner: Runner) -> tracing.Trace:
    """A few runs under the profiler."""

    def run_once() -> None:
        runner.run()

    return tracing.read(tracing.collect(OwnTrace(), run_once, TRACED_RUNS, warmup=1))


def breakdown(taken: tracing.Trace, executable: LoadedExecutable) -> dict[str, float]:
    """Compute, communication, and what of it is hidden, in ms per step.

    On each run the device whose collectives took least counts: on the others they also wait for it.
    """
    module = proto.parse(executables.read_executable(executable))
    # On CPU an instruction tells what it is; on GPU its kernel does.
    names = {i.name for c in module.computations for i in c.instructions if i.opcode.startswith(_MOVED)}
    per_run: dict[int, list[dict[str, float]]] = defaultdict(list)
    for (run, _), items in by_place(taken, module.name).items():
        per_run[run].append(_breakdown(items, names))
    if not per_run:
        raise ProfileError(f"the trace holds nothing of {module.name}")
    chosen = [min(places, key=lambda one: one["communication_ms"]) for places in per_run.values()]
    return {name: round(statistics.median(one[name] for one in chosen), 4) for name in chosen[0]}


def _breakdown(items: Sequence[Execution], collectives: Container[str]) -> dict[str, float]:
    compute = merged(span(i) for i in items if not is_collective(i, collectives))
    communication = merged(span(i) for i in items if is_collective(i, collectives))
    everything = merged(map(span, items))
    hidden = length_ns(compute) + length_ns(communication) - length_ns(everything)
    return {
        "compute_ms": length_ns(compute) / 1e6,
        "communication_ms": length_ns(communication) / 1e6,
        "hidden_ms": hidden / 1e6,
        "exposed_ms": (length_ns(communication) - hidden) / 1e6,
        "idle_ms": (everything[-1][1] - everything[0][0] - length_ns(everything)) / 1e6,
        "span_ms": (everything[-1][1] - everything[0][0]) / 1e6,
    }


def is_collective(item: Execution, collectives: Container[str]) -> bool:
    """Whether this is a transfer between devices: by its kernel on GPU, by its instruction on CPU."""
    if item.kernel:
        return "nccl" in item.kernel.lower() or "all_reduce" in item.kernel.lower()
    return item.op in collectives


# --- PGLE -----------------------------------------------------------------------------------------


def fdo_profile(runner: Runner, runs: int = 3) -> bytes:
    """What jax's own profile-guided latency estimation collects of a step (JAX_ENABLE_PGLE).

    Raises:
        RuntimeError: the traces were empty.
    """
    from jax._src.profiler import PGLEProfiler

    profiler = PGLEProfiler(runs, 90)
    for _ in range(runs):
        with PGLEProfiler.trace(profiler):
            runner.run()
    collected = profiler.consume_fdo_profile()
    if not collected:
        raise RuntimeError("jax collected an empty profile")
    return bytes(collected)
