"""What the backward pass computes again is kept instead: recomputing steps give the same numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from disco_hlo.errors import IllegalMoveError
from disco_hlo.structure.choose import Prices
from disco_hlo.structure.keep import index_in_turn, keep, kept_in, kept_in_turns
from disco_hlo.structure.loops import Loop, read_loop
from disco_hlo.structure.moves import Keep, KeepTurns, Move, apply_moves, from_json, to_json
from disco_hlo.structure.numbering import Numbers
from disco_hlo.structure.program import Program, computations, dtype, evaluate, literal_value
from disco_hlo.structure.propose_loops import KEPT_IN_PART, kept_in_part, loop_schedules
from tests.modules import module_of
from tests.structure import steps
from tests.structure.enact import Run, assert_equal, moved, run
from tests.structure.test_illegal import GLOBAL, LOOPS

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


@pytest.mark.parametrize("form", ["unroll", "microbatches, scan"])
@pytest.mark.parametrize("name", ["keep-kernels", "keep", "gather-once"])
def test_a_recomputing_step_keeps_what_it_computes_twice(form: str, name: str) -> None:
    expected, found = unmoved(form)
    moves = found[name]
    assert from_json(to_json(moves)) == moves
    assert any(isinstance(move, KeepTurns if "scan" in form else Keep) for move in moves)
    less = "all-gather" if name == "gather-once" else "dot"
    assert counted(apply_moves(expected.module, moves), less) < counted(expected.module, less)
    assert_equal(moved(expected, moves), expected)


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


LAID = """x = f32[2,3]{1,0} parameter(0)
  c = f32[2,3]{0,1} copy(x)
"""
BITCASTS = """
f { p = f32[2,3]{1,0} parameter(0)
  ROOT q = f32[3,2]{0,1} bitcast(p) }
g { p = f32[2,3]{0,1} parameter(0)
  ROOT q = f32[3,2]{0,1} bitcast(p) }
"""
START = f"(f32[2,3]{{1,0}}, f32[4,3]{{1,0}}) all-gather-start(x), {GLOBAL}, dimensions={{0}}"


@pytest.mark.parametrize(
    ("pair", "is_same"),
    [
        ("a = f32[3,2]{0,1} bitcast(x)\n b = f32[3,2]{0,1} bitcast(c)", False),
        ("a = f32[6]{0} bitcast(x)\n b = f32[6]{0} reshape(c)", True),
        ('a = f32[2]{0} custom-call(x), custom_call_target="f"\n b = f32[2]{0} custom-call(c), custom_call_target="f"',
            False),
        ("a = f32[3,2]{0,1} fusion(x), kind=kLoop, calls=f\n b = f32[3,2]{0,1} fusion(c), kind=kLoop, calls=g", False),
        (f"a = {START}\n b = {START}", False),
    ],
    ids=["bitcast", "reshape", "custom-call", "fusion", "start"],
)  # fmt: skip
def test_values_are_equal_where_layouts_do_not_matter(pair: str, is_same: bool) -> None:
    shapes = [re.split(r" [a-z-]+\(", line.split("= ")[1])[0] for line in pair.splitlines()]
    text = f"{BITCASTS}\nENTRY main {{ {LAID} {pair}\n ROOT r = ({', '.join(shapes)}) tuple(a, b) }}"
    program = Program(module_of(text))
    numbers = Numbers().of(program, {})
    a, b = (next(numbers[i.id] for i in program.instructions if i.name == name) for name in "ab")
    assert (a == b) is is_same


KERNELS = """
ENTRY main { x = f32[4] parameter(0)
  u = f32[1] parameter(1)
  z = s32[] constant(0)
  k = f32[4] custom-call(x), custom_call_target="f"
  t = (f32[4]) tuple(x)
  o = (f32[4]) opt-barrier(t)
  y = f32[4] get-tuple-element(o), index=0
  l = f32[4] custom-call(y), custom_call_target="f"
  e = f32[4] negate(k)
"""
READS = {
    "read": "d = f32[4] cosine(l)\n ROOT r = (f32[4], f32[4]) tuple(e, d) }",
    "written over": "d = f32[4] dynamic-update-slice(l, u, z)\n ROOT r = (f32[4], f32[4]) tuple(e, d) }",
    "returned": "ROOT r = (f32[4], f32[4], f32[4]) tuple(k, e, l) }",
    "seen after the first is written over": """v = f32[2,2] bitcast(l)
  s = f32[1,1] slice(v), slice={[0:1],[0:1]}
  q = f32[1] bitcast(s)
  d = f32[4] dynamic-update-slice(k, q, z)
  w = f32[2,2] cosine(v)
  ROOT r = (f32[4], f32[4], f32[2,2]) tuple(e, d, w) }""",
}


@pytest.mark.parametrize("case", READS)
def test_after_copy_insertion_only_what_is_read_alone_is_kept(case: str) -> None:
    source = module_of(KERNELS + READS[case])
    assert len(kept_in(Program(source, copies=False), "kernels")) == 1
    assert len(kept_in(Program(source), "kernels")) == (case == "read")


def test_what_writes_over_an_array_still_waits_for_what_reads_it() -> None:
    """``d`` waited for ``s``, which reads ``w``, for ``l`` alone, which goes."""
    program = Program(
        module_of("""
