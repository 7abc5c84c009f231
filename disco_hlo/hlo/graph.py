"""The graph the whole project works on: one training step in canonical form.

A :class:`Graph` is what is left of an HLO entry computation once XLA's own decisions are
taken out of it: op fusions inlined, identical ops merged, combined all-reduces taken apart,
async pairs folded into one node. Two compilations of one step that differ only in those
decisions have equal graphs and equal fingerprints. (DisCo, section 3: the input module H_in.)

Nodes are numbered 0..n-1 in a topological order that depends on structure alone (depth-first
post-order from the root), so a node number means the same thing in every process whose step has
the same key, and plans refer to nodes by it.

This module knows no protobuf and no XLA: it is data. ``canonical.py`` builds it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import TypeVar

DTYPE_BYTES: dict[str, float] = {
    "pred": 1, "s2": 0.25, "s4": 0.5, "s8": 1, "s16": 2, "s32": 4, "s64": 8,
    "u2": 0.25, "u4": 0.5, "u8": 1, "u16": 2, "u32": 4, "u64": 8,
    "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
    "f8e5m2": 1, "f8e4m3": 1, "f8e4m3fn": 1, "f8e4m3b11fnuz": 1, "f8e5m2fnuz": 1,
    "f8e4m3fnuz": 1, "f8e3m4": 1, "f8e8m0fnu": 1, "f4e2m1fn": 0.5,
    "token": 0, "opaque": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """An array shape with its layout, or a tuple of shapes."""

    dtype: str
    """Element type as HLO text prints it (``f32``), or ``tuple``."""
    dims: tuple[int, ...] = ()
    layout: tuple[int, ...] = ()
    """Minor-to-major order of the dimensions; empty for scalars and tuples."""
    elements: tuple[Shape, ...] = ()
    """Members of a tuple shape; empty for arrays."""

    @property
    def element_count(self) -> int:
        """Number of array elements (0 for tuples)."""
        if self.dtype == "tuple":
            return 0
        count = 1
        for extent in self.dims:
            count *= extent
        return count

    @property
    def first_array(self) -> Shape:
        """The shape itself, or the first array of a tuple (the results of a variadic reduce are alike)."""
        shape = self
        while shape.dtype == "tuple" and shape.elements:
            shape = shape.elements[0]
        return shape

    @property
    def size_bytes(self) -> int:
        """Bytes of storage, tuple members included, padding excluded."""
        if self.dtype == "tuple":
            return sum(element.size_bytes for element in self.elements)
        return int(self.element_count * DTYPE_BYTES[self.dtype])

    @property
    def leaves(self) -> tuple[Shape, ...]:
        """The arrays in it, in order: itself, or those of a tuple's members."""
        return (
            tuple(leaf for one in self.elements for leaf in one.leaves) if self.dtype == "tuple" else (self,)
        )

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return "(" + ", ".join(map(str, self.elements)) + ")"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


class Kind(enum.IntEnum):
    """What the search may do with a node."""

    PARAMETER = 0
    """An entry parameter."""
    CONSTANT = 1
    """A constant. Scalars are cloned into every group that reads them; they are never units."""
    FUSIBLE = 2
    """May stand inside an op group."""
    FIXED = 3
    """Executed as it is: library calls, matmuls, loops, in-place updates, other collectives."""
    ALL_REDUCE = 4
    """One transfer of one array: a member of exactly one bucket. Nearly always an all-reduce; a reduce-scatter
    or all-gather of one array is one too, in a bucket of its own."""
    FREE = 5
    """Takes no time by itself: tuple, get-tuple-element, bitcast. Bitcasts may join groups."""


@dataclass(frozen=True, slots=True)
class Node:
    """One instruction of the canonical graph."""

    id: int
    opcode: str
    shape: Shape
    operands: tuple[int, ...]
    """Node ids, in operand order."""
    kind: Kind
    key: str
    """Cost key: a digest of opcode, operand and result shapes and attributes. Equal key, equal time."""
    flops: int = 0
    """Floating-point operations of one execution, by XLA's counting rules (estimate for FIXED)."""
    transcendentals: int = 0
    """Evaluations of exp, log, tanh and their like, counted apart from ``flops``."""
    dimensions: tuple[int, ...] = ()
    """The ``dimensions`` attribute: of a broadcast where each operand dimension goes, of a reduce what
    is reduced, of a transpose the permutation, of a concatenate the axis."""
    collective: str = ""
    """For collectives: digest of devices, reduction and mode. Only equal ones may share a bucket, and only
    all-reduces have equal ones."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Of a collective the devices that take part together (:class:`~disco_hlo.hlo.collectives.CollectiveKind`)."""
    name: str = ""
    """Instruction name in the module it was read from. Not part of the fingerprint."""
    source: str = ""
    """The user's source line (``file.py:12``), where metadata has it. Not part of the fingerprint."""
    op_name: str = ""
    """The name jax gave the op (``jit(step)/transpose/dot_general``). Not part of the fingerprint."""


