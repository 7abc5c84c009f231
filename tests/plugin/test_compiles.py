"""Compiles of our own: what they capture, and that XLA goes on with the module it is given, at either stage."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import UnsupportedError, XlaRefusalError
from disco_hlo.hlo import proto
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.xla import compiles, executables, hook, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest, Handler
from tests.plugin.handled import handled, seen
from tests.steps.intercept import intercept
from tests.steps.opcodes import opcodes

Install = Callable[[Handler], None]
REMATERIALIZING = dataclasses.replace(BACKENDS["cpu"], rematerializes=True)


def exchanging(old: str, new: str) -> Handler:
    return lambda request: compiles.compile_module(
        request, exchange_opcode(compiles.capture(request), old, new)
    )


# --- capture --------------------------------------------------------------------------------------


def test_capture_gives_the_scheduled_module_and_the_same_bytes_each_time() -> None:
    def captured(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) @ x

    first, *others = seen(lambda r: [compiles.capture(r) for _ in range(3)], captured, np.ones((8, 8)))
    module = proto.parse(first)
    assert module.name == "jit_captured"
    assert len(module.schedule.sequences) >= 1
    assert "tanh" in opcodes(first)
    assert others == [first, first]


def test_capture_passes_on_what_xla_says_of_the_users_module() -> None:
    def unknown_target(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("disco_no_such_target", jax.ShapeDtypeStruct((2,), np.float32))(x)

    for look in (compiles.capture, lambda _: None):
        with pytest.raises(jax.errors.JaxRuntimeError, match="disco_no_such_target"):
            seen(look, unknown_target, np.ones(2, np.float32))


# --- enactment ------------------------------------------------------------------------------------


def test_xla_executes_the_module_it_is_given() -> None:
    executable: list[LoadedExecutable] = []

    def enact(request: CompileRequest) -> LoadedExecutable:
        executable.append(exchanging("negate", "cosine")(request))
        return executable[0]

    np.testing.assert_array_equal(handled(enact, jnp.negative, np.zeros(4)), np.ones(4))
    ran = opcodes(executables.read_executable(executable[0]))
    assert "cosine" in ran
    assert "negate" not in ran


def test_a_module_is_seen_and_replaced_within_one_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enactment compiled twice: on GPU a start took XLA's passes and autotuning twice as well."""
    compile_past_cache, compiled = compiles.compile_past_cache, []
    monkeypatch.setattr(
        compiles, "compile_past_cache", lambda *args: compiled.append(1) or compile_past_cache(*args)
    )

    def enact(request: CompileRequest) -> LoadedExecutable:
        with compiles.halted(request) as waiting:
            module = waiting.module()
            assert waiting.module() == module
            return waiting.finish(exchange_opcode(module, "negate", "cosine"))

    assert handled(enact, lambda x: -x, 0.0) == 1.0
    assert len(compiled) == 1


def test_a_compile_that_nobody_answers_ends_with_its_block() -> None:
    def look(request: CompileRequest) -> bool:
        with compiles.halted(request) as waiting:
            module = waiting.module()
        with compiles.halted(request):
            pass  # not begun
        return module == compiles.capture(request)

    assert seen(look, lambda x: -x, 1.0)


def test_a_compile_without_the_early_stage_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits at its late stage, and both would have waited for ever."""

    def late_alone(_request: object, own: hook.OwnCompile, _options: object) -> None:
        assert own.late(b"") is None

    monkeypatch.setattr(compiles, "_own_compile", late_alone)
    request: Any = SimpleNamespace(module_name="jit_step")
    with (
        compiles.halted(request, early=True) as waiting,
        pytest.raises(UnsupportedError, match="XLA did not call the HLO hook while compiling jit_step"),
    ):
        waiting.early_module()


def test_xla_knows_what_switches_its_autotuner_off_for_a_compile_of_one_process_alone() -> None:
    """It refuses options that it does not know. Sharded, the autotuner waits for the other processes at any level."""
    off = BACKENDS["gpu"].untuned
    assert (off["xla_gpu_autotune_level"], off["xla_gpu_shard_autotuning"]) == (0, False)

    def look(request: CompileRequest) -> bool:
        return compiles.capture(request, None, off) == compiles.capture(request)

    assert seen(look, lambda x: -x, 1.0)


def test_a_waiting_compile_goes_on_with_xlas_module() -> None:
    """A step without a plan, or whose plan is XLA's default, was compiled twice."""

    def enact(request: CompileRequest) -> LoadedExecutable | None:
        with compiles.halted(request) as waiting:
            assert waiting.go_on() is None  # not begun
            module = waiting.module()
            executable = waiting.go_on()
            assert opcodes(module) == opcodes(executables.read_executable(executable))
            assert waiting.go_on() is None  # over
            return executable

    assert handled(enact, lambda x: -x, 1.0) == -1.0


