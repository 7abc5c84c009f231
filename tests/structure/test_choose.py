"""What is kept where there is no room for all: literal loops whose best choice is seen by hand, and random steps."""

from __future__ import annotations

import pytest

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
from tests.structure.test_illegal import LOOPS
from tests.structure.test_keep import counted

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
        (128, 150.0, ["a"], 64, 400.0),
        (128, 250.0, ["b"], 128, 1000.0),
        (191, 250.0, ["b"], 128, 1000.0),
        (192, 150.0, ["a", "b"], 192, 1000.0),
        (64, 250.0, ["a"], 64, 400.0),
        (63, 150.0, [], 0, 0.0),
    ],
)
def test_the_value_that_saves_most_time_per_byte_is_kept_first(
    room_bytes: int, b_ns: float, names: list[str], held_bytes: int, saved_ns: float
) -> None:
    """``a`` takes 100 ns in each of 4 turns and 64 bytes for all: 6.25 ns a byte; ``b`` 128 bytes, so 4.7 or 7.8."""
    found, kept = chosen(SIDE_BY_SIDE, room_bytes, a=100.0, b=b_ns)
    assert kept == names
    assert (found.chosen.held_bytes, found.chosen.saved_ns) == (held_bytes, saved_ns)
    assert found.schedules.keys() == (set(KEPT_IN_PART_NAMES) if names else set())
    for moves in found.schedules.values():
        assert from_json(to_json(moves)) == moves
        (move,) = (one for one in moves if isinstance(one, KeepTurns))
        assert len(move.pairs) == len(names)
        made = apply_moves(loops(SIDE_BY_SIDE), moves, copies=False)
        assert counted(made, "custom-call") == 4 - len(names)


@pytest.mark.parametrize(
    ("room_bytes", "names", "held_bytes", "saved_ns"),
    [
        (64, ["a"], 64, 400.0),
        (127, ["a"], 64, 400.0),
        (128, ["b"], 128, 600.0),
        (UNLIMITED, ["b"], 128, 600.0),
    ],
)
def test_the_input_of_what_is_kept_is_kept_no_more(
    room_bytes: int, names: list[str], held_bytes: int, saved_ns: float
) -> None:
    """``a`` takes 100 ns and is first; ``b``, 50 ns more, gives its 64 bytes back."""
    found, kept = chosen(CHAIN, room_bytes, a=100.0, b=50.0)
    assert (kept, found.chosen.held_bytes, found.chosen.saved_ns) == (names, held_bytes, saved_ns)


def test_pointwise_work_is_done_again_in_the_kernel_that_reads_it() -> None:
    made = f"aN = f32[4] {A}\n eN = f32[4] negate(aN)\n yN = f32[4] OP(eN, x)"
    assert chosen(made, UNLIMITED, a=100.0, e=50.0)[1] == ["a"]
    read = made.replace("yN", f"kN = f32[4] {B.replace('G', 'eN')}\n yN").replace("OP(eN", "OP(kN")
    assert chosen(read, UNLIMITED, a=100.0, e=50.0, k=10.0)[1] == ["k"], (
        "which keeps the kernel from reading anything"
    )
    other = read.replace('target="b"', 'target="OP"')
    assert chosen(other, UNLIMITED, a=100.0, e=50.0, k=10.0)[1] == ["e"], (
        "a kernel that is not made again reads it"
    )


@pytest.mark.parametrize(("ns_per_byte", "names"), [(1.5, ["a"]), (1.6, [])])
def test_what_takes_longer_to_write_and_read_than_to_make_is_not_kept(
    ns_per_byte: float, names: list[str]
) -> None:
    """16 bytes are copied into the array of all turns and out of it: 64 bytes are read or written in 100 ns."""
    assert chosen(SIDE_BY_SIDE, UNLIMITED, ns_per_byte, a=100.0)[1] == names


def test_equal_values_are_kept_in_the_order_of_their_names() -> None:
    made = SIDE_BY_SIDE.replace("f32[8]", "f32[4]").replace("slice(bN), slice={[0:4]}", "negate(bN)")
    assert chosen(made, 64, a=100.0, b=100.0)[1] == ["a"]
    assert chosen(made.replace("aN", "eN"), 64, e=100.0, b=100.0)[1] == ["b"]


def test_with_room_for_all_the_module_is_that_of_keeping_all() -> None:
    source = loops(SIDE_BY_SIDE)
    moves = chosen(SIDE_BY_SIDE, UNLIMITED, a=100.0, b=100.0)[0].schedules[KEPT_IN_PART]
    everything = loop_schedules(source, copies=False)["keep-kernels"]
    assert apply_moves(source, moves, copies=False) == apply_moves(source, everything, copies=False)


def test_what_one_computation_makes_again_takes_no_copies() -> None:
    """``l`` is ``k``; it is held from there on, once."""
    source = module_of("""
ENTRY main { x = f32[4] parameter(0)
  k = f32[4] custom-call(x), custom_call_target="f"
  t = (f32[4]) tuple(x)
  o = (f32[4]) opt-barrier(t)
  y = f32[4] get-tuple-element(o), index=0
  l = f32[4] custom-call(y), custom_call_target="f"
  e = f32[4] negate(k)
  d = f32[4] cosine(l)
  ROOT r = (f32[4], f32[4]) tuple(e, d) }
""")
    prices = Prices({"main": {"k": 100.0, "l": 100.0}}, 1e9)
    for room_bytes, count in ((15, 2), (16, 1)):
        found = kept_in_part(source, lambda _: prices, room_bytes)
        made = source if count == 2 else apply_moves(source, found.schedules[KEPT_IN_PART])
        assert counted(made, "custom-call") == count
        expected = Chosen() if count == 2 else Chosen(frozenset({("main", "l")}), 16, 100.0)
        assert found.chosen == expected
