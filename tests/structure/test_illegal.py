"""Every refusal of the table in docs/structure.md, with its reason; the test's name is the row's."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from disco_hlo.errors import IllegalMoveError
from disco_hlo.structure.moves import (
    Chunk,
    Double,
    FinishLater,
    Hoist,
    HoistRepeated,
    Keep,
    KeepTurns,
    Move,
    Narrow,
    Prefetch,
    Reorder,
    SliceSend,
    Split,
    Unroll,
    Widen,
    apply_moves,
)
from disco_hlo.structure.program import Program
from tests.modules import ADD, module_of
from tests.structure.enact import opcodes

TABLE = Path(__file__).parents[2] / "docs" / "structure.md"

COMPUTATIONS = (
    ADD
    + """
mul { a = f32[] parameter(0)
      b = f32[] parameter(1)
      ROOT s = f32[] multiply(a, b) }
max { a = f32[] parameter(0)
      b = f32[] parameter(1)
      ROOT s = f32[] maximum(a, b) }
two { a = f32[] parameter(0)
      b = f32[] parameter(1)
      c = f32[] parameter(2)
      d = f32[] parameter(3)
      s = f32[] add(a, c)
      t = f32[] add(b, d)
      ROOT r = (f32[], f32[]) tuple(s, t) }
