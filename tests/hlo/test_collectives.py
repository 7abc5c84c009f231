"""Kinds of collectives, what they are for, and what they take where nobody measured them.

Also those that no simulation has: in loops and branches that are no regions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from disco_hlo.errors import ModuleError, ProfileError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.collectives import (
    ALL_REDUCE,
    CollectiveKind,
    collective_bytes,
    collective_kind,
    moved_bytes,
    ring_share,
)
from disco_hlo.hlo.cost_model import LinearPieces, by_ring, never_falls, on_one_line
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.proto import Module
from disco_hlo.hlo.regions import Region, inner_collectives, not_simulated
from tests.captured import captured
from tests.cost_models import MadeUpCosts
from tests.modules import ADD, module_of

ARRAY, HALF = "f32[8,4]{1,0}", "f32[4,4]{1,0}"
RESULTS = f"({ARRAY}, {HALF}, {HALF}, {ARRAY}, {ARRAY})"
EVERYONE = "replica_groups={{0,1,2,3}}, use_global_device_ids=true"
STEP = f"""
HloModule jit_step, is_scheduled=true, num_partitions=4

{ADD}
ENTRY %main (p: f32[8,4], q: f32[2,4]) -> {RESULTS} {{
  %p = {ARRAY} parameter(0)
  %q = f32[2,4]{{1,0}} parameter(1)
  %all = {ARRAY} all-reduce(%p), channel_id=1, {EVERYONE}, to_apply=%add
  %pairs = {HALF} all-gather(%q), channel_id=2, replica_groups={{{{2,3}},{{1,0}}}}, use_global_device_ids=true,
    dimensions={{0}}
  %part = {HALF} reduce-scatter(%p), channel_id=3, replica_groups=[2,2]<=[4], use_global_device_ids=true,
    dimensions={{0}}, to_apply=%add
  %swap = {ARRAY} all-to-all(%p), channel_id=4, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
  %next = {ARRAY} collective-permute(%p), channel_id=5, source_target_pairs={{{{1,2}},{{0,1}},{{2,3}},{{3,0}}}}
  ROOT %out = {RESULTS} tuple(%all, %pairs, %part, %swap, %next)
}}
"""
LINE = LinearPieces.of((0, 1.0, 100.0), (1000, 2.0, 0.0))


def step() -> Graph:
    return canonicalize(module_of(STEP)).graph


def test_each_collective_has_a_kind_and_bytes() -> None:
    graph = step()
    found = {
        str(collective_kind(node)): collective_bytes(graph, node.id)
        for node in graph.nodes
        if node.opcode.startswith(("all-", "reduce-", "collective-"))
    }
    assert found == {
        "all-reduce": 128,
        "all-gather {0,1},{2,3}": 64,
        "reduce-scatter {0,1},{2,3}": 128,
        "all-to-all": 128,
        "collective-permute {0,1},{1,2},{2,3},{3,0}": 128,
    }
    assert sorted(moved_bytes(graph).tolist())[-6:] == [0, *sorted(found.values())]


def test_hundreds_of_devices_have_a_short_name() -> None:
    kinds = [CollectiveKind("all-gather", tuple((i, i + step) for i in range(500))) for step in (1, 2)]
    assert str(kinds[0]).startswith("all-gather 500 groups ")
    assert len(str(kinds[0])) < 60
    assert str(kinds[0]) != str(kinds[1])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ALL_REDUCE, 1.0),
        (CollectiveKind("all-gather"), 0.5),
        (CollectiveKind("all-to-all"), 0.5),
        # Of 4 devices each sends 6/4 of an all-reduce's bytes; in pairs 2/2 of one, or 1/2 of a reduce-scatter's.
        (CollectiveKind("all-reduce", ((0, 1), (2, 3))), 1 / 1.5),
        (CollectiveKind("reduce-scatter", ((0, 1), (2, 3))), 0.5 / 1.5),
        (CollectiveKind("collective-permute", ((0, 1), (1, 2), (2, 3), (3, 0))), 1 / 1.5),
        (CollectiveKind("collective-permute", ((0, 1), (1, 0))), 1.0),
        (CollectiveKind("all-gather", ((0,), (1,))), 0.0),
    ],
)
def test_what_nobody_measured_takes_as_long_as_an_all_reduce_that_sends_as_much(
    kind: CollectiveKind, expected: float
) -> None:
    assert ring_share(kind) == pytest.approx(expected)
    if expected:
        sizes = np.array([1200, 6000])
        np.testing.assert_allclose(by_ring(kind, LINE).exact(sizes), LINE.exact(np.rint(sizes * expected)))


def test_a_size_is_found_from_its_time() -> None:
    sizes = [0, 1, 999, 1000, 10**9]
    assert LINE.sizes(LINE.exact(sizes)).tolist() == sizes
    # Nothing takes 50 ns, nor between 1099 and 2000; nothing tells sizes of one time apart.
    assert LINE.sizes([50.0, 1500.0]).tolist() == [0, 999]
    assert LinearPieces.of((0, 0.0, 7.0)).sizes([7.0, 9.0]).tolist() == [0, 0]


@dataclass(frozen=True)
class OwnLines(MadeUpCosts):
    """Lines of single kinds, and a ring's of others."""

    own: dict[str, LinearPieces] = field(default_factory=dict)

    def collective(self, kind: CollectiveKind) -> LinearPieces:
        return self.own.get(str(kind), by_ring(kind, self.line))


