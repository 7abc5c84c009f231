"""Measure random fused ops of real training steps: the data that the estimator learns from.

    python scripts/sample_fused_ops.py configs/estimator/samples_cpu.toml -o cpu.sqlite
    python scripts/sample_fused_ops.py configs/estimator/samples_h200.toml -o h200.sqlite --seconds 540

Training steps are captured as XLA would compile them here, random legal fused ops are drawn from them
(DisCo, section 5.2), packed by the hundred into one module and timed from traces. Run it again with the
same file to go on where it stopped; a pack that kills the process is halved until the culprit is known.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from disco_hlo.errors import DiscoError, IllegalStrategyError, ProfileError, UnsupportedError
from disco_hlo.estimator.analytic import AnalyticModel, DeviceModel
from disco_hlo.estimator.dataset import Dataset, Measurement, Sample, Source
from disco_hlo.estimator.kernel_cost import kernel_ns
from disco_hlo.estimator.samples import FusedOp, Grower, Growth, is_plain, single_ops
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plan.pack import PackedKernel
from disco_hlo.plugin import jaxlink
from disco_hlo.profiler.keys import group_key

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
CRASHES_ALLOWED = 40


# --- configuration --------------------------------------------------------------------------------


class StepConfig(msgspec.Struct, forbid_unknown_fields=True):
    """A training step to capture: a model of ``examples/models``, or a file with a module."""

    model: str
    size: str = ""
    change: dict[str, Any] = {}
    """Fields of the model's configuration that differ from its size."""
    file: str = ""
    """Instead: a serialized HloModuleProto (.pb or .pb.gz), relative to the repository."""


class MeasureConfig(msgspec.Struct, forbid_unknown_fields=True):
    """How packs are made and timed."""

    pack_samples: int
    pack_bytes: int
    """Most bytes that the kernels of one pack read and return together."""
    reuse_after_bytes: int
    """An input is read again only after this much other traffic: a few times the largest cache."""
    input_bytes: int
    """Most bytes of inputs kept on the device between packs."""
    sessions: int
    repeats: int
    """Runs in each of the sessions, each a trace of its own."""
    pack_seconds: float
    """Most time the runs of one pack may take."""
    rounds: float
    """How often a sample is measured, each time in another pack: 1.1 measures each once and a tenth twice."""


class Config(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    seed: int
    samples_per_model: int
    most_members: int
    sample_bytes: int
    """Samples that move more are not taken."""
    longest_ms: float
    """Samples that the analytical estimate expects to take longer are not taken."""
    bandwidth: float
    """Bytes per second of the device's memory: of that estimate, and of the one that training calibrates."""
    flops: float
    """Flops per second of a large matrix multiplication, for the estimate that training calibrates."""
    scalar_flops: float
    """Flops per second of code that is not vectorised, for what may take too long."""
    measure: MeasureConfig
    steps: list[StepConfig]


def read_config(path: Path) -> Config:
    """The configuration file; ValueError or OSError where it is bad."""
    return msgspec.toml.decode(path.read_bytes(), type=Config)


# --- capture --------------------------------------------------------------------------------------


class Captured(BaseException):
    """Ends a compile of which only the module was wanted."""


def step_name(step: StepConfig) -> str:
    if step.file:
        return f"{step.model} {Path(step.file).name}"
    changes = "".join(f" {name}={value}" for name, value in sorted(step.change.items()))
    return f"{step.model} {step.size}{changes}"


def captured(step: StepConfig) -> bytes:
    """The module of a training step as XLA would run it on one device here."""
    if step.file:
        import gzip

        data = (ROOT / step.file).read_bytes()
        return gzip.decompress(data) if step.file.endswith(".gz") else data
    import jax

    sys.path.insert(0, str(EXAMPLES))
    from models.training import abstract_arguments, read_config as read_model

    module = importlib.import_module(f"models.{step.model}")
    config = read_model(module.Config, ROOT / "configs" / "models" / f"{step.model}.toml", step.size)
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in step.change.items()}
    made = module.build(dataclasses.replace(config, **changes))
    lowered = jax.jit(made.step, donate_argnums=0).lower(*abstract_arguments(made, made.batch_per_device))
    found: list[bytes] = []

    def handler(request: jaxlink.CompileRequest) -> Any:
        found.append(jaxlink.capture(request))
        raise Captured

    jaxlink.install(handler)
    try:
        lowered.compile()
    except Captured:
        return found[0]
    finally:
        jaxlink.uninstall()
    raise UnsupportedError(f"{step_name(step)} was compiled without passing through the hook")


