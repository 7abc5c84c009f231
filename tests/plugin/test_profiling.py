"""What profiling a step runs, traces and tells, and what it does without where a module fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.regions import step_times
from disco_hlo.plan.plan import Bucket, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import one_bucket, unfused, varied_buckets
from disco_hlo.plugin.measuring import profiling, room
from disco_hlo.plugin.measuring.known_times import STORE_NAME
from disco_hlo.plugin.measuring.profiling import _to_trace, _with_called, profile_step
from disco_hlo.plugin.measuring.step_traces import ALONE, BESIDE, UNFUSED
from disco_hlo.plugin.measuring.traced_modules import Findings, NamedTrace, Traceable
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.session import Session, join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.executables import Memory
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.profiler import trace as tracing
from disco_hlo.profiler.keys import kernel_keys
from disco_hlo.profiler.profile import Link, OpTime, Profile
from disco_hlo.profiler.store import ProfileStore
from tests.known_times import PLATFORM, SWEEP, know_all, know_device
from tests.plugin.handled import in_session
from tests.plugin.sessions import fake_session
from tests.steps import models
from tests.steps.intercept import captured_step, intercept

LAYERS, WIDTH = 5, 64


@pytest.fixture
def step() -> CanonicalModule:
    return captured_step("mlp")


@pytest.mark.parametrize(("backend", "expected"), [("cpu", one_bucket), ("gpu", unfused)])
def test_where_all_reduces_block_ops_are_timed_in_a_step_that_has_them_together(
    step: CanonicalModule, backend: str, expected: Callable[[Graph], Strategy]
) -> None:
    """Behind one of many an op took half as long again, and one-bucket plans were predicted too slow."""
    session = fake_session(facts=SimpleNamespace(backend=backend))
    wanted = {"unfused ops": True, "ops": True, "contention": False}
    modules = _to_trace(session, step, read(step), wanted, None)
    unfused_step = next(module.trial for module in modules if module.trial.name == "unfused step")
    assert unfused_step.strategy is not None
    assert unfused_step.strategy.groups == ()
    assert unfused_step.strategy.buckets == expected(step.graph).buckets


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"ops": True, "unfused ops": True, "contention": False},
            [("XLA's kernels", True), ("unfused step", False)]),
        ({"ops": True, "unfused ops": True, "contention": True},
            [("XLA's kernels", False), ("unfused step", False), ("transfers beside XLA's kernels", False)]),
    ],
)  # fmt: skip
def test_calls_of_a_training_stand_in_where_it_is_known_what_transfers_cost_their_kernels(
    step: CanonicalModule, wanted: dict[str, bool], expected: list[tuple[str, bool]]
) -> None:
    session = fake_session(on_calls=object(), request=SimpleNamespace(call_default=object))
    modules = _to_trace(session, step, read(step), wanted, None)
    assert [(module.trial.name, module.is_called) for module in modules] == expected
    structure: Any = object()
    modules = _to_trace(session, step, read(step), wanted, None, structure)
    assert not any(module.is_called for module in modules), "nobody calls another structure of it"


@pytest.mark.parametrize("structure", [None, object()], ids=["of the step", "of another structure"])
def test_calls_stand_in_for_a_module_without_room_only_where_it_is_of_their_step(
    step: CanonicalModule, monkeypatch: pytest.MonkeyPatch, structure: Any
) -> None:
    """Where a structure's kernels had no room, the step's own were traced again, for 46 s of a training."""
    monkeypatch.setattr(profiling, "_compile", lambda *_, **__: None)
    session = fake_session(on_calls=object(), request=SimpleNamespace(call_default=object))
    trial = Trial(ALONE, read(step), 0, restructured=structure, executable=object())
    modules = [Traceable(trial, None)]
    found = list(_with_called(session, step, modules, {ALONE: Findings()}))
    assert [module.is_called for module in found] == ([False, True] if structure is None else [False])


def test_transfers_of_many_sizes_are_traced_alone_and_beside_kernels(step: CanonicalModule) -> None:
    """Buckets filled up to a threshold are all of one size, from which no wait can be told."""
    xla = one_bucket(step.graph, read(step).groups)
    wanted = {"unfused ops": False, "ops": False, "contention": True}
    modules = _to_trace(fake_session(), step, xla, wanted, None)
    alone, beside = (module.trial for module in modules)
    assert alone.strategy is not None
    assert beside.strategy is not None
    assert alone.strategy.buckets == beside.strategy.buckets == varied_buckets(xla).buckets
    assert alone.strategy.groups == beside.strategy.groups == xla.groups
    assert len(varied_buckets(xla).buckets) > len(xla.buckets)


def test_every_other_bucket_of_several_is_taken_apart() -> None:
    buckets = (Bucket((1, 2)), Bucket((3,)), Bucket((4, 5), "variadic"), Bucket((6, 7, 8), "variadic"))
    apart = (Bucket((1,)), Bucket((2,)), Bucket((3,)), buckets[2], *(Bucket((node,)) for node in (6, 7, 8)))
    assert varied_buckets(Strategy((), buckets, ("b0",))) == Strategy((), apart)


def profiled(folder: Path) -> tuple[set[str], set[str]]:
    """Cost keys of XLA's kernels of a step, and those of which profiling it finds the time."""
    know_all(folder, devices=models.DEVICES, processes=1)

    def look(session: Session, source: CanonicalModule) -> tuple[set[str], set[str]]:
        with ProfileStore(folder / STORE_NAME) as store:
            found = profile_step(session, source, read(source), store)
        assert found is not None
        xlas = kernel_keys(source.graph, unit_graph(source.graph, read(source)).kernels(source.graph))
        return {*xlas}, {*found.profile.ops}

    keys: tuple[set[str], set[str]] = in_session(folder, look)
    return keys