ENTRY main { x = f32[4] parameter(0)
  w = f32[4] negate(x)
  n = f32[4] sine(w)
  k = f32[4] custom-call(n), custom_call_target="f"
  t = (f32[4]) tuple(w)
  o = (f32[4]) opt-barrier(t)
  y = f32[4] get-tuple-element(o), index=0
  s = f32[4] sine(y)
  l = f32[4] custom-call(s), custom_call_target="f"
  e = f32[4] negate(s)
  z = s32[] constant(0)
  q = f32[1] slice(l), slice={[0:1]}
  m = f32[1] slice(k), slice={[1:2]}
  p = f32[1] add(m, q)
  d = f32[4] dynamic-update-slice(w, p, z)
  ROOT r = (f32[4], f32[4]) tuple(d, e) }""")
    )
    keep(program, kept_in(program, "kernels"))
    names = {i.id: i.name for i in program.instructions}
    assert "l" not in names.values()
    (update,) = (i for i in program.instructions if i.opcode == "dynamic-update-slice")
    assert [names[i] for i in update.control_predecessor_ids] == ["s"]


def loops_of(text: str) -> tuple[Loop, Loop]:
    program = Program(module_of(text), copies=False)
    first, second = (i for i in program.instructions if i.opcode == "while")
    return read_loop(program, first), read_loop(program, second)


def test_loops_that_never_turn_keep_nothing() -> None:
    with pytest.raises(IllegalMoveError, match="it turns 0 times"):
        kept_in_turns(*loops_of(LOOPS.replace("constant(4)", "constant(0)")), "gathers")


def test_an_index_wraps_around_as_the_counter_does() -> None:
    text = LOOPS.replace("subtract(three, i)", "multiply(three, i)").replace(
        "constant(3)", "constant(1073741824)"
    )
    _, second = loops_of(text)
    (index,) = (i for i in second.body.instructions if i.name == "k")
    assert [index_in_turn(second, index, turn) for turn in range(3)] == [0, 1 << 30, -(1 << 31)]


def test_no_index_is_made_of_floats() -> None:
    """Of a bf16 constant there are only the bits."""
    program = Program(module_of("ENTRY main { c = bf16[] constant(3)\n ROOT r = s32[] convert(c) }"))
    assert evaluate(program, program.by_id[program.root]) is None


CALLS = """
  n = ((f32[4], f32[4]), f32[4]) custom-call(g), custom_call_target="f"
  m = (f32[4], f32[4]) get-tuple-element(n), index=0
  h = f32[4] get-tuple-element(m), index=0
"""


def test_of_tuples_in_tuples_nothing_is_kept() -> None:
    text = LOOPS.replace("y = f32[4] add(x, g)", CALLS + "y = f32[4] add(x, h)")
    text = text.replace(
        "y = f32[4] multiply(x, r)", CALLS.replace("(g)", "(r)") + "y = f32[4] multiply(x, h)"
    )
    assert not kept_in_turns(*loops_of(text), "kernels")


LATE = (
    LOOPS.replace("f32[4,2]", "f32[8,2]")
    .replace("dynamic-slice(w, i, z)", "dynamic-slice(w, a, z)")
    .replace("s = f32[1,2] dynamic-slice(w, a", "a = s32[] add(i, i)\n s = f32[1,2] dynamic-slice(w, a")
    .replace(
        "k = s32[] subtract(three, i)",
        "d = s32[] add(i, i)\n six = s32[] constant(6)\n k = s32[] subtract(six, d)",
    )
    .replace(
        "y = f32[4] multiply(x, r)",
        """o = f32[4] multiply(x, r)
  l = s32[] subtract(three, i)
  m = f32[1] dynamic-slice(x, l), dynamic_slice_sizes={1}
  y = f32[4] dynamic-update-slice(o, m, l)""",
    )
)
"""The second loop computes which turn of the first it belongs to behind what reads what that has gathered."""


def test_an_index_may_stand_behind_what_reads_the_kept_value() -> None:
    source = module_of(LATE)
    moves = loop_schedules(source, copies=False)["gather-once"]
    for _, program in computations(Program(apply_moves(source, moves, copies=False), copies=False)):
        place = {one.id: at for at, one in enumerate(program.instructions)}
        assert all(
            place[before] < place[one.id] for one in program.instructions for before in one.operand_ids
        )


CONVERTED = """u = u32[] convert(INDEX)
  f = f32[] convert(u)
  b = f32[4] broadcast(f), dimensions={}
  q = f32[4] add(G, b)
  c = f32[4] custom-call(q), custom_call_target="c"
