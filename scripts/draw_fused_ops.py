"""What scripts/sample_fused_ops.py measures: its configuration, captured steps, and fused ops drawn from them."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from checkout import ROOT, find_package

find_package()

from evaluation.step import EXAMPLES, intercepted  # noqa: E402
from pack import PackedKernel  # noqa: E402

from disco_hlo.backends import BACKENDS  # noqa: E402
from disco_hlo.errors import UnsupportedError  # noqa: E402
from disco_hlo.estimator.analytic import AnalyticModel, DeviceModel  # noqa: E402
from disco_hlo.estimator.dataset import Dataset, Source  # noqa: E402
from disco_hlo.estimator.gnn import GnnModel  # noqa: E402
from disco_hlo.estimator.kernel_cost import kernels_ns  # noqa: E402
from disco_hlo.estimator.samples import FusedOp, Grower, is_plain, single_ops  # noqa: E402
from disco_hlo.hlo.attributes import triton_settings  # noqa: E402
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize  # noqa: E402
from disco_hlo.hlo.cost_model import Kernels, triton_emitter  # noqa: E402
from disco_hlo.hlo.flatten import emitter_of  # noqa: E402
from disco_hlo.hlo.graph import Graph, as_kernel, kernel_nodes  # noqa: E402
from disco_hlo.hlo.regions import ENTRY  # noqa: E402
from disco_hlo.optimize.costs import Costs, costs_for  # noqa: E402
from disco_hlo.optimize.pipeline import searchable  # noqa: E402
from disco_hlo.plan.plan import Strategy  # noqa: E402
from disco_hlo.plan.read import read  # noqa: E402
from disco_hlo.plan.variants import unfused  # noqa: E402
from disco_hlo.plugin.xla import compiles  # noqa: E402
from disco_hlo.printable import counted  # noqa: E402
from disco_hlo.profiler.keys import GROUP_PREFIX, kernel_key  # noqa: E402
from disco_hlo.profiler.profile import load as load_profile  # noqa: E402
from disco_hlo.report.bundle import read_module  # noqa: E402
from disco_hlo.search.api import SearchSettings  # noqa: E402
from disco_hlo.search.run import search  # noqa: E402
from disco_hlo.search.strategies import kernels_of  # noqa: E402

_ATTEMPTS = 20
"""Draws for each sample wanted, before a step counts as exhausted."""
_STORED_AT_ONCE = 400
_SEEDS_OF_A_ROUND = 10_000


class StepConfig(msgspec.Struct, forbid_unknown_fields=True):
    """A training step to capture: a model of ``examples/models``, or a file with a module."""

    model: str
    size: str = ""
    change: dict[str, Any] = {}
    """Fields of the model's configuration that differ from its size."""
    share: float = 1.0
    """Weight among the model's steps when its samples are divided among them."""
    file: str = ""
    """Instead: a serialized HloModuleProto (.pb or .pb.gz), relative to the repository."""
    searches: int = 0
    """How many searches choose kernels of it (:func:`chosen_kernels`), which are taken before random ones."""
    candidates: int = 40_000
    """Of each of these searches."""

    @property
    def name(self) -> str:
        """Model, size and changes."""
        if self.file:
            return f"{self.model} {Path(self.file).name}"
        return f"{self.model} {self.size}" + "".join(
            f" {key}={self.change[key]}" for key in sorted(self.change)
        )


class MeasureConfig(msgspec.Struct, forbid_unknown_fields=True):
    """How packs are made and timed."""

    pack_samples: int
    pack_bytes: int
    """Most bytes that the kernels of one pack read and return together."""
    held_bytes: int
    """Results kept at a time (see ``pack.py``); 0 keeps all of a pack."""
    processes: int
    """Processes that compile; only one of them uses the device at a time."""
    by_model: bool
    """Whether a pack holds samples of one step only, so that inputs serve many packs; else of all."""
    reuse_after_bytes: int
    """An input is read again only after this much other traffic: a few times the largest cache."""
    input_bytes: int
    """Most bytes of inputs kept on the device between packs."""
    compile_threads: int
    """Packs compiled while another is measured; 0 where compiling would disturb measuring (CPU)."""
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
    """Drawn for each model; ``samples`` has exceptions."""
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
    samples: dict[str, int] = {}

    def count(self, step: StepConfig) -> int:
        """Samples wanted of one step."""
        total = sum(other.share for other in self.steps if other.model == step.model)
        return round(self.samples.get(step.model, self.samples_per_model) * step.share / total)


