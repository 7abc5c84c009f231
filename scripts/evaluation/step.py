"""A training step in our hands, by name, and what is kept of it between runs: module, profile, plan.

Profiling needs the devices, searching does not, and measuring needs them again. So each leaves a file
beside the record, and a run begins where the files end: a search can be made on another machine.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import importlib.metadata
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from disco_hlo.backends import backend_of
from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.optimize.ablations import Candidate, candidates
from disco_hlo.optimize.cold_start import COMPILE_S
from disco_hlo.optimize.costs import Costs, costs_of
from disco_hlo.optimize.pipeline import Budget, Case, Optimized, optimize
from disco_hlo.plan.plan import SEARCHED, Prediction, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plugin.measuring.inputs.arguments import fit_inputs
from disco_hlo.plugin.measuring.profiling import Kept, compile_ahead, profile_step
from disco_hlo.plugin.phases.finding import search_settings
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step
from disco_hlo.plugin.xla import compiles, jaxlink
from disco_hlo.profiler.profile import Profile
from disco_hlo.profiler.profile import load as load_profile
from disco_hlo.profiler.profile import save as save_profile
from disco_hlo.profiler.store import ProfileStore
from disco_hlo.report.bundle import read_module
from evaluation import commands
from evaluation.record import CellName, write_atomically

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODULE, PROFILE, PLAN = "module.hlo.pb.gz", "profile.json", "plan.json"
STORE = "profile.sqlite"
ALGORITHM_1, BY_ANALYTICAL = "plan of Algorithm 1", "plan by analytical estimates"
OTHER_SEARCHES = (ALGORITHM_1, BY_ANALYTICAL)
"""The paper's search instead of ours; ours with estimates that no network corrects."""
_TINY_ADAM = 10


def request_of(name: str, size: str) -> jaxlink.CompileRequest:
    """The compile of the named step over all devices, as jax would ask for it; nothing is run.

    Names are those that ``scripts/benchmark.py`` takes, and that of the demo's model (``transformer_lm``, which has one
    size).

    Raises:
        DiscoError: jax compiled no such step.
    """
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    if commands.STRUCTURED.fullmatch(name):
        made = _compilable(name, size)
        found = intercepted(made.function.lower(*made.arguments))
    else:
        found = intercepted(_lowered(name, size), "jit_train_step")
    if found is None:
        raise DiscoError(f"jax compiled no training step for {name}")
    return found


def _lowered(model: str, size: str) -> Any:
    import jax
    import parallel

    if commands.is_form(model):
        return lowered_form(model, size)
    if model == "transformer_lm":
        import transformer_lm

        step: Any = transformer_lm.train_step
        rows = transformer_lm.BATCH_PER_DEVICE * jax.device_count()
        tokens = jax.ShapeDtypeStruct((rows, transformer_lm.SEQUENCE + 1), "int32")
        arguments: Any = (jax.eval_shape(transformer_lm.init, jax.random.key(0)), tokens)
    else:
        import train
        from models.training import abstract_arguments

        made = train.load(model, size)
        step, arguments = made.step, abstract_arguments(made, made.batch_per_device * jax.device_count())
    compiled: Any = parallel.compile_step(step, parallel.data_parallel())
    return compiled.lower(*arguments)


def lowered_form(model: str, size: str) -> Any:
    """The step of that form over all devices, lowered; examples/ must be on the path."""
    import llama

    found = commands.FORM.fullmatch(model)
    assert found is not None
    projections = "together" if found["qkv"] else "apart"
    microbatches = int(found["accumulate"] or 1)
    form = llama.Form(found["shard"], found["layers"], accumulate=microbatches, projections=projections)
    config, where = llama.load(size), llama.layout(form)
    return llama.compile_step(config, where).lower(*llama.abstract_arguments(config, where))


def _compilable(step: str, size: str) -> Any:
    import self_attention
    import sharded_adam
    import tensor_parallel

    tiny = size == "tiny"
    kind, *variant, number = step.split("-")
    if kind == "adam":
        return sharded_adam.compilable(_TINY_ADAM if tiny else int(number), replicated=bool(variant))
    if kind == "tp":
        return tensor_parallel.compilable(tensor_parallel.load(size), training=number == "train")
    return self_attention.compilable(self_attention.load("tiny" if tiny else step))


def intercepted(lowered: Any, module_name: str = "") -> jaxlink.CompileRequest | None:
    """The compile that jax asks for when it compiles ``lowered``, which goes no further; None where there is none.

    Args:
        module_name: of the module that is meant; empty for whichever comes first.
    """
    found: list[jaxlink.CompileRequest] = []

    class Taken(BaseException):
        """Ends the compile; an Exception would only be logged."""

    def handler(request: jaxlink.CompileRequest) -> None:
        if not module_name or request.module_name == module_name:
            found.append(request)
            raise Taken

    jaxlink.install(handler)
    try:
        lowered.compile()
    except Taken:
        pass
    finally:
        jaxlink.uninstall()
    return found[0] if found else None


def captured(request: jaxlink.CompileRequest, module: bytes | None = None) -> Step:
    """The step's module, XLA's own unless one is given, and its graph; the request's inputs are chosen by it."""
    module = compiles.capture(request) if module is None else module
    source = canonicalize(module)
    fit_inputs(request, source)
    return Step(module, source)


class OtherSearch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one of :data:`OTHER_SEARCHES` found in the time that the tool's own had."""

    strategy: Strategy
    predicted_ns: int
    """By its own estimates."""
    evaluations: int
    search_s: float


