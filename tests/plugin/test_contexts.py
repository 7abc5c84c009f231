"""What the user's code has set for its thread: off while we handle a compile, and on again afterwards as before."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler, config
from jax._src import mesh as jax_mesh
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType

from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin.measuring import tolerances
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.tolerances import Allowed
from disco_hlo.plugin.phases import enact_phase
from disco_hlo.plugin.refusals import switched_on
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest, Handler, contexts
from disco_hlo.plugin.xla.jaxlink.contexts import context_of_thread, entered
from disco_hlo.plugin.xla.own_programs import on_each_device
from tests.plugin.handled import handled, save_plan, seen
from tests.steps import models
from tests.steps.intercept import intercepted

pytestmark = pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
Context = Callable[[], contextlib.AbstractContextManager[Any]]


def explicit_mesh() -> Any:
    return jax.make_mesh((2,), ("x",), (AxisType.Explicit,))


CONTEXTS: dict[str, Context] = {
    "set_mesh": lambda: jax.set_mesh(explicit_mesh()),
    "with mesh": models.mesh,
    "use_abstract_mesh": lambda: jax.sharding.use_abstract_mesh(explicit_mesh().abstract_mesh),
    "default_device": lambda: jax.default_device(jax.devices()[3]),
    "default_matmul_precision": lambda: jax.default_matmul_precision("bfloat16"),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "enable_x64": lambda: jax.enable_x64(True),
    "disable_jit": jax.disable_jit,
    "transfer_guard": lambda: jax.transfer_guard("disallow_explicit"),
    "log_compiles": jax.log_compiles,
    "default_prng_impl": lambda: jax.default_prng_impl("rbg"),
    "checking_leaks": jax.checking_leaks,
    "thread_guard": lambda: config.thread_guard(True),
    "set_xla_metadata": lambda: set_xla_metadata(theirs="1"),
    "named_scope": lambda: jax.named_scope("theirs"),
    "numpy's errstate": lambda: np.errstate(all="raise"),
}


def handled_under(context: Context, body: Callable[[CompileRequest], Any]) -> Any:
    """What ``body`` returns of the request of a step that is compiled under ``context``."""
    step, arguments = models.mlp()
    lowered = step.lower(*arguments)
    with context():
        before = context_of_thread()
        found = intercepted(lowered, lambda request: len(request.devices) == models.DEVICES, body)
        assert context_of_thread() == before
    return found


def plus_one(values: Any) -> tuple[Any]:
    return (values + 1,)


def work(request: CompileRequest) -> tuple[Any, ...]:
    """Work of ours of each kind: eager ops, programs on each device, runs of the step and their comparison."""
    outputs = Runner(request, request.call_default(), seed=3).output_arrays()
    first = next(one for one in outputs if one[0].shape == (48, 48))
    allowed = Allowed(first, None, on_devices=True)
    [wrong] = on_each_device(request.local_devices, plus_one, (), first)
    eager = jnp.arange(3) * jnp.float32(1.5) + np.ones((2, 1))
    overflows = np.float32(1e38) * np.float32([1e38])
    own = context_of_thread()
    others = {one.name for one in own.values}.difference(contexts._STAYS)  # tracing leaves its own
    return (
        allowed.unlike(first), allowed.unlike(wrong), first[0].reshape(-1)[np.arange(2)].tolist(), eager.tolist(),
        str(eager.dtype), [one.id for one in eager.devices()], str(jax.random.key(0).dtype), overflows.tolist(),
        others, len(own.meshes),
    )  # fmt: skip


@functools.cache
def without() -> tuple[Any, ...]:
    return handled_under(contextlib.nullcontext, work)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", CONTEXTS)
def test_what_we_do_while_a_step_is_compiled_does_not_depend_on_what_its_thread_has_set(name: str) -> None:
    found = handled_under(CONTEXTS[name], work)
    assert found == without()
    assert found[0] == (0, "")
    assert found[1][1].startswith("by 1, where roundings make ")


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_a_thread_has_set_is_there_again_after_an_error_of_ours(name: str) -> None:
    def fail(_: CompileRequest) -> None:
        with jaxlink.ours():
            raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        handled_under(CONTEXTS[name], fail)
    with CONTEXTS[name](), contextlib.suppress(KeyboardInterrupt):
        before, errors = context_of_thread(), np.geterr()
        try:
            with jaxlink.ours():
                raise KeyboardInterrupt
        finally:
            assert (context_of_thread(), np.geterr()) == (before, errors)
    assert context_of_thread().meshes == (jax_mesh.EMPTY_ENV,)


def test_a_plan_of_a_training_under_a_mesh_is_compared_and_enacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compared: list[str] = []

    def unlike(allowed: Allowed, got: Any) -> tuple[int, str]:
        compared.append(type(got[0]).__name__)
        return found_unlike(allowed, got)

    def handle(request: CompileRequest) -> LoadedExecutable | None:
        if request.module_name != "jit_mlp_step":
            return None
        save_plan(request, settings, jax="0.0.1")  # under another it was not compared
        return enact_phase.handle(request, settings)

    found_unlike, settings = Allowed.unlike, Settings(search=False, directory=tmp_path)
    monkeypatch.setattr(Allowed, "unlike", unlike)
    monkeypatch.setattr(tolerances, "_ON_DEVICES", 2)  # as large outputs
    monkeypatch.setattr(models, "mesh", lambda: jax.make_mesh((2,), ("data",), (AxisType.Explicit,)))
    caplog.set_level(logging.INFO, "disco_hlo")
    with jax.set_mesh(models.mesh()):
        step, arguments = models.mlp(donate=False)
        expected = float(step(*arguments)[-1])
        jax.clear_caches()
        jaxlink.install(handle)
        try:
            assert float(step(*arguments)[-1]) == pytest.approx(expected)
        finally:
            jaxlink.uninstall()
    assert compared.count("ArrayImpl") > 6, caplog.text
    assert "enacts the plan of jit_mlp_step" in caplog.text


def test_a_guard_that_the_user_set_on_all_threads_is_off() -> None:
    before = jax.config.jax_transfer_guard
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        with jaxlink.ours():
            made = jax.numpy.ones(3).tolist()
    finally:
        jax.config.update("jax_transfer_guard", before)
    assert made == [1, 1, 1]


def test_a_mesh_that_is_left_after_a_compile_is_left_as_ever() -> None:
    mesh = models.mesh()
    with mesh:
        assert seen(lambda _: jax_mesh.thread_resources.env.physical_mesh.empty, lambda x: x + 1, 1.0)
        assert jax_mesh.thread_resources.env.physical_mesh == mesh
    assert jax_mesh.thread_resources.env.physical_mesh.empty


def test_nothing_is_traced_where_a_script_compiles_while_it_traces() -> None:
    def inner(x: Any) -> Any:
        return x * 2

    def look(_: CompileRequest) -> list[float]:
        return (jnp.ones(2) + 1).tolist()  # type: ignore[no-any-return]

    found: list[list[float]] = []

    def outer(x: Any) -> Any:
        found.append(seen(look, inner, np.float32(1)))
        return x + 1

    assert float(jax.jit(outer)(1.0)) == 2.0
    assert found == [[2.0, 2.0]]


def switches() -> tuple[Any, ...]:
    """What a compile of JAX's asks, and what the functions do that partition ops within it."""
    mesh = jax_mesh.thread_resources.env.physical_mesh
    return (
        jax.sharding.get_mesh(), mesh, jax.config.jax_enable_compilation_cache,
        jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision,
    )  # fmt: skip


