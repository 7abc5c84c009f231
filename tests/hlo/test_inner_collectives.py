"""Collectives that no simulation has: those inside loops and branches."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from disco_hlo.errors import ModuleError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.inner_collectives import inner_collectives, not_simulated
from disco_hlo.hlo.proto import Message, Module

DATA = Path(__file__).parents[1] / "data"


def module(*computations: tuple[str, ...]) -> Message:
    """Computations by number; each instruction is an opcode, and the computation that it calls if any."""
    made = Module(name="jit_step", entry_computation_id=0)
    for number, instructions in enumerate(computations):
        computation = made.computations.add(id=number)
        for text in instructions:
            opcode, *called = text.split()
            computation.instructions.add(opcode=opcode, called_computation_ids=map(int, called))
    return made


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
    assert inner_collectives(ModuleIndex(module(*computations))) == count


def test_a_loop_without_its_body_is_no_module() -> None:
    with pytest.raises(ModuleError, match="computation 7 is called but missing"):
        inner_collectives(ModuleIndex(module(("while 7",))))


def test_one_line_says_how_many() -> None:
    assert not_simulated(ModuleIndex(module(("all-reduce",)))) == ()
    assert not_simulated(ModuleIndex(module(("while 1",), ("all-reduce",)))) == (
        "1 collective lies inside loops or branches and is not simulated",
    )


@pytest.mark.product_only
@pytest.mark.parametrize(("step", "count"), [("fsdp_scan", 11), ("fsdp_unroll", 0)])
def test_those_of_scanned_layers_are_found(step: str, count: int) -> None:
    source = canonicalize(gzip.decompress((DATA / "h100_llama" / f"{step}.hlo.pb.gz").read_bytes()))
    assert inner_collectives(source.index) == count