@pytest.mark.parametrize("too_large", [("unfused step",), ("unfused step", "XLA's kernels")])
def test_a_module_without_room_is_not_run_and_the_other_tells(
    too_large: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A step that all but fills the device has no room for its unfused form: the search was given up."""
    names = "unfused step", "XLA's kernels"
    sizes = [Memory(1 << 50 if name in too_large else 1 << 10, 0, 0, 0) for name in names]
    monkeypatch.setattr(room, "memory", lambda executable: sizes.pop(0))
    monkeypatch.setattr(room, "room_bytes", lambda session: 1 << 30)

    with caplog.at_level(logging.INFO, "disco_hlo"):
        if len(too_large) == 2:
            with pytest.raises(
                ProfileError,
                match=r"own could be profiled: .*; DISCO_WHEN=training profiles it on the training's own",
            ):
                profiled(tmp_path)
        else:
            xlas, found = profiled(tmp_path)
            assert xlas & found
    said = "unfused step: not profiled: rank 0: it needs 1073741824 MiB a device, 1024 MiB of what is free are usable"
    assert caplog.messages.count(said) == 1


def test_a_module_that_fails_is_done_without_and_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the search. And where another module was traced, what it would have shown was never asked for again."""
    whole, fails = profiling.take, True

    def take(session: Session, module: Any, *more: Any, **named: Any) -> Any:
        if fails and module.trial.name == "XLA's kernels":
            raise MemoryError("out of memory")
        return whole(session, module, *more, **named)

    monkeypatch.setattr(profiling, "take", take)

    with caplog.at_level(logging.INFO, "disco_hlo"):
        xlas, first = profiled(tmp_path)
    assert "XLA's kernels: not profiled: MemoryError: out of memory" in caplog.messages
    assert first
    assert not xlas & first
    fails = False
    _, second = profiled(tmp_path)
    assert xlas & second


@pytest.mark.parametrize(
    ("alone_ns", "again_ns", "beside_ns"),
    [(1_000_000, 1_010_000, 1_030_000), (1_000_000, 0, 0), (0, 1_010_000, 0)],
)
def test_a_gpu_that_grew_warm_between_two_steps_does_not_count_as_slowed_by_transfers(
    alone_ns: int, again_ns: int, beside_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step beside transfers was timed last, on the warmest GPU, and held against the first."""
    source: Any = SimpleNamespace(graph=None)
    untraced = {ALONE: alone_ns, UNFUSED: 0, BESIDE: 1_040_300}
    timed: list[tuple[str, str]] = []

    def take(_session: Any, module: Traceable, *_: Any, timed: bool) -> NamedTrace:
        name = module.trial.name
        assert timed == (name != UNFUSED)
        empty = tracing.Trace((), ())
        return NamedTrace(empty, (), b"module", f"runner of {name}", empty, untraced[name], untraced[name])  # type: ignore[arg-type]

    def timed_again(_session: Any, trial: Trial, runner: Any, _first_runs: Any, _run_ns: int) -> int:
        timed.append((trial.name, runner))
        return again_ns

    monkeypatch.setattr(profiling, "take", take)
    monkeypatch.setattr(profiling, "untraced_ns", timed_again)
    monkeypatch.setattr(profiling, "lack_of_memory", lambda *_: "")
    monkeypatch.setattr(profiling, "tell_of_uneven_devices", lambda *_: None)
    times = {"dot": OpTime(1, 0, 1)}
    monkeypatch.setattr(
        profiling, "findings", lambda *given, **_: Findings(times=times, step_ns=given[2].step_ns)
    )
    modules = [Traceable(Trial(name, None, 0)) for name in (ALONE, UNFUSED, BESIDE)]
    found = profiling._trace(fake_session(), source, modules, 0, None)
    assert (found[ALONE].step_ns, found[BESIDE].step_ns) == (alone_ns, beside_ns)
    assert timed == ([(ALONE, f"runner of {ALONE}")] if alone_ns else [])


def scanned() -> tuple[Any, tuple[Any, ...]]:
    """Two devices, each with half of every layer's weights."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    split = NamedSharding(mesh, PartitionSpec(None, "data"))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        whole = jax.lax.with_sharding_constraint(weights, everywhere)
        return jax.lax.with_sharding_constraint(jnp.tanh(x @ whole), rows), None

    def loss(weights: Any, x: Any) -> Any:
        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).mean()

    def scanned_step(weights: Any, x: Any) -> Any:
        return weights - 0.1 * jax.grad(loss)(weights, x)

    step = jax.jit(scanned_step, in_shardings=(split, rows), out_shardings=split, donate_argnums=0)
    shapes = (LAYERS, WIDTH, WIDTH), (16, WIDTH)
    return step, tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)