# --- drawing --------------------------------------------------------------------------------------


def key_of(source: CanonicalModule, op: FusedOp) -> str:
    """The cost key under which a profile would store the kernel's time."""
    if len(op.members) == 1 and op.kind != "triton":
        return source.graph.nodes[op.members[0]].key
    emitter = f"triton {op.config}" if op.kind == "triton" else ""
    return group_key(source.graph, set(op.members), op.results, emitter)


def xla_kernels(source: CanonicalModule) -> list[FusedOp]:
    """The kernels that XLA itself formed; Triton's with their tiles."""
    from disco_hlo.hlo.attributes import backend_config
    from disco_hlo.hlo.flatten import emitter_of

    found = []
    for origin in source.origins:
        if origin.role != "fusion" or not origin.results:
            continue
        kind, config = emitter_of(origin.proto), ""
        if kind == "triton":
            settings = backend_config(origin.proto)["fusion_backend_config"]
            config = msgspec.json.encode(settings, order="deterministic").decode()
        found.append(FusedOp(origin.nodes, origin.results, kind, config))
    return found


class Affordable:
    """Whether a fused op is small and quick enough to be measured."""

    def __init__(self, config: Config, source: CanonicalModule) -> None:
        self.config = config
        self.source = source
        cpu = source.graph.backend == "cpu"
        self.model = AnalyticModel(DeviceModel(config.bandwidth, config.scalar_flops, hoists=cpu))

    def __call__(self, op: FusedOp) -> bool:
        if not is_plain(self.source.graph, op.members, op.results):
            return False
        if PackedKernel(self.source, op.members, op.results).moved_bytes > self.config.sample_bytes:
            return False
        return self.expected_ns(op) <= 1e6 * self.config.longest_ms

    def expected_ns(self, op: FusedOp) -> float:
        graph = self.source.graph
        members, results = (np.array(ids, np.int32) for ids in (op.members, op.results))
        tiled = op.kind == "triton"
        return float(kernel_ns(self.model.tables(graph), members, results, tiled, self.model.scratch(graph)))


def draw(config: Config, source: CanonicalModule, count: int, seed: int, known: set[str]) -> dict[str, FusedOp]:
    """Up to ``count`` new fused ops by key: all single ops, XLA's own, and random ones."""
    affordable = Affordable(config, source)
    own = xla_kernels(source)
    found: dict[str, FusedOp] = {}

    def keep(op: FusedOp) -> None:
        key = key_of(source, op)
        if key not in known and key not in found and affordable(op):
            found[key] = op

    for op in (*single_ops(source.graph), *own):
        keep(op)
    grower = Grower(source.graph, own, Growth(config.most_members), seed)
    for _ in range(20 * count):
        if len(found) >= count:
            break
        drawn = grower.draw()
        if drawn is not None:
            keep(drawn)
    return found


