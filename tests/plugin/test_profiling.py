"""What is measured again, and what never: a repeated search must see the same numbers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.plan import Bucket, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import one_bucket, unfused, varied_buckets
from disco_hlo.plugin.measuring import profiling, room, traced_modules
from disco_hlo.plugin.measuring.candidates import Trial
from disco_hlo.plugin.measuring.known_times import KnownTimes
from disco_hlo.plugin.measuring.links import AFTER_COMPUTE
from disco_hlo.plugin.measuring.profiling import _to_trace, profile_step
from disco_hlo.plugin.measuring.step_traces import ALONE, BESIDE, UNFUSED, _alike, _slow_downs
from disco_hlo.plugin.measuring.traced_modules import Findings, NamedTrace, Traceable
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.executables import Memory
from disco_hlo.profiler import trace as tracing
from disco_hlo.profiler.allreduce import SweepPoint
from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.in_step import InStep
from disco_hlo.profiler.kernel_keys import kernel_keys
from disco_hlo.profiler.profile import Contention, Link, OpTime, Platform, Profile
from disco_hlo.profiler.store import ProfileStore
from tests.plugin.sessions import in_session
from tests.steps import models
from tests.steps.intercept import intercept

PLATFORM = Platform("some cpu", "cpu", "", "0.12", "0.12")
CONSTANTS = DeviceConstants(launch_ns=400, memory_bandwidth=2e10, flops_per_s=1e11, noise=0.01)


@pytest.fixture(scope="module")
def step() -> CanonicalModule:
    return canonicalize(intercept(*models.mlp(), compiles.capture))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ProfileStore]:
    with ProfileStore(tmp_path / "profile.sqlite") as opened:
        yield opened


def points(*sizes: int) -> tuple[SweepPoint, ...]:
    return tuple(SweepPoint(size, 1000 + size // 10, 5, 7) for size in sizes)


def test_nothing_is_measured_twice(step: CanonicalModule, store: ProfileStore) -> None:
    first = KnownTimes(PLATFORM, Link(2, 1), store)
    lacking = first.lacks(step, read(step))
    assert lacking["device"] is True
    assert lacking["ops"] is True
    assert lacking["collectives"]["all-reduce"][0] == 1024
    first.add_constants(CONSTANTS)
    # A trace that shows one op of many: another trace of the same step would show no more.
    first.add_ops(step.graph.fingerprint, {"dot": OpTime(100, 1, 12)}, [5000, 5100, 5050])
    first.add_sweep(points(*lacking["collectives"]["all-reduce"]))
    second = KnownTimes(PLATFORM, Link(2, 1), store)
    assert not any(second.lacks(step, read(step)).values())
    assert second.profile("f00d") == first.profile("f00d")
    assert set(second.profile("f00d").ops) == {"dot"}


def test_what_a_steps_all_reduces_took_in_it_is_asked_once_of_processes_on_cpu(
    step: CanonicalModule, store: ProfileStore
) -> None:
    fingerprint, link = step.graph.fingerprint, Link(2, 2, AFTER_COMPUTE)
    first = KnownTimes(PLATFORM, link, store)
    first.add_constants(CONSTANTS)
    first.add_ops(fingerprint, {"dot": OpTime(100, 1, 12)}, [5000, 5100, 5050])
    assert first.lacks(step, read(step))["ops"] is True
    apart, together = InStep(((8, 1), (64, 2)), 4000, 1000, 3), InStep(((136, 1),), 700, 100, 3)
    first.add_collectives(fingerprint, {"all-reduce": apart}, {"all-reduce": together})
    second = KnownTimes(PLATFORM, link, store)
    assert second.lacks(step, read(step))["ops"] is False
    found = second.profile(fingerprint)
    assert (found.in_step, found.together) == (apart, together)
    assert set(found.ops) == {"dot"}
    assert second.profile("f00d").in_step is None
    assert second.profile("f00d").together is None


def test_traces_that_tell_nothing_of_all_reduces_are_not_taken_again(
    step: CanonicalModule, store: ProfileStore
) -> None:
    known = KnownTimes(PLATFORM, Link(2, 2, AFTER_COMPUTE), store)
    known.add_constants(CONSTANTS)
    known.add_ops(step.graph.fingerprint, {"dot": OpTime(100, 1, 12)}, [5000, 5100, 5050])
    known.add_collectives(step.graph.fingerprint, {}, {})
    assert known.lacks(step, read(step))["ops"] is False
    assert known.profile(step.graph.fingerprint).in_step is None


def test_the_noise_is_that_of_the_whole_step(step: CanonicalModule, store: ProfileStore) -> None:
    fingerprint = step.graph.fingerprint
    first = KnownTimes(PLATFORM, Link(2, 1), store)
    first.add_constants(CONSTANTS)
    assert first.profile(fingerprint).noise == pytest.approx(0.01)
    first.add_ops(fingerprint, {"dot": OpTime(100, 1, 12)}, [4000, 5000, 5200, 5100, 4900])
    assert first.profile(fingerprint).noise == 100 / 5000
    assert KnownTimes(PLATFORM, Link(2, 1), store).profile(fingerprint).noise == 100 / 5000


def test_another_step_is_traced(step: CanonicalModule, store: ProfileStore) -> None:
    known = KnownTimes(PLATFORM, Link(2, 1), store)
    known.add_ops("0" * 64, {"dot": OpTime(100, 1, 12)}, [5000])
    assert known.lacks(step, read(step))["ops"] is True


def test_a_larger_step_extends_the_sweep(step: CanonicalModule, store: ProfileStore) -> None:
    known = KnownTimes(PLATFORM, Link(2, 1), store)
    known.add_sweep(points(1024, 2048, 4096))
    lacking = known.lacks(step, read(step))["collectives"]["all-reduce"]
    assert lacking
    assert min(lacking) > 4096
    assert max(lacking) == 1 << 16


def test_on_one_device_no_all_reduce_is_measured(step: CanonicalModule, store: ProfileStore) -> None:
    assert KnownTimes(PLATFORM, Link(1, 1), store).lacks(step, read(step))["collectives"] == {}


def test_without_a_store_a_search_still_has_its_numbers() -> None:
    known = KnownTimes(PLATFORM, Link(2, 1), None)
    known.add_constants(CONSTANTS)
    known.add_sweep(points(1024, 2048, 4096))
    profile = known.profile("f00d")
    assert profile.launch_ns == 400
    assert profile.all_reduce is not None
    assert profile.ops == {}


@pytest.mark.parametrize(("backend", "expected"), [("cpu", one_bucket), ("gpu", unfused)])
def test_where_all_reduces_block_ops_are_timed_in_a_step_that_has_them_together(
    step: CanonicalModule, backend: str, expected: Callable[[Graph], Strategy]
) -> None:
    """Behind one of many an op took half as long again, and one-bucket plans were predicted too slow."""
    session = cast(Session, SimpleNamespace(facts=SimpleNamespace(backend=backend)))
    modules = _to_trace(session, step, read(step), {"ops": True, "contention": False}, None)
    unfused_step = next(module.trial for module in modules if module.trial.name == "unfused step")
    assert unfused_step.strategy is not None
    assert unfused_step.strategy.groups == ()
    assert unfused_step.strategy.buckets == expected(step.graph).buckets


def test_transfers_of_many_sizes_are_traced_alone_and_beside_kernels(step: CanonicalModule) -> None:
    """Buckets filled up to a threshold are all of one size, from which no wait can be told."""
    session = cast(Session, SimpleNamespace(facts=SimpleNamespace(backend="gpu")))
    xla = one_bucket(step.graph, read(step).groups)
    modules = _to_trace(session, step, xla, {"ops": False, "contention": True}, None)
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


def test_modules_compiled_at_once_are_held_against_each_other_by_their_own_names() -> None:
    def taken(name: str, *kernels: tuple[str, int, int]) -> Findings:
        return Findings(
            tracing.Trace(
                tuple(
                    tracing.Execution(op, name, 0, 0, 1000 * start, 1000 * end, "", 1000 * end, kernel)
                    for op, start, end in kernels
                    for kernel in ("nccl" if op == "b0" else op,)
                ),
                (),
            ),
            name,
        )

    alone = taken("jit_step", ("b0", 0, 100), ("g0", 100, 180))
    beside = taken("jit_step__disco_2", ("b0", 0, 120), ("g0", 10, 110))
    assert _slow_downs({ALONE: alone, BESIDE: beside}, frozenset()) == Contention(100 / 80, 100 / 80)


def test_where_one_module_has_no_names_in_command_buffers_all_are_held_against_each_other_without() -> None:
    """Kernels in command buffers were held against the same without, which take longer."""
    with_buffers, without, beside = (tracing.Trace((), ()) for _ in range(3))
    alone = Findings(with_buffers, "jit_a", without)
    fallen_back = Findings(beside, "jit_b", beside)
    assert (alone.as_run, fallen_back.as_run, Findings(with_buffers, "jit_a").as_run) == (True, False, True)
    alike = _alike({ALONE: alone, BESIDE: fallen_back})
    assert [alike[name].trace for name in (ALONE, BESIDE)] == [without, beside]
    assert _alike({ALONE: alone})[ALONE].trace is with_buffers


def test_times_of_modules_that_did_not_run_as_in_training_are_not_kept(
    step: CanonicalModule, store: ProfileStore
) -> None:
    known = KnownTimes(PLATFORM, Link(1, 1), store)
    known.add_constants(CONSTANTS)
    known.keep_no_more()
    known.add_ops(step.graph.fingerprint, {"dot": OpTime(5, 0, 1)}, [700])
    assert known.profile(step.graph.fingerprint).ops["dot"] == OpTime(5, 0, 1)
    assert "dot" not in store.ops(PLATFORM)
    assert store.steps(PLATFORM, step.graph.fingerprint) == ()


def test_what_xlas_buckets_took_on_gpus_is_asked_once_for_a_step(
    step: CanonicalModule, store: ProfileStore
) -> None:
    platform, link, fingerprint = replace(PLATFORM, backend="gpu"), Link(2, 1), step.graph.fingerprint
    first = KnownTimes(platform, link, store)
    first.add_constants(CONSTANTS)
    first.add_contention(Contention(1.1, 1.2), fingerprint)
    assert first.lacks(step, read(step))["contention"] is True
    first.add_collectives(fingerprint, {}, {"all-reduce": InStep(((64, 3),), 700, 100, 3)})
    second = KnownTimes(platform, link, store)
    assert second.lacks(step, read(step))["contention"] is False
    found = second.profile(fingerprint)
    assert found.together is not None
    assert found.together.total_ns == 700
    assert found.in_step is None


@pytest.mark.parametrize("too_large", [("unfused step",), ("unfused step", "XLA's kernels")])
def test_a_module_without_room_is_not_run_and_the_other_tells(
    too_large: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A step that all but fills the device has no room for its unfused form: the search was given up."""
    arguments_bytes = {True: 1 << 50, False: 1 << 10}
    sizes = [
        Memory(arguments_bytes[name in too_large], 0, 0, 0) for name in ("unfused step", "XLA's kernels")
    ]
    monkeypatch.setattr(room, "memory", lambda executable: sizes.pop(0))
    monkeypatch.setattr(room, "room_bytes", lambda session: 1 << 30)

    def look(session: Session, source: CanonicalModule) -> tuple[CanonicalModule, Profile]:
        found = profile_step(session, source, read(source), None)
        assert found is not None
        return source, found.profile

    with caplog.at_level(logging.INFO, "disco_hlo"):
        if len(too_large) == 2:
            with pytest.raises(
                ProfileError, match="neither the unfused step nor XLA's own could be profiled"
            ):
                in_session(tmp_path, look)
        else:
            source, profile = in_session(tmp_path, look)
            xlas = {*kernel_keys(source.graph, unit_graph(source.graph, read(source)).kernels(source.graph))}
            assert xlas & set(profile.ops)
    assert (
        caplog.messages.count(
            "unfused step: not profiled: rank 0: it needs 1073741824 MiB a device, 1024 MiB of what is free are usable"
        )
        == 1
    )


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

    def look(session: Session, source: CanonicalModule) -> tuple[CanonicalModule, Profile]:
        with ProfileStore(tmp_path / "profile.sqlite") as store:
            found = profile_step(session, source, read(source), store)
        assert found is not None
        return source, found.profile

    with caplog.at_level(logging.INFO, "disco_hlo"):
        source, first = in_session(tmp_path, look)
    assert "XLA's kernels: not profiled: MemoryError: out of memory" in caplog.messages
    xlas = {*kernel_keys(source.graph, unit_graph(source.graph, read(source)).kernels(source.graph))}
    assert first.ops
    assert not xlas & set(first.ops)
    fails = False
    _, second = in_session(tmp_path, look)
    assert xlas & set(second.ops)


