"""Programs as data: written by seed, read from JSON, evaluated, made smaller."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest

from tests.fuzz.findings import is_sound, pruned, shrink
from tests.fuzz.grammar import Builder, generate, is_stable
from tests.fuzz.interpret import check_types, evaluate
from tests.fuzz.operations import COLLECTIVES, OPS
from tests.fuzz.pairs import Case
from tests.fuzz.program import Body, Op, Program, ProgramError, Type
from tests.fuzz.sharing import TEMPLATES, in_a_scan
from tests.fuzz.strategies import Wanted

SEEDS = range(60)


@cache
def drawn(seed: int) -> Program:
    """The program of a seed, drawn once for all tests."""
    return generate(seed)


def names(body: Body) -> set[str]:
    return {op.name for op in body.ops}.union(*(names(inner) for op in body.ops for inner in op.bodies))


def test_a_seed_gives_one_program_and_each_another() -> None:
    assert [drawn(seed) for seed in SEEDS[:20]] == [generate(seed) for seed in SEEDS[:20]]
    assert len({msgspec.json.encode(drawn(seed)) for seed in SEEDS}) == len(SEEDS)


def test_what_is_written_survives_json_and_types_are_what_they_say() -> None:
    for program in map(drawn, SEEDS):
        assert msgspec.json.decode(msgspec.json.encode(program), type=Program) == program
        check_types(program)
        assert is_stable(program.body, [True] * len(program.arguments))


def test_all_ops_devices_and_ways_to_hand_on_arguments_are_met() -> None:
    programs = [*map(drawn, SEEDS)]
    met = set().union(*(names(one.body) for one in programs))
    rare = {
        "and", "argmax", "batched_dot", "conv", "decay", "random", "rsqrt", "sort_pairs", "not", "xor", "barrier",
    }  # fmt: skip
    assert met >= {*OPS, *COLLECTIVES, "cond", "scan", "while"} - rare
    assert {(one.devices, one.mode) for one in programs} >= {(1, "jit"), (2, "jit"), (4, "shard_map")}
    arguments = [range(len(one.arguments)) for one in programs]
    assert any({*one.body.results} & {*known} for one, known in zip(programs, arguments, strict=True))
    assert any(len({*one.body.results}) < len(one.body.results) for one in programs)
    assert sum(bool(one.donated) for one in programs) > 20


def test_a_wrong_type_is_told_from_a_right_one() -> None:
    body = Body((Type("f32", (3,)),), (Op("tanh", (0,), (Type("f32", (4,)),)),), (1,))
    b = Builder()
    b.argument("f32", 3)
    with pytest.raises(ProgramError, match=r"tanh gives \['f32\[3\]'\]"):
        check_types(Program(body, tuple(b.arguments), sharded=(False,)))


def test_nothing_decides_by_numbers_that_may_be_rounded_in_several_ways() -> None:
    b = Builder()
    x = b.argument("f32", 4)
    assert b.types[b.op("compare", x, b.op("neg", x), how="gt")] == Type("pred", (4,))
    with pytest.raises(ProgramError, match="decides by numbers"):
        b.op("compare", x, b.op("tanh", x), how="gt")
    with pytest.raises(ProgramError, match="decides by numbers"):
        b.op("convert", b.op("tanh", x), to="s32")


def test_by_hand_collectives_and_loops_are_what_xla_makes_of_them() -> None:
    checked = 0
    for seed in range(400):
        program = drawn(seed)
        if program.mode != "shard_map" or not names(program.body) & {"psum_scatter", "all_to_all", "scan"}:
            continue
        Case(program)  # skipped where the default is another
        checked += 1
        if checked == 3:
            return
    raise AssertionError("too few programs")


def test_a_scan_by_hand_carries_on_and_stacks() -> None:
    inner = Builder([Type("s32", ()), Type("s32", ())])
    body = inner.body(inner.op("add", 0, 1), 0)
    b = Builder()
    x, rows = b.argument("s32"), b.argument("s32", 4)
    attributes = {"carried": 1, "sliced": 1, "length": 4, "reverse": True, "unroll": 1}
    last, before = b.ops("scan", [x, rows], attributes, (body,))
    found = evaluate(b.program(last, before, rows, x))
    (total,), (stacked,), (given,), (start,) = found.outputs
    assert total == start + given.sum()
    np.testing.assert_array_equal(stacked, start + np.array([*np.cumsum(given[:0:-1])[::-1], 0]))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_inside_of_a_scan_is_the_same_step_three_times(name: str) -> None:
    program = TEMPLATES[name]("f32")
    looped = in_a_scan(program)
    check_types(looped)
    once, thrice = evaluate(program), evaluate(looped)
    for one, stacked in zip(once.outputs, thrice.outputs[-len(once.outputs) :], strict=True):
        np.testing.assert_array_equal(stacked[0][0], one[0])


def test_shrinking_leaves_what_is_wrong_and_nothing_else() -> None:
    def has_window(program: Program) -> bool:
        return any(op.name == "window" for op in program.body.ops)

    seed = next(s for s in range(500) if len((p := pruned(drawn(s))).body.ops) > 12 and has_window(p))
    tried: list[Program] = []

    def still_wrong(program: Program) -> bool:
        tried.append(program)
        return has_window(program)

    small = shrink(drawn(seed), still_wrong, lambda: True)
    assert [op.name for op in small.body.ops] == ["window"]
    assert (len(small.arguments), small.devices, small.donated) == (1, 1, ())
    assert all(is_sound(one) for one in tried)


def test_a_shrunk_program_runs() -> None:
    program = shrink(drawn(1), lambda one: len(one.body.ops) >= 2, lambda: True)
    assert len(program.body.ops) == 2
    assert Case(program).attempt(Wanted("xla")).kind in ("same", "repeated")
