"""Collectives that no simulation has: those in loops and branches that are no regions."""

from __future__ import annotations

import pytest

from disco_hlo.errors import ModuleError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.proto import Module
from disco_hlo.hlo.regions import Region, inner_collectives, not_simulated
from tests.captured import captured


def step(*computations: tuple[str, ...], regions: tuple[int, ...] = ()) -> CanonicalModule:
    """Computations by number; each instruction is an opcode, and the computations that it calls if any."""
    made = Module(name="jit_step", entry_computation_id=0)
    for number, instructions in enumerate(computations):
        computation = made.computations.add(id=number)
        for text in instructions:
            opcode, *called = text.split()
            computation.instructions.add(opcode=opcode, called_computation_ids=map(int, called))
    index, graph = ModuleIndex(made), Graph((), 0, (), "gpu", "jit_step", "0")

    def canonical(number: int) -> CanonicalModule:
        return CanonicalModule(graph, made, index, (), (), computation=number)

    opened = tuple(Region(f"loop{number}", (), (canonical(number),)) for number in regions)
    return CanonicalModule(graph, made, index, (), (), regions=opened)


@pytest.mark.parametrize(
    ("computations", "count"),
    [
        ([("all-reduce 1", "async-start 2"), ("add",), ("reduce-scatter",)], 0),
        ([("while 1 2",), ("all-gather-start", "all-gather-done", "dot"), ("compare",)], 1),
        (
            [("call 1",), ("while 2 3",), ("async-start 4", "all-reduce"), ("compare",), ("reduce-scatter",)],
            2,
        ),
        ([("conditional 1 2",), ("all-reduce",), ("while 3 3",), ("all-to-all",)], 2),
        ([("while 1 1",), ("all-reduce", "while 1 1")], 1),
    ],
)
def test_they_are_counted_once_each(computations: list[tuple[str, ...]], count: int) -> None:
    assert inner_collectives(step(*computations)) == count


def test_those_of_regions_are_simulated() -> None:
    body = ("all-gather", "async-start 3", "while 4 2")
    inside = [("while 1 2",), body, ("compare",), ("reduce-scatter",), ("all-reduce",)]
    assert inner_collectives(step(*inside, regions=(1, 4))) == 0
    assert inner_collectives(step(*inside, regions=(1,))) == 1
    assert inner_collectives(step(*inside)) == 3


def test_a_loop_without_its_body_is_no_module() -> None:
    with pytest.raises(ModuleError, match="computation 7 is called but missing"):
        inner_collectives(step(("while 7",)))


def test_one_line_says_how_many() -> None:
    assert not_simulated(step(("all-reduce",))) == ()
    assert not_simulated(step(("while 1",), ("all-reduce",))) == (
        "1 collective lies in loops or branches that stay as XLA compiled them, and is not simulated",
    )


def test_none_of_scanned_layers_is_left_out() -> None:
    assert inner_collectives(captured("h100_llama/fsdp_scan")) == 0