def read_config(path: Path) -> Config:
    """The configuration file; ValueError or OSError where it is bad."""
    return msgspec.toml.decode(path.read_bytes(), type=Config)


# --- capture --------------------------------------------------------------------------------------


def captured(step: StepConfig) -> bytes:
    """The module of a training step as XLA would run it on one device here.

    Raises DiscoError or ValueError where there is no such model, size, field or file.
    """
    if step.file:
        return read_module(ROOT / step.file)
    request = intercepted(_lowered(step))
    if request is None:
        raise UnsupportedError(f"{step.name} was compiled without passing through the hook")
    return compiles.capture(request)


def _lowered(step: StepConfig) -> Any:
    import jax

    sys.path.insert(0, str(EXAMPLES))
    from models import training

    changes = {name: tuple(v) if isinstance(v, list) else v for name, v in step.change.items()}
    path = ROOT / "configs" / "models" / f"{step.model}.toml"
    try:
        module = importlib.import_module(f"models.{step.model}")
        config = training.read_config(module.Config, path, step.size)
        made = module.build(dataclasses.replace(config, **changes))
    except (ImportError, TypeError) as error:
        raise ValueError(f"step {step.name!r}: {error}") from error
    arguments = training.abstract_arguments(made, made.batch_per_device)
    return jax.jit(made.step, donate_argnums=0).lower(*arguments)


# --- drawing --------------------------------------------------------------------------------------


def key_of(source: CanonicalModule, op: FusedOp) -> str:
    """The cost key under which a profile would store the kernel's time."""
    ops, results = as_kernel(source.graph, op.members, op.results)
    return kernel_key(source.graph, ops, results, triton_emitter(op.config) if op.kind == "triton" else "")


def xla_kernels(source: CanonicalModule) -> list[FusedOp]:
    """The kernels that XLA itself formed; Triton's with their tiles."""
    found = []
    for origin in source.origins:
        if origin.role != "fusion" or not origin.results:
            continue
        kind, config = emitter_of(origin.proto), ""
        if kind == "triton":
            config = triton_settings(origin.proto)
        ops, results = as_kernel(source.graph, origin.nodes, origin.results)
        if ops:
            found.append(FusedOp(kernel_nodes(source.graph, ops), results, kind, config))
    return found


def affordable(config: Config, source: CanonicalModule) -> Callable[[FusedOp], bool]:
    """Whether a fused op is small and quick enough to be measured: by its bytes, then by the analytical estimate."""
    graph = source.graph
    hoists = BACKENDS[graph.backend].hoists
    model = AnalyticModel(DeviceModel(config.bandwidth, config.scalar_flops, hoists=hoists))

    def fits(op: FusedOp) -> bool:
        if not is_plain(graph, op.members, op.results):
            return False
        if PackedKernel(source, op.members, op.results).moved_bytes > config.sample_bytes:
            return False
        emitter, expected_ns = op.kind if op.kind == "triton" else "", np.zeros(1)
        kernel = Kernels.of_lists([op.members], [op.results], [emitter])
        kernels_ns(model.tables(graph), kernel.flat, model.scratch(graph), expected_ns)
        return bool(expected_ns[0] <= 1e6 * config.longest_ms)

    return fits


def draw(
    config: Config, source: CanonicalModule, count: int, seed: int, known: set[str], chosen: Iterable[FusedOp]
) -> Iterator[tuple[str, FusedOp]]:
    """New fused ops with their keys: all single ops, XLA's own, those ``chosen``, and random ones until there are
    ``count``."""
    fits = affordable(config, source)
    own = xla_kernels(source)
    grower = Grower(source.graph, own, config.most_members, seed)
    attempts = (grower.draw() for _ in range(_ATTEMPTS * count))
    certain = [*single_ops(source.graph), *own, *chosen]
    found = set(known)
    for number, op in enumerate(itertools.chain(certain, attempts)):
        if number >= len(certain) and len(found) >= count + len(known):
            return
        if op is None:
            continue
        key = key_of(source, op)
        if key not in found and fits(op):
            found.add(key)
            yield key, op


def mark(what: str, name: str, turn: int) -> str:
    """Name of a fact about a step in a round: that its samples are in the file (``drawn``), or the keys of the kernels
    that searches chose of it (``chosen``)."""
    return f"{what}: {name}" + (f", round {turn}" if turn > 1 else "")


