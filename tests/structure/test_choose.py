"""What is kept where there is no room for all: literal loops whose best choice is seen by hand, and random steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.optimize.costs import costs_for
from disco_hlo.plugin.phases.keeping import prices_of
from disco_hlo.structure.choose import Chosen, Prices
from disco_hlo.structure.moves import KeepTurns, apply_moves, from_json, to_json
from disco_hlo.structure.propose_loops import (
    KEPT_IN_PART,
    KEPT_IN_PART_NAMES,
    InPart,
    kept_in_part,
    loop_schedules,
)
from tests.modules import module_of
from tests.structure import steps, test_random
from tests.structure.enact import assert_equal, moved, run
from tests.structure.test_illegal import LOOPS
from tests.structure.test_keep import KERNELS, READS, counted

P = steps.P
UNLIMITED = 1 << 40
A = 'custom-call(G), custom_call_target="a"'
B = 'custom-call(G), custom_call_target="b"'
SIDE_BY_SIDE = (
    f"aN = f32[4] {A}\n bN = f32[8] {B}\n cN = f32[4] slice(bN), slice={{[0:4]}}\n yN = f32[4] OP(aN, cN)"
)
"""Turn after turn both loops make ``a`` of 16 bytes and ``b`` of 32; there are 4 turns."""
CHAIN = SIDE_BY_SIDE.replace(B, B.replace("G", "aN")).replace("OP(aN", "OP(x")
"""``b`` is made of ``a``, which only it reads."""


def loops(made: str) -> bytes:
    """Two loops whose turns make the same of what they gather, ``G``, and something else of that; N is 1 or 2."""
    text = LOOPS.replace(
        "y = f32[4] add(x, g)", made.replace("N", "1").replace("G", "g").replace("OP", "add")
    )
    second = made.replace("N", "2").replace("G", "r").replace("OP", "multiply")
    text = text.replace("y = f32[4] multiply(x, r)", second)
    return module_of(
        text.replace("tuple(j, w, y)", "tuple(j, w, y1)", 1).replace("tuple(j, w, y)", "tuple(j, w, y2)")
    )


def chosen(made: str, room_bytes: int, ns_per_byte: float = 0.0, **ns: float) -> tuple[InPart, list[str]]:
    """What is kept, and the names of it, where ops take so long."""
    prices = Prices({"second_body": {f"{name}2": one for name, one in ns.items()}}, ns_per_byte)
    found = kept_in_part(loops(made), lambda _: prices, room_bytes, copies=False)
    return found, sorted(name.removesuffix("2") for _, name in found.chosen.values)


@pytest.mark.parametrize(
    ("room_bytes", "b_ns", "names", "held_bytes", "saved_ns"),
    [
        (160, 150.0, ["a"], 80, 400.0),
        (160, 250.0, ["b"], 160, 1000.0),
        (239, 250.0, ["b"], 160, 1000.0),
        (240, 150.0, ["a", "b"], 240, 1000.0),
        (80, 250.0, ["a"], 80, 400.0),
        (79, 150.0, [], 0, 0.0),
    ],
)
def test_the_value_that_saves_most_time_per_byte_is_kept_first(
    room_bytes: int, b_ns: float, names: list[str], held_bytes: int, saved_ns: float
) -> None:
    """``a`` takes 100 ns in each of 4 turns, and 80 bytes for all and one more: 5 ns a byte; ``b`` 160 bytes, so
    3.75 or 6.25."""
    found, kept = chosen(SIDE_BY_SIDE, room_bytes, a=100.0, b=b_ns)
    assert kept == names
    assert (found.chosen.held_bytes, found.chosen.saved_ns) == (held_bytes, saved_ns)
    assert found.schedules.keys() == (set(KEPT_IN_PART_NAMES) if names else set())
    for moves in found.schedules.values():  # of rotated loops turns are written besides
        assert from_json(to_json(moves)) == moves
        (move,) = (one for one in moves if isinstance(one, KeepTurns))
        assert len(move.pairs) == len(names)
    if names:
        made = apply_moves(loops(SIDE_BY_SIDE), found.schedules[KEPT_IN_PART], copies=False)
        assert counted(made, "custom-call") == 4 - len(names)


@pytest.mark.parametrize(
    ("room_bytes", "names", "held_bytes", "saved_ns"),
    [
        (80, ["a"], 80, 400.0),
        (159, ["a"], 80, 400.0),
        (160, ["b"], 160, 600.0),
        (UNLIMITED, ["b"], 160, 600.0),
    ],
)
def test_the_input_of_what_is_kept_is_kept_no_more(
    room_bytes: int, names: list[str], held_bytes: int, saved_ns: float
) -> None:
    """``a`` takes 100 ns and is first; ``b``, 50 ns more, gives its 80 bytes back."""
    found, kept = chosen(CHAIN, room_bytes, a=100.0, b=50.0)
    assert (kept, found.chosen.held_bytes, found.chosen.saved_ns) == (names, held_bytes, saved_ns)


def test_pointwise_work_is_done_again_in_the_kernel_that_reads_it() -> None:
    made = f"aN = f32[4] {A}\n eN = f32[4] negate(aN)\n yN = f32[4] OP(eN, x)"
    assert chosen(made, UNLIMITED, a=100.0, e=50.0)[1] == ["a"]
    read = made.replace("yN", f"kN = f32[4] {B.replace('G', 'eN')}\n yN").replace("OP(eN", "OP(kN")
    kept = chosen(read, UNLIMITED, a=100.0, e=50.0, k=10.0)[1]
    assert kept == ["k"], "which keeps the kernel from reading anything"
    kept = chosen(read.replace('target="b"', 'target="OP"'), UNLIMITED, a=100.0, e=50.0, k=10.0)[1]
    assert kept == ["e"], "a kernel that is not made again reads it"


@pytest.mark.parametrize(("ns_per_byte", "names"), [(1.5, ["a"]), (1.6, [])])
def test_what_takes_longer_to_write_and_read_than_to_make_is_not_kept(
    ns_per_byte: float, names: list[str]
) -> None:
    """16 bytes are copied into the array of all turns and out of it: 64 bytes are read or written in 100 ns."""
    assert chosen(SIDE_BY_SIDE, UNLIMITED, ns_per_byte, a=100.0)[1] == names


def test_equal_values_are_kept_in_the_order_of_their_names() -> None:
    made = SIDE_BY_SIDE.replace("f32[8]", "f32[4]").replace("slice(bN), slice={[0:4]}", "negate(bN)")
    assert chosen(made, 80, a=100.0, b=100.0)[1] == ["a"]
    assert chosen(made.replace("aN", "eN"), 80, e=100.0, b=100.0)[1] == ["b"]


def test_with_room_for_all_the_module_is_that_of_keeping_all() -> None:
    source = loops(SIDE_BY_SIDE)
    moves = chosen(SIDE_BY_SIDE, UNLIMITED, a=100.0, b=100.0)[0].schedules[KEPT_IN_PART]
    everything = loop_schedules(source, copies=False)["keep-kernels"]
    assert apply_moves(source, moves, copies=False) == apply_moves(source, everything, copies=False)


def test_what_one_computation_makes_again_takes_no_copies() -> None:
    """``l`` is ``k``; it is held from there on, once."""
    source = module_of(KERNELS + READS["read"])
    prices = Prices({"main": {"k": 100.0, "l": 100.0}}, 1e9)
    for room_bytes, count in ((15, 2), (16, 1)):
        found = kept_in_part(source, lambda _: prices, room_bytes)
        made = source if count == 2 else apply_moves(source, found.schedules[KEPT_IN_PART])
        assert counted(made, "custom-call") == count
        expected = Chosen() if count == 2 else Chosen(frozenset({("main", "l")}), 16, 100.0)
        assert found.chosen == expected


# --- random recomputing steps ----------------------------------------------------------------------

PARTS = tuple(part for part in test_random.STEPS if part.__name__ not in ("_sorted", "_lookup", "_window"))
"""Those that have a gradient with respect to all they read."""


def random_step(dice: random.Random, is_scanned: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Gradients of layers of random parts, recomputed, scanned or unrolled."""
    parts, layers = dice.choices(PARTS, k=3), dice.randint(2, 4)

    def layer(x: jax.Array, w: jax.Array, table: jax.Array) -> jax.Array:
        for part in parts:
            x = part(x, w, table)
        return jnp.tanh(x @ w) * part(x, w, table)

    def loss(w: jax.Array, x: jax.Array, table: jax.Array) -> jax.Array:
        again = jax.checkpoint(layer, prevent_cse=not is_scanned)
        if is_scanned:
            x, _ = lax.scan(lambda x, one: (again(x, one, table), None), x, w)
        for one in [] if is_scanned else w:
            x = again(x, one, table)
        return (x * x).sum()

    on = steps.mesh(2)
    specs = P(None, None, "model"), P(), P()
    mapped = jax.shard_map(
        jax.value_and_grad(loss),
        mesh=on, in_specs=specs, out_specs=(P(), specs[0]), check_vma=False,
    )  # fmt: skip
    rows, tokens, width = test_random.ROWS, test_random.TOKENS, test_random.WIDTH
    values = (
        steps.normal(1, (layers, width, 2 * width), jnp.float32, 0.3),
        steps.normal(2, (rows, tokens, width), jnp.float32),
        steps.normal(3, (16, width), jnp.float32),
    )
    return mapped, tuple(steps.place(on, values, specs))


def by_bytes(module: bytes) -> Prices:
    """Times by bytes and flops alone, where copies take none."""
    return replace(prices_of(costs_for(canonicalize(module), None, None), module), ns_per_byte=0.0)


@pytest.mark.parametrize(("seed", "form"), [(2, "scan"), (3, "unroll")])
def test_a_random_step_keeps_its_numbers_and_its_room(seed: int, form: str) -> None:
    dice = random.Random(seed)
    expected = run(*random_step(dice, form == "scan"))
    everything = kept_in_part(expected.module, by_bytes, UNLIMITED).chosen
    assert everything.values
    room_bytes = dice.randint(0, everything.held_bytes)
    found = kept_in_part(expected.module, by_bytes, room_bytes)
    assert found.chosen.held_bytes <= room_bytes
    assert found.chosen.saved_ns <= everything.saved_ns
    assert found == kept_in_part(expected.module, by_bytes, room_bytes)
    got = moved(expected, found.schedules.get(KEPT_IN_PART, ()))
    assert_equal(got, expected)
    if form == "scan":  # XLA leaves gaps between buffers; unrolled, it also orders all ops anew
        assert got.memory_bytes <= 1.05 * (expected.memory_bytes + found.chosen.held_bytes)
