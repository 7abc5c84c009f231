"""Identity and key of a step: which values of constants count in which."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.graph import Graph, Kind
from tests.modules import module_of

Values = tuple[float, ...]
COUNT = 5
"""Scalar constants of a random step."""
NUMBERS = st.sampled_from([0.001, 0.01, 0.1, 2.0, 100.0, 200.0])
VALUES = st.tuples(*[NUMBERS] * COUNT)
SEEDS = st.integers(0, 1 << 30)

LOOP = """
%body (t: (s32[], f32[8], f32[])) -> (s32[], f32[8], f32[]) {
  %t = (s32[], f32[8]{0}, f32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %v = f32[8]{0} get-tuple-element(%t), index=1
  %r = f32[] get-tuple-element(%t), index=2
  %rate = f32[] constant(RATE)
  %s = f32[] multiply(%rate, %r)
  %b = f32[8]{0} broadcast(%s), dimensions={}
  %next = f32[8]{0} multiply(%v, %b)
  %one = s32[] constant(STRIDE)
  %j = s32[] add(%i, %one)
  ROOT %back = (s32[], f32[8]{0}, f32[]) tuple(%j, %next, %r)
}
%condition (c: (s32[], f32[8], f32[])) -> pred[] {
  %c = (s32[], f32[8]{0}, f32[]) parameter(0)
  %k = s32[] get-tuple-element(%c), index=0
  %end = s32[] constant(BOUND)
  ROOT %goes_on = pred[] compare(%k, %end), direction=LT
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %first = s32[] constant(FIRST)
  %scale = f32[] constant(SCALE)
  %start = (s32[], f32[8]{0}, f32[]) tuple(%first, %x, %scale)
  %loop = (s32[], f32[8]{0}, f32[]) while(%start), condition=%condition, body=%body
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=1
}
"""
BRANCHES = """
%yes (p: (f32[8], f32[])) -> f32[8] {
  %p = (f32[8]{0}, f32[]) parameter(0)
  %a = f32[8]{0} get-tuple-element(%p), index=0
  %c = f32[] constant(INSIDE)
  %d = f32[] get-tuple-element(%p), index=1
  %e = f32[] multiply(%c, %d)
  %f = f32[8]{0} broadcast(%e), dimensions={}
  ROOT %g = f32[8]{0} multiply(%a, %f)
}
%no (q: f32[8]) -> f32[8] {
  ROOT %q = f32[8]{0} parameter(0)
}
ENTRY %main (x: f32[8], n: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %n = s32[] parameter(1)
  %period = s32[] constant(PERIOD)
  %turn = s32[] remainder(%n, %period)
  %handed = f32[] constant(HANDED)
  %both = (f32[8]{0}, f32[]) tuple(%x, %handed)
  ROOT %out = f32[8]{0} conditional(%turn, %both, %x), branch_computations={%yes, %no}
}
"""
SLICE = """
ENTRY %main (x: f32[8], y: f32[2]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[2]{0} parameter(1)
  %factor = f32[1]{0} constant({FACTOR})
  %number = f32[] reshape(%factor)
  %spread = f32[2]{0} broadcast(%number), dimensions={}
  %part = f32[2]{0} multiply(%y, %spread)
  %at = s32[] constant(PLACE)
  ROOT %out = f32[8]{0} dynamic-update-slice(%x, %part, %at)
}
"""
ARRAY = """
ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %factors = f32[2]{0} constant({FIRST, 3})
  ROOT %out = f32[2]{0} multiply(%x, %factors)
}
"""
DEFAULTS = {
    "RATE": 0.5, "STRIDE": 1, "BOUND": 9, "FIRST": 0, "SCALE": 0.25, "INSIDE": 0.5, "HANDED": 0.25, "PERIOD": 10,
    "FACTOR": 0.5, "PLACE": 3,
}  # fmt: skip


def graph_of(text: str, **values: float) -> Graph:
    for name, value in {**DEFAULTS, **values}.items():
        text = text.replace(name, str(value))
    return canonicalize(module_of(text, scheduled=True)).graph


def random_step(seed: int, values: Sequence[float], *, array: float = 1.5) -> Graph:
    """A step of random ops, the same for a seed whatever the values of its constants are."""
    dice = random.Random(seed)
    numbers = [f"%c{i}" for i in range(len(values))]
    arrays = ["%x", "%array"]
    lines = ["%x = f32[8]{0} parameter(0)", f"%array = f32[8]{{0}} constant({{{array},1,2,3,4,5,6,7}})"]
    lines += [f"%c{i} = f32[] constant({value})" for i, value in enumerate(values)]
    for i in range(12):
        kind = dice.choice(["number", "spread", "ops", "ops"])
        opcode = dice.choice(["add", "multiply", "subtract"])
        if kind == "number":
            lines.append(f"%number{i} = f32[] {opcode}({dice.choice(numbers)}, {dice.choice(numbers)})")
            numbers.append(f"%number{i}")
        elif kind == "spread":
            lines.append(f"%spread{i} = f32[8]{{0}} broadcast({dice.choice(numbers)}), dimensions={{}}")
            arrays.append(f"%spread{i}")
        else:
            lines.append(f"%made{i} = f32[8]{{0}} {opcode}({dice.choice(arrays)}, {dice.choice(arrays)})")
            arrays.append(f"%made{i}")
    results = dice.sample(arrays[1:] + numbers, 4)
    shapes = ["f32[]" if one in numbers else "f32[8]{0}" for one in results]
    lines.append(f"ROOT %out = ({', '.join(shapes)}) tuple({', '.join(results)})")
    body = "\n".join(lines)
    return graph_of(f"ENTRY %main (x: f32[8]) -> ({', '.join(shapes)}) {{\n{body}\n}}")


def structure(graph: Graph) -> list[tuple[object, ...]]:
    """All that a strategy's numbers rest on."""
    return [(node.opcode, node.shape, node.operands, node.kind) for node in graph.nodes]


