"""A program while it is rewritten: index arithmetic on each device, and what may be read later."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding

from disco_hlo.errors import IllegalMoveError
from disco_hlo.structure import program as literals
from disco_hlo.structure.moves import Chunk, Reorder, Split, apply_moves
from disco_hlo.structure.program import Program, evaluate
from disco_hlo.structure.propose import schedules
from tests.modules import module_of
from tests.structure import steps
from tests.structure.enact import assert_same, moved, opcodes, run
from tests.structure.legal import legal_moves
from tests.structure.test_illegal import module


def doubling(links: int) -> Program:
    """``partition-id`` doubled again and again: every link reads the one before twice."""
    chain = "".join(f"x{i + 1} = u32[] add(x{i}, x{i})\n" for i in range(links))
    return Program(
        module_of(f"ENTRY main {{\nx0 = u32[] partition-id()\n{chain}ROOT r = u32[] negate(x{links})\n}}")
    )


def test_a_chain_that_reads_each_link_twice_is_evaluated_once_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    program, evaluated = doubling(30), []
    real = literals.computed_value
    monkeypatch.setattr(
        literals,
        "computed_value",
        lambda instruction, operands: evaluated.append(1) or real(instruction, operands),
    )
    last = next(i for i in program.instructions if i.name == "x30")
    found = evaluate(program, last, partition=3)
    assert found is not None
    assert int(found) == 3 << 30
    assert len(evaluated) == 30


def test_a_longer_chain_is_not_followed() -> None:
    program = doubling(40)
    assert evaluate(program, next(i for i in program.instructions if i.name == "x40"), partition=1) is None


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("u32[] divide(n, two)", [0, 0, 1, 1]),
        ("u32[] remainder(n, two)", [0, 1, 0, 1]),
        ("pred[] compare(n, two), direction=LT", [True, True, False, False]),
        ("pred[] compare(two, n), direction=GE", [True, True, True, False]),
        ("s32[] divide(m, s)", [None, 0, 0, 1]),  # s32: -1, 0, 1, 2 over 2
        ("u32[] divide(two, n)", [None, 2, 1, 0]),
    ],
)
def test_the_number_of_a_device_is_divided_and_compared(op: str, expected: list[int | None]) -> None:
    lines = [
        "n = u32[] partition-id()",
        "two = u32[] constant(2)",
        "s = s32[] constant(2)",
        "c = s32[] constant(-1)",
    ]
    lines += ["i = s32[] convert(n)", "m = s32[] add(i, c)", f"ROOT r = {op}"]
    program = Program(module_of("ENTRY main {\n" + "\n".join(lines) + "\n}"))
    found = [evaluate(program, program.by_id[program.root], partition=device) for device in range(4)]
    assert [None if one is None else int(one) for one in found] == expected


@pytest.mark.parametrize(("dtype", "value"), [("s8", -3), ("u8", 200), ("s16", -300), ("u16", 40000)])
def test_numbers_of_few_bits_are_read(dtype: str, value: int) -> None:
    text = f"ENTRY main {{\nROOT c = {dtype}[2] constant({{{value}, 1}})\n}}"
    [constant] = Program(module_of(text)).instructions
    found = literals.literal_value(constant)
    assert found is not None
    assert found.tolist() == [value, 1]


P = steps.P


def test_a_loop_that_begins_with_the_own_shard_gets_a_copy_of_it() -> None:
    on = steps.mesh(2)
    whole, split = NamedSharding(on, P()), NamedSharding(on, P("model"))

    def function(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = lax.with_sharding_constraint(x @ w, whole)
        own = lax.with_sharding_constraint(y, split)
        last = lax.fori_loop(0, 5, lambda i, v: v * 1.5 + i, own)
        return last, y * last.sum()

    values = (steps.normal(1, (8, 4), jnp.float32), steps.normal(2, (4, 6), jnp.float32))
    arguments = tuple(steps.place(on, values, (P(None, "model"), P("model"))))
    expected = run(function, arguments, out_shardings=(split, whole))
    moves = schedules(expected.module)["split"]
    assert [type(move) for move in moves] == [Split, Reorder, Reorder]
    assert_same(moved(expected, moves), expected, 1e-5)


def test_no_legal_move_reads_a_donated_argument_after_its_new_value() -> None:
    on = steps.mesh(2)
    whole, split = NamedSharding(on, P()), NamedSharding(on, P("model"))

    def function(old: jax.Array) -> tuple[jax.Array, jax.Array]:
        gathered = lax.with_sharding_constraint(old, whole)
        new = old * 0.5 - gathered.sum()
        return new, gathered * new.sum()

    def arguments() -> tuple[jax.Array, ...]:
        return tuple(steps.place(on, (steps.normal(1, (8, 4), jnp.float32),), (P("model"),)))

    expected = run(function, arguments(), out_shardings=(split, whole), donate_argnums=0)
    reorders = [move for move in legal_moves(expected.module) if isinstance(move, Reorder)]
    assert [move.opcode for move in reorders] == ["reduce"]
    for move in reorders:
        assert_same(moved(expected, [move], arguments()), expected, 1e-5)
    late = opcodes(expected.module)
    with pytest.raises(IllegalMoveError, match=r"\(subtract\) may overwrite .* before it is read there"):
        apply_moves(expected.module, [Reorder(late.index("all-gather"), len(late) - 2, "multiply")])


def test_a_broadcast_of_a_donated_argument_is_not_made_again_after_its_new_value() -> None:
    source = module(
        "p = f32[8] parameter(0)\nb = f32[4,8] broadcast(p), dimensions={1}\nz = f32[] constant(0)\n"
        "s = f32[] reduce(b, z), dimensions={0,1}, to_apply=add\nt = f32[8] broadcast(s), dimensions={}\n"
        "n = f32[8] subtract(p, t)\nm = f32[4,8] broadcast(n), dimensions={1}\no = f32[4,8] multiply(b, m)\n"
        "ROOT r = (f32[8], f32[4,8]) tuple(n, o)",
        ", input_output_alias={ {0}: (0, {}, may-alias) }",
    )
    at = opcodes(source).index("multiply")
    move = Chunk((at,), ("multiply",), (1,), 2)
    with pytest.raises(IllegalMoveError, match=r"n.* \(subtract\) may overwrite p before it is read there"):
        apply_moves(source, [move])
    assert "copy" not in opcodes(apply_moves(source, [move], copies=False)), (
        "XLA:GPU inserts its copies later"
    )


def test_what_something_waits_for_by_control_stays_though_nothing_reads_it() -> None:
    source = module(
        "p = f32[] parameter(0)\nb = f32[8] broadcast(p), dimensions={}\ny = f32[8] parameter(1)\n"
        "z = f32[8] add(b, y)\nw = f32[8] negate(y), control-predecessors={b}\nROOT s = f32[8] subtract(z, w)"
    )
    moved = Program(apply_moves(source, [Chunk((opcodes(source).index("add"),), ("add",), (0,), 2)]))
    waiting = [before for i in moved.instructions for before in i.control_predecessor_ids]
    assert [moved.by_id[before].opcode for before in waiting] == ["broadcast"]


def test_a_sum_that_says_where_a_slice_begins_is_no_obstacle_to_schedules() -> None:
    source = module_of(
        "add { a = s32[] parameter(0)\n b = s32[] parameter(1)\n ROOT s = s32[] add(a, b) }\n"
        "ENTRY main {\nx = f32[8] parameter(0)\ni = s32[] parameter(1)\n"
        "r = s32[] all-reduce(i), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=add\n"
        "ROOT y = f32[4] dynamic-slice(x, r), dynamic_slice_sizes={4}\n}\n"
    )
    assert all(not moves for moves in schedules(source).values())