def test_all_that_a_loop_runs_has_a_measured_time(tmp_path: Path) -> None:
    gather, link = CollectiveKind("all-gather"), Link(2, 1)
    know_device(tmp_path)

    def body(request: CompileRequest) -> tuple[CanonicalModule, Profile]:
        session = join(request, Settings(search=True, directory=tmp_path))
        source = canonicalize(compiles.capture(request))
        with ProfileStore(tmp_path / STORE_NAME) as store:
            for kind in (ALL_REDUCE, gather):
                store.add_sweep(PLATFORM, link, SWEEP, kind)
            found = profile_step(session, source, read(source), store)
        assert found is not None
        return source, found.profile

    source, profile = intercept(*scanned(), body, devices=2)
    loops = [region for region in source.regions if region.name.startswith("loop")]
    assert len(loops) == 2, "forward and backward"
    plans = dict(read(source).regions)
    for region in loops:
        graph = region.source.graph
        single = {
            node.key for node in graph.nodes
            if node.kind in (Kind.FUSIBLE, Kind.FIXED) and node.opcode not in COLLECTIVES
        }  # fmt: skip
        assert single <= set(profile.ops)
        assert {*kernel_keys(graph, unit_graph(graph, plans[region.name]).kernels(graph))} <= set(profile.ops)
        assert profile.loops[graph.key].executions == LAYERS
    together = profile.collectives["all-gather"].together
    assert together is not None
    assert together.sizes == ((4 * WIDTH * WIDTH, 2 * LAYERS),), "every turn of both loops gathers"
    line = profile.line(gather)
    assert line is not None
    predicted = step_times(source, read(source), costs_of(profile, source), as_compiled=True)
    assert predicted.executions == {ENTRY: 1.0, **{region.name: float(LAYERS) for region in loops}}
    gathers_ns = 2 * LAYERS * int(line(4 * WIDTH * WIDTH))
    assert predicted.communication_ns >= gathers_ns


def test_structures_have_no_profile_where_nothing_of_the_step_was_kept(
    monkeypatch: pytest.MonkeyPatch, step: CanonicalModule
) -> None:
    """Of a structure kernels alone are traced; without the step's ops and constants they make no profile."""
    wanted = {"device": True, "unfused ops": True, "ops": True, "contention": False, "collectives": {}}
    monkeypatch.setattr(profiling, "_known_and_wanted", lambda *_, **__: (None, wanted))
    session, structure = cast(Session, None), cast(Any, SimpleNamespace(source=step))
    [found] = profiling.profile_structures(session, {"split": structure}, step, None).values()
    assert isinstance(found, ProfileError)
    assert "was not kept" in str(found)


def test_a_structure_whose_kernels_another_one_has_shown_is_not_run(
    monkeypatch: pytest.MonkeyPatch, step: CanonicalModule
) -> None:
    """Of structures that share a loop, one alone is traced."""
    ran: list[int] = []

    def lacks(*_: object, **__: object) -> tuple[None, dict[str, object]]:
        return None, {"device": False, "ops": not ran, "contention": False, "collectives": {}}

    def profiled(*arguments: Any) -> SimpleNamespace:
        ran.extend(arguments[-1])
        return SimpleNamespace(profile=len(arguments[-1]))

    monkeypatch.setattr(profiling, "_known_and_wanted", lacks)
    monkeypatch.setattr(profiling, "_to_trace", lambda *_: [SimpleNamespace(trials=[])])
    monkeypatch.setattr(profiling, "_compile", lambda *_, **__: None)
    monkeypatch.setattr(profiling, "_profiled", profiled)
    two = cast(Any, {name: SimpleNamespace(source=step) for name in ("rotate", "gather-once-rotate")})
    assert profiling.profile_structures(cast(Session, None), two, step, None) == {
        "rotate": 1, "gather-once-rotate": 0
    }  # fmt: skip
