"""Compile the search, the first time on a machine, before its clock runs."""

from __future__ import annotations

from dataclasses import replace

from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph, Kind, Node, Shape
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.interpreter import without_collector
from disco_hlo.search.restart import FEWEST_PROPOSALS
from disco_hlo.search.run import search
from disco_hlo.simulator.costs import MachineModel

_ARRAY = Shape("f32", (8,), (0,))
_CANDIDATES = FEWEST_PROPOSALS + 100
"""More than the climbs that come first can look at: those of everything, with their orders, are met as well."""


def warm_up(graph: Graph, costs: CostModel, machine: MachineModel, settings: SearchSettings) -> None:
    """Search a step of a few ops as ``settings`` say, so that all code exists for one like ``graph``."""
    few = replace(settings, evaluations=_CANDIDATES, seconds=None, seeds=1, memory_limit_bytes=None)
    small = small_step(graph.backend, transfers=bool(graph.all_reduces))
    with without_collector():  # the compiler makes much that lives on
        search(small, costs, machine, start=small_plan(small), settings=few)


def small_plan(small: Graph) -> Strategy:
    """A plan of :func:`small_step` with a kernel of two ops."""
    return Strategy((Group((2,), (1,)),), tuple(Bucket((x,)) for x in small.all_reduces))


def small_step(backend: str, *, transfers: bool) -> Graph:
    """A step with two all-reduces, or without: a profile of one device does not know what one takes."""
    nodes = [
        Node(0, "parameter", _ARRAY, (), Kind.PARAMETER, key="parameter"),
        Node(1, "negate", _ARRAY, (0,), Kind.FUSIBLE, key="negate"),
        Node(2, "exponential", _ARRAY, (1,), Kind.FUSIBLE, key="exponential"),
        Node(3, "negate", _ARRAY, (1,), Kind.FUSIBLE, key="negate"),
    ]
    if transfers:
        nodes += [
            Node(4, "all-reduce", _ARRAY, (2,), Kind.ALL_REDUCE, key="all-reduce", collective="sum"),
            Node(5, "all-reduce", _ARRAY, (3,), Kind.ALL_REDUCE, key="all-reduce", collective="sum"),
        ]
    root = len(nodes)
    nodes.append(Node(root, "tuple", Shape("tuple"), (root - 2, root - 1), Kind.FREE, key="tuple"))
    return Graph(tuple(nodes), root, (), backend, "jit_step", "warm")
