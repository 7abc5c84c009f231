"""Pipeline sends in shards: the same bits, and never of what the devices of a group do not hold alike.

XLA fuses nothing here: it may round pointwise work otherwise where it fuses a slice with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

from disco_hlo.errors import IllegalMoveError
from disco_hlo.structure.moves import SliceSend, apply_moves, from_json, to_json
from disco_hlo.structure.program import Program
from disco_hlo.structure.propose import schedules, slice_sends
from tests.modules import module_of
from tests.structure import steps
from tests.structure.enact import Run, handed_over, moved, opcodes, run
from tests.structure.legal import legal_moves

P = steps.P
GROUPS = "replica_groups={{0,1},{2,3}}, use_global_device_ids=true"
STAGES = "source_target_pairs={{0,2},{1,3}}"


def stages(local: Callable[..., Any], results: Any) -> tuple[Callable[..., Any], tuple[jax.Array, ...]]:
    """A step on 2 stages x 2 devices, of x ``[8, 16]``, which all have, and w ``[16, 16]``, a half on each device of a
    stage."""
    on = Mesh(np.array(jax.devices()).reshape(2, 2), ("stage", "model"))
    specs = (P(), P("stage", "model"))
    values = (steps.normal(1, (8, 16), np.float32), steps.normal(2, (32, 16), np.float32))
    mapped = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=results, check_vma=False)
    return mapped, tuple(steps.place(on, values, specs))


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """A stage's layer: an all-reduced matmul and pointwise work."""
    own = lax.dynamic_slice_in_dim(x, lax.axis_index("model") * 8, 8, axis=1)
    return jax.nn.gelu(lax.psum(own @ w[:8], "model")[:, :8] + 1.0)


def pipeline(x: jax.Array, w: jax.Array) -> jax.Array:
    """One microbatch through both stages."""
    sent = lax.ppermute(layer(x, w), "stage", [(0, 1)])
    return jax.numpy.tanh(sent @ w[:8]) + lax.axis_index("stage")


