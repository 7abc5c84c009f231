"""Moves of loops: random scanned layers with sharded weights under every schedule, the same numbers bit by bit."""

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

from disco_hlo.hlo.attributes import backend_config
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.loops import Loop, read_loop
from disco_hlo.structure.moves import Double, Hoist, Move, Prefetch, Unroll, apply_moves, from_json, to_json
from disco_hlo.structure.program import Program
from disco_hlo.structure.propose_loops import loop_schedules
from tests.modules import ADD, module_of
from tests.structure import steps
from tests.structure.enact import Run, assert_equal, moved, opcodes, run, run_early
from tests.structure.test_illegal import LOOPS, NESTED

P = steps.P
WIDTH = 8
REDUCING = (
    ADD
    + """
condition { p = (s32[], f32[4], f32[4,4], f32[4]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(4)
  ROOT c = pred[] compare(i, n), direction=LT }
body { p = (s32[], f32[4], f32[4,4], f32[4]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[4] get-tuple-element(p), index=1
  rows = f32[4,4] get-tuple-element(p), index=2
  total = f32[4] get-tuple-element(p), index=3
  square = f32[4] multiply(x, x)
  sum = f32[4] all-reduce(square), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=add
  row = f32[1,4] reshape(sum)
  three = s32[] constant(3)
  k = s32[] subtract(three, i)
  z = s32[] constant(0)
  kept = f32[4,4] dynamic-update-slice(rows, row, k, z)
  cosine = f32[4] cosine(x)
  other = f32[4] all-reduce(cosine), channel_id=2, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=add
  more = f32[4] add(total, other)
  y = f32[4] sine(x)
  one = s32[] constant(1)
  j = s32[] add(i, one)
  ROOT t = (s32[], f32[4], f32[4,4], f32[4]) tuple(j, y, kept, more) }
ENTRY main { w = f32[4,4] parameter(0)
  x = f32[4] parameter(1)
  z = s32[] constant(0)
  t = (s32[], f32[4], f32[4,4], f32[4]) tuple(z, x, w, x)
  l = (s32[], f32[4], f32[4,4], f32[4]) while(t), condition=condition, body=body
  a = f32[4] get-tuple-element(l), index=1
  b = f32[4,4] get-tuple-element(l), index=2
  c = f32[4] get-tuple-element(l), index=3
  ROOT r = (f32[4], f32[4,4], f32[4]) tuple(a, b, c) }
"""
)
"""A loop that reduces into the rows of an array, from the last to the first, and into a sum."""
COUNTED = (
    'body=first_body, backend_config={"known_trip_count":{"n":"4"},"known_init_step":{"init":"0","step":"1"}}'
)


def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array], form: random.Random) -> jax.Array:
    """A layer that gathers its weights, before or after it converts them, and perhaps uses one of them twice."""
    up, down = weights
    if form.random() < 0.5:
        up = lax.all_gather(up.astype(jnp.bfloat16), "model", tiled=True).astype(jnp.float32)
    else:
        up = lax.all_gather(up, "model", tiled=True)
    down = lax.all_gather(down, "model", tiled=True)
    hidden = jnp.tanh(x @ up)
    if form.random() < 0.5:
        hidden = hidden * up[0]
    return x + hidden @ down