"""
)
GLOBAL = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"


CONDITION = """condition { p = (s32[], f32[4,2], f32[4]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(4)
  ROOT c = pred[] compare(i, n), direction=LT }
"""
LOOPS = (
    f"{ADD}\nfirst_{CONDITION}second_{CONDITION}"
    """
first_body { p = (s32[], f32[4,2], f32[4]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  w = f32[4,2] get-tuple-element(p), index=1
  x = f32[4] get-tuple-element(p), index=2
  z = s32[] constant(0)
  s = f32[1,2] dynamic-slice(w, i, z), dynamic_slice_sizes={1,2}
  r = f32[2] reshape(s)
  g = f32[4] all-gather(r), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, dimensions={0}
  y = f32[4] add(x, g)
  one = s32[] constant(1)
  j = s32[] add(i, one)
  ROOT t = (s32[], f32[4,2], f32[4]) tuple(j, w, y) }
second_body { p = (s32[], f32[4,2], f32[4]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  w = f32[4,2] get-tuple-element(p), index=1
  x = f32[4] get-tuple-element(p), index=2
  z = s32[] constant(0)
  three = s32[] constant(3)
  k = s32[] subtract(three, i)
  s = f32[1,2] dynamic-slice(w, k, z), dynamic_slice_sizes={1,2}
  g = f32[1,4] all-gather(s), channel_id=2, replica_groups={{0,1}}, use_global_device_ids=true, dimensions={1}
  r = f32[4] reshape(g)
  y = f32[4] multiply(x, r)
  one = s32[] constant(1)
  j = s32[] add(i, one)
  ROOT t = (s32[], f32[4,2], f32[4]) tuple(j, w, y) }
ENTRY main { w = f32[4,2] parameter(0)
  x = f32[4] parameter(1)
  v = f32[4,2] parameter(2)
  z = s32[] constant(0)
  t = (s32[], f32[4,2], f32[4]) tuple(z, w, x)
  first = (s32[], f32[4,2], f32[4]) while(t), condition=first_condition, body=first_body
  a = f32[4] get-tuple-element(first), index=2
  u = (s32[], f32[4,2], f32[4]) tuple(z, w, a)
  second = (s32[], f32[4,2], f32[4]) while(u), condition=second_condition, body=second_body
  ROOT b = f32[4] get-tuple-element(second), index=2 }
"""
)
"""Two loops that gather the same entries, upward and downward."""


def module(body: str, header: str = "") -> bytes:
    """Of an entry whose parameters stand with their types where they are first read: ``negate(f32[8] x)``."""
    given = re.findall(r"(\w+\[[\d,]*\]) (\w+)(?=[,)])", body)
    parameters = [f"{name} = {shape} parameter({number})" for number, (shape, name) in enumerate(given)]
    entry = "\n".join([*parameters, re.sub(r"\w+\[[\d,]*\] (\w+)(?=[,)])", r"\1", body)])
    return module_of(f"HloModule m{header}\n{COMPUTATIONS}\nENTRY main {{\n{entry}\n}}\n")


def chunk_of(opcode: str, dimension: int, parts: int = 2) -> tuple[str, int, int]:
    return (opcode, dimension, parts)


def sending(
    made: str = "negate(y)", pairs: str = "{0,2},{1,3}", channel: str = "channel_id=2, ", size: int = 8
) -> str:
    """A stage of two devices that sends what it ``made`` of a sum to the next stage."""
    return (
        f"x = f32[{size}] parameter(0)\ny = f32[{size}] all-reduce(x), channel_id=1, "
        f"replica_groups={{{{0,1}},{{2,3}}}}, use_global_device_ids=true, to_apply=add\nz = f32[{size}] {made}\n"
        f"ROOT s = f32[{size}] collective-permute(z), {channel}source_target_pairs={{{pairs}}}"
    )


CASES: dict[str, tuple[str, Move | tuple[str, int, int], str]] = {
    "parts-do-not-divide": ("ROOT y = f32[6] negate(f32[6] x)",
        chunk_of("negate", 0, 4), "dimension 0 has 6 elements, which 4 does not divide"),
    "no-such-dimension": ("ROOT y = f32[6] negate(f32[6] x)", chunk_of("negate", 1), "has no dimension 1"),
    "too-many-parts": ("ROOT y = f32[256] negate(f32[256] x)",
        chunk_of("negate", 0, 128), "expected 2 to 64 parts, got 128"),
    "op-without-a-rule": ('ROOT y = f32[8] custom-call(f32[8] x), custom_call_target="f"',
        chunk_of("custom-call", 0), "no dimension is known to pass through it"),
    "several-results": ("y = f32[8] negate(f32[8] x)\nROOT t = (f32[8]) tuple(y)",
        chunk_of("tuple", 0), "its result is no single array"),
    "inner-factor": ("ROOT y = f32[32] reshape(f32[4,8] x)",
        chunk_of("reshape", 0, 8), "dimension 0 of x has 4 elements, which 8 does not divide"),
    "scattered-parts": ("ROOT y = f32[4,8] reshape(f32[32] x)",
        chunk_of("reshape", 1), "inner factor of a merged dimension"),
    "joined-dimension": ("ROOT z = f32[8] concatenate(f32[4] x, f32[4] y), dimensions={0}",
        chunk_of("concatenate", 0), "it joins its operands along dimension 0 itself"),
    "sliced-dimension": ("ROOT y = f32[4] slice(f32[8] x), slice={[0:4]}",
        chunk_of("slice", 0), "it takes a part of dimension 0 itself"),
    "dynamically-sliced-dimension": ("ROOT y = f32[4] dynamic-slice(f32[8] x, s32[] i), dynamic_slice_sizes={4}",
        chunk_of("dynamic-slice", 0), "it takes a part of dimension 0 itself"),
    "updated-dimension": ("ROOT y = f32[8] dynamic-update-slice(f32[8] x, f32[4] u, s32[] i)",
        chunk_of("dynamic-update-slice", 0), "it writes a part of dimension 0 itself"),
    "padded-dimension": ("z = f32[] constant(0)\nROOT y = f32[8] pad(f32[6] x, z), padding=1_1",
        chunk_of("pad", 0), "it pads dimension 0 itself"),
    "counted-dimension": ("ROOT y = s32[8] iota(), iota_dimension=0",
        chunk_of("iota", 0), "each part would start from zero"),
    "reversed-dimension": ("ROOT y = f32[8] reverse(f32[8] x), dimensions={0}",
        chunk_of("reverse", 0), "it works along dimension 0 itself"),
    "picked-dimension": ("ROOT y = f32[4,2] gather(f32[16,8] x, s32[4,1] i), offset_dims={1}, "
        "collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,2}",
        chunk_of("gather", 1), "it picks from dimension 1 of its operand"),
    "overlapping-windows": ("z = f32[] constant(0)\n"
        "ROOT y = f32[8] reduce-window(f32[8] x, z), window={size=3 pad=1_1}, to_apply=add",
        chunk_of("reduce-window", 0), "its windows overlap or are padded along dimension 0"),
    "other-element-size": ("ROOT y = u64[4] bitcast-convert(f32[4,2] x)",
        chunk_of("bitcast-convert", 0), "its operands have another shape than its result"),
    "several-reductions": ("z = f32[] constant(0)\n"
        "r = (f32[4], f32[4]) reduce(f32[4,8] x, x, z, z), dimensions={1}, to_apply=two\n"
        "ROOT y = f32[4] get-tuple-element(r), index=0", chunk_of("reduce", 0), "its result is no single array"),
    "partial-sums-of-a-product": ("z = f32[] constant(1)\n"
        "ROOT y = f32[] reduce(f32[8] x, z), dimensions={0}, to_apply=mul",
        chunk_of("reduce", ~0), "partial results of its reduction cannot be joined"),
    "sum-from-something": ("z = f32[] constant(1)\nROOT y = f32[] reduce(f32[8] x, z), dimensions={0}, to_apply=add",
        chunk_of("reduce", ~0), "does not start from a constant zero"),
    "sum-over-another-dimension": ("z = f32[] constant(0)\n"
        "ROOT y = f32[4] reduce(f32[8,4] x, z), dimensions={0}, to_apply=add",
        chunk_of("reduce", ~1), "it does not reduce dimension 1"),
    "dot-without-that-contraction": ("ROOT z = f32[8,6] dot(f32[8,4] x, f32[4,6] y), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={0}", chunk_of("dot", ~0), "it does not contract dimension 0"),
    "nothing-to-sum": ("ROOT y = f32[8] negate(f32[8] x)", chunk_of("negate", ~0), "it sums over nothing"),
    "several-arrays-in-one-collective": (
        f"ROOT r = (f32[8], f32[8]) all-reduce(f32[8] x, f32[8] y), {GLOBAL}, to_apply=add",
        Split(2, 0), "it carries several arrays"),
    "gathered-dimension": (f"ROOT y = f32[16] all-gather(f32[8] x), {GLOBAL}, dimensions={{0}}",
        chunk_of("all-gather", 0), "it works along dimension 0 itself"),
    "ordered-by-control": ("y = f32[8] negate(f32[8] x)\nz = f32[8] negate(x), control-predecessors={y}\n"
        "ROOT s = f32[8] add(y, z)", Chunk((1,), ("negate",), (0,), 2), "waits for it by a control dependency"),
    "waiting-by-control": ("y = f32[8] negate(f32[8] x)\nz = f32[8] negate(x), control-predecessors={y}\n"
        "ROOT s = f32[8] add(y, z)", Chunk((2,), ("negate",), (0,), 2), "it is ordered by a control dependency"),
    "no-such-instruction": ("ROOT x = f32[8] parameter(0)", Split(7, 0), "there is no instruction 7"),
    "another-instruction": ("ROOT y = f32[8] negate(f32[8] x)", Split(1, 0), "is y (negate), expected all-reduce"),
    "stretch-out-of-order": ("y = f32[8] negate(f32[8] x)\nROOT z = f32[8] negate(y)",
        Chunk((2, 1), ("negate", "negate"), (0, 0), 2), "in ascending order"),
    "stretch-of-uneven-lists": ("ROOT y = f32[8] negate(f32[8] x)",
        Chunk((1,), ("negate",), (0, 0), 2), "expected one opcode and one dimension per instruction"),
    "split-of-a-maximum": (f"ROOT y = f32[8] all-reduce(f32[8] x), {GLOBAL}, to_apply=max",
        Split(1, 0), "only a sum can be scattered"),
    "split-indivisible": (f"ROOT y = f32[7] all-reduce(f32[7] x), {GLOBAL}, to_apply=add",
        Split(1, 0), "which 2 devices do not divide"),
    "split-of-no-dimension": (f"ROOT y = f32[8] all-reduce(f32[8] x), {GLOBAL}, to_apply=add",
        Split(1, 3), "has no dimension 3"),
    "groups-of-replicas": ("ROOT y = f32[8] all-reduce(f32[8] x), replica_groups={{0,1}}, to_apply=add",
        Split(1, 0), "its groups name replicas"),
    "groups-of-one": ("ROOT y = f32[8] all-reduce(f32[8] x), channel_id=1, replica_groups={{0},{1}}, "
        "use_global_device_ids=true, to_apply=add", Split(1, 0), "not of one size of two devices or more"),
    "reader-of-something-else": (f"y = f32[16] all-gather(f32[8] x), {GLOBAL}, dimensions={{0}}\n"
        "z = f32[8] negate(x)\nROOT t = (f32[16], f32[8]) tuple(y, z)",
        Reorder(1, 2, "negate"), "it does not read y"),
    "reader-is-a-collective": (f"y = f32[16] all-gather(f32[8] x), {GLOBAL}, dimensions={{0}}\n"
        f"ROOT z = f32[16] all-reduce(y), {GLOBAL.replace('=1', '=2')}, to_apply=add",
        Reorder(1, 2, "all-reduce"), "it mixes the values of several devices"),
    "reader-along-the-gathered-dimension": (f"y = f32[16] all-gather(f32[8] x), {GLOBAL}, dimensions={{0}}\n"
        "ROOT z = f32[16] reverse(y), dimensions={0}",
        Reorder(1, 2, "reverse"), "it works along dimension 0 itself"),
    "maximum-over-the-gathered-dimension": (f"y = f32[16,4] all-gather(f32[8,4] x), {GLOBAL}, dimensions={{0}}\n"
        "m = f32[] constant(0)\nROOT z = f32[4] reduce(y, m), dimensions={0}, to_apply=max",
        Reorder(1, 3, "reduce"), "it works along dimension 0 that y joins"),
    "another-operand-differs": (f"y = f32[16] all-gather(f32[8] x), {GLOBAL}, dimensions={{0}}\n"
        "ROOT z = f32[16] add(y, f32[16] w)",
        Reorder(1, 3, "add"), "w is not proven equal on the devices of a group"),
    "shards-not-contiguous": (f"y = f32[16,4] all-gather(f32[8,4] x), {GLOBAL}, dimensions={{0}}\n"
        "ROOT z = f32[4,16] transpose(y), dimensions={1,0}",
        Reorder(1, 2, "transpose"), "is not the outermost in memory"),
    "another-shard": (f"y = f32[16] all-gather(f32[8] x), {GLOBAL}, dimensions={{0}}\np = u32[] partition-id()\n"
        "t = s32[2] constant({8, 0})\ne = s32[1] dynamic-slice(t, p), dynamic_slice_sizes={1}\n"
        "i = s32[] reshape(e)\nROOT z = f32[8] dynamic-slice(y, i), dynamic_slice_sizes={8}",
        Reorder(1, 6, "dynamic-slice"), "it takes a part of dimension 0 itself"),
    "sent-array-differs": (sending("add(x, y)"), SliceSend((), 3, 1, "all-reduce", 0),
        "z is not proven equal on the devices of a group"),
    "send-out-of-order": (sending(pairs="{0,3},{1,2}"), SliceSend((), 3, 1, "all-reduce", 0),
        "its pairs do not join groups of y device by device, in order"),
    "send-of-half-a-group": (sending(pairs="{0,2}"), SliceSend((), 3, 1, "all-reduce", 0),
        "its pairs do not join groups of y device by device, in order"),
    "send-without-shards": (sending(size=5), SliceSend((), 3, 1, "all-reduce", 0),
        "2 devices have no contiguous shards of one size along dimension 0 of [5]"),
    "send-between-replicas": (sending(channel=""), SliceSend((), 3, 1, "all-reduce", 0),
        "it is no send of one array between the partitions of one program"),
    "send-of-no-sum": (sending(), SliceSend((), 3, 1, "reduce-scatter", 0),
        "a reduce-scatter leaves no array alike on the devices of a group"),
}  # fmt: skip


Asked = Callable[[bytes], Move]


def gathers_in(inside: Program) -> tuple[list[int], list[Program], list[int]]:
    """Places of loops, their bodies, and the place of the gather in each."""
    loops = [position for position, i in enumerate(inside.instructions) if i.opcode == "while"]
    bodies = [inside.inside(inside.instructions[at].called_computation_ids[0]) for at in loops]
    return loops, bodies, [[i.opcode for i in body.instructions].index("all-gather") for body in bodies]


def asked_of_summed(source: bytes) -> Move:
    return Widen((), (opcodes(source).index("scatter"),))


def asked_of_loops(source: bytes, kind: type[Move]) -> Move:
    loops, bodies, gathers = gathers_in(Program(source))
    if kind is FinishLater:
        at = [i.opcode for i in bodies[0].instructions].index("all-reduce")
        return FinishLater((loops[0],), (at,), ("all-reduce",))
    if kind in (Double, Unroll):
        return kind((loops[0],))  # type: ignore[call-arg]
    if kind is KeepTurns:
        again = [i.opcode for i in bodies[-1].instructions].index("all-gather") + 1
        return KeepTurns((loops[0],), loops[-1], ((gathers[0], again),), (("all-gather", "reshape"),))
    return kind((loops[0],), (gathers[0],))  # type: ignore[call-arg]


def asked_of_nested(source: bytes) -> Hoist:
    entry = Program(source)
    at = opcodes(source).index("while")
    loops, _, gathers = gathers_in(entry.inside(entry.instructions[at].called_computation_ids[0]))
    return Hoist((at,), tuple(zip(loops, gathers, strict=True)))


def asked_of_twice(source: bytes) -> Keep:
    first, again = (at for at, opcode in enumerate(opcodes(source)) if opcode == "sine")
    return Keep((), ((first, again),), (("sine", "sine"),))


EDITS: dict[str, tuple[tuple[str, str], type[Move], str]] = {
    "loop-shares-its-body": (
        ("condition=second_condition, body=second_body", "condition=first_condition, body=first_body"),
        Prefetch, "another instruction calls its body or condition too"),
    "loop-ordered-by-control": (("body=first_body", "body=first_body, control-predecessors={v}"),
        Prefetch, "it is ordered by a control dependency"),
    "loop-state-read-whole": (
        ("ROOT b = f32[4] get-tuple-element(second), index=2", "ROOT b = (s32[], f32[4,2], f32[4]) copy(first)"),
        Prefetch, "its state is not taken apart element by element"),
    "turns-not-known": (("add(i, one)", "add(i, i)"), Prefetch, "how often it turns is not known"),
    "turns-contradicted": (("body=first_body", 'body=first_body, backend_config={"known_trip_count":{"n":"5"}}'),
        Prefetch, "it says that it turns 5 times, and counts 4"),
    "too-few-turns": (("constant(4)", "constant(3)"), Double, "it turns 3 times, expected 4 or more"),
    "turn-with-effects": (
        ("y = f32[4] add(x, g)", 'y = f32[4] custom-call(g), custom_call_target="f", custom_call_has_side_effect=true'),
        Double, "its body holds y (custom-call), which is not repeated"),
    "turn-in-a-group": (("y = f32[4] add(x, g)",
                         'y = f32[4] add(x, g), frontend_attributes={_scheduling_group_id="1"}'),
        Double, "its body holds y, of a scheduling group"),
    "condition-with-effects": (
        (f"first_{CONDITION}", f"first_{CONDITION}".replace("  n = ",
         '  e = s32[] custom-call(i), custom_call_target="f", custom_call_has_side_effect=true\n  n = ')),
        Unroll, "its condition has effects"),
    "too-many-turns": (("constant(4)", "constant(4000)"), Unroll, "instructions, expected up to 20000"),
    "gather-not-foreseen": (("r = f32[2] reshape(s)", "r = f32[2] slice(x), slice={[0:2]}"),
        Prefetch, "what the next turn gathers does not follow from the loop's counter"),
    "gather-in-the-state": (("tuple(j, w, y)", "tuple(j, w, g)"), Prefetch, "it is part of the loop's state already"),
    "other-value-in-its-turn": (("all-gather(s), channel_id=2, replica_groups={{0,1}}",
                             "all-gather(s), channel_id=2, replica_groups={{1,0}}"),
        KeepTurns, "it may be another value than g"),
    "gather-read-as-it-is": (("y = f32[4] add(x, g)", "y = f32[4] subtract(x, g)"),
        Narrow, "not only a conversion to fewer bits reads it"),
    "reduction-read-in-its-turn": (
        ("y = f32[4] add(x, g)", f"y = f32[4] all-reduce(x), {GLOBAL.replace('1,', '3,', 1)}, to_apply=add"),
        FinishLater, "the turn itself reads its result"),
    "gather-not-repeated": (("k = s32[] subtract(three, i)", "k = s32[] subtract(i, three)"),
        HoistRepeated, "what it gathers may change with the turns"),
    "other-number-of-turns": (
        (f"second_{CONDITION}", f"second_{CONDITION}".replace("(4)", "(3)")),
        KeepTurns, "it turns 3 times, first 4"),
}  # fmt: skip
"""What of :data:`LOOPS` is written otherwise, the move that is asked for, and why it is refused."""

NESTED = (
    LOOPS.replace("ENTRY main", "outer_body")
    .replace(
        "w = f32[4,2] parameter(0)\n  x = f32[4] parameter(1)\n  v = f32[4,2] parameter(2)",
        """p = (s32[], f32[4,2], f32[4]) parameter(0)
  n = s32[] get-tuple-element(p), index=0
  w = f32[4,2] get-tuple-element(p), index=1
  x = f32[4] get-tuple-element(p), index=2
  v = f32[4,2] negate(w)
  more = s32[] constant(1)
  m = s32[] add(n, more)""",
    )
    .replace(
        "ROOT b = f32[4] get-tuple-element(second), index=2 }",
        """b = f32[4] get-tuple-element(second), index=2
  ROOT r = (s32[], f32[4,2], f32[4]) tuple(m, w, b) }
outer_condition { p = (s32[], f32[4,2], f32[4]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(2)
  ROOT c = pred[] compare(i, n), direction=LT }
ENTRY main { w = f32[4,2] parameter(0)
  x = f32[4] parameter(1)
  z = s32[] constant(0)
  t = (s32[], f32[4,2], f32[4]) tuple(z, w, x)
  outer = (s32[], f32[4,2], f32[4]) while(t), condition=outer_condition, body=outer_body
  ROOT b = f32[4] get-tuple-element(outer), index=2 }""",
    )
)
"""The same in a loop over microbatches."""
EDITS_OF_NESTED: dict[str, tuple[tuple[str, str], str]] = {
    "hoisted-array-changes": (("tuple(m, w, b)", "tuple(m, v, b)"), "what it gathers changes in the outer loop"),
    "hoisted-entry-missing": (("three = s32[] constant(3)", "three = s32[] constant(4)"),
        "it gathers an entry that there is not"),
}  # fmt: skip


def test_what_nested_loops_are_refused_for_is_the_edit_alone() -> None:
    source = module_of(NESTED)
    made = apply_moves(source, [asked_of_nested(source)])
    assert opcodes(made).count("all-gather") == 1


@pytest.mark.parametrize("kind", [Prefetch, Double, Unroll, KeepTurns])
def test_what_the_loops_are_refused_for_is_the_edit_alone(kind: type[Move]) -> None:
    source = module_of(LOOPS)
    assert apply_moves(source, [asked_of_loops(source, kind)], copies=kind is not KeepTurns) != source


def test_an_earlier_loop_cannot_read_what_a_later_one_keeps() -> None:
    source = module_of(LOOPS)
    move = asked_of_loops(source, KeepTurns)
    assert isinstance(move, KeepTurns)
    ((value, again),) = move.pairs
    turned = KeepTurns((move.later,), move.loop[0], ((again, value),), (("reshape", "all-gather"),))
    with pytest.raises(IllegalMoveError, match="it comes before the loop that keeps"):
        apply_moves(source, [turned])


TWICE = """
ENTRY main { x = f32[4,2]{1,0} parameter(0)
  a = f32[4,2]{1,0} sine(x)
  b = f32[4,2]{1,0} negate(a)
  t = (f32[4,2]{1,0}) tuple(x)
  o = (f32[4,2]{1,0}) opt-barrier(t)
  y = f32[4,2]{1,0} get-tuple-element(o), index=0
  c = f32[4,2]{1,0} sine(y)
  ROOT r = f32[4,2]{1,0} multiply(b, c) }
"""
EDITS_OF_TWICE: dict[str, tuple[tuple[str, str], str]] = {
    "other-value": (("tuple(x)", "tuple(b)"), "c (sine): it may be another value than a"),
    "lies-otherwise": (("c = f32[4,2]{1,0}", "c = f32[4,2]{0,1}"), "c (sine): a lies otherwise in memory"),
    "returned-twice": (
        ("r = f32[4,2]{1,0} multiply(b, c)", "r = (f32[4,2]{1,0}, f32[4,2]{1,0}) tuple(a, c)"),
        "c (sine): it needs a buffer of its own",
    ),
}


SUMMED = """
add { a = bf16[] parameter(0)
      b = bf16[] parameter(1)
      ROOT s = bf16[] add(a, b) }
ENTRY main { x = bf16[] constant(0)
  rows = bf16[8,2] broadcast(x), dimensions={}
  ids = s32[4,1] parameter(0)
  updates = bf16[4,2] parameter(1)
  ROOT sum = bf16[8,2] scatter(rows, ids, updates), update_window_dims={1}, inserted_window_dims={0},
    scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=add }
"""
EDITS_OF_SUMMED: dict[str, tuple[tuple[str, str], str]] = {
    "sum-finer-already": (("bf16", "f32"), "sum (scatter): it adds up no array in 16 bits"),
    "rows-added-to-once": (
        ("to_apply=add", "to_apply=add, unique_indices=true"),
        "each row is added to once",
    ),
    "maximum-of-rows": (("add(a, b)", "maximum(a, b)"), "sum (scatter): it does something else than add"),
}


OF_LOOPS: dict[str, tuple[str, tuple[str, str], Asked, str]] = {
    **{
        case: (LOOPS, edit, partial(asked_of_loops, kind=kind), why)
        for case, (edit, kind, why) in EDITS.items()
    },
    **{case: (NESTED, edit, asked_of_nested, why) for case, (edit, why) in EDITS_OF_NESTED.items()},
    **{case: (TWICE, edit, asked_of_twice, why) for case, (edit, why) in EDITS_OF_TWICE.items()},
    **{case: (SUMMED, edit, asked_of_summed, why) for case, (edit, why) in EDITS_OF_SUMMED.items()},
}


def test_what_is_added_up_is_refused_for_the_edit_alone() -> None:
    source = module_of(SUMMED)
    assert opcodes(apply_moves(source, [asked_of_summed(source)])).count("convert") == 3


@pytest.mark.parametrize("case", OF_LOOPS)
def test_refused_of_loops_and_of_what_is_made_twice(case: str) -> None:
    text, (old, new), asked, reason = OF_LOOPS[case]
    assert old in text
    source = module_of(text.replace(old, new))
    move = asked(source)
    with pytest.raises(IllegalMoveError, match=re.escape(reason)):
        apply_moves(source, [move], copies=not isinstance(move, KeepTurns))


def test_what_is_made_twice_is_refused_for_the_edit_alone() -> None:
    source = module_of(TWICE)
    assert opcodes(apply_moves(source, [asked_of_twice(source)])).count("sine") == 1


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str) -> None:
    body, asked, reason = CASES[case]
    source = module(body)
    if isinstance(asked, tuple):
        opcode, dimension, parts = asked
        asked = Chunk((opcodes(source).index(opcode),), (opcode,), (dimension,), parts)
    with pytest.raises(IllegalMoveError, match=re.escape(reason)) as refusal:
        apply_moves(source, [asked])
    assert str(refusal.value).startswith("move 0 (")


def test_a_scheduled_module_is_refused() -> None:
    source = module("x = f32[8] parameter(0)\nROOT y = f32[8] negate(x)", ", is_scheduled=true")
    with pytest.raises(IllegalMoveError, match="is scheduled"):
        apply_moves(source, [Split(1, 0)])


def test_the_table_in_the_documentation_names_every_refusal() -> None:
    section = TABLE.read_text().split("## What is refused")[1].split("## ")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)
    assert sorted(rows) == sorted({*CASES, *OF_LOOPS})