def test_a_sharded_step_with_an_all_reduce_executes_the_module_it_is_given() -> None:
    def enact(request: CompileRequest) -> LoadedExecutable | None:
        assert len(request.devices) == 4
        assert request.local_devices == request.devices
        assert request.process_indices == (0,)
        return exchanging("negate", "abs")(request)

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, PartitionSpec("data")))
    assert handled(enact, lambda x: jnp.negative(x).sum(), x) == 28.0


def test_donation_is_kept_from_jax_0_11_on() -> None:
    aliased: list[int] = []

    def enact(request: CompileRequest) -> LoadedExecutable | None:
        executable = exchanging("negate", "abs")(request)
        aliased.append(executable.get_compiled_memory_stats().alias_size_in_bytes)
        return executable

    x = jax.device_put(np.full(16, -2, np.float32), jax.devices()[0])
    result = handled(enact, lambda x: -x, x, donate_argnums=0)
    np.testing.assert_array_equal(result, np.full(16, 2, np.float32))
    assert aliased == ([64] if jaxlink.keeps_donation() else [0])
    assert x.is_deleted() == jaxlink.keeps_donation()
    assert jaxlink.keeps_donation() == (jax.__version_info__ >= (0, 11))


def test_extra_options_are_for_that_compile_alone() -> None:
    def enact(request: CompileRequest) -> LoadedExecutable:
        before = list(request.options.env_option_overrides)
        with pytest.raises(jax.errors.JaxRuntimeError, match="disco_no_such_option"):
            compiles.compile_module(request, None, {"disco_no_such_option": "1"})
        assert before == request.options.env_option_overrides == [("xla_cpu_enable_fast_min_max", False)]
        return compiles.compile_module(request, None, {"xla_cpu_enable_fast_math": False})

    options = {"xla_cpu_enable_fast_min_max": False}
    assert handled(enact, lambda x: x + 1, 1.0, compiler_options=options) == 2.0


