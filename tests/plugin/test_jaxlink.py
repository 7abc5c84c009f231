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

CompileWith = Callable[[str, Handler], list[CompileRequest]]
Install = Callable[[Handler], None]


def opcodes(module: bytes) -> list[str]:
    message = proto.parse(module)
    return [instruction.opcode for c in message.computations for instruction in c.instructions]


def exchanging(old: str, new: str) -> Handler:
    return lambda request: compiles.compile_module(
        request, exchange_opcode(compiles.capture(request), old, new)
    )


def four_devices() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), ("data",))


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


def test_a_sharded_step_with_an_all_reduce_executes_the_module_it_is_given(compile_with: CompileWith) -> None:
    mesh = four_devices()
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
        for attempt in (compiles.capture, lambda request: compiles.compile_module(request, b"")):
            with pytest.raises(UnsupportedError) as error:
                attempt(request)
            raised.append(str(error.value))

    def silent_hook(x: jax.Array) -> jax.Array:
        return x + 1

    compile_with("silent_hook", handle)
    assert float(jax.jit(silent_hook)(1.0)) == 2.0
    assert len(raised) == 2
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


# --- the early stage ------------------------------------------------------------------------------


def test_the_early_module_has_no_schedule_and_no_fusion_and_is_the_same_each_time(
    compile_with: CompileWith,
) -> None:
    captured: list[bytes] = []

    def handle(request: CompileRequest) -> None:
        captured.extend(compiles.capture_structure(request) for _ in range(2))
        captured.append(compiles.capture(request, captured[0]))

    def see_early(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * 2 + jnp.negative(x)

    compile_with("see_early", handle)
    jax.jit(see_early)(jnp.ones((8, 8)))
    early, again, scheduled = captured
    assert early == again
    assert proto.parse(early).name == "jit_see_early"
    assert len(proto.parse(early).schedule.sequences) == 0
    assert {"tanh", "negate", "multiply", "add"} <= set(opcodes(early))
    assert "fusion" not in opcodes(early)
    assert len(proto.parse(scheduled).schedule.sequences) >= 1


def test_xla_goes_on_with_the_early_module_it_is_given_and_others_are_left_alone(
    compile_with: CompileWith,
) -> None:
    seen: list[bytes] = []

    def handle(request: CompileRequest) -> LoadedExecutable:
        changed = exchange_opcode(compiles.capture_structure(request), "negate", "cosine")
        executable, scheduled = compiles.compile_seen(request, structure=changed)
        seen.extend([scheduled, compiles.capture(request, changed), compiles.capture(request)])
        return executable

    def early_cosine(x: jax.Array) -> jax.Array:
        return -x

    compile_with("early_cosine", handle)
    np.testing.assert_array_equal(jax.jit(early_cosine)(jnp.zeros(4)), np.ones(4, np.float32))
    np.testing.assert_array_equal(jax.jit(lambda x: -x)(jnp.ones(4)), -np.ones(4, np.float32))
    assert ["cosine" in opcodes(one) for one in seen] == [True, True, False]
    assert seen[0] == seen[1]


def test_both_stages_can_be_replaced_in_one_compile(compile_with: CompileWith) -> None:
    def handle(request: CompileRequest) -> LoadedExecutable:
        early = exchange_opcode(compiles.capture_structure(request), "negate", "cosine")
        late = exchange_opcode(compiles.capture(request, early), "cosine", "abs")
        return compiles.compile_module(request, late, None, early)

    def twice_replaced(x: jax.Array) -> jax.Array:
        return -x

    compile_with("twice_replaced", handle)
    np.testing.assert_array_equal(jax.jit(twice_replaced)(-jnp.ones(4)), np.ones(4, np.float32))


def test_an_early_module_xla_refuses_is_an_illegal_strategy(compile_with: CompileWith) -> None:
    def handle(request: CompileRequest) -> None:
        broken = exchange_opcode(compiles.capture_structure(request), "negate", "dot")
        for use in (compiles.capture, lambda r, s: compiles.compile_module(r, None, None, s)):
            with pytest.raises(IllegalStrategyError, match="XLA refused the re"):
                use(request, broken)

    def early_broken(x: jax.Array) -> jax.Array:
        return -x

    asked = compile_with("early_broken", handle)
    np.testing.assert_array_equal(jax.jit(early_broken)(jnp.ones(4)), -np.ones(4, np.float32))
    assert len(asked) == 1


def test_the_passes_that_the_user_turned_off_stay_off(compile_with: CompileWith) -> None:
    found: list[bool] = []

    def handle(request: CompileRequest) -> None:
        options = compiles._early_options(request, {"xla_disable_hlo_passes": "dce"})
        passes = str(options["xla_disable_hlo_passes"]).split(",")
        found.append(passes[:2] == ["cse", "dce"] and "fusion-wrapper" in passes)

    def passes_off(x: jax.Array) -> jax.Array:
        return -x

    compile_with("passes_off", handle)
    jax.jit(passes_off, compiler_options={"xla_disable_hlo_passes": "cse"})(jnp.ones(4))
    assert found == [True]


def test_the_passes_that_xla_flags_turn_off_stay_off(compile_with: CompileWith) -> None:
    """XLA_FLAGS are read once a process; they arrive as debug options of the request."""
    found: list[str] = []

    def handle(request: CompileRequest) -> None:
        options = copy.deepcopy(request.options)
        options.executable_build_options.debug_options.xla_disable_hlo_passes = "algsimp"
        early = compiles._early_options(dataclasses.replace(request, options=options), {})
        found.append(str(early["xla_disable_hlo_passes"]))

    def flags_off(x: jax.Array) -> jax.Array:
        return -x

    compile_with("flags_off", handle)
    jax.jit(flags_off)(jnp.ones(4))
    assert found == [f"algsimp,{compiles._CPU_PASSES_OFF}"]


def test_thresholds_of_xla_flags_do_not_join_what_was_parted_and_that_is_said_once(
    compile_with: CompileWith, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[list[Mapping[str, object]]] = []
    gather, reduce, scatter = compiles._GPU_COMBINERS
    monkeypatch.setenv("XLA_FLAGS", f"--{reduce}=12345 --{gather}=678 --xla_gpu_autotune_level=0")

    def handle(request: CompileRequest) -> None:
        compiles._say_what_does_not_hold.cache_clear()
        gpus = [SimpleNamespace(platform="gpu", process_index=lambda rank=rank: rank) for rank in (0, 0, 1)]
        requests = [dataclasses.replace(request, backend=gpu) for gpu in gpus]
        with caplog.at_level(logging.INFO, "disco_hlo"):
            found.append([compiles._early_options(one, {"xla_gpu_autotune_level": 4}) for one in requests])

    def thresholds(x: jax.Array) -> jax.Array:
        return -x

    compile_with("thresholds", handle)
    jax.jit(thresholds, compiler_options={gather: 99})(jnp.ones(4))
    assert found == [[{reduce: 0, scatter: 0, "xla_gpu_autotune_level": 4}] * 3]
    assert [line.getMessage() for line in caplog.records] == [
        f"a step whose structure is changed is compiled without {reduce} of XLA_FLAGS: the plan decides"
    ]


def test_a_matmul_between_layouts_computes_the_same_without_fusion(compile_with: CompileWith) -> None:
    """With ``fusion`` and ``fusion-wrapper`` off, XLA:CPU's simplifier dropped the copies around this one."""

    def handle(request: CompileRequest) -> LoadedExecutable:
        return compiles.compile_module(request, None, None, compiles.capture_structure(request))

    def relaid(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("bsd,dthe->btshe", x, w)

    compile_with("relaid", handle)
    random = np.random.default_rng(0)
    x, w = random.normal(size=(4, 16, 32)), random.normal(size=(32, 3, 4, 8))
    found = jax.jit(relaid)(x.astype(np.float32), w.astype(np.float32))
    np.testing.assert_allclose(found, np.einsum("bsd,dthe->btshe", x, w), rtol=1e-4, atol=1e-4)


# --- interception ---------------------------------------------------------------------------------


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

    mesh = four_devices()
    split = NamedSharding(mesh, PartitionSpec("data"))
    x = np.ones((4, 2), np.float32)
    mapped = jax.shard_map(by_shard_map, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    install(handle)
    assert float(jax.jit(by_jit, in_shardings=split)(x)) == 8.0
    assert jax.jit(mapped)(x).tolist() == [[4.0, 4.0]]
    assert jax.pmap(by_pmap, axis_name="data")(x).tolist() == [[4.0, 4.0]] * 4
    assert [devices for _, devices in reached if devices > 1] == [4, 4, 4]
    assert ("jit_by_jit", 4) in reached


def test_none_means_the_default(compile_with: CompileWith) -> None:
    def asked_default(x: jax.Array) -> jax.Array:
        return x + 1

    requests = compile_with("asked_default", lambda request: None)
    assert float(jax.jit(asked_default)(1.0)) == 2.0
    assert len(requests) == 1


def test_an_error_of_the_handler_is_one_line_and_training_goes_on(
    compile_with: CompileWith, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(request: CompileRequest) -> LoadedExecutable:
        raise RuntimeError("no such luck")

    def unlucky(x: jax.Array) -> jax.Array:
        return x + 1

    compile_with("unlucky", handle)
    with caplog.at_level(logging.WARNING, "disco_hlo"):
        assert float(jax.jit(unlucky)(1.0)) == 2.0
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["jit_unlucky runs as XLA compiles it: RuntimeError: no such luck"]


def test_a_compile_that_is_not_understood_is_left_to_jax(
    install: Install, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> CompileRequest:
        raise KeyError("sym_name")

    def nameless(x: jax.Array) -> jax.Array:
        return x + 1

    x = np.float32(1.0)
    monkeypatch.setattr(jaxlink, "_request", unreadable)
    install(lambda request: None)
    with caplog.at_level(logging.WARNING, "disco_hlo"):
        assert float(jax.jit(nameless)(x)) == 2.0
    assert "a module runs as XLA compiles it: KeyError: 'sym_name'" in caplog.text


def test_ctrl_c_in_the_handler_is_the_users(compile_with: CompileWith) -> None:
    def handle(request: CompileRequest) -> LoadedExecutable:
        raise KeyboardInterrupt

    def stopped(x: jax.Array) -> jax.Array:
        return x + 1

    compile_with("stopped", handle)
    with pytest.raises(KeyboardInterrupt):
        jax.jit(stopped)(1.0)


def test_compiles_made_by_the_handler_are_not_intercepted(install: Install) -> None:
    asked: list[str] = []

    def handle(request: CompileRequest) -> None:
        asked.append(request.module_name)
        assert float(jax.jit(lambda x: x * 3)(2.0)) == 6.0
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()

    def in_a_thread() -> None:
        with jaxlink.ours():
            assert float(jax.jit(lambda x: x * 5)(2.0)) == 10.0

    def nesting(x: jax.Array) -> jax.Array:
        return x + 1

    install(handle)
    assert float(jax.jit(nesting)(np.float32(1.0))) == 2.0
    assert asked == ["jit_nesting"]


def test_the_default_is_compiled_once(compile_with: CompileWith) -> None:
    defaults: list[LoadedExecutable] = []

    def handle(request: CompileRequest) -> None:
        defaults.extend([request.call_default(), request.call_default()])

    def once(x: jax.Array) -> jax.Array:
        return x + 1

    compile_with("once", handle)
    assert float(jax.jit(once)(1.0)) == 2.0
    assert defaults[0] is defaults[1]


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


def test_uninstalling_gives_jax_its_own_function_back(install: Install) -> None:
    from jax._src import compiler

    own = compiler.compile_or_get_cached
    install(lambda request: None)
    install(lambda request: None)
    assert compiler.compile_or_get_cached is not own
    jaxlink.uninstall()
    assert compiler.compile_or_get_cached is own


@pytest.mark.parametrize("name", ["compile_or_get_cached", "backend_compile_and_load"])
def test_a_jax_without_the_compile_functions_is_unsupported(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax._src import compiler

    monkeypatch.delattr(compiler, name)
    with pytest.raises(UnsupportedError, match=f"jax._src.compiler.{name} is missing"):
        jaxlink.install(lambda request: None)


def test_a_jax_whose_compile_function_takes_other_arguments_is_unsupported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jax._src import compiler

    monkeypatch.setattr(compiler, "compile_or_get_cached", lambda backend, computation, devices: None)
    with pytest.raises(
        UnsupportedError, match="takes no compile_options, executable_devices, host_callbacks"
    ):
        jaxlink.install(lambda request: None)


def test_a_jax_without_the_hook_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax.extend.xla

    monkeypatch.delattr(jax.extend.xla, "register_hlo_module_transformation")
    with pytest.raises(UnsupportedError, match="register_hlo_module_transformation is missing"):
        jaxlink.install(lambda request: None)


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
