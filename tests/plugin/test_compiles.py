"""Compiles of our own: what they capture, and that XLA runs the module that it is given."""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.errors import IllegalStrategyError, UnsupportedError
from disco_hlo.hlo import proto
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.xla import compiles, executables, hook, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest, Handler
from tests.steps.opcodes import opcodes

CompileWith = Callable[[str, Handler], list[CompileRequest]]
Install = Callable[[Handler], None]


def exchanging(old: str, new: str) -> Handler:
    return lambda request: compiles.compile_module(
        request, exchange_opcode(compiles.capture(request), old, new)
    )


# --- capture --------------------------------------------------------------------------------------


def test_capture_gives_the_scheduled_module_and_the_same_bytes_each_time(compile_with: CompileWith) -> None:
    captured: list[bytes] = []

    def handle(request: CompileRequest) -> None:
        captured.extend(compiles.capture(request) for _ in range(3))

    def capture_twice(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) @ x

    compile_with("capture_twice", handle)
    jax.jit(capture_twice)(jnp.ones((8, 8)))
    first = proto.parse(captured[0])
    assert first.name == "jit_capture_twice"
    assert len(first.schedule.sequences) >= 1
    assert "tanh" in opcodes(captured[0])
    assert captured[1] == captured[0]
    assert captured[2] == captured[0]


def test_capture_sees_the_module_of_a_full_compile(compile_with: CompileWith) -> None:
    seen: list[list[str]] = []

    def handle(request: CompileRequest) -> LoadedExecutable:
        executable = compiles.compile_module(request, None)
        seen.append(opcodes(compiles.capture(request)))
        seen.append(opcodes(executables.read_executable(executable)))
        return executable

    def capture_full(x: jax.Array) -> jax.Array:
        return jnp.exp(x).sum()

    compile_with("capture_full", handle)
    jax.jit(capture_full)(jnp.ones((64, 64)))
    assert sorted(seen[0]) == sorted(seen[1])