def program(seed: int, devices: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Scanned layers, forward and backward, and arguments: layers counted up or down, recomputed or not, perhaps in
    a loop over microbatches."""
    rng = random.Random(seed)
    layers, backward, reverse = rng.choice((2, 4, 5, 7)), rng.random() < 0.7, rng.random() < 0.5
    recompute, microbatches = rng.random() < 0.7, rng.choice((1, 1, 2))

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, one: Any) -> tuple[jax.Array, jax.Array]:
            x = layer(x, one, random.Random(seed))
            return x, x.sum()

        scanned = jax.checkpoint(body) if recompute else body
        x, sums = lax.scan(scanned, x, weights, reverse=reverse)
        return (x * x).sum() + sums.sum()

    def local(up: jax.Array, down: jax.Array, x: jax.Array) -> Any:
        def step(total: Any, part: jax.Array) -> tuple[Any, jax.Array]:
            if not backward:
                return total, loss((up, down), part)
            value, gradient = jax.value_and_grad(loss)((up, down), part)
            return jax.tree.map(jnp.add, total, gradient), value

        total, values = lax.scan(step, (up * 0, down * 0), x) if microbatches > 1 else step((up, down), x[0])
        return total, lax.psum(values, "model")

    on = steps.mesh(devices)
    specs = (P(None, "model"), P(None, "model"), P(None, "model"))
    out = ((P(None, "model"), P(None, "model")), P())
    mapped = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=out, check_vma=False)
    values = (
        steps.normal(seed, (layers, WIDTH, WIDTH), jnp.float32, 0.3),
        steps.normal(seed + 1, (layers, WIDTH, WIDTH), jnp.float32, 0.3),
        steps.normal(seed + 2, (microbatches, 2 * devices, WIDTH), jnp.float32),
    )
    return mapped, tuple(steps.place(on, values, specs))


@cache
def unmoved(seed: int, devices: int) -> Run:
    return run(*program(seed, devices))


@cache
def proposed(module: bytes, *, copies: bool = True) -> dict[str, tuple[Move, ...]]:
    return loop_schedules(module, copies=copies)


@pytest.mark.product_only  # minutes of compiling
@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "devices", "names"), [(2, 2, {"prefetch", "gather-once", "hoist"}), (3, 4, {"prefetch"})]
)
def test_every_schedule_of_random_loops_gives_the_same_numbers(
    seed: int, devices: int, names: set[str]
) -> None:
    """The first is a step of microbatches and layers that are recomputed."""
    expected = unmoved(seed, devices)
    found = proposed(expected.module)
    assert names <= set(found)
    for moves in found.values():
        assert_equal(moved(expected, moves), expected)


@pytest.mark.product_only  # the older jaxlib has another way to compile a module
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (LOOPS, {"prefetch", "double", "gather-once", "gather-once-prefetch"}),
        (NESTED, {"prefetch", "double", "gather-once", "hoist"}),
        (REDUCING, {"finish-later", "double"}),
        (LOOPS.replace("dynamic-slice(w, i, z)", "dynamic-slice(w, z, z)"), {"hoist", "prefetch", "double"}),
    ],
    ids=["loops", "nested", "reducing", "repeating"],
)
def test_xla_accepts_what_the_moves_make_before_copy_insertion(text: str, wanted: set[str]) -> None:
    """As on XLA:GPU: all of XLA's passes come after the moves."""
    source, rng = module_of(text), np.random.default_rng(0)
    parameters = [i for i in Program(source).instructions if i.opcode == "parameter"]
    shapes = [tuple(i.shape.dimensions) for i in sorted(parameters, key=lambda one: one.parameter_number)]
    shards = [[rng.normal(size=shape).astype(np.float32) for _ in range(2)] for shape in shapes]
    expected = run_early(source, shards)
    found = proposed(source, copies=False)
    assert found.keys() >= wanted
    for moves in found.values():
        made = run_early(apply_moves(source, moves, copies=False), shards)
        for new, old in zip(made, expected, strict=True):
            np.testing.assert_array_equal(new, old)


def loop_of(module: bytes, *, number: int = 0) -> Loop:
    program = Program(module)
    return read_loop(program, [i for i in program.instructions if i.opcode == "while"][number])


def written(name: str, *, copies: bool) -> bytes:
    source = module_of(LOOPS.replace("body=first_body", COUNTED))
    moves = proposed(source, copies=copies)[name]
    assert from_json(to_json(moves)) == moves
    return apply_moves(source, moves, copies=copies)


def in_body(loop: Loop, opcode: str) -> list[Message]:
    return [i for i in loop.body.instructions if i.opcode == opcode]


def test_a_prefetching_loop_is_one_turn_shorter_and_says_so() -> None:
    loop = loop_of(written("prefetch", copies=False))
    assert (loop.start, loop.step, loop.turns) == (0, 1, 3)
    assert backend_config(loop.instruction)["known_trip_count"] == {"n": "3"}
    # For the first turn of each loop.
    assert opcodes(written("prefetch", copies=False)).count("all-gather") == 2
    (gather,) = in_body(loop, "all-gather")
    assert loop.root.operand_ids[-1] == gather.id
    (taken,) = in_body(loop, "dynamic-slice")
    assert loop.body.operands(taken)[1].id == loop.ends[loop.counter].id


def test_a_doubled_loop_runs_half_as_often_and_says_so() -> None:
    loop = loop_of(written("double", copies=False))
    assert (loop.start, loop.step, loop.turns) == (0, 2, 2)
    assert backend_config(loop.instruction) == {
        "known_trip_count": {"n": "2"},
        "known_init_step": {"init": "0", "step": "2"},
    }
    assert len({gather.channel_id for gather in in_body(loop, "all-gather")}) == 2


def test_after_copy_insertion_what_a_turn_reads_is_overwritten_once_it_is_read() -> None:
    loop = loop_of(written("prefetch", copies=True))
    last = loop.ends[-1]
    assert last.opcode == "copy"
    assert [loop.body.by_id[i].name for i in last.control_predecessor_ids] == ["y"]
    assert not in_body(loop_of(written("prefetch", copies=False)), "copy")


def test_the_second_loop_gathers_nothing_that_the_first_has_gathered() -> None:
    module = written("gather-once", copies=False)
    assert len(in_body(loop_of(module), "all-gather")) == 1
    assert not in_body(loop_of(module, number=1), "all-gather")
    assert "all-gather" not in opcodes(module)


def test_a_loop_that_reduces_later_begins_with_its_second_turn() -> None:
    source = module_of(REDUCING)
    module = apply_moves(source, proposed(source)["finish-later"])
    loop = loop_of(module)
    assert (loop.start, loop.step, loop.turns) == (1, 1, 3)
    assert opcodes(module).count("all-reduce") == len(in_body(loop, "all-reduce")) == 2
    waiting = [loop.body.operands(reduction)[0] for reduction in in_body(loop, "all-reduce")]
    assert [int(one.tuple_index) for one in waiting] == [4, 5]


def test_loops_in_a_loop_are_told_apart_by_their_paths() -> None:
    found = proposed(unmoved(2, 2).module)
    moves: list[Move] = [*found["prefetch"], *found["hoist"]]
    assert {len(move.loop) for move in moves if isinstance(move, Prefetch)} == {2}
    assert {len(move.loop) for move in moves if isinstance(move, Hoist)} == {1}


def test_a_loop_whose_turns_nobody_knows_has_no_schedule() -> None:
    assert not proposed(module_of(LOOPS.replace("add(i, one)", "add(i, i)")))


def test_an_odd_loop_is_doubled_but_for_its_last_turn() -> None:
    source = module_of(LOOPS.replace("constant(4)", "constant(5)").replace("f32[4,2]", "f32[5,2]"))
    module = apply_moves(source, [Double((opcodes(source).index("while"),))], copies=False)
    assert loop_of(module).turns == 2
    assert opcodes(module).count("all-gather") == 1


def test_loops_that_communicate_are_written_out() -> None:
    moves = proposed(unmoved(1, 4).module)["unroll"]
    assert all(isinstance(move, Unroll) for move in moves if not isinstance(move, Prefetch))