def prepare(config: Config, data: Dataset, step: StepConfig, turn: int = 1) -> None:
    """Capture a step and store samples of its entry and regions, bit by bit: what ends this leaves a file of use.

    Args:
        turn: the round, from 1. In later ones only what searches choose is drawn, by the weights as they are then.
    """
    started = time.time()
    module = captured(step)
    computations = canonicalize(module).computations
    say(f"{step.name}: captured in {time.time() - started:.1f} s")
    seed = config.seed + config.steps.index(step) + _SEEDS_OF_A_ROUND * (turn - 1)
    chosen_keys: set[str] = set()
    structures = {name: len(single_ops(source.graph)) for name, source in computations.items()}
    for name, source in computations.items():
        if not structures[name]:
            continue
        label = step.name if name == ENTRY else f"{step.name}, {name}"
        wanted = round(config.count(step) * structures[name] / sum(structures.values()))
        stored = data.add_source(step.model, label, source.graph.fingerprint, module)
        chosen = list(chosen_kernels(source, step.searches, step.candidates, seed)) if step.searches else []
        chosen_keys.update(key_of(source, op) for op in chosen)
        store(config, data, stored, source, wanted if turn == 1 else 0, seed, chosen)
    if step.searches:
        data.describe({mark("chosen", step.name, turn): sorted(chosen_keys)})
    data.describe({mark("drawn", step.name, turn): True})


def store(
    config: Config, data: Dataset, stored: Source, source: CanonicalModule, wanted: int, seed: int,
    chosen: Sequence[FusedOp],
) -> None:  # fmt: skip
    """Draw samples of one computation until the file holds ``wanted`` of it."""
    started = time.time()
    known = {sample.key for sample in data.samples()}
    drawn = draw(config, source, wanted - len(data.samples(stored)), seed, known, chosen)
    added = 0
    while some := dict(itertools.islice(drawn, _STORED_AT_ONCE)):
        added += data.add_samples(stored, some)
    drew = f"{counted(added, 'sample')} drawn in {time.time() - started:.1f} s"
    say(f"{stored.name}: {counted(len(source.graph), 'node')}, {drew}")


# --- chosen by searches ---------------------------------------------------------------------------
#
# Of all kernels that never ran a search takes those that the estimator underestimates (``profiler.corrections``), and
# random ones hold few of their kind. So the estimator also learns from the kernels of plans: what it, and the
# analytical estimate that it corrects, would have chosen. The kernels behind the shipped weights for the H200 were
# chosen on 2026-11-23, by searches of two seeds: one began with what it was given, one with the unfused step. Today's
# have four, so the same configuration chooses others.

PROFILE = ROOT / "disco_hlo" / "data" / "profiles" / "nvidia-h200-nvlink.json"
"""What ops take, as far as it knows them; no kernel of it is believed, so that all are estimated."""
_ON_THE_WAY = 8
"""Of the plans that a search finds on its way, about so many are looked at."""


def chosen_kernels(source: CanonicalModule, searches: int, candidates: int, seed: int) -> Iterator[FusedOp]:
    """Kernels of plans that were the best so far in one of so many searches, each with a seed of its own: every other
    by the trained network, the rest by the analytical estimate; two from XLA's kernels, then two from none.

    The same arguments give the same kernels. Triton's, whose tiles are made for what they compute, are left out.
    """
    profile = load_profile(PROFILE)
    profile = dataclasses.replace(
        profile, ops={key: time for key, time in profile.ops.items() if not key.startswith(GROUP_PREFIX)}
    )
    starts = searchable(source.graph, read(source)), unfused(source.graph)
    for number in range(searches):
        costs = costs_for(source, profile, None)
        if number % 2 and isinstance(costs.estimator, GnnModel):
            costs = Costs(profile, costs.estimator.analytic)
        plans: list[Strategy] = []
        settings = SearchSettings(seed=seed + number, evaluations=candidates, processes=1)
        found = search(
            source.graph, costs, costs.machine, start=starts[number // 2 % 2], settings=settings,
            on_best=lambda one, plans=plans: plans.append(one.strategy),  # type: ignore[misc]
        )  # fmt: skip
        plans = plans[:: max(1, len(plans) // _ON_THE_WAY)]
        for plan in (*plans, *(one.strategy for one in found.finalists)):
            yield from kernels_in(source.graph, plan)


def kernels_in(graph: Graph, plan: Strategy) -> Iterator[FusedOp]:
    """The op groups of a plan as they would be measured, in the order of their results."""
    groups = {frozenset(group.ops): group for group in plan.groups}
    for ops, results in sorted(kernels_of(graph, plan), key=lambda kernel: kernel[1]):
        group = groups[ops]
        if group.kind != "triton":
            yield FusedOp(kernel_nodes(graph, ops), results, group.kind, group.config)


def say(text: str) -> None:
    """One line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
