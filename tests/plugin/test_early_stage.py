"""Compiles of our own that begin with another module in the early stage, before XLA fuses and combines."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo import proto
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest, Handler
from tests.steps.opcodes import opcodes

CompileWith = Callable[[str, Handler], list[CompileRequest]]


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
