"""Random programs with collectives, random legal moves: the numbers stay (2 and 4 devices, f32 and bf16)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from disco_hlo.structure.moves import Chunk, Move, Reorder, Split, apply_moves, from_json, to_json
from tests.structure import steps
from tests.structure.enact import Run, assert_same, moved, run
from tests.structure.legal import legal_moves

P = steps.P
ROWS, TOKENS, WIDTH = 8, 4, 8
Step = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Of (x [rows, tokens, width] equal on all devices, w [width, width] not, table [16, width] equal)."""


def _matmul(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
    return lax.psum(x @ w, "model") * 0.1


def _attention(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x, x @ w), axis=-1)
    return lax.psum(jnp.einsum("bqk,bkd->bqd", weights, x), "model") * 0.5


def _norm(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1)


def _residual(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
    return x + jnp.tanh(x) * table[0]


def _lookup(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
    return x + table[(jnp.abs(x[..., 0]) * 7).astype(jnp.int32) % 16]


def _turned(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.swapaxes(jnp.flip(jnp.swapaxes(x, 0, 2), axis=1), 0, 2)


def _flat(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
    return lax.psum(x.reshape(ROWS * TOKENS, WIDTH) @ w, "model").reshape(x.shape) * 0.1


def _pieces(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
    padded = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))
    return jnp.concatenate([padded[:, :TOKENS, :4], x[..., 4:] * 2], axis=-1)


def _masked(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
    seen = lax.broadcasted_iota(jnp.int32, x.shape, 0) >= lax.broadcasted_iota(jnp.int32, x.shape, 2)
    return jnp.where(seen, x, jnp.asarray(0.5, x.dtype))


def _centered(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
    return x - x.mean(0) + x.max(axis=(0, 1)) * 0.1


def _sorted(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.sort(x, axis=1)


def _window(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
    sums = lax.reduce_window(x, jnp.asarray(0, x.dtype), lax.add, (2, 1, 2), (2, 1, 2), "VALID")
    return jnp.repeat(jnp.repeat(sums, 2, axis=0), 2, axis=2) * 0.5


def _shard(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
    size = ROWS // lax.axis_size("model")
    own = lax.dynamic_slice_in_dim(lax.psum(x * w[0], "model"), lax.axis_index("model") * size, size)
    return lax.all_gather(jnp.tanh(own), "model", tiled=True)


STEPS: tuple[Step, ...] = (
    _matmul, _attention, _norm, _residual, _lookup, _turned, _flat, _pieces, _masked, _centered, _sorted, _window,
    _shard,
)  # fmt: skip


def program(seed: int, devices: int, dtype: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A random chain of steps that starts with a collective, and its arguments."""
    rng = random.Random(seed)
    chain = [rng.choice((_matmul, _flat, _attention)), *rng.sample(STEPS, 4)]

    def local(x: jax.Array, w: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = x
        for step in chain:
            x = step(x, w, table)
        return x, lax.psum(jnp.einsum("btd,bte->de", start, x) + w * 0, "model")

    on = steps.mesh(devices)
    specs = (P(), P("model"), P())
    mapped = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=(P(), P()), check_vma=False)
    values = (
        steps.normal(seed, (ROWS, TOKENS, WIDTH), dtype),
        steps.normal(seed + 1, (WIDTH * devices, WIDTH), dtype),
        steps.normal(seed + 2, (16, WIDTH), dtype),
    )
    return mapped, tuple(steps.place(on, values, specs))


@cache
def unmoved(seed: int, devices: int, dtype: str) -> Run:
    """What such a program computes."""
    return run(*program(seed, devices, jnp.dtype(dtype)))


def random_moves(module: bytes, seed: int, count: int) -> list[Move]:
    """Up to ``count`` legal moves, each legal after those before it."""
    rng = random.Random(seed)
    moves: list[Move] = []
    for _ in range(count):
        options = legal_moves(module)
        if not options:
            break
        kinds = sorted({type(m).__name__ for m in options})
        kind = rng.choice(kinds)
        moves.append(rng.choice([m for m in options if type(m).__name__ == kind]))
        module = apply_moves(module, moves[-1:])
    return moves


@pytest.mark.product_only  # minutes of compiling; the steps one by one run on both legs
@pytest.mark.parametrize(
    ("seed", "devices", "dtype"),
    [(0, 2, "float32"), (2, 2, "float32"), (2, 4, "bfloat16")],
)
def test_random_legal_moves_keep_the_numbers(seed: int, devices: int, dtype: str) -> None:
    expected = unmoved(seed, devices, dtype)
    moves = random_moves(expected.module, seed, 3)
    assert moves
    assert_same(moved(expected, moves), expected, 2e-5 if dtype == "float32" else 4e-2)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__.strip("_"))
def test_every_kind_of_step_in_the_longest_legal_chunk(step: Step) -> None:
    on = steps.mesh(2)

    def local(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
        return step(lax.psum(x * w[0], "model"), w, table)

    specs = (P(), P("model"), P())
    values = (
        steps.normal(1, (ROWS, TOKENS, WIDTH), jnp.float32),
        steps.normal(2, (2 * WIDTH, WIDTH), jnp.float32),
        steps.normal(3, (16, WIDTH), jnp.float32),
    )
    mapped = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=P(), check_vma=False)
    arguments = tuple(steps.place(on, values, specs))
    expected = run(mapped, arguments)
    chunks = [m for m in legal_moves(expected.module) if isinstance(m, Chunk)]
    longest = max(chunks, key=lambda chunk: (len(chunk.instructions), chunk.parts))
    assert_same(moved(expected, [longest]), expected, 1e-5)


def start() -> bytes:
    return unmoved(0, 2, "float32").module


def test_no_move_gives_the_very_bytes_back_and_any_prefix_stands_alone() -> None:
    module = start()
    moves = random_moves(module, 1, 3)
    stepwise = module
    for n, move in enumerate(moves):
        stepwise = apply_moves(stepwise, [move])
        assert apply_moves(module, moves[: n + 1]) == stepwise
    assert apply_moves(module, []) == module


def test_every_legal_move_survives_json() -> None:
    moves = legal_moves(start())
    assert {type(m) for m in moves} >= {Split, Chunk}
    assert from_json(to_json(moves)) == tuple(moves)


def test_an_all_gather_that_the_user_wrote_moves_too() -> None:
    on = steps.mesh(2)

    def local(x: jax.Array) -> jax.Array:
        return jnp.tanh(lax.all_gather(x, "model", tiled=True)) * 2

    mapped = jax.shard_map(local, mesh=on, in_specs=(P("model"),), out_specs=P(), check_vma=False)
    arguments = tuple(steps.place(on, (steps.normal(1, (8, 4), jnp.float32),), (P("model"),)))
    expected = run(mapped, arguments)
    (move,) = [m for m in legal_moves(expected.module) if isinstance(m, Reorder)]
    assert_same(moved(expected, [move]), expected, 1e-6)
    np.testing.assert_array_equal(expected.outputs[0].shape, (8, 4))
