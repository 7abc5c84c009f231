"""Rows that are added up in 16 bits are added up in float32: nearer to the truth, where the user allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from disco_hlo.structure.moves import Narrow, Widen, apply_moves, from_json, to_json
from disco_hlo.structure.program import Program, computations, dtype
from disco_hlo.structure.propose_loops import FLOAT32_SUMS, loop_schedules
from tests.modules import module_of
from tests.structure import steps
from tests.structure.enact import moved, run
from tests.structure.test_illegal import GLOBAL, SUMMED

ROWS, WIDTH, TOKENS = 32, 8, 1200


def gradient(tokens: jax.Array, cotangents: jax.Array, kind: Any) -> jax.Array:
    """Of an embedding in 16 bits."""
    table = jnp.ones((ROWS, WIDTH), kind)
    return jax.vjp(lambda table: table[tokens], table)[1](cotangents.astype(kind))[0].astype(jnp.float32)


def at_once(kind: Any) -> Callable[..., jax.Array]:
    return lambda tokens, cotangents: gradient(tokens, cotangents, kind)


def in_microbatches(kind: Any) -> Callable[..., jax.Array]:
    def step(tokens: jax.Array, cotangents: jax.Array) -> jax.Array:
        def one(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + gradient(*part, kind), None

        parts = tokens.reshape(2, -1), cotangents.reshape(2, -1, WIDTH)
        return lax.scan(one, jnp.zeros((ROWS, WIDTH), jnp.float32), parts)[0]

    return step


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("form", [at_once, in_microbatches])
def test_an_embeddings_gradient_is_the_sum_of_its_rows(form: Callable[..., Any], kind: Any) -> None:
    tokens = jax.random.randint(jax.random.key(0), (TOKENS,), 0, 3)
    cotangents = steps.normal(1, (TOKENS, WIDTH), jnp.float32) + 1
    default = run(form(kind), (tokens, cotangents))
    moves = loop_schedules(default.module)[FLOAT32_SUMS]
    assert from_json(to_json(moves)) == moves
    assert [isinstance(move, Widen) and len(move.loop) for move in moves] == [form is in_microbatches]

    exact = np.zeros((ROWS, WIDTH))
    np.add.at(exact, np.asarray(tokens), np.asarray(cotangents.astype(kind), np.float64))
    own, theirs = (
        np.linalg.norm(one.outputs[0] - exact) / np.linalg.norm(exact)
        for one in (moved(default, moves), default)
    )
    assert own < float(jnp.finfo(kind).eps) / 2 < 4 * own < theirs


def test_a_thousand_ones_are_a_thousand() -> None:
    """In bfloat16 256 and 1 are 256."""
    tokens, ones = jnp.zeros((1024,), jnp.int32), jnp.ones((1024, WIDTH))
    default = run(at_once(jnp.bfloat16), (tokens, ones))
    assert default.outputs[0].max() == 256
    assert moved(default, loop_schedules(default.module)[FLOAT32_SUMS]).outputs[0].max() == 1024


def test_nothing_is_added_up_in_float32_where_xla_may_compute_in_no_finer_type() -> None:
    assert list(loop_schedules(module_of(SUMMED))) == [FLOAT32_SUMS]
    assert loop_schedules(module_of(SUMMED), in_float32=False) == {}


def test_an_array_that_is_kept_in_16_bits_is_not_converted_for_a_few_rows() -> None:
    kept = SUMMED.replace("broadcast(x), dimensions={}", "parameter(2)")
    assert loop_schedules(module_of(kept)) == {}


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_every_other_schedule_begins_with_it(kind: str) -> None:
    """Two computations of which one calls what the other does; gathers in the entry and in a loop, too."""
    text = SUMMED.replace("bf16", kind).split("ENTRY main {")[0]
    scattered = """scatter(%s, ids, updates), update_window_dims={1}, inserted_window_dims={0},
    scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=add"""
    source = module_of(f"""{text}
body {{ p = (s32[], f32[4], {kind}[8,2], s32[4,1], {kind}[4,2]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[4] get-tuple-element(p), index=1
  total = {kind}[8,2] get-tuple-element(p), index=2
  ids = s32[4,1] get-tuple-element(p), index=3
  updates = {kind}[4,2] get-tuple-element(p), index=4
  one = s32[] constant(1)
  j = s32[] add(i, one)
  zero = {kind}[] constant(0)
  rows = {kind}[8,2] broadcast(zero), dimensions={{}}
  sum = {kind}[8,2] {scattered % "rows"}
  g = f32[8] all-gather(x), {GLOBAL.replace("1,", "2,", 1)}, dimensions={{0}}
  n = {kind}[8] convert(g)
  w = {kind}[8,2] broadcast(n), dimensions={{0}}
  a = {kind}[8,2] add(sum, w)
  b = {kind}[8,2] add(total, a)
  ROOT r = (s32[], f32[4], {kind}[8,2], s32[4,1], {kind}[4,2]) tuple(j, x, b, ids, updates) }}
condition {{ p = (s32[], f32[4], {kind}[8,2], s32[4,1], {kind}[4,2]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(4)
  ROOT c = pred[] compare(i, n), direction=LT }}
ENTRY main {{ zero = {kind}[] constant(0)
  rows = {kind}[8,2] broadcast(zero), dimensions={{}}
  ids = s32[4,1] parameter(0)
  updates = {kind}[4,2] parameter(1)
  sum = {kind}[8,2] {scattered % "rows"}
  x = f32[4] parameter(2)
  h = f32[8] all-gather(x), {GLOBAL}, dimensions={{0}}
  z = s32[] constant(0)
  t = (s32[], f32[4], {kind}[8,2], s32[4,1], {kind}[4,2]) tuple(z, x, sum, ids, updates)
  loop = (s32[], f32[4], {kind}[8,2], s32[4,1], {kind}[4,2]) while(t), condition=condition, body=body
  total = {kind}[8,2] get-tuple-element(loop), index=2
  n = {kind}[8] convert(h)
  w = {kind}[8,2] broadcast(n), dimensions={{0}}
  ROOT m = {kind}[8,2] add(total, w) }}
""")
    found = loop_schedules(source, copies=False)
    first = found[FLOAT32_SUMS]
    assert [len(move.loop) for move in first if isinstance(move, Widen)] == [1, 0]
    assert all(moves[:2] == first for moves in found.values())
    narrowed = found["narrow"]
    assert [len(move.loop) for move in narrowed if isinstance(move, Narrow)] == [1, 0]
    assert {"double", "unroll"} <= found.keys()
    made = Program(apply_moves(source, narrowed, copies=False))
    for _, inside in computations(made):
        kinds = {one.opcode: dtype(one) for one in inside.instructions}
        assert (kinds["scatter"], kinds["all-gather"]) == ("f32", kind)
