"""What a search refuses before it has cost anything; what runs on made-up inputs runs alone, on all ranks the same."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

from disco_hlo.activation.agree import Agreement, unframe
from disco_hlo.errors import ActivationError, UnsupportedError, is_shared
from disco_hlo.plugin import install, refusals
from disco_hlo.plugin import step as steps
from disco_hlo.plugin.install import compiles_no_step
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.phases import capture_phase, enact_phase, search_phase
from disco_hlo.plugin.refusals import (
    may_be_run,
    refuse_other_threads,
    refuse_switched_on,
    waits_for_python,
)
from disco_hlo.plugin.session import Session, join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import captured
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests import modules
from tests.steps import models
from tests.steps.intercept import intercept

RANKS: Any = SimpleNamespace(process_indices=(0, 1))
ALONE: Any = SimpleNamespace(process_indices=(0,))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing was compiled or said so far, and what is compiled here, other tests do not know of."""
    steps._histories.clear()
    install._told.clear()
    refusals._out_of_step.clear()
    refusals._threads.clear()
    yield
    refusals._out_of_step.clear()
    refusals._threads.clear()


@pytest.fixture
def compiling_thread() -> Callable[[], None]:
    """Starts a thread that compiles for all processes and goes on; called again, it ends."""
    compiled, ended = threading.Event(), threading.Event()

    def train() -> None:
        may_be_run(RANKS)
        compiled.set()
        ended.wait(60)

    thread = threading.Thread(target=train, name="trains", daemon=True)

    def start_or_end() -> None:
        if not compiled.is_set():
            thread.start()
            assert compiled.wait(60)
        else:
            ended.set()
            thread.join()

    return start_or_end


def searched(step: models.Step, folder: Path, **settings: Any) -> object:
    """A step that is searched before it is called."""
    asked = Settings(search=True, directory=folder, **settings)
    return intercept(*step, lambda request: search_phase.handle(request, asked))


@pytest.fixture
def differing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are about to run different steps."""
    monkeypatch.setattr(refusals, "agree", lambda *_, **__: Agreement("", "rank 0: A; rank 1: B"))


@pytest.mark.usefixtures("differing")
def test_ranks_that_were_about_to_search_different_steps_wait_for_each_other_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []

    def counted(request: CompileRequest, settings: Settings) -> Session:
        joined.append(request.module_name)
        return join(request, settings)

    monkeypatch.setattr(search_phase, "join", counted)
    with pytest.raises(ActivationError, match="rank 0: A; rank 1: B; no other step is run on made-up inputs"):
        searched(models.mlp(), tmp_path)
    steps._histories.clear()
    assert searched(models.mlp(), tmp_path) is None
    assert len(joined) == 1


def test_a_step_compiled_beside_a_thread_that_may_run_another_is_not_searched_in_several_processes(
    compiling_thread: Callable[[], None],
) -> None:
    assert may_be_run(RANKS)
    refuse_other_threads(RANKS, threading.current_thread())
    compiling_thread()
    refuse_other_threads(ALONE, threading.current_thread())
    with pytest.raises(UnsupportedError, match=r"another thread \(trains\) may run another step"):
        refuse_other_threads(RANKS, threading.current_thread())
    compiling_thread()
    refuse_other_threads(RANKS, threading.current_thread())


@pytest.mark.usefixtures("differing")
def test_a_step_that_may_not_be_run_is_captured_without_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was run, and its all-reduces met those of the step that another thread trained."""
    monkeypatch.setattr(capture_phase, "profile_step", lambda *_, **__: pytest.fail("was run"))
    settings = Settings(search=False, directory=tmp_path / "plans")
    caplog.set_level(logging.INFO, "disco_hlo")
    intercept(*models.mlp(), lambda request: capture_phase.handle(request, settings, tmp_path / "step"))
    assert "captured without measured times: rank 0: A; rank 1: B" in caplog.text
    assert not (tmp_path / "step" / "profile.json").exists()
    assert (tmp_path / "step" / "default.hlo.pb.gz").exists()


@pytest.fixture
def debugging() -> Iterator[None]:
    jax.config.update("jax_debug_nans", True)
    yield
    jax.config.update("jax_debug_nans", False)


def test_a_profiler_under_way_is_noticed_before_anything_is_measured(tmp_path: Path) -> None:
    """Two modules were compiled and run before it was seen, and three lines said so."""
    said = r"jax.profiler.* under way.* start the trace after"
    jax.profiler.start_trace(str(tmp_path))
    try:
        with pytest.raises(UnsupportedError, match=said) as refused:
            searched(models.mlp(), tmp_path / "plans")
    finally:
        jax.profiler.stop_trace()
    assert is_shared(refused.value)
    assert not (tmp_path / "plans").exists()
    intercept(*models.mlp(), refuse_switched_on)


@pytest.mark.usefixtures("debugging")
def test_debug_nans_makes_another_step_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"jax_debug_nans is on, .* another step, .*JAX_DEBUG_NANS=0"):
        searched(models.mlp(), tmp_path)
    assert list(tmp_path.iterdir()) == []

    assert "there is no plan for it in" in (said := why_not_enacted(models.mlp(), tmp_path))
    assert "; jax_debug_nans is on, " in said


