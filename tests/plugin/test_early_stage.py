"""Compiles of our own that begin with another module in the early stage, before XLA fuses and combines."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo import proto
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.plugin.handled import handled, seen
from tests.steps.opcodes import opcodes


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


def test_an_early_module_xla_refuses_is_an_illegal_strategy() -> None:
    def look(request: CompileRequest) -> None:
        broken = exchange_opcode(compiles.capture_structure(request), "negate", "dot")
        for use in (compiles.capture, lambda r, s: compiles.compile_module(r, None, None, s)):
            with pytest.raises(IllegalStrategyError, match="XLA refused the re"):
                use(request, broken)

    seen(look, jnp.negative, np.ones(4))


def test_the_passes_that_the_user_turned_off_stay_off() -> None:
    """By an option of the compile; or by XLA_FLAGS, which are read once a process and arrive as debug options."""

    def look(request: CompileRequest) -> tuple[str, str]:
        own = str(
            compiles._early_options(request, {"xla_disable_hlo_passes": "dce"})["xla_disable_hlo_passes"]
        )
        options = copy.deepcopy(request.options)
        options.env_option_overrides = []
        options.executable_build_options.debug_options.xla_disable_hlo_passes = "algsimp"
        flags = compiles._early_options(dataclasses.replace(request, options=options), {})
        return own, str(flags["xla_disable_hlo_passes"])

    own, flags = seen(look, jnp.negative, np.ones(4), compiler_options={"xla_disable_hlo_passes": "cse"})
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