class FoundPlans(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a search left: strategies to measure, best first, and what was predicted."""

    fingerprint: str
    strategies: tuple[Candidate, ...]
    """All but XLA's default."""
    prediction: Prediction
    evaluations: int
    search_s: float
    others: dict[str, OtherSearch] = {}
    """By name, as far as they were asked for."""

    @property
    def named(self) -> dict[str, Strategy]:
        """All of them, by name."""
        return {name: strategy for name, strategy, _ in self.strategies if strategy is not None}

    @property
    def searched(self) -> list[Strategy]:
        """The search's own, without the baselines that are measured beside them."""
        named = ((name, one) for name, one, _ in self.strategies if f"{name} ".startswith(f"{SEARCHED} "))
        return [one for _, one in named if one is not None]


class Files:
    """The folder beside a cell's record."""

    def __init__(self, out: Path, cell: CellName) -> None:
        self.folder = out / cell.stem
        self.folder.mkdir(parents=True, exist_ok=True)

    def module(self) -> bytes | None:
        """XLA's own module as the last run saw it; None where there is none."""
        path = self.folder / MODULE
        return read_module(path) if path.exists() else None

    def save_module(self, module: bytes) -> None:
        """Keep XLA's own module."""
        write_atomically(self.folder / MODULE, gzip.compress(module, mtime=0))

    def save_row(self, row: str, module: bytes) -> None:
        """Keep what XLA made of a row by itself: what was predicted of it can be explained later, without devices."""
        name = re.sub(r"[^a-z0-9]+", "-", row.lower()).strip("-")
        write_atomically(self.folder / f"{name}.{MODULE}", gzip.compress(module, mtime=0))

    def profile(self) -> Profile | None:
        """The kept profile."""
        path = self.folder / PROFILE
        return load_profile(path) if path.exists() else None

    def save_profile(self, profile: Profile) -> None:
        """Keep a profile."""
        save_profile(profile, self.folder / PROFILE)

    def plans(self) -> FoundPlans | None:
        """What the kept search found; None where there is none."""
        path = self.folder / PLAN
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=FoundPlans)
        except msgspec.MsgspecError as error:
            raise DiscoError(f"{path} does not hold the plans of a search: {error}") from error

    def save_plans(self, plans: FoundPlans) -> None:
        """Keep what a search found."""
        write_atomically(self.folder / PLAN, msgspec.json.encode(plans))


def keep_tuner_results(request: jaxlink.CompileRequest, out: Path) -> None:
    """Let XLA:GPU's autotuner pick the same in all runs that write to ``out``: what they measure is one module."""
    if backend_of(request.backend.platform).autotunes:
        request.tuner_results = out / "autotune"
        request.tuner_results.mkdir(parents=True, exist_ok=True)


def compile_for_profile(session: Session, step: Step, out: Path) -> Kept:
    """Compile what :func:`profile` will trace; the steps of several cells at once."""
    with ProfileStore(out / STORE) as store:
        return compile_ahead(session, step.source, read(step.source), store)


def profile(session: Session, step: Step, out: Path, compiled: Kept | None = None) -> Profile:
    """Measure what the store in ``out`` does not know; a second model or link knows much from the first."""
    with ProfileStore(out / STORE) as store:
        found = profile_step(session, step.source, read(step.source), store, kept=compiled)
    if found is None:
        raise DiscoError("profiling ended without a profile")
    return found.profile


def costs(profile: Profile, step: Step, plans: FoundPlans | None = None) -> Costs:
    """The cost model and the machine model that the search uses, after it found ``plans``."""
    known = [read(step.source)]
    if plans is not None:  # of the others nobody has measured a kernel
        known += plans.searched[:1]
    return costs_of(profile, step.source, known)


def search(step: Step, profile: Profile, settings: Settings) -> FoundPlans:
    """The plugin's own search, on this machine; needs no device."""
    found, search_s = _optimized(step, profile, settings)
    strategies = [one for one in candidates(found, settings.finalists) if one.strategy is not None]
    prediction = found.case.prediction(found.best)
    return FoundPlans(
        step.source.graph.fingerprint, tuple(strategies), prediction, found.result.evaluations, search_s
    )


def search_otherwise(step: Step, profile: Profile, settings: Settings, name: str) -> OtherSearch:
    """One of :data:`OTHER_SEARCHES`, within the same budget."""
    method = "backtracking" if name == ALGORITHM_1 else "joint"
    found, search_s = _optimized(step, profile, settings, method, analytical=name == BY_ANALYTICAL)
    return OtherSearch(found.best.strategy, found.best.predicted_ns, found.evaluations, search_s)


def _optimized(
    step: Step, profile: Profile, settings: Settings, method: str = "joint", *, analytical: bool = False
) -> tuple[Optimized, float]:
    """What a search finds, and the seconds that it took."""
    started, xla = time.monotonic(), read(step.source)
    case = Case(step.source, xla, costs_of(profile, step.source, [xla], analytical=analytical))
    _ = case.unfused  # the code that predicts is compiled once on a machine, which the budget does not count
    wanted = replace(search_settings(settings), method=method)
    found = optimize(case, wanted, Budget.of(settings.budget_s, COMPILE_S))
    for note in found.notes:
        print(note, file=sys.stderr)
    return found, round(time.monotonic() - started, 3)


def with_option(request: jaxlink.CompileRequest, name: str, value: object) -> jaxlink.CompileRequest:
    """The same compile with another value of one of XLA's build options."""
    options = copy.deepcopy(request.options)
    setattr(options.executable_build_options, name, value)
    return replace(request, options=options)


def versions() -> dict[str, str]:
    """Software that a result was made with."""
    found = {"python": sys.version.split()[0]}
    for name in ("jax", "jaxlib", "flax", "optax", "numpy", "disco-hlo"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
