"""What of JAX is intercepted: which compiles reach the handler, and what becomes of them."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.extend.xla
import numpy as np
import pytest
from jax._src import compiler
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.xla_client import AutotuneCacheMode

from disco_hlo.errors import ActivationError, UnsupportedError, shared
from disco_hlo.plugin.phases import training_phase
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest, Handler, requests
from tests.plugin.handled import handled, seen

Install = Callable[[Handler], None]


def test_jit_shard_map_and_pmap_all_reach_the_handler(install: Install) -> None:
    reached: list[tuple[str, int]] = []

    def handle(request: CompileRequest) -> None:
        reached.append((request.module_name, len(request.devices)))

    def by_jit(x: jax.Array) -> jax.Array:
        return x.sum()

    def by_shard_map(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "data")

    def by_pmap(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "data")

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    x = np.ones((4, 2), np.float32)
    mapped = jax.shard_map(by_shard_map, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    install(handle)
    assert float(jax.jit(by_jit, in_shardings=split)(x)) == 8.0
    assert jax.jit(mapped)(x).tolist() == [[4.0, 4.0]]
    assert jax.pmap(by_pmap, axis_name="data")(x).tolist() == [[4.0, 4.0]] * 4
    assert [devices for _, devices in reached if devices > 1] == [4, 4, 4]
    assert ("jit_by_jit", 4) in reached


def test_an_error_of_the_handler_is_one_line_and_training_goes_on(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(_: CompileRequest) -> LoadedExecutable:
        raise RuntimeError("no such luck")

    def unlucky(x: jax.Array) -> jax.Array:
        return x + 1

    x = np.float32(1.0)
    install(handle)
    with caplog.at_level(logging.WARNING, "disco_hlo"):
        assert float(jax.jit(unlucky)(x)) == 2.0
    assert caplog.messages == ["jit_unlucky runs as XLA compiles it: RuntimeError: no such luck"]


def test_a_compile_that_is_not_understood_is_left_to_jax(
    install: Install, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> CompileRequest:
        raise KeyError("sym_name")

    def nameless(x: jax.Array) -> jax.Array:
        return x + 1

    x = np.float32(1.0)
    monkeypatch.setattr(jaxlink.requests, "_request", unreadable)
    install(lambda request: None)
    with caplog.at_level(logging.WARNING, "disco_hlo"):
        assert float(jax.jit(nameless)(x)) == 2.0
    assert "a module runs as XLA compiles it: KeyError: 'sym_name'" in caplog.text


def test_compiles_made_by_the_handler_are_not_intercepted() -> None:
    asked: list[str] = []

    def handle(request: CompileRequest) -> None:
        asked.append(request.module_name)
        assert float(jax.jit(lambda x: x * 3)(2.0)) == 6.0
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(in_a_thread).result() == 10.0

    def in_a_thread() -> float:
        with jaxlink.ours():
            return float(jax.jit(lambda x: x * 5)(2.0))

    def nesting(x: jax.Array) -> jax.Array:
        return x + 1

    assert handled(handle, nesting, 1.0) == 2.0
    assert asked == ["jit_nesting"]


def test_what_stands_for_a_python_function_and_cannot_be_called_reaches_the_runtime_as_it_is() -> None:
    """On TPU JAX hands XLA a handle of the runtime's for each function; a wrapper of it is no handle."""
    handle, silent, told = object(), threading.Event(), []
    assert requests._unless(silent, handle) is handle
    wrapper = requests._unless(silent, lambda number: told.append(number) or (number,))
    assert wrapper(1) == (1,)
    silent.set()
    assert wrapper(2) == ()
    assert told == [1]


def test_the_default_is_compiled_once() -> None:
    assert seen(lambda request: request.call_default() is request.call_default(), lambda x: x + 1, 1.0)


def test_uninstalling_gives_jax_its_own_function_back(install: Install) -> None:
    own = compiler.compile_or_get_cached
    install(lambda request: None)
    install(lambda request: None)
    assert compiler.compile_or_get_cached is not own
    jaxlink.uninstall()
    assert compiler.compile_or_get_cached is own


