"""Random steps with made-up costs and random legal strategies for them, reproducible from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.hlo.graph import Graph, Kind, Node, Shape, behind_bitcasts
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.units import unit_graph
from tests.cost_models import MadeUpCosts
from tests.steps.strategies import random_order


@dataclass(frozen=True)
class TableCosts(MadeUpCosts):
    """A node takes what the table says, a group as long as all it computes, an all-reduce T = x + 5."""

    line: LinearPieces = field(default_factory=lambda: LinearPieces.of((0, 1.0, 5.0)), kw_only=True)
    table_ns: tuple[int, ...]
    """By node id; nodes beyond its end take 10 ns."""

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        return np.array([self._node_ns(node) for node in range(len(graph))], np.int64)

    def kernel_ns(self, graph: Graph, inside: set[int], results: Sequence[int]) -> int:
        return sum(map(self._node_ns, inside))

    def _node_ns(self, node: int) -> int:
        return self.table_ns[node] if node < len(self.table_ns) else 10


@dataclass(frozen=True)
class LoopCosts(TableCosts):
    """And these nodes run collectives of their own, the first of them so long after their beginning."""

    first_ns: dict[int, int] = field(default_factory=dict)

    def first_collective_ns(self, graph: Graph) -> dict[int, int]:
        del graph
        return self.first_ns


@dataclass(frozen=True)
class HoldingCosts(TableCosts):
    """And every node holds transfers for its share of this, by turns."""

    shares: tuple[float, ...] = (0.0,)

    def hold_shares(self, graph: Graph) -> NDArray[np.float64]:
        return np.resize(self.shares, len(graph))


OPCODES = {
    "add": Kind.FUSIBLE,
    "exp": Kind.FUSIBLE,
    "dot": Kind.FIXED,
    "bitcast": Kind.FREE,
    "all-reduce": Kind.COLLECTIVE,
}


def random_step(random: Random, count: int, *, dots: int = 0) -> tuple[Graph, TableCosts]:
    """A graph of ``count`` nodes between a parameter and the root, and what its nodes cost; the more ``dots``, the more
    of them."""
    nodes = [Node(0, "parameter", Shape("f32", (8,)), (), Kind.PARAMETER, key="")]
    for i in range(1, count + 1):
        opcode = random.choice([*OPCODES, "add", "exp", *["dot"] * dots])
        operands = random.sample(range(i), min(i, 2 if opcode == "add" else 1))
        shape = Shape("f32", (random.randint(1, 20),))
        nodes.append(Node(i, opcode, shape, tuple(operands), OPCODES[opcode], key=""))
    read = {operand for node in nodes for operand in node.operands}
    unread = tuple(node.id for node in nodes if node.id not in read)
    nodes.append(Node(count + 1, "tuple", Shape("tuple"), unread, Kind.FREE, key=""))
    before = []
    for _ in range(random.randrange(3)):
        first, second = sorted(random.sample(range(count + 1), 2)) if count else (0, 0)
        before += [(first, second)] if first != second else []
    costs = TableCosts(tuple(random.randrange(60) for _ in nodes))
    return Graph(tuple(nodes), count + 1, tuple(before), "gpu", "jit_step", "f00d"), costs


def random_strategy(
    random: Random, graph: Graph, *, asynchronous: bool, groups: tuple[Group, ...] | None = None
) -> Strategy:
    """Groups (unless given), buckets and an order, each added only if the strategy stays legal."""
    strategy = Strategy(groups or (), tuple(Bucket((node,)) for node in graph.collectives))
    for _ in range(0 if groups is not None else random.randrange(6)):
        strategy = _if_legal(graph, strategy, _with_group(random, graph, strategy))
    for _ in range(random.randrange(4)):
        strategy = _if_legal(graph, strategy, _with_merged_buckets(random, strategy))
    order = random_order(unit_graph(graph, strategy), asynchronous, random)
    return Strategy(strategy.groups, strategy.buckets, order)


def _if_legal(graph: Graph, old: Strategy, new: Strategy) -> Strategy:
    try:
        unit_graph(graph, new)
    except IllegalStrategyError:
        return old
    return new


def _with_group(random: Random, graph: Graph, strategy: Strategy) -> Strategy:
    owned = {node for group in strategy.groups for node in group.nodes}
    free = [n.id for n in graph.nodes if n.id not in owned and n.kind is Kind.FUSIBLE]
    nodes = sorted(random.sample(free, min(len(free), random.randint(1, 4))))
    shown = behind_bitcasts(graph)
    read = {shown[operand] for node in nodes for operand in graph.nodes[node].operands} - {*nodes}
    duplicates = sorted(
        node for node in read if graph.nodes[node].kind is Kind.FUSIBLE and random.random() < 0.5
    )
    kind = random.choice(("loop", "input", "triton"))
    return Strategy((*strategy.groups, Group(tuple(nodes), tuple(duplicates), kind)), strategy.buckets)


def _with_merged_buckets(random: Random, strategy: Strategy) -> Strategy:
    if len(strategy.buckets) < 2:
        return strategy
    first, second = random.sample(strategy.buckets, 2)
    merged = Bucket(first.collectives + second.collectives, random.choice(("concat", "variadic")))
    others = tuple(bucket for bucket in strategy.buckets if bucket not in (first, second))
    return Strategy(strategy.groups, (*others, merged))