def compile_anew(request: CompileRequest) -> LoadedExecutable:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(compiles.compile_module, request, None).result()


@pytest.mark.parametrize(
    ("function", "handler"),
    [
        ("compile_or_get_cached", CompileRequest.call_default),
        ("compile_or_get_cached", lambda _: None),
        ("backend_compile_and_load", compile_anew),
    ],
    ids=["XLA's default for us", "XLA's default", "a plan"],
)
def test_the_users_module_is_compiled_by_what_its_thread_has_set(
    function: str, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX asks there whether to keep the executable, and where."""
    original, noted = getattr(compiler, function), []

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        noted.append(switches())
        return original(*args, **kwargs)

    monkeypatch.setattr(compiler, function, noting)
    with (
        jax.set_mesh(explicit_mesh()), models.mesh(), config.enable_compilation_cache(False),
        jax.enable_x64(True), jax.default_matmul_precision("float32"),
    ):  # fmt: skip
        expected = switches()
        assert float(handled(handler, lambda x: x + 1, np.float32(1))) == 2.0
        assert noted == [expected]


def test_what_another_thread_had_set_holds_where_its_step_is_compiled_but_for_its_guards() -> None:
    with jax.transfer_guard("disallow"), jax.enable_x64(True), models.mesh():
        users = context_of_thread().to_enter()

    def look() -> None:
        for context in (contextlib.nullcontext(), entered(users), contextlib.nullcontext()):
            with jaxlink.ours(), context:
                mesh = jax_mesh.thread_resources.env.physical_mesh
                guard = jax.config.jax_transfer_guard_host_to_device
                found.append((jax.config.jax_enable_x64, guard, mesh.empty))

    found: list[tuple[Any, ...]] = []
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(False, "allow", True), (True, "allow", False), (False, "allow", True)]


def test_a_step_of_64_bits_that_its_thread_alone_allows_runs_on_made_up_inputs() -> None:
    """They were made with 32 bits, so the step took none of them, and was not searched."""

    def runs(request: CompileRequest) -> list[str]:
        runner = Runner(request, request.call_default(), seed=3)
        return [str(one[0].dtype) for _ in range(2) for one in runner.output_arrays()]

    with jax.enable_x64(True):
        lowered = jax.jit(lambda x, i: (x * 2, i + 1), donate_argnums=(0,)).lower(
            jnp.ones((64, 64), jnp.float64), jnp.ones(4, jnp.int64)
        )
        found = intercepted(lowered, lambda _: True, runs)
    assert found == ["float64", "int64"] * 2


def test_a_switch_of_this_thread_alone_makes_another_step_too() -> None:
    assert seen(switched_on, lambda x: x + 1, 1.0) == ""
    with jax.debug_nans(True):
        assert "jax_debug_nans is on" in seen(switched_on, lambda x: x + 1, 1.0)


# --- another jax ----------------------------------------------------------------------------------------

NO_CONTEXTS = (
    "post_hook",  # follows debug_nans and debug_infs
    "mlir_thread_local_context",  # kept to be used again
    "pallas_",  # while a kernel is traced
)
NO_LOCALS = {
    "thread_resources",  # see ``contexts``
    "_source_info_context",  # names of ops
    "runtime_tokens",  # of what was dispatched
    "_error_storage",  # of checks within a program
    "_pallas_tracing_env", "_sp_env",  # while a kernel is traced
}  # fmt: skip


def test_all_that_jax_keeps_by_thread_is_known() -> None:
    """One that is new to us would hold for our work, too."""
    everything = [one for name, one in list(sys.modules.items()) if name.partition(".")[0] == "jax" and one]
    modules = [one for one in everything if not one.__name__.startswith("jax._src.test_")]
    named = [(f"{one.__name__}.{name}", value) for one in modules for name, value in list(vars(one).items())]
    known = {*config.config_states.values(), *contexts._without_options()}
    others = {
        f"{where} ({value.name})" for where, value in named
        if isinstance(value, config.config_ext.Config) and value not in known
        and not value.name.startswith(NO_CONTEXTS)
    }  # fmt: skip
    others |= {
        where for where, value in named
        if isinstance(value, threading.local) and where.rpartition(".")[2] not in NO_LOCALS
    }  # fmt: skip
    assert not others, (
        f"jax {jax.__version__} keeps {sorted(others)} for each thread: have disco_hlo/plugin/xla/jaxlink/contexts.py "
        "clear it, or name it here if it is no context"
    )


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [(jax_mesh, "thread_resources", "thread_resources"), (config, "config_states", "config_states")],
)
def test_a_jax_that_keeps_them_elsewhere_is_unsupported(
    module: Any, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(module, name)
    with pytest.raises(UnsupportedError, match=f"what threads set lies elsewhere, without .*{said}"):
        jaxlink.install(lambda request: None)


def test_a_jax_without_a_mesh_among_its_settings_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "_without_options", lambda: (SimpleNamespace(name="trace_state"),))
    with pytest.raises(UnsupportedError, match="without abstract_mesh_context_manager, device_context"):
        jaxlink.install(lambda request: None)