def test_each_collective_counts_as_the_all_reduce_that_takes_as_long() -> None:
    graph = step()
    gathers = LinearPieces.of((0, 10.0, 500.0))
    line, sizes = on_one_line(graph, OwnLines(LINE, own={"all-gather {0,1},{2,3}": gathers}))
    found = {graph.nodes[node].opcode: int(sizes[node]) for node in graph.collectives}
    assert line == LINE
    assert found == {
        "all-reduce": 128, "all-gather": 999, "reduce-scatter": round(128 / 3), "all-to-all": 64,
        "collective-permute": round(128 / 1.5),
    }  # fmt: skip
    assert line([999]).tolist() == [1099], "next to the 1140 ns of 64 bytes gathered"


def test_the_line_is_that_of_the_kind_of_all_reduce_that_moves_most() -> None:
    text = STEP.replace(EVERYONE, EVERYONE.replace("0,1,2,3", "0,2},{1,3"))
    graph = canonicalize(module_of(text)).graph
    own = LinearPieces.of((0, 3.0, 30.0))
    line, sizes = on_one_line(graph, OwnLines(LINE, own={"all-reduce {0,2},{1,3}": own}))
    assert line == own
    assert max(sizes.tolist()) == 128


def test_what_a_bucket_saves_is_told_exactly_beside_larger_permutations() -> None:
    """Their latency was that of every bucket: all-reduces together seemed to save next to nothing."""
    large = "f32[800,4]{1,0}"
    text = (
        STEP.replace("q: f32[2,4])", "q: f32[2,4], r: f32[800,4])")
        .replace(RESULTS, f"{RESULTS.removesuffix(f'{ARRAY})')}{large})")
        .replace(f"%next = {ARRAY}", f"%r = {large} parameter(2)\n  %next = {large}")
        .replace("collective-permute(%p)", "collective-permute(%r)")
    )
    graph = canonicalize(module_of(text)).graph
    sent = LinearPieces.of((0, 0.5, 10.0))
    line, sizes = on_one_line(graph, OwnLines(LINE, own={"collective-permute {0,1},{1,2},{2,3},{3,0}": sent}))
    node_of = {graph.nodes[x].opcode: x for x in graph.collectives}
    assert (line([128 + 128]).tolist(), sizes[node_of["all-reduce"]]) == (LINE([256]).tolist(), 128)
    assert line([sizes[node_of["collective-permute"]]]).tolist() == sent([4 * 800 * 4]).tolist()


def test_a_line_that_ends_flat_makes_no_other_collective_free() -> None:
    """Of a sharded step the all-reduces were small, and took as long whatever their size: all-gathers that moved
    75 ms were predicted to take none."""
    graph = step()
    gathers = LinearPieces.of((0, 10.0, 500.0))
    flat = LinearPieces.of((0, 0.0, 20.0))
    line, sizes = on_one_line(graph, OwnLines(flat, own={"all-gather {0,1},{2,3}": gathers}))
    found = {graph.nodes[node].opcode: line([sizes[node]]).tolist() for node in graph.collectives}
    assert found.pop("all-gather") == [1140]
    assert len(found) == 4
    assert all(took == [20] for took in found.values())
    assert line([64, 1000]).tolist() == gathers([64, 1000]).tolist()
    assert never_falls(line.lines)


def test_what_takes_less_than_any_of_the_kind_that_moves_most_takes_less_on_its_line() -> None:
    graph = canonicalize(module_of(STEP.replace("[8,4]", "[8000,4]").replace("[4,4]", "[4000,4]"))).graph
    own = {
        "all-gather {0,1},{2,3}": LinearPieces.of((0, 0.0, 15_000.0)),
        "reduce-scatter {0,1},{2,3}": LinearPieces.of((0, 0.0, 20_000.0)),
    }
    slow = LinearPieces.of((0, 0.01, 30_000.0), (1 << 20, 0.02, 20_000.0))
    line, sizes = on_one_line(graph, OwnLines(slow, own=own))
    node_of = {graph.nodes[x].opcode: x for x in graph.collectives}
    assert line([sizes[node_of["all-gather"]], sizes[node_of["reduce-scatter"]]]).tolist() == [15_000, 20_000]
    assert line([10 * sizes[node_of["all-gather"]]]).tolist() == [15_001], "ten in a bucket have one latency"
    assert sizes[node_of["all-reduce"]] == 128_000
    assert line([128_000, 1 << 20]).tolist() == slow([128_000, 1 << 20]).tolist()
    assert never_falls(line.lines)


def test_a_model_that_knows_no_line_says_so_only_where_one_is_needed() -> None:
    class NoLine(MadeUpCosts):
        def collective(self, kind: CollectiveKind) -> LinearPieces:
            raise ProfileError("none")

    with pytest.raises(ProfileError, match="none"):
        on_one_line(step(), NoLine())


def module_of_computations(*computations: tuple[str, ...], regions: tuple[int, ...] = ()) -> CanonicalModule:
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
    assert inner_collectives(module_of_computations(*computations)) == count


def test_those_of_regions_are_simulated() -> None:
    body = ("all-gather", "async-start 3", "while 4 2")
    inside = [("while 1 2",), body, ("compare",), ("reduce-scatter",), ("all-reduce",)]
    assert inner_collectives(module_of_computations(*inside, regions=(1, 4))) == 0
    assert inner_collectives(module_of_computations(*inside, regions=(1,))) == 1
    assert inner_collectives(module_of_computations(*inside)) == 3


def test_a_loop_without_its_body_is_no_module() -> None:
    with pytest.raises(ModuleError, match="computation 7 is called but missing"):
        inner_collectives(module_of_computations(("while 7",)))


def test_one_line_says_how_many() -> None:
    assert not_simulated(module_of_computations(("all-reduce",))) == ()
    assert not_simulated(module_of_computations(("while 1",), ("all-reduce",))) == (
        "1 collective lies in loops or branches that stay as XLA compiled them, and is not simulated",
    )


def test_none_of_scanned_layers_is_left_out() -> None:
    assert inner_collectives(captured("h100_llama/fsdp_scan")) == 0
