"""Compile the search, the first time on a machine, before a clock runs."""

from __future__ import annotations

from dataclasses import replace

from disco_hlo.search.api import SearchSettings
from disco_hlo.search.run import search

from disco_hlo.hlo.graph import Graph, Kind, Node, Shape
from disco_hlo.plan.baselines import unfused
from disco_hlo.simulator.costs import CostModel, MachineModel

_ARRAY = Shape("f32", (8,), (0,))


def warm_up(graph: Graph, costs: CostModel, machine: MachineModel, settings: SearchSettings) -> None:
    """Search a step of three ops as ``settings`` say, so that all code exists for one like ``graph``."""
    few = replace(settings, evaluations=20, seconds=None, seeds=1, memory_limit_bytes=None)
    small = _small_step(graph.backend, transfers=bool(graph.all_reduces))
    search(small, costs, machine, start=unfused(small), settings=few)


def _small_step(backend: str, *, transfers: bool) -> Graph:
    """A step with an all-reduce, or without: a profile of one device does not know what one takes."""
    nodes = (
        Node(0, "parameter", _ARRAY, (), Kind.PARAMETER, key="parameter"),
        Node(1, "negate", _ARRAY, (0,), Kind.FUSIBLE, key="negate"),
        Node(2, "exponential", _ARRAY, (1,), Kind.FUSIBLE, key="exponential"),
        Node(3, "all-reduce", _ARRAY, (2,), Kind.ALL_REDUCE, key="all-reduce", collective="sum")
        if transfers
        else Node(3, "negate", _ARRAY, (2,), Kind.FUSIBLE, key="negate"),
        Node(4, "tuple", Shape("tuple"), (3,), Kind.FREE, key="tuple"),
    )
    return Graph(nodes, 4, (), backend, "jit_step", "warm")