def constants(graph: Graph) -> list[str]:
    return [node.key for node in graph.nodes if node.kind is Kind.CONSTANT]


def pattern(values: Values) -> list[int]:
    """Which of the values are equal."""
    return [values.index(value) for value in values]


@settings(max_examples=40)
@given(SEEDS, VALUES, VALUES)
def test_steps_of_one_key_number_their_ops_alike_and_one_identity_has_one_key(
    seed: int, first: Values, second: Values
) -> None:
    one, other = random_step(seed, first), random_step(seed, second)
    if one.key == other.key:
        assert structure(one) == structure(other)
    else:
        assert pattern(first) != pattern(second)
        assert structure(one) != structure(other)
    same = structure(one) == structure(other) and constants(one) == constants(other)
    assert (one.fingerprint == other.fingerprint) == same


@settings(max_examples=40)
@given(SEEDS, VALUES, st.sampled_from([0.0, 1.0, 0.5]))
def test_the_values_of_an_array_stay_in_the_key(seed: int, values: Values, first: float) -> None:
    one, other = random_step(seed, values), random_step(seed, values, array=first)
    holds_it = any(node.opcode == "constant" and node.shape.dims for node in one.nodes)
    assert (one.key == other.key) == (not holds_it)
    assert (one.fingerprint == other.fingerprint) == (not holds_it)


@pytest.mark.parametrize(
    ("text", "name", "decides"),
    [
        (LOOP, "BOUND", True),
        (LOOP, "STRIDE", True),
        (LOOP, "FIRST", True),
        (LOOP, "RATE", False),
        (LOOP, "SCALE", False),
        (BRANCHES, "PERIOD", True),
        (BRANCHES, "INSIDE", False),
        (BRANCHES, "HANDED", False),
        (SLICE, "PLACE", True),
        (SLICE, "FACTOR", False),
        (ARRAY, "FIRST", True),
    ],
)
def test_a_scalar_stays_in_the_key_where_it_decides_what_runs(text: str, name: str, decides: bool) -> None:
    one, other = graph_of(text), graph_of(text, **{name: 2 if decides else 0.75})
    assert one.fingerprint != other.fingerprint
    assert (one.key != other.key) == decides
    assert structure(one) == structure(other)


def test_constants_that_are_equal_in_one_step_alone_make_steps_of_two_keys() -> None:
    """They are one node there, and two in the other step."""
    equal, apart = graph_of(LOOP, SCALE=0.25, RATE=0.25), graph_of(BRANCHES, INSIDE=0.5, HANDED=0.5)
    assert equal.key == graph_of(LOOP).key  # in two computations they are never one
    assert apart.key == graph_of(BRANCHES, HANDED=0.75).key
    text = """
ENTRY %main (x: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %a = f32[] constant(RATE)
  %b = f32[] constant(SCALE)
  %c = f32[] multiply(%x, %a)
  ROOT %d = f32[] add(%c, %b)
}
"""
    assert graph_of(text).key == graph_of(text, RATE=0.125).key != graph_of(text, RATE=0.25).key


def test_how_a_window_is_padded_is_part_of_both_digests() -> None:
    """A saved module with another padding was once taken for the step's own: of one shape, with other numbers."""
    text = """
%larger (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %m = f32[] maximum(%a, %b)
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %least = f32[] constant(-inf)
  ROOT %w = f32[8]{0} reduce-window(%x, %least), window={size=3 pad=PAD}, to_apply=%larger
}
"""
    graphs = [graph_of(text.replace("PAD", pad)) for pad in ("1_1", "0_2", "2_0")]
    assert len({graph.fingerprint for graph in graphs}) == len({graph.key for graph in graphs}) == 3
    assert len({graph.nodes[-1].key for graph in graphs}) == 1