def test_a_script_without_jit_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """What JAX compiles then are single ops, and the way out was not named."""
    caplog.set_level("WARNING", "disco_hlo")
    assert compiles_no_step(leads=True) is False
    jax.config.update("jax_disable_jit", True)
    try:
        assert [compiles_no_step(leads) for leads in (False, True, True)] == [True] * 3
    finally:
        jax.config.update("jax_disable_jit", False)
    [line] = caplog.messages
    assert line.startswith("jax_disable_jit is on: ")
    assert line.endswith("switch it off (JAX_DISABLE_JIT=0)")


def why_not_enacted(step: models.Step, folder: Path) -> str:
    """What is said of a step that has no plan in ``folder``."""

    def reason(request: CompileRequest) -> str:
        session, found = join(request, Settings(search=False, directory=folder)), captured(request)
        assert found is not None
        slot = session.slot(found.source.graph.key)
        return enact_phase._propose(session, found, slot, None, contextlib.ExitStack()).reason

    said: str = intercept(*step, reason)
    return said


def asking() -> models.Step:
    """A step that uses what Python returns."""

    def loss(p: Any, x: Any) -> Any:
        answer = jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), jnp.float32), x.sum())
        return jnp.mean(jnp.tanh(x @ p["w"]) ** 2) + answer

    batch = (models.random(2, 8, 32),)
    return models.trained("asking_step", loss, {"w": models.random(0, 32, 32)}, batch, optax.sgd(0.1))


def test_a_step_that_waits_for_python_is_refused_before_it_is_profiled_and_searched(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="waits for Python"):
        searched(asking(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("called", "waits"),
    [
        ("told = () custom-call a target=xla_ffi_python_cpu_callback", False),
        ("told = f32[8] custom-call a target=xla_ffi_python_cpu_callback", True),
        ("told = token[] custom-call a target=xla_ffi_python_gpu_callback", True),
        ("told = (f32[8]) custom-call a target=xla_buffer_python_cpu_callback", True),
        ("told = f32[8] custom-call a target=other", False),
    ],
)
def test_what_waits_for_python_is_what_python_returns_something_to(called: str, waits: bool) -> None:
    inner = f"""
        a = f32[8] parameter
        {called}
        b = f32[8] negate a
    """
    module = modules.module("x = f32[8] parameter\nb = f32[8] call x calls=inner", {"inner": inner})
    assert waits_for_python(module) == waits


def test_a_step_whose_devices_decide_by_their_numbers_is_refused_before_it_is_run(tmp_path: Path) -> None:
    """On made-up inputs devices waited for each other, until XLA ended the job."""

    def local(x: Any) -> Any:
        total = jax.lax.pmean(jnp.tanh(x) @ jnp.ones((8, 8)), "data")
        first = jax.lax.axis_index("data") == 0
        return jax.lax.cond(first, lambda: total * jax.lax.pmean(x.sum(), "data"), lambda: total * 2) + x

    rows = PartitionSpec("data")
    step = jax.jit(jax.shard_map(local, mesh=models.mesh(), in_specs=rows, out_specs=rows, check_vma=False))
    said = r"a branch .* depends on the device's own number .*; decide by a value"
    with pytest.raises(UnsupportedError, match=said):
        searched((step, (models.random(0, 8, 8),)), tmp_path, module="local")
    assert list(tmp_path.iterdir()) == []


def test_who_enacts_a_step_that_waits_for_python_is_not_told_to_search_it(tmp_path: Path) -> None:
    assert why_not_enacted(asking(), tmp_path).endswith("; a step that waits for Python is not searched")
    assert why_not_enacted(models.printing(), tmp_path).endswith("; search first (ENABLE_SEARCH=1)")


@pytest.mark.parametrize("error", [OSError("Stale file handle"), RecursionError("nested too deeply")])
def test_whatever_keeps_rank_0_from_its_plan_the_others_are_told(error: Exception, tmp_path: Path) -> None:
    sent: list[bytes | None] = []

    def broadcast(payload: bytes | None, **_: object) -> bytes:
        sent.append(payload)
        return payload or b""

    class Unreadable:
        path = tmp_path

        def load(self) -> None:
            raise error

    def received(request: object) -> object:
        session, step = join(request, Settings(search=False, directory=tmp_path)), captured(request)
        channel = SimpleNamespace(rank=0, size=2, broadcast=broadcast)
        return enact_phase._receive(replace(session, channel=channel), step, Unreadable())

    plan, reason = intercept(*models.mlp(), received)
    assert (plan, reason) == (None, one_line(error))
    assert [unframe(payload or b"") for payload in sent] == [(None, reason)]


def test_a_plan_beside_is_of_another_step_for_every_reason_that_there_may_be() -> None:
    """A rate that equals another constant of the step makes another key, and the line said nothing of numbers alike;
    nor of x64 or a flag of XLA's, but of the number of devices, which all that are counted share."""
    graph = SimpleNamespace(module_name="jit_step", backend="cpu")
    step: Any = SimpleNamespace(source=SimpleNamespace(graph=graph), chosen="by its size")
    slot: Any = SimpleNamespace(beside=lambda _name: 2)
    session: Any = SimpleNamespace(facts=SimpleNamespace(device_count=2))
    assert enact_phase._others(session, step, slot) == (
        "; for jit_step 2 plans lie beside (disco list), but another batch size, type of numbers, number of processes, "
        "version or flag of XLA, or number that decides a loop, a branch or a slice or equals another of the step's "
        "takes a plan of its own"
    )