"""


def test_an_index_may_be_unsigned() -> None:
    """After copy insertion the counter is counted on in its buffer; what it is converted to stays."""
    first, second = (
        CONVERTED.replace("INDEX", index).replace("G", gathered) for index, gathered in ("ig", "kr")
    )
    text = LOOPS.replace("y = f32[4] add(x, g)", first + "y = f32[4] add(x, c)")
    source = module_of(text.replace("y = f32[4] multiply(x, r)", second + "y = f32[4] multiply(x, c)"))
    kept = apply_moves(source, loop_schedules(source)["keep-kernels"])
    every = [one for _, inside in computations(Program(kept)) for one in inside.instructions]
    assert any(one.opcode == "dynamic-update-slice" for one in every)
    assert {dtype(one) for one in every if one.opcode == "constant"} == {"s32", "u32"}
    assert all(literal_value(one) is not None for one in every if one.opcode == "constant")


UNREAD = """
  e = f32[4] custom-call(g), custom_call_target="e"
  h = f32[4] custom-call(g), custom_call_target="h"
  u = f32[4] negate(h)
  m = f32[4] custom-call(g), custom_call_target="m"
  v = f32[4] negate(m)
"""


def test_a_kept_value_may_be_read_by_what_nothing_reads() -> None:
    text = LOOPS.replace("y = f32[4] add(x, g)", UNREAD + "y = f32[4] add(x, e)")
    text = text.replace(
        "y = f32[4] multiply(x, r)",
        UNREAD.replace("(g)", "(r)").replace("negate", "cosine") + "y = f32[4] multiply(x, e)",
    )
    source = module_of(text)
    moves = loop_schedules(source, copies=False)["keep-kernels"]
    assert [len(move.pairs) for move in moves if isinstance(move, KeepTurns)] == [3]
    assert counted(apply_moves(source, moves, copies=False), "custom-call") == 3


def test_a_loop_whose_results_are_kept_is_gone_for_later_moves() -> None:
    """A scan within ``jax.checkpoint`` is made again as a whole: no schedule was found of a step that has one."""
    body = """bodyN { s = (s32[], f32[4]) parameter(0)
      i = s32[] get-tuple-element(s), index=0
      x = f32[4] get-tuple-element(s), index=1
      one = s32[] constant(1)
      j = s32[] add(i, one)
      y = f32[4] custom-call(x), custom_call_target="y"
      ROOT t = (s32[], f32[4]) tuple(j, y) }
    conditionN { s = (s32[], f32[4]) parameter(0)
      i = s32[] get-tuple-element(s), index=0
      n = s32[] constant(3)
      ROOT c = pred[] compare(i, n), direction=LT }"""
    loop = """beginN = (s32[], f32[4]) tuple(z, p)
      wN = (s32[], f32[4]) while(beginN), condition=conditionN, body=bodyN
      vN = f32[4] get-tuple-element(wN), index=1"""
    source = module_of(
        "\n".join(body.replace("N", number) for number in "12")
        + "ENTRY e { p = f32[4] parameter(0)\n z = s32[] constant(0)\n"
        + "\n".join(loop.replace("N", number) for number in "12")
        + "\n a = f32[4] add(v1, p)\n ROOT r = f32[4] multiply(a, v2) }"
    )
    moves = loop_schedules(source, copies=False)["keep-kernels"]
    part = kept_in_part(source, lambda _: Prices({}, 1.0), 1 << 20, copies=False)
    assert part.schedules[KEPT_IN_PART] == moves
    assert counted(apply_moves(source, moves, copies=False), "while") == 1


LOOP_AGAIN = """
body { s = (s32[], f32[4]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  one = s32[] constant(1)
  j = s32[] add(i, one)
  y = f32[4] get-tuple-element(s), index=1
  z = f32[4] cosine(y)
  ROOT t = (s32[], f32[4]) tuple(j, z) }
cond { s = (s32[], f32[4]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(3)
  ROOT p = pred[] compare(i, n), direction=LT }
ENTRY main { x = f32[4] parameter(0)
  zero = s32[] constant(0)
  a = (s32[], f32[4]) tuple(zero, x)
  w = (s32[], f32[4]) while(a), body=body, condition=cond
  u = f32[4] get-tuple-element(w), index=1
  k = f32[4] custom-call(u), custom_call_target="f"
  t = (f32[4]) tuple(x)
  o = (f32[4]) opt-barrier(t)
  y = f32[4] get-tuple-element(o), index=0
  b = (s32[], f32[4]) tuple(zero, y)
  v = (s32[], f32[4]) while(b), body=body, condition=cond
  q = f32[4] get-tuple-element(v), index=1
  l = f32[4] custom-call(q), custom_call_target="f"
  e = f32[4] negate(k)
  d = f32[4] cosine(l)
  ROOT r = (f32[4], f32[4]) tuple(e, d) }
"""


def test_a_loop_goes_that_only_a_kept_value_needed() -> None:
    source = module_of(LOOP_AGAIN)
    kept = apply_moves(source, loop_schedules(source)["keep-kernels"])
    assert [counted(one, "while") for one in (source, kept)] == [2, 1]