def test_capture_passes_on_what_xla_says_of_the_users_module(compile_with: CompileWith) -> None:
    raised: list[str] = []

    def handle(request: CompileRequest) -> None:
        try:
            compiles.capture(request)
        except jax.errors.JaxRuntimeError as error:
            raised.append(str(error))

    def unknown_target(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("disco_no_such_target", jax.ShapeDtypeStruct((2,), np.float32))(x)

    compile_with("unknown_target", handle)
    with pytest.raises(jax.errors.JaxRuntimeError, match="disco_no_such_target"):
        jax.jit(unknown_target)(jnp.ones(2))
    assert all("disco_no_such_target" in text for text in raised)


# --- enactment ------------------------------------------------------------------------------------


def test_xla_executes_the_module_it_is_given(compile_with: CompileWith) -> None:
    ran: list[list[str]] = []

    def handle(request: CompileRequest) -> LoadedExecutable:
        executable = exchanging("negate", "cosine")(request)
        ran.append(opcodes(executables.read_executable(executable)))
        return executable

    def enact_cosine(x: jax.Array) -> jax.Array:
        return -x

    compile_with("enact_cosine", handle)
    np.testing.assert_array_equal(jax.jit(enact_cosine)(jnp.zeros(4)), np.ones(4, np.float32))
    assert "cosine" in ran[0]
    assert "negate" not in ran[0]


def test_a_module_is_seen_and_replaced_within_one_compile(
    compile_with: CompileWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enactment compiled twice: on GPU a start took XLA's passes and autotuning twice as well."""
    compile_past_cache, compiled = compiles.compile_past_cache, []
    monkeypatch.setattr(
        compiles, "compile_past_cache", lambda *args: compiled.append(1) or compile_past_cache(*args)
    )

    def handle(request: CompileRequest) -> LoadedExecutable:
        with compiles.halted(request) as waiting:
            module = waiting.module()
            assert waiting.module() == module
            return waiting.finish(exchange_opcode(module, "negate", "cosine"))

    def seen_and_replaced(x: jax.Array) -> jax.Array:
        return -x

    compile_with("seen_and_replaced", handle)
    assert float(jax.jit(seen_and_replaced)(0.0)) == 1.0
    assert len(compiled) == 1


def test_a_compile_that_nobody_answers_ends_with_its_block(compile_with: CompileWith) -> None:
    captured: list[bool] = []

    def handle(request: CompileRequest) -> None:
        with compiles.halted(request) as waiting:
            module = waiting.module()
        with compiles.halted(request):
            pass  # not begun
        captured.append(module == compiles.capture(request))

    def unanswered(x: jax.Array) -> jax.Array:
        return -x

    compile_with("unanswered", handle)
    assert float(jax.jit(unanswered)(1.0)) == -1.0
    assert captured == [True]


def test_a_waiting_compile_goes_on_with_xlas_module(compile_with: CompileWith) -> None:
    """A step without a plan, or whose plan is XLA's default, was compiled twice."""
    found: list[list[str]] = []

    def handle(request: CompileRequest) -> LoadedExecutable | None:
        with compiles.halted(request) as waiting:
            assert waiting.go_on() is None  # not begun
            module = waiting.module()
            executable = waiting.go_on()
            found.extend([opcodes(module), opcodes(executables.read_executable(executable))])
            assert waiting.go_on() is None  # over
            return executable

    def gone_on_with(x: jax.Array) -> jax.Array:
        return -x

    compile_with("gone_on_with", handle)
    assert float(jax.jit(gone_on_with)(1.0)) == -1.0
    assert found[0] == found[1]


def test_a_waiting_compile_says_what_xla_refuses(compile_with: CompileWith) -> None:
    refused: list[str] = []

    def handle(request: CompileRequest) -> None:
        with compiles.halted(request) as waiting:
            waiting.module()
            with pytest.raises(IllegalStrategyError) as error:
                waiting.finish(b"no module")
            refused.append(str(error.value))

    def given_nonsense(x: jax.Array) -> jax.Array:
        return -x

    compile_with("given_nonsense", handle)
    assert float(jax.jit(given_nonsense)(1.0)) == -1.0
    assert refused
    assert refused[0].startswith("XLA refused the rewritten jit_given_nonsense: ")


def test_a_sharded_step_with_an_all_reduce_executes_the_module_it_is_given(compile_with: CompileWith) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, PartitionSpec("data")))

    def enact_sharded(x: jax.Array) -> jax.Array:
        return jnp.negative(x).sum()

    requests = compile_with("enact_sharded", exchanging("negate", "abs"))
    assert float(jax.jit(enact_sharded)(x)) == 28.0
    assert len(requests[0].devices) == 4
    assert requests[0].local_devices == requests[0].devices
    assert requests[0].process_indices == (0,)


def test_donation_is_kept_from_jax_0_11_on(compile_with: CompileWith) -> None:
    aliased: list[int] = []

    def handle(request: CompileRequest) -> LoadedExecutable:
        executable = exchanging("negate", "abs")(request)
        aliased.append(executable.get_compiled_memory_stats().alias_size_in_bytes)
        return executable

    def enact_donated(x: jax.Array) -> jax.Array:
        return -x

    compile_with("enact_donated", handle)
    x = jax.device_put(np.full(16, -2, np.float32), jax.devices()[0])
    np.testing.assert_array_equal(jax.jit(enact_donated, donate_argnums=0)(x), np.full(16, 2, np.float32))
    assert aliased == ([64] if jaxlink.keeps_donation() else [0])
    assert x.is_deleted() == jaxlink.keeps_donation()
    assert jaxlink.keeps_donation() == (jax.__version_info__ >= (0, 11))


def test_extra_options_are_for_that_compile_alone(compile_with: CompileWith) -> None:
    overrides: list[Any] = []

    def handle(request: CompileRequest) -> LoadedExecutable:
        before = list(request.options.env_option_overrides)
        with pytest.raises(jax.errors.JaxRuntimeError, match="disco_no_such_option"):
            compiles.compile_module(request, None, {"disco_no_such_option": "1"})
        overrides.extend([before, list(request.options.env_option_overrides)])
        return compiles.compile_module(request, None, {"xla_cpu_enable_fast_math": False})

    def with_options(x: jax.Array) -> jax.Array:
        return x + 1

    compile_with("with_options", handle)
    step = jax.jit(with_options, compiler_options={"xla_cpu_enable_fast_min_max": False})
    assert float(step(1.0)) == 2.0
    assert overrides[0] == overrides[1] == [("xla_cpu_enable_fast_min_max", False)]