def test_a_module_xla_refuses_is_an_illegal_strategy() -> None:
    def refused_step(x: jax.Array) -> jax.Array:
        return -x

    def look(request: CompileRequest) -> None:
        module, early = compiles.capture(request), compiles.capture_structure(request)
        wrong, broken = exchange_opcode(module, "negate", "add"), exchange_opcode(early, "negate", "dot")
        refusing = pytest.raises(XlaRefusalError, match=r"^XLA refused the re\w+ jit_refused_step: ")
        for refused in (wrong, b"not a module", module[: len(module) // 2]):
            with refusing:
                compiles.compile_module(request, refused)
        with compiles.halted(request) as waiting:
            waiting.module()
            with refusing:
                waiting.finish(b"no module")
        with refusing:
            compiles.capture(request, broken)
        with refusing:
            compiles.compile_module(request, None, None, broken)

    seen(look, refused_step, 2.0)


def test_a_hook_that_is_never_called_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "module_name", lambda module: "someone else's")

    def silent_hook(x: jax.Array) -> jax.Array:
        return x + 1

    def wait_for(request: CompileRequest) -> bytes:
        with compiles.halted(request) as waiting:
            return waiting.module()

    def look(request: CompileRequest) -> None:
        for attempt in (compiles.capture, lambda request: compiles.compile_module(request, b""), wait_for):
            with pytest.raises(UnsupportedError, match=r"did not call the HLO hook .* jit_silent_hook"):
                attempt(request)

    seen(look, silent_hook, 1.0)


def test_an_interrupt_inside_the_hook_stays_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupting(_: bytes) -> None:
        raise KeyboardInterrupt

    def enact(request: CompileRequest) -> LoadedExecutable:
        with monkeypatch.context() as patched:
            patched.setattr(compiles, "OwnCompile", lambda *_, **__: hook.OwnCompile(interrupting))
            return compiles.compile_module(request, b"")

    interrupted = jax.jit(lambda x: -x)
    with pytest.raises(KeyboardInterrupt):
        handled(enact, interrupted, 1.0)
    assert float(interrupted(1.0)) == -1.0


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes after the hook, moves and repeats ops, and nothing checks the buffers then. What the user turned off,
    and what this compile turns off, stays off."""
    found: list[Any] = []
    compile_past_cache = compiles.compile_past_cache

    def noting(request: CompileRequest, module: object, extra: Mapping[str, Any]) -> LoadedExecutable:
        found.append(extra.get("xla_disable_hlo_passes"))
        return compile_past_cache(request, module, extra)

    def look(request: CompileRequest) -> None:
        module = compiles.capture(request)
        compiles.compile_module(request, module)
        monkeypatch.setattr(compiles, "backend_of", lambda _: REMATERIALIZING)
        compiles.compile_module(request, None, {"xla_cpu_enable_fast_math": False})
        compiles.compile_module(request, module)
        options = copy.deepcopy(request.options)
        options.executable_build_options.debug_options.xla_disable_hlo_passes = "algsimp"
        flagged = dataclasses.replace(request, options=options)
        compiles.compile_module(flagged, module, {"xla_disable_hlo_passes": "dce"})
        compiles.compile_module(request, None, None, compiles.capture_structure(request))

    monkeypatch.setattr(compiles, "compile_past_cache", noting)
    seen(look, lambda x: -x, 1.0, compiler_options={"xla_disable_hlo_passes": "cse"})
    *found, early, structure = found
    assert found == [None, None, None, "cse,rematerialization", "algsimp,cse,dce,rematerialization"]
    assert ("rematerialization" in early, "rematerialization" in structure) == (False, True)


@pytest.mark.parametrize(("mark", "compiled_anew"), [(b"", 0), (b"add.3.remat", 1), (b"copy-start", 1)])
def test_a_waiting_compile_that_rematerialized_is_made_anew_without(
    mark: bytes, compiled_anew: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began with the user's options, as it may go on with XLA's module."""
    anew: list[bytes | None] = []
    compile_module, read_executable = compiles.compile_module, compiles.read_executable

    def again(request: CompileRequest, module: bytes | None) -> LoadedExecutable:
        anew.append(module)
        return compile_module(request, module)

    def enact(request: CompileRequest) -> LoadedExecutable:
        monkeypatch.setattr(compiles, "backend_of", lambda _: REMATERIALIZING)
        monkeypatch.setattr(compiles, "compile_module", again)
        monkeypatch.setattr(compiles, "read_executable", lambda one: read_executable(one) + mark)
        with compiles.halted(request) as waiting:
            return waiting.finish(exchange_opcode(waiting.module(), "negate", "cosine"))

    assert handled(enact, lambda x: -x, 0.0) == 1.0
    assert len(anew) == compiled_anew


def test_an_executable_that_shows_no_module_counts_as_rematerialized() -> None:
    silent = SimpleNamespace(hlo_modules=list)
    assert compiles.is_rematerialized(b"", silent)


# --- the persistent compilation cache -------------------------------------------------------------


def test_with_the_persistent_cache_on_each_run_executes_what_it_asked_for(tmp_path: Path) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    def cached_step(x: jax.Array) -> jax.Array:
        return -x

    settings = {
        "jax_compilation_cache_dir": "",
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    # Each begins with an empty cache, and each follows every other.
    orders = [("unset", "search", "enact"), ("enact", "search", "unset"), ("search", "unset", "enact")]
    handlers: dict[str, tuple[Handler, float]] = {
        "unset": (lambda request: None, -4.0),
        "search": (exchanging("negate", "sqrt"), 2.0),
        "enact": (exchanging("negate", "abs"), 4.0),
    }
    try:
        for number, order in enumerate(orders):
            directory = tmp_path / str(number)
            for name, value in {**settings, "jax_compilation_cache_dir": str(directory)}.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            for phase in (*order, *order):
                handler, expected = handlers[phase]
                assert handled(handler, cached_step, np.float32(4.0)) == expected, (order, phase)
            assert [path.name for path in directory.iterdir() if path.name.startswith("jit_cached_step")]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def partitioned_by_python() -> CompileRequest:
    """A step with an op that a Python function partitions, as cuDNN's attention is."""

    @custom_partitioning
    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    doubled.def_partition(
        partition=lambda mesh, given, result: (
            mesh, lambda x: x * 2, result.sharding, (given[0].sharding,)
        ),
        infer_sharding_from_operands=lambda _mesh, given, _result: given[0].sharding,
        sharding_rule="i j -> i j",
    )  # fmt: skip
    rows = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data"))
    step = jax.jit(lambda x: doubled(x).sum(0), in_shardings=rows)
    found = intercept(step, (jax.ShapeDtypeStruct((4, 2), np.float32),), lambda r: r, devices=2)
    assert isinstance(found, CompileRequest)
    return found


def test_a_step_can_be_compiled_when_jax_has_forgotten_how_its_ops_are_partitioned() -> None:
    """Captured later, a step with cuDNN's attention failed: `KeyError` in `custom_partitioning`."""
    kept = partitioned_by_python()
    jax.clear_caches()
    gc.collect()
    assert "all-reduce" in opcodes(compiles.capture(kept))


def test_ranks_agree_on_a_step_whose_ops_python_partitions() -> None:
    """A module names such a function by its address, which each process has of its own: two ranks that trained with
    cuDNN's attention waited for each other under two names, without end."""
    one, other = partitioned_by_python(), partitioned_by_python()
    assert one.digest == other.digest
    assert one.holds_addresses


# --- the early stage ------------------------------------------------------------------------------


def test_the_early_module_has_no_schedule_and_no_fusion_and_is_the_same_each_time() -> None:
    def see_early(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * 2 + jnp.negative(x)

    def look(request: CompileRequest) -> tuple[bytes, bytes, bytes]:
        early = compiles.capture_structure(request)
        return early, compiles.capture_structure(request), compiles.capture(request, early)

    early, again, scheduled = seen(look, see_early, np.ones((8, 8)))
    assert early == again
    assert proto.parse(early).name == "jit_see_early"
    assert len(proto.parse(early).schedule.sequences) == 0
    assert {"tanh", "negate", "multiply", "add"} <= set(opcodes(early))
    assert "fusion" not in opcodes(early)
    assert len(proto.parse(scheduled).schedule.sequences) >= 1


def test_xla_goes_on_with_the_early_module_it_is_given_and_others_are_left_alone() -> None:
    found: list[bytes] = []

    def enact(request: CompileRequest) -> LoadedExecutable:
        changed = exchange_opcode(compiles.capture_structure(request), "negate", "cosine")
        executable, scheduled = compiles.compile_seen(request, structure=changed)
        found.extend([scheduled, compiles.capture(request, changed), compiles.capture(request)])
        return executable

    np.testing.assert_array_equal(handled(enact, jnp.negative, np.zeros(4)), np.ones(4))
    np.testing.assert_array_equal(jax.jit(lambda x: -x)(jnp.ones(4)), -np.ones(4))
    assert ["cosine" in opcodes(one) for one in found] == [True, True, False]
    assert found[0] == found[1]


def test_both_stages_can_be_replaced_in_one_compile() -> None:
    def enact(request: CompileRequest) -> LoadedExecutable:
        early = exchange_opcode(compiles.capture_structure(request), "negate", "cosine")
        late = exchange_opcode(compiles.capture(request, early), "cosine", "abs")
        return compiles.compile_module(request, late, None, early)

    np.testing.assert_array_equal(handled(enact, jnp.negative, -np.ones(4)), np.ones(4))


def test_the_passes_that_the_user_turned_off_stay_off() -> None:
    """By an option of the compile; or by XLA_FLAGS, which are read once a process and arrive as debug options."""
    passes_off = "xla_disable_hlo_passes"

    def look(request: CompileRequest) -> tuple[str, str]:
        own = str(compiles._early_options(request, {passes_off: "dce"})[passes_off])
        options = copy.deepcopy(request.options)
        options.env_option_overrides = []
        options.executable_build_options.debug_options.xla_disable_hlo_passes = "algsimp"
        flags = compiles._early_options(dataclasses.replace(request, options=options), {})
        return own, str(flags[passes_off])

    own, flags = seen(look, jnp.negative, np.ones(4), compiler_options={passes_off: "cse"})
    assert own.split(",")[:2] == ["cse", "dce"]
    assert "fusion-wrapper" in own.split(",")
    assert flags == f"algsimp,{BACKENDS['cpu'].passes_off}"


def test_thresholds_of_xla_flags_do_not_join_what_was_parted_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gather, reduce, scatter = BACKENDS["gpu"].combiners
    monkeypatch.setenv("XLA_FLAGS", f"--{reduce}=12345 --{gather}=678 --xla_gpu_autotune_level=0")

    def look(request: CompileRequest) -> list[Mapping[str, object]]:
        compiles._say_what_does_not_hold.cache_clear()
        gpus = [SimpleNamespace(platform="gpu", process_index=lambda rank=rank: rank) for rank in (0, 0, 1)]
        requests = [dataclasses.replace(request, backend=gpu) for gpu in gpus]
        with caplog.at_level(logging.INFO, "disco_hlo"):
            return [compiles._early_options(one, {"xla_gpu_autotune_level": 4}) for one in requests]

    found = seen(look, jnp.negative, np.ones(4), compiler_options={gather: 99})
    assert found == [{reduce: 0, scatter: 0, "xla_gpu_autotune_level": 4}] * 3
    assert caplog.messages == [
        f"a step whose structure is changed is compiled without {reduce} of XLA_FLAGS: the plan decides"
    ]


def test_a_matmul_between_layouts_computes_the_same_without_fusion() -> None:
    """With ``fusion`` and ``fusion-wrapper`` off, XLA:CPU's simplifier dropped the copies around this one."""

    def enact(request: CompileRequest) -> LoadedExecutable:
        return compiles.compile_module(request, None, None, compiles.capture_structure(request))

    def relaid(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("bsd,dthe->btshe", x, w)

    random = np.random.default_rng(0)
    x, w = random.normal(size=(4, 16, 32)), random.normal(size=(32, 3, 4, 8))
    found = handled(enact, relaid, x.astype(np.float32), w.astype(np.float32))
    np.testing.assert_allclose(found, np.einsum("bsd,dthe->btshe", x, w), rtol=1e-4, atol=1e-4)
