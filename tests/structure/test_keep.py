"""What the backward pass computes again is kept instead: recomputing steps give the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from disco_hlo.structure.moves import Keep, KeepTurns, Move, apply_moves, from_json, to_json
from disco_hlo.structure.program import Program, computations, dtype
from disco_hlo.structure.propose_loops import loop_schedules
from tests.modules import module_of
from tests.structure import steps
from tests.structure.enact import Run, run
from tests.structure.test_illegal import GLOBAL

P = steps.P
LAYERS, WIDTH, ROWS = 4, 16, 8


def layer(x: jax.Array, weights: tuple[jax.Array, ...], key: jax.Array) -> jax.Array:
    """A sharded layer with all that is recomputed: norm, gathers, matmuls, an all-reduce, dropout."""
    gain, up, down = weights
    up, down = (lax.all_gather(one, "model", tiled=True) for one in (up, down))
    normed = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain
    hidden = jax.nn.silu(normed @ up)
    kept = jax.random.bernoulli(key, 0.9, hidden.shape)
    return x + lax.pmean((hidden * kept) @ down, "model")


def step(form: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step's gradients, of layers that are scanned or unrolled, perhaps over microbatches."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.key(0), LAYERS)
        again = jax.checkpoint(layer, prevent_cse="scan" not in form)
        if "scan" in form:
            x, _ = lax.scan(lambda x, one: (again(x, one[:-1], one[-1]), None), x, (*weights, keys))
        else:
            for number in range(LAYERS):
                x = again(x, tuple(one[number] for one in weights), keys[number])
        return (x * x).sum()

    def local(gain: jax.Array, up: jax.Array, down: jax.Array, x: jax.Array) -> Any:
        weights = (gain, up, down)
        if "microbatches" not in form:
            return jax.value_and_grad(loss)(weights, x)

        def accumulated(total: Any, part: jax.Array) -> tuple[Any, jax.Array]:
            value, gradient = jax.value_and_grad(loss)(weights, part)
            return jax.tree.map(jnp.add, total, gradient), value

        total, values = lax.scan(accumulated, jax.tree.map(jnp.zeros_like, weights), jnp.stack((x, 2 * x)))
        return values.sum(), total

    on = steps.mesh(2)
    specs = (P(), P(None, "model"), P(None, "model"), P("model"))
    mapped = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=(P(), specs[:-1]), check_vma=False)
    values = (
        steps.normal(0, (LAYERS, WIDTH), jnp.float32),
        steps.normal(1, (LAYERS, WIDTH, 3 * WIDTH), jnp.float32, 0.3),
        steps.normal(2, (LAYERS, 3 * WIDTH, WIDTH), jnp.float32, 0.3),
        steps.normal(3, (2 * ROWS, WIDTH), jnp.float32),
    )
    return mapped, tuple(steps.place(on, values, specs))


@cache
def unmoved(form: str) -> tuple[Run, dict[str, tuple[Move, ...]]]:
    found = run(*step(form))
    return found, loop_schedules(found.module)


def counted(module: bytes, opcode: str) -> int:
    return sum(i.opcode == opcode for _, one in computations(Program(module)) for i in one.instructions)


@pytest.mark.parametrize("form", ["scan", "unroll", "microbatches, scan"])
@pytest.mark.parametrize("name", ["keep-kernels", "keep", "gather-once"])
def test_a_recomputing_step_keeps_what_it_computes_twice(form: str, name: str) -> None:
    expected, found = unmoved(form)
    moves = found[name]
    assert from_json(to_json(moves)) == moves
    assert any(isinstance(move, KeepTurns if "scan" in form else Keep) for move in moves)
    less = "all-gather" if name == "gather-once" else "dot"
    assert counted(apply_moves(expected.module, moves), less) < counted(expected.module, less)
    got = run(*step(form), moves)
    for new, old in zip(got.outputs, expected.outputs, strict=True):
        np.testing.assert_array_equal(new, old)


def test_a_gather_that_is_kept_is_gathered_in_the_type_that_is_read() -> None:
    module = module_of(f"""
ENTRY main {{ x = f32[4] parameter(0)
  g = f32[8] all-gather(x), {GLOBAL}, dimensions={{0}}
  a = bf16[8] convert(g)
  t = (f32[4]) tuple(x)
  o = (f32[4]) opt-barrier(t)
  y = f32[4] get-tuple-element(o), index=0
  h = f32[8] all-gather(y), {GLOBAL}, dimensions={{0}}
  b = bf16[8] convert(h)
  c = bf16[8] negate(b)
  ROOT r = (bf16[8], bf16[8]) tuple(a, c) }}
""")
    found = loop_schedules(module)
    assert {"narrow", "gather-once"} <= found.keys()
    program = Program(apply_moves(module, found["gather-once"]))
    assert [dtype(i) for i in program.instructions if i.opcode == "all-gather"] == ["bf16"]
    assert [i.opcode for i in program.instructions].count("convert") == 1