def test_a_module_xla_refuses_is_an_illegal_strategy_and_training_goes_on(
    compile_with: CompileWith, caplog: pytest.LogCaptureFixture
) -> None:
    raised: list[Exception] = []

    def handle(request: CompileRequest) -> LoadedExecutable:
        module = compiles.capture(request)
        for refused in (
            exchange_opcode(module, "negate", "add"),
            b"not a module",
            module[: len(module) // 2],
        ):
            with pytest.raises(IllegalStrategyError) as error:
                compiles.compile_module(request, refused)
            raised.append(error.value)
        raise raised[0]

    def refused_step(x: jax.Array) -> jax.Array:
        return -x

    compile_with("refused_step", handle)
    with caplog.at_level(logging.WARNING, "disco_hlo"):
        assert float(jax.jit(refused_step)(2.0)) == -2.0
    assert len(raised) == 3
    assert all("jit_refused_step" in str(error) for error in raised)
    assert len(caplog.records) == 1
    assert "jit_refused_step runs as XLA compiles it" in caplog.records[0].getMessage()


def test_a_hook_that_is_never_called_is_reported(
    compile_with: CompileWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[str] = []
    monkeypatch.setattr(hook, "module_name", lambda module: "someone else's")

    def handle(request: CompileRequest) -> None:
        for attempt in (compiles.capture, lambda request: compiles.compile_module(request, b""), wait_for):
            with pytest.raises(UnsupportedError) as error:
                attempt(request)
            raised.append(str(error.value))

    def wait_for(request: CompileRequest) -> bytes:
        with compiles.halted(request) as waiting:
            return waiting.module()

    def silent_hook(x: jax.Array) -> jax.Array:
        return x + 1

    compile_with("silent_hook", handle)
    assert float(jax.jit(silent_hook)(1.0)) == 2.0
    assert len(raised) == 3
    assert all("did not call the HLO hook while compiling jit_silent_hook" in text for text in raised)


def test_an_interrupt_inside_the_hook_stays_an_interrupt(
    compile_with: CompileWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting(hook.OwnCompile):
        @property
        def replacement(self) -> bytes:
            raise KeyboardInterrupt

        @replacement.setter
        def replacement(self, value: bytes | None) -> None:
            pass

    def handle(request: CompileRequest) -> LoadedExecutable:
        monkeypatch.setattr(compiles, "OwnCompile", Interrupting)
        return compiles.compile_module(request, b"")

    def interrupted(x: jax.Array) -> jax.Array:
        return -x

    compile_with("interrupted", handle)
    with pytest.raises(KeyboardInterrupt):
        jax.jit(interrupted)(1.0)
    monkeypatch.undo()
    jaxlink.uninstall()
    assert float(jax.jit(interrupted)(1.0)) == -1.0


def test_threads_compiling_modules_of_one_name_get_their_own(install: Install) -> None:
    started = threading.Barrier(4)
    results: dict[str, float] = {}

    def handle(request: CompileRequest) -> LoadedExecutable | None:
        if request.module_name != "jit_same_name":
            return None
        started.wait()
        module = compiles.capture(request)
        for old, new in (("sine", "cosine"), ("tanh", "exponential")):
            if old in opcodes(module):
                return compiles.compile_module(request, exchange_opcode(module, old, new))
        return None

    def run(label: str, function: Callable[[jax.Array], jax.Array]) -> None:
        def same_name(x: jax.Array) -> jax.Array:
            return function(x)

        results[label] = float(jax.jit(same_name)(np.float32(0.0)))

    install(handle)
    functions: dict[str, Callable[[Any], Any]] = {
        "sine": jnp.sin,
        "tanh": lambda x: 2 * jnp.tanh(x),
        "negate": lambda x: 5 - x,
        "add": lambda x: x + 7,
    }
    threads = [threading.Thread(target=run, args=item) for item in functions.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"sine": 1.0, "tanh": 2.0, "negate": 5.0, "add": 7.0}


# --- what XLA:GPU does behind the hook ---------------------------------------------------------------


def test_a_module_of_ours_is_compiled_without_rematerialization_on_gpu(
    compile_with: CompileWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the hook, moves and repeats ops, and nothing checks the buffers then. What the user turned off,
    and what this compile turns off, stays off."""
    found: list[object] = []
    compile_past_cache = compiles.compile_past_cache

    def noting(request: CompileRequest, module: object, extra: Mapping[str, Any]) -> LoadedExecutable:
        found.append(extra.get("xla_disable_hlo_passes"))
        return compile_past_cache(request, module, extra)

    def handle(request: CompileRequest) -> LoadedExecutable:
        module = compiles.capture(request)
        compiles.compile_module(request, module)
        monkeypatch.setattr(compiles, "_rematerializes", lambda _: True)
        compiles.compile_module(request, None, {"xla_cpu_enable_fast_math": False})
        compiles.compile_module(request, module)
        options = copy.deepcopy(request.options)
        options.executable_build_options.debug_options.xla_disable_hlo_passes = "algsimp"
        flagged = dataclasses.replace(request, options=options)
        return compiles.compile_module(flagged, module, {"xla_disable_hlo_passes": "dce"})

    def kept_as_it_is(x: jax.Array) -> jax.Array:
        return -x

    compile_with("kept_as_it_is", handle)
    monkeypatch.setattr(compiles, "compile_past_cache", noting)
    step = jax.jit(kept_as_it_is, compiler_options={"xla_disable_hlo_passes": "cse"})
    assert float(step(1.0)) == -1.0
    assert found == [None, None, None, "cse,rematerialization", "algsimp,cse,dce,rematerialization"]


def test_rematerialization_is_for_gpus_alone() -> None:
    backends = [SimpleNamespace(backend=SimpleNamespace(platform=name)) for name in ("cpu", "gpu", "cuda")]
    assert [compiles._rematerializes(one) for one in backends] == [False, True, True]


@pytest.mark.parametrize(("mark", "compiled_anew"), [(b"", 0), (b"add.3.remat", 1), (b"copy-start", 1)])
def test_a_waiting_compile_that_rematerialized_is_made_anew_without(
    mark: bytes, compiled_anew: int, compile_with: CompileWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began with the user's options, as it may go on with XLA's module."""
    anew: list[bytes | None] = []
    compile_module, read_executable = compiles.compile_module, compiles.read_executable

    def again(request: CompileRequest, module: bytes | None) -> LoadedExecutable:
        anew.append(module)
        return compile_module(request, module)

    def handle(request: CompileRequest) -> LoadedExecutable:
        monkeypatch.setattr(compiles, "_rematerializes", lambda _: True)
        monkeypatch.setattr(compiles, "compile_module", again)
        monkeypatch.setattr(compiles, "read_executable", lambda one: read_executable(one) + mark)
        with compiles.halted(request) as waiting:
            return waiting.finish(exchange_opcode(waiting.module(), "negate", "cosine"))

    def remade(x: jax.Array) -> jax.Array:
        return -x

    compile_with("remade", handle)
    assert float(jax.jit(remade)(0.0)) == 1.0
    assert len(anew) == compiled_anew


def test_an_executable_that_shows_no_module_counts_as_rematerialized() -> None:
    silent = SimpleNamespace(hlo_modules=list)
    assert compiles.is_rematerialized(b"", silent)


# --- the persistent compilation cache -------------------------------------------------------------


def test_with_the_persistent_cache_on_each_run_executes_what_it_asked_for(
    compile_with: CompileWith, tmp_path: Path
) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    def cached_step(x: jax.Array) -> jax.Array:
        return -x

    settings = {
        "jax_compilation_cache_dir": "",
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    handlers: dict[str, tuple[Handler, float]] = {
        "unset": (lambda request: None, -4.0),
        "search": (exchanging("negate", "sqrt"), 2.0),
        "enact": (exchanging("negate", "abs"), 4.0),
    }
    try:
        for number, order in enumerate(permutations(handlers)):
            directory = tmp_path / str(number)
            for name, value in {**settings, "jax_compilation_cache_dir": str(directory)}.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            for phase in (*order, *order):
                handler, expected = handlers[phase]
                compile_with("cached_step", handler)
                jax.clear_caches()
                assert float(jax.jit(cached_step)(np.float32(4.0))) == expected, (order, phase)
            assert [path.name for path in directory.iterdir() if path.name.startswith("jit_cached_step")]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