@pytest.mark.parametrize(
    ("module", "name", "instead", "said"),
    [
        (compiler, "compile_or_get_cached", None, "jax._src.compiler.compile_or_get_cached is missing"),
        (compiler, "backend_compile_and_load", None, "jax._src.compiler.backend_compile_and_load is missing"),
        (
            compiler, "compile_or_get_cached", lambda backend, computation, devices: None,
            "takes no compile_options, executable_devices, host_callbacks",
        ),
        (jax.extend.xla, "register_hlo_module_transformation", None, "transformation is missing"),
    ],
)  # fmt: skip
def test_a_jax_that_compiles_otherwise_is_unsupported(
    module: Any, name: str, instead: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(module, name)
    if instead is not None:
        monkeypatch.setattr(module, name, instead, raising=False)
    with pytest.raises(UnsupportedError, match=said):
        jaxlink.install(lambda request: None)


# --- what the autotuner picks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("users", "writable", "expected"),
    [
        (("", "UPDATE"), True, ("ours", "UPDATE")),
        (("", "UPDATE"), False, ("ours", "READ")),
        (("users", "UPDATE"), True, ("users", "UPDATE")),
        (("users", "READ"), True, ("ours", "UPDATE")),
    ],
)
def test_our_compiles_keep_what_the_autotuner_picks(
    users: tuple[str, str],
    writable: bool,
    expected: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it five starts of VGG19 in two processes were four modules: a plan for one is none for the next. JAX's
    own cache lets the first rank alone write; XLA has each rank tune a share, so what the others picked was lost."""
    compiler, kept = jaxlink.compiler_module(), []
    compile_and_load = compiler.backend_compile_and_load

    @functools.wraps(compile_and_load)
    def noting(**all_of_it: Any) -> Any:
        build = all_of_it["options"].executable_build_options
        debug = build.debug_options
        mode = debug.xla_gpu_experimental_autotune_cache_mode
        kept.append((debug.xla_gpu_per_fusion_autotune_cache_dir, mode.name))
        return compile_and_load(**all_of_it)

    def handle(request: CompileRequest) -> None:
        build = request.options.executable_build_options
        debug = build.debug_options
        debug.xla_gpu_per_fusion_autotune_cache_dir = users[0]
        debug.xla_gpu_experimental_autotune_cache_mode = getattr(AutotuneCacheMode, users[1])
        request.tuner_results = tmp_path
        monkeypatch.setattr(jaxlink.requests.os, "access", lambda path, mode: writable)
        monkeypatch.setattr(compiler, "backend_compile_and_load", noting)
        compiles.capture(request)
        monkeypatch.undo()

    assert handled(handle, lambda x: -x, 1.0) == -1.0
    assert kept == [(str(tmp_path) if expected[0] == "ours" else expected[0], expected[1])]


def test_jaxs_own_compile_of_a_step_that_trains_keeps_what_the_autotuner_picks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """XLA tunes once in a process: what that compile did not keep, the next job tuned anew, perhaps otherwise."""
    kept: list[str] = []
    compile_and_load = compiler.backend_compile_and_load

    @functools.wraps(compile_and_load)
    def noting(*given: Any, **named: Any) -> Any:
        options = inspect.signature(compile_and_load).bind(*given, **named).arguments["options"]
        kept.append(options.executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir)
        return compile_and_load(*given, **named)

    def handle(request: CompileRequest) -> None:
        request.tuner_results = tmp_path
        training_phase.handle(request, Settings(search=True, directory=tmp_path, when="training"))

    monkeypatch.setattr(compiler, "backend_compile_and_load", noting)
    assert handled(handle, lambda x: -x, 1.0) == -1.0
    assert kept == [str(tmp_path)]


class _Rank:
    """What a compile request says of the process that it is of."""

    module_name = "jit_step"
    process_indices = (0, 1)

    def __init__(self, rank: int) -> None:
        self.backend = self
        self.process_index = lambda: rank


@pytest.mark.parametrize(
    ("error", "speakers"),
    [
        (shared(ActivationError("the ranks differ")), [0]),
        (shared(MemoryError("no room here")), [0]),
        (ActivationError("rank 0 of 2 did not answer"), [0, 1]),
    ],
)
def test_where_all_ranks_know_why_rank_0_speaks(
    error: Exception, speakers: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Each of a hundred ranks said the same."""
    caplog.set_level(logging.WARNING, "disco_hlo")

    def fail(_: CompileRequest) -> None:
        raise error

    for rank in (0, 1):
        before = len(caplog.messages)
        assert jaxlink.requests._ask(fail, _Rank(rank)) is None  # type: ignore[arg-type]
        assert len(caplog.messages) - before == (rank in speakers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_a_large_constant_counts_in_the_digest_of_a_compile_and_is_not_written_down(
    install: Install, dtype: str
) -> None:
    """A step that closes over a table of 100 MiB came a second later, as the digest was of the module's text."""
    table = np.asarray((np.arange(6000) % 7).astype(np.dtype(dtype)))
    other = table.copy()
    other[5] = 0
    asked: list[CompileRequest] = []

    def compile_with(values: Any) -> None:
        def closing_over(x: jax.Array) -> jax.Array:
            return x + jax.numpy.asarray(values)[::2]

        jax.jit(closing_over).lower(np.zeros(3000, table.dtype)).compile()

    install(asked.append)
    for values in (table, table, other):
        compile_with(values)
    digests = [one.digest for one in asked if one.module_name == "jit_closing_over"]
    assert len(digests) == 3
    assert digests[0] == digests[1] != digests[2]
    if dtype in ("float32", "bfloat16", "int8"):
        text, numbers = requests._told_apart(asked[-1].mlir_module)
        assert "__elided__" in text
        assert len(numbers) == 1