@pytest.mark.parametrize(
    ("backend", "step_ns", "runs"),
    [("gpu", 100_000_000, 10), ("gpu", 1_000_000, 30), ("gpu", 3_000_000_000, 0), ("cpu", 1_000_000, 0)],
)
def test_a_gpu_computes_for_a_second_before_it_is_traced(
    backend: str, step_ns: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = SimpleNamespace(
        facts=SimpleNamespace(backend=backend), tell=lambda value, _tag: value, between_steps=None
    )
    runner: Any = SimpleNamespace(run=lambda: step_ns)
    first_runs: Any = SimpleNamespace(begin=lambda _runs: None)
    monkeypatch.setattr(traced_modules, "run_on_all", lambda _session, _what, run, _guard: run())
    monkeypatch.setattr(
        traced_modules, "repeated", lambda _session, _what, run, count, _guard: [run()] * count
    )
    monkeypatch.setattr(traced_modules, "traced", lambda _runner, _runs, warm_ups: warm_ups)
    warm_ups: Any = traced_modules.traced_on_all(session, "a step", runner, 5, first_runs)
    assert warm_ups == runs


@pytest.mark.parametrize(
    ("alone_ns", "again_ns", "beside_ns"),
    [(1_000_000, 1_010_000, 1_030_000), (1_000_000, 0, 0), (0, 1_010_000, 0)],
)
def test_a_gpu_that_grew_warm_between_two_steps_does_not_count_as_slowed_by_transfers(
    alone_ns: int, again_ns: int, beside_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step beside transfers was timed last, on the warmest GPU, and held against the first."""
    source: Any = SimpleNamespace(graph=None)
    session: Any = SimpleNamespace(
        facts=SimpleNamespace(backend="gpu", process_count=1), stage=lambda _name: contextlib.nullcontext()
    )
    untraced = {ALONE: alone_ns, UNFUSED: 0, BESIDE: 1_040_300}
    timed: list[tuple[str, str]] = []

    def take(_session: Any, module: Traceable, *_: Any, timed: bool) -> NamedTrace:
        name = module.trial.name
        assert timed == (name != UNFUSED)
        empty = tracing.Trace((), ())
        return NamedTrace(empty, (), "executable", f"runner of {name}", empty, untraced[name], untraced[name])  # type: ignore[arg-type]

    def timed_again(_session: Any, trial: Trial, runner: Any, _first_runs: Any) -> int:
        timed.append((trial.name, runner))
        return again_ns

    monkeypatch.setattr(profiling, "take", take)
    monkeypatch.setattr(profiling, "untraced_ns", timed_again)
    monkeypatch.setattr(profiling, "lack_of_memory", lambda *_: "")
    monkeypatch.setattr(profiling, "tell_of_uneven_devices", lambda *_: None)
    monkeypatch.setattr(
        profiling,
        "findings",
        lambda _graph, _trial, taken, *_, **__: Findings(
            times={"dot": OpTime(1, 0, 1)}, step_ns=taken.step_ns
        ),
    )
    modules = [Traceable(Trial(name, None, 0)) for name in (ALONE, UNFUSED, BESIDE)]
    found = profiling._trace(session, source, modules, 0, None)
    assert (found[ALONE].step_ns, found[BESIDE].step_ns) == (alone_ns, beside_ns)
    assert timed == ([(ALONE, f"runner of {ALONE}")] if alone_ns else [])