def prepare(config: Config, data: Dataset, models: Sequence[str], deadline: float) -> None:
    """Capture the steps and draw the samples that the file lacks."""
    steps = [step for step in config.steps if not models or step.model in models]
    names = {source.name for source in data.sources()}
    counts = Counter(step.model for step in steps)
    known = {sample.key for sample in data.samples()}
    for number, step in enumerate(steps):
        if step_name(step) in names:
            continue
        if time.time() > deadline:
            return
        started = time.time()
        module = captured(step)
        source = canonicalize(module)
        stored = data.add_source(step.model, step_name(step), source.graph.fingerprint, module)
        drawn = draw(config, source, config.samples_per_model // counts[step.model], config.seed + number, known)
        known.update(drawn)
        added = data.add_samples(stored, drawn)
        say(f"captured {stored.name}: {len(source.graph)} nodes, {added} samples, {time.time() - started:.1f} s")


# --- measuring ------------------------------------------------------------------------------------


@dataclass
class Measuring:
    """One process's work on the file."""

    config: Config
    data: Dataset
    deadline: float

    def __post_init__(self) -> None:
        from disco_hlo.plugin.packs import Inputs, PackCompiler

        self.sources: dict[int, CanonicalModule] = {}
        self.stored: dict[int, Source] = {source.id: source for source in self.data.sources()}
        self.inputs = Inputs(self.config.measure.input_bytes)
        cores = len(os.sched_getaffinity(0))
        self.compiler = PackCompiler(cores, self.config.measure.reuse_after_bytes)
        self.longest_s = 0.0
        self.done = 0
        self.total = 0

    def run(self) -> bool:
        """Measure all that is pending; False where time ran out before."""
        with self.compiler:
            # What was begun and never ended killed the process: try it in halves.
            for killed in self.data.interrupted():
                half = len(killed) // 2
                for part in filter(None, (killed[:half], killed[half:])):
                    if len(killed) == 1:
                        self.data.fail(part[0], "it killed the process while it was compiled or run")
                    elif not self.measure(part):
                        return False
            return self.rounds()

    def rounds(self) -> bool:
        rounds = self.config.measure.rounds
        for number in range(1, math.ceil(rounds) + 1):
            share = rounds - number + 1
            chosen = [s for s in self.data.pending(number) if random.Random(s.key).random() < share]
            if not all(self.measure(pack) for pack in self.packs(chosen, number)):
                return False
        return True

    def packs(self, samples: Sequence[Sample], number: int) -> Iterator[list[Sample]]:
        """Shuffled, differently in each round, into packs of limited count and bytes."""
        limits = self.config.measure
        seed = f"{self.config.seed} {number}"
        order = sorted(samples, key=lambda sample: random.Random(f"{seed} {sample.key}").random())
        self.total = self.done + len(order)
        current: list[Sample] = []
        held_bytes = 0
        for sample in order:
            size_bytes = self.kernel(sample).moved_bytes
            if current and (len(current) == limits.pack_samples or held_bytes + size_bytes > limits.pack_bytes):
                yield current
                current, held_bytes = [], 0
            current.append(sample)
            held_bytes += size_bytes
        if current:
            yield current

    def kernel(self, sample: Sample) -> PackedKernel:
        if sample.source not in self.sources:
            self.sources[sample.source] = canonicalize(self.data.module(self.stored[sample.source]))
        op = sample.op
        return PackedKernel(self.sources[sample.source], op.members, op.results, op.kind, op.config)

    def measure(self, samples: Sequence[Sample]) -> bool:
        """Measure one pack, in halves where XLA refuses it; False where no time is left for it."""
        if time.time() + 1.5 * self.longest_s > self.deadline:
            return False
        started = time.time()
        number = self.data.begin(samples)
        try:
            times, load = self.timed(samples)
        except (IllegalStrategyError, UnsupportedError, RuntimeError, ValueError) as error:
            return self.refused(samples, number, error)
        measured = {s.id: summary(row, load) for s, row in zip(samples, times, strict=True) if row.all()}
        for sample in samples:
            if sample.id not in measured:
                self.data.fail(sample, "the trace shows no execution of it")
        self.data.record(number, measured)
        self.done += len(samples)
        spent = time.time() - started
        self.longest_s = max(self.longest_s, spent)
        middle = np.median([m.low_ns for m in measured.values()]) / 1e3 if measured else 0.0
        say(f"{self.done}/{self.total} samples, pack {number}: {len(measured)} in {spent:.1f} s, median {middle:.1f} us")
        return True

    def timed(self, samples: Sequence[Sample]) -> tuple[Any, float]:
        from disco_hlo.plugin.packs import load_per_core

        limits = self.config.measure
        compiled = self.compiler.compile([self.kernel(sample) for sample in samples])
        times = compiled.measure(self.inputs, limits.sessions, limits.repeats, limits.pack_seconds)
        return times, load_per_core()

    def refused(self, samples: Sequence[Sample], number: int, error: Exception) -> bool:
        self.data.forget(number)
        reason = " ".join(str(error).split())
        say(f"pack {number} of {len(samples)} failed: {reason[:300]}")
        if len(samples) == 1:
            self.data.fail(samples[0], f"{type(error).__name__}: {reason}")
            self.done += 1
            return True
        half = len(samples) // 2
        return self.measure(samples[:half]) and self.measure(samples[half:])


def summary(times: Any, load: float) -> Measurement:
    low, middle, high = np.quantile(times, (0.25, 0.5, 0.75))
    return Measurement(round(low), round(middle), round((high - low) / 2), len(times), round(load, 2))


def facts(config: Config) -> dict[str, Any]:
    """What a time in the file depends on."""
    import jax

    from disco_hlo.profiler.profile import host_cpu_kind

    device = jax.devices()[0]
    backend = "cpu" if device.platform == "cpu" else "gpu"
    return {
        "backend": backend,
        "device_kind": host_cpu_kind() if backend == "cpu" else str(device.device_kind),
        "jax": jax.__version__,
        "parallelism": len(os.sched_getaffinity(0)) if backend == "cpu" else 1,
        "config": msgspec.to_builtins(config),
    }


def work(args: argparse.Namespace, config: Config) -> int:
    """The child: capture, draw, measure. 0 when all is measured, 3 when time ran out."""
    deadline = args.until
    with Dataset(args.out) as data:
        about = facts(config)
        data.describe(about)
        prepare(config, data, args.models, deadline)
        finished = Measuring(config, data, deadline).run()
        totals = f"{len(data.measurements())} of {len(data.samples())} samples measured, {len(data.failures())} failed"
        say(totals if finished else f"out of time: {totals}; run again to go on")
    return 0 if finished else 3


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


# --- the parent -----------------------------------------------------------------------------------


def parent(args: argparse.Namespace) -> int:
    """Run the child until it ends by itself, again where a kernel killed it."""
    until = time.time() + args.seconds
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--until", str(until)]
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ}
    environment.pop("ENABLE_SEARCH", None)
    for crashes in range(CRASHES_ALLOWED):
        with subprocess.Popen(command, env=environment) as child:
            try:
                code = child.wait(timeout=max(1.0, until + 60 - time.time()))
            except subprocess.TimeoutExpired:
                child.kill()
                print("sample_fused_ops.py: killed a measurement that did not end", file=sys.stderr)
                return 3
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)
                return 130
        if code >= 0:
            return code
        say(f"the process died of {signal.Signals(-code).name} ({crashes + 1} of {CRASHES_ALLOWED} allowed)")
    print("sample_fused_ops.py: too many crashes", file=sys.stderr)
    return 1


def main() -> int:
    """Parse, check, and run the child or the parent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="configuration file, for instance configs/estimator/samples_cpu.toml")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="data set, made or continued")
    parser.add_argument("--seconds", type=float, default=540.0, help="stop before this much time (default 540)")
    parser.add_argument("--models", nargs="*", default=[], metavar="MODEL", help="only steps of these models")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        config = read_config(args.config)
        if not args.out.absolute().parent.is_dir():
            raise ProfileError(f"the directory {args.out.absolute().parent} does not exist")
        return parent(args) if args.until is None else work(args, config)
    except (DiscoError, OSError, ValueError) as error:
        print(f"sample_fused_ops.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