def is_cloned(node: Node) -> bool:
    """Whether the node is a scalar constant, which every kernel carries its own copy of."""
    return node.kind is Kind.CONSTANT and not node.shape.dims and node.shape.dtype != "tuple"


def external_reads(graph: Graph, inside: Collection[int]) -> list[int]:
    """Nodes that a kernel of these reads from outside, ascending; scalar constants, which it has itself, left out."""
    read = {operand for member in inside for operand in graph.nodes[member].operands}
    return sorted(x for x in read.difference(inside) if not is_cloned(graph.nodes[x]))


@dataclass(frozen=True)
class Graph:
    """A training step in canonical form. Immutable; nodes are topologically numbered."""

    nodes: tuple[Node, ...]
    root: int
    """Id of the entry root, nearly always a tuple."""
    before: tuple[tuple[int, int], ...]
    """Pairs (a, b): a must run before b though b does not read a. Control dependencies, and readers
    of a buffer (a) before the op that overwrites it in place (b)."""
    backend: str
    """``cpu`` or ``gpu``."""
    module_name: str
    fingerprint: str
    """The step's identity, a hex digest: opcodes, shapes, attributes, edges. No names, no metadata."""
    inplace: tuple[tuple[int, int], ...] = field(default=())
    """Pairs (value, writer): ``writer`` leaves its result in the buffer of the value (an in-place update, or
    the update of a donated parameter)."""
    shown: tuple[int, ...] = field(default=())
    """For each array the node whose value it shows: itself, or behind bitcasts, members of tuples and barriers what
    lies in the same buffer, unchanged. Not given: there are no such nodes but bitcasts."""
    lies_in: tuple[tuple[int, ...], ...] = field(default=())
    """For each node the buffers of its arrays, in order, by numbers: what has one number shares one buffer. Not given:
    what is shown shares one, and so do the arrays of :attr:`inplace`."""
    key: str = field(default="")
    """The identity without the values of scalar constants that decide nothing: under it the step's plan is found."""

    def __post_init__(self) -> None:
        if not self.shown:
            shown: list[int] = []
            for node in self.nodes:
                shown.append(shown[node.operands[0]] if node.opcode == "bitcast" else node.id)
            object.__setattr__(self, "shown", tuple(shown))
        if not self.lies_in:
            over = {writer: value for value, writer in self.inplace}
            lies_in: list[tuple[int, ...]] = []
            for node, shown_node in zip(self.nodes, self.shown, strict=True):
                place = over.get(node.id, shown_node)
                members = node.operands if node.kind is Kind.FREE and node.shape.dtype == "tuple" else ()
                passed_on = tuple(buffer for x in members for buffer in lies_in[x])
                lies_in.append(passed_on or (lies_in[place] if place < node.id else (node.id,)))
            object.__setattr__(self, "lies_in", tuple(lies_in))

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the ids of the nodes that read it, ascending, without repeats."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for operand in node.operands if len(node.operands) < 2 else sorted(set(node.operands)):
                found[operand].append(node.id)
        return tuple(tuple(ids) for ids in found)

    @cached_property
    def first_of_key(self) -> tuple[int, ...]:
        """For each node the first of its :attr:`Node.key` and kind: what follows from shapes and attributes is found
        once for all of them, since the layers of a model repeat. An op that is kept apart may have a twin that may
        be fused."""
        first: dict[tuple[str, Kind], int] = {}
        return tuple(first.setdefault((node.key, node.kind), node.id) for node in self.nodes)

    @cached_property
    def all_reduces(self) -> tuple[int, ...]:
        """Ids of the nodes of kind :attr:`Kind.ALL_REDUCE`, ascending."""
        return tuple(node.id for node in self.nodes if node.kind is Kind.ALL_REDUCE)


_Found = TypeVar("_Found")


def once_per_graph(find: Callable[[Graph], _Found]) -> Callable[[Graph], _Found]:
    """Let a function be computed at the first call for a graph, and its result be kept with the graph."""
    name = f"{find.__module__}.{find.__qualname__}"

    @wraps(find)
    def kept(graph: Graph) -> _Found:
        known: dict[str, _Found] = vars(graph)
        if name not in known:
            known[name] = find(graph)
        return known[name]

    return kept


@once_per_graph
def overwritten_names(graph: Graph) -> tuple[tuple[int, int], ...]:
    """``graph.inplace`` with every node under which an overwritten value can be read."""
    names: dict[int, list[int]] = {}
    for node, shown in enumerate(graph.shown):
        names.setdefault(shown, []).append(node)
    return tuple(
        (name, writer) for value, writer in graph.inplace for name in names.get(graph.shown[value], [value])
    )


@once_per_graph
def rewriting(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Pairs (value, writer) where the writer reads what it overwrites. Another kernel that recomputes the writer reads
    the value too, so it must run before."""
    pairs = {
        (value, writer)
        for value, writer in graph.inplace
        if graph.nodes[writer].kind is Kind.FUSIBLE
        and any(graph.shown[x] == graph.shown[value] for x in graph.nodes[writer].operands)
    }
    return tuple(sorted(pairs, key=lambda pair: pair[::-1]))