def scanned(x: jax.Array, w: jax.Array, adds: bool = False) -> jax.Array:
    """Microbatches in a loop, as pipelines are written."""

    def turn(carried: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = lax.axis_index("stage") == 0
        given = jax.numpy.where(first, x * batch, carried)
        made = layer(given, w)
        made = jax.numpy.concatenate([made, made], axis=1)
        made = given + made if adds else made
        return lax.ppermute(made, "stage", [(0, 1)]), made

    return lax.scan(turn, x * 0, np.arange(3, dtype=np.float32))[1]


def residual(x: jax.Array, w: jax.Array) -> jax.Array:
    """The same with what came from the stage before added, as in transformers: what a turn sends is the next one's."""
    return scanned(x, w, adds=True)


def mixed(x: jax.Array, w: jax.Array) -> jax.Array:
    """A send of what differs on the devices of a stage."""
    alike = lax.psum(w, "model")
    return lax.ppermute(alike + w, "stage", [(0, 1)]) + alike


def assert_bit_equal(found: Run, expected: Run) -> None:
    for new, old in zip(found.outputs, expected.outputs, strict=True):
        assert new.tobytes() == old.tobytes()


@pytest.mark.parametrize("local", [pipeline, scanned, residual])
def test_a_pipeline_gives_the_same_bits_with_sliced_sends(local: Callable[..., Any]) -> None:
    expected = run(*stages(local, P(("stage", "model"))))
    moves = schedules(expected.module)["slice-sends"]
    assert [type(move) for move in moves] == [SliceSend]
    assert from_json(to_json(moves)) == moves
    found = moved(expected, moves)
    assert_bit_equal(found, expected)
    (sent,) = [line for line in found.text.splitlines() if " collective-permute(" in line]
    (whole,) = [line for line in expected.text.splitlines() if " collective-permute(" in line]
    assert "f32[8," in whole
    assert "f32[4," in sent


def test_after_a_split_the_shards_of_the_sum_are_sent() -> None:
    expected = run(*stages(pipeline, P(("stage", "model"))))
    moves = schedules(expected.module)["split-slice-sends"]
    made = [
        one for one in opcodes(apply_moves(expected.module, moves)) if one in ("all-reduce", "all-gather")
    ]
    assert made == ["all-gather"]
    assert_bit_equal(moved(expected, moves), expected)


def test_what_differs_within_a_stage_is_sent_whole() -> None:
    module = handed_over(*stages(mixed, P("stage", "model")))
    assert "collective-permute" in opcodes(module)
    assert slice_sends(module) == ()
    assert not [move for move in legal_moves(module) if isinstance(move, SliceSend)]


def random_send(seed: int) -> tuple[bytes, bool]:
    """A random graph that ends in a send, and whether the sent value is equal within {0, 1} and {2, 3}, tracked apart
    from the move's own proof."""
    rng = random.Random(seed)
    lines = ["x0 = f32[4] parameter(0)", "n = u32[] partition-id()", "m = f32[] convert(n)"]
    lines += ["x1 = f32[4] broadcast(m), dimensions={}", "c = f32[] constant(2)"]
    lines += [
        "x2 = f32[4] broadcast(c), dimensions={}",
        f"x3 = f32[4] all-reduce(x0), channel_id=1, {GROUPS}, to_apply=a",
    ]
    alike = [False, False, True, True]
    for number in range(4, 14):
        one, two = rng.randrange(number), rng.randrange(number)
        kind = rng.choice(["add", "multiply", "negate", "across", "within", "permute", "bitcast"])
        if kind in ("add", "multiply"):
            made, same = f"{kind}(x{one}, x{two})", alike[one] and alike[two]
        elif kind in ("negate", "bitcast"):
            made, same = f"{kind}(x{one})", alike[one]
        elif kind == "permute":
            made, same = (
                f"collective-permute(x{one}), channel_id={number}, source_target_pairs={{{{0,1}}}}",
                False,
            )
        else:
            groups = GROUPS if kind == "within" else GROUPS.replace("0,1},{2,3", "0,2},{1,3")
            made = f"all-reduce(x{one}), channel_id={number}, {groups}, to_apply=a"
            same = kind == "within" or alike[one]
        lines.append(f"x{number} = f32[4] {made}")
        alike.append(same)
    sent = rng.randrange(14)
    lines.append(f"ROOT s = f32[4] collective-permute(x{sent}), channel_id=90, {STAGES}")
    sums = "a { p = f32[] parameter(0)\nq = f32[] parameter(1)\nROOT r = f32[] add(p, q) }\n"
    return module_of(f"{sums}ENTRY main {{\n" + "\n".join(lines) + "\n}\n"), alike[sent]


def test_of_random_graphs_exactly_the_sends_of_equal_values_are_sliced() -> None:
    told = []
    for seed in range(200):
        module, alike = random_send(seed)
        program = Program(module)
        grouped = next(i for i in program.instructions if i.name == "x3")
        move = SliceSend((), len(program.instructions) - 1, program.position(grouped), "all-reduce", 0)
        told.append(alike)
        if alike:
            assert "all-gather" in opcodes(apply_moves(module, [move])), seed
        else:
            with pytest.raises(IllegalMoveError, match="not proven equal"):
                apply_moves(module, [move])
    assert 40 < sum(told) < 160


CARRIED = """a { p = f32[] parameter(0)
  q = f32[] parameter(1)
  ROOT r = f32[] add(p, q) }
condition { p = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(4)
  ROOT c = pred[] compare(i, n), direction=LT }
body { p = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[8] get-tuple-element(p), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
  y = f32[8] all-reduce(x), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=a
  s = f32[8] collective-permute(x), channel_id=2, source_target_pairs={{0,2},{1,3}}
  z = f32[8] add(s, y)
  ROOT t = (s32[], f32[8]) tuple(j, z) }
ENTRY main { x = f32[8] parameter(0)
  z = s32[] constant(0)
  t = (s32[], f32[8]) tuple(z, x)
  w = (s32[], f32[8]) while(t), condition=condition, body=body
  ROOT r = f32[8] get-tuple-element(w), index=1 }
"""


def carried(*changes: tuple[str, str], is_replicated: bool = True) -> bytes:
    """The loop with some lines changed, whose argument all devices have, or each its own."""
    text = CARRIED
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    program = Program(module_of(text))
    if is_replicated:
        program.module.spmd_parameters_shardings.add().type = 0
    return program.serialize()


def test_a_loops_state_is_alike_where_it_is_before_and_stays_so() -> None:
    (loop,) = (at for at, one in enumerate(Program(carried()).instructions) if one.opcode == "while")
    assert slice_sends(carried()) == (SliceSend((loop,), 5, 6, "all-reduce", 0),)


@pytest.mark.parametrize(
    "module",
    [
        carried(is_replicated=False),
        carried(("z = f32[8] add(s, y)", "n = u32[] partition-id()\n  m = f32[] convert(n)\n"
                 "  d = f32[8] broadcast(m), dimensions={}\n  e = f32[8] add(d, s)\n  z = f32[8] add(e, y)")),
        carried(("source_target_pairs={{0,2},{1,3}}", "source_target_pairs={{0,3},{1,2}}")),
        carried(("w = (s32[], f32[8]) while(t)", "n = u32[] partition-id()\n  m = f32[] convert(n)\n"
                 "  d = f32[8] broadcast(m), dimensions={}\n  e = (s32[], f32[8]) tuple(z, d)\n"
                 "  v = (s32[], f32[8]) while(t), condition=condition, body=body\n"
                 "  w = (s32[], f32[8]) while(e)")),
    ],
    ids=["before", "made different", "sent out of order", "another loop's state"],
)  # fmt: skip
def test_other_states_of_loops_are_sent_whole(module: bytes) -> None:
    assert slice_sends(module) == ()
    assert not [move for move in legal_moves(module) if isinstance(move, SliceSend)]


def test_two_loops_that_share_a_body_slice_its_send_once() -> None:
    again = """w2 = (s32[], f32[8]) while(w), condition=condition, body=body
  ROOT r = f32[8] get-tuple-element(w2), index=1"""
    two = CARRIED.replace("collective-permute(x)", "collective-permute(y)")
    module = module_of(two.replace("ROOT r = f32[8] get-tuple-element(w), index=1", again))
    assert [(move.loop, move.send) for move in slice_sends(module) if isinstance(move, SliceSend)] == [
        ((3,), 6)
    ]


def test_what_an_asynchronous_send_delivers_differs() -> None:
    module = module_of("""a { p = f32[] parameter(0)
  q = f32[] parameter(1)
  ROOT r = f32[] add(p, q) }
ENTRY main { x = f32[8] parameter(0)
  y = f32[8] all-reduce(x), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=a
  b = (f32[8], f32[8]) collective-permute-start(y), channel_id=2, source_target_pairs={{0,1}}
  d = f32[8] collective-permute-done(b)
  ROOT s = f32[8] collective-permute(d), channel_id=3, source_target_pairs={{0,2},{1,3}} }
""")
    assert slice_sends(module) == ()
