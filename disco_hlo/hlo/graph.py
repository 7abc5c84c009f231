"""The graph the whole project works on: one training step in canonical form.

A :class:`Graph` is what is left of an HLO entry computation once XLA's own decisions are
taken out of it: op fusions inlined, identical ops merged, combined collectives taken apart,
async pairs folded into one node. Two compilations of one step that differ only in those
decisions have equal graphs and equal fingerprints. (DisCo, section 3: the input module H_in.)

Nodes are numbered 0..n-1 in a topological order that depends on structure alone (depth-first
post-order from the root), so a node number means the same thing in every process whose step has
the same key, and plans refer to nodes by it.

A bitcast shows a value in another shape and takes no time. So strategies name ops only, and a kernel is its ops with
all bitcasts through which they read: it has each value that it reads under one name, and leaves the ops themselves.
What nothing but a kernel reads by another shape is written where it is read: in another kernel, or next to all of them.

What prepares a step for compiled code begins with the graph as flat arrays (:class:`FlatGraph`). This module knows no
protobuf and no XLA: it is data. ``canonical.py`` builds it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import chain
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.walks import reached

DTYPE_BYTES: dict[str, float] = {
    "pred": 1, "s2": 0.25, "s4": 0.5, "s8": 1, "s16": 2, "s32": 4, "s64": 8,
    "u2": 0.25, "u4": 0.5, "u8": 1, "u16": 2, "u32": 4, "u64": 8,
    "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
    "f8e5m2": 1, "f8e4m3": 1, "f8e4m3fn": 1, "f8e4m3b11fnuz": 1, "f8e5m2fnuz": 1,
    "f8e4m3fnuz": 1, "f8e3m4": 1, "f8e8m0fnu": 1, "f4e2m1fn": 0.5,
    "token": 0, "opaque": 0,
}  # fmt: skip
_Of = TypeVar("_Of")
_Found = TypeVar("_Found")


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
        return 0 if self.dtype == "tuple" else prod(self.dims)

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
    """Executed as it is: library calls, matmuls, loops, in-place updates, collectives that no plan moves."""
    COLLECTIVE = 4
    """A collective of one array that a plan moves
    (:func:`~disco_hlo.hlo.flatten.is_moved_collective`): a member of exactly one bucket."""
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
    """For collectives: digest of devices, reduction and mode. Only equal ones may share a bucket."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Of a collective the devices that take part together (:class:`~disco_hlo.hlo.collectives.CollectiveKind`)."""
    name: str = ""
    """Instruction name in the module it was read from. Not part of the fingerprint."""
    source: str = ""
    """The user's source line (``file.py:12``), where metadata has it. Not part of the fingerprint."""
    op_name: str = ""
    """The name jax gave the op (``jit(step)/transpose/dot_general``). Not part of the fingerprint."""


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
    def collectives(self) -> tuple[int, ...]:
        """Ids of the nodes of kind :attr:`Kind.COLLECTIVE`, ascending."""
        return tuple(node.id for node in self.nodes if node.kind is Kind.COLLECTIVE)


def once_per_graph(find: Callable[[_Of], _Found]) -> Callable[[_Of], _Found]:
    """Let a function be computed at the first call for a graph, or another record that never changes, and its result be
    kept with that."""
    name = f"{find.__module__}.{find.__qualname__}"

    @wraps(find)
    def kept(graph: _Of) -> _Found:
        known: dict[str, _Found] = vars(graph)
        if name not in known:
            known[name] = find(graph)
        return known[name]

    return kept


def is_cloned(node: Node) -> bool:
    """Whether the node is a scalar constant, which every kernel carries its own copy of."""
    return node.kind is Kind.CONSTANT and not node.shape.dims and node.shape.dtype != "tuple"


def external_reads(graph: Graph, inside: Collection[int]) -> list[int]:
    """Nodes that a kernel of these reads from outside, ascending; scalar constants, which it has itself, left out."""
    read = {operand for member in inside for operand in graph.nodes[member].operands}
    return sorted(x for x in read.difference(inside) if not is_cloned(graph.nodes[x]))


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


# Bitcasts ---------------------------------------------------------------------------------------


@once_per_graph
def behind_bitcasts(graph: Graph) -> tuple[int, ...]:
    """For each node what it shows: a bitcast what it reads, directly or through others, any other node itself."""
    return tuple(flat_graph(graph).shown.tolist())


def kernel_nodes(graph: Graph, ops: Iterable[int]) -> tuple[int, ...]:
    """All nodes of the kernel that computes ``ops``, ascending: these and the bitcasts through which they read."""
    read, inside = _bitcasts_read(graph), {*ops}
    return tuple(sorted(inside.union(*(read[x] for x in inside))))


@once_per_graph
def _bitcasts_read(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each node the bitcasts through which it reads."""
    found: list[tuple[int, ...]] = []
    for node in graph.nodes:
        read = [x for x in node.operands if graph.nodes[x].opcode == "bitcast"]
        found.append(tuple(dict.fromkeys(y for x in read for y in (x, *found[x]))) if read else ())
    return tuple(found)


def as_kernel(
    graph: Graph, nodes: Iterable[int], results: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A kernel as a module has it, wherever its bitcasts stand there: its ops, and those whose values leave it; both
    ascending."""
    shown = behind_bitcasts(graph)
    ops = [x for x in nodes if shown[x] == x]
    return tuple(sorted(ops)), tuple(sorted({shown[x] for x in results}))


def readers(graph: Graph, node: int) -> tuple[int, ...]:
    """The ops that read a node's value, bitcasts looked through; a bitcast nobody reads counts itself."""

    def shows(x: int) -> bool:
        return x == node or graph.nodes[x].opcode == "bitcast"

    behind = reached([node], lambda x: graph.users[x] if shows(x) else ())
    return tuple(x for x in behind if not (shows(x) and graph.users[x]))


# Flat arrays ------------------------------------------------------------------------------------


class FlatGraph(NamedTuple):
    """A graph's edges and what is asked of every node. Arrays are never written."""

    kind: NDArray[np.int64]
    """``[nodes]``: ``Kind``."""
    first: NDArray[np.int64]
    """``[nodes]``: ``Graph.first_of_key``."""
    example: NDArray[np.int64]
    """``[keys]``: the first node of each key, ascending."""
    of_key: NDArray[np.int64]
    """``[nodes]``: place in ``example`` of the first node with the key of each."""
    is_bitcast: NDArray[np.bool_]
    """``[nodes]``"""
    is_cloned: NDArray[np.bool_]
    """``[nodes]``: :func:`~disco_hlo.hlo.graph.is_cloned`."""
    operand_at: NDArray[np.int64]
    """``[nodes + 1]``: where the operands of each node begin in ``operand``."""
    operand: NDArray[np.int64]
    """As written, repeats included."""

    @property
    def reader(self) -> NDArray[np.int64]:
        """For each entry of ``operand`` the node that reads it."""
        return np.repeat(np.arange(self.first.size), np.diff(self.operand_at))

    @property
    def shown(self) -> NDArray[np.int64]:
        """``[nodes]``: of a bitcast what it shows, directly or through others; any other node itself."""
        shown = np.arange(self.first.size)
        shown[self.is_bitcast] = self.operand[self.operand_at[:-1][self.is_bitcast]]
        while self.is_bitcast[shown].any():
            shown = shown[shown]
        return shown


@once_per_graph
def flat_graph(graph: Graph) -> FlatGraph:
    """The arrays of ``graph``."""
    nodes = graph.nodes
    kind = np.fromiter([node.kind for node in nodes], np.int64, len(nodes))
    cloned = np.zeros(len(nodes), np.bool_)
    for x in np.flatnonzero(kind == Kind.CONSTANT).tolist():
        cloned[x] = is_cloned(nodes[x])
    bitcast = np.fromiter([node.opcode == "bitcast" for node in nodes], np.bool_, len(nodes))
    first = np.array(graph.first_of_key, np.int64)
    keys = np.unique(first, return_inverse=True)
    return FlatGraph(kind, first, *keys, bitcast, cloned, *flat_lists([node.operands for node in nodes]))


class FlatShapes(NamedTuple):
    """The shapes of a graph. Nodes have few different ones, so what follows from a shape is found once for each."""

    distinct: tuple[Shape, ...]
    """In the order of the first nodes that have them."""
    of_key: NDArray[np.int64]
    """``[keys]``: place in ``distinct``, for each of ``FlatGraph.example``."""
    geometry: NDArray[np.int64]
    """``[distinct]``: equal numbers, equal dimensions and layout, whatever the element type."""
    elements: NDArray[np.int64]
    """``[distinct]``: ``Shape.element_count``."""
    reads_in_place: NDArray[np.bool_]
    """``[keys]``: whether all operands that have dimensions have the node's own, in its layout."""


@once_per_graph
def flat_shapes(graph: Graph) -> FlatShapes:
    """The shapes of ``graph``."""
    flat = flat_graph(graph)
    number: dict[object, int] = {}
    distinct: list[Shape] = []
    of_key = np.empty(flat.example.size, np.int64)
    for key, x in enumerate(flat.example.tolist()):
        shape = graph.nodes[x].shape  # its fields are hashed in half the time that it takes
        of_key[key] = place = number.setdefault(
            (shape.dtype, shape.dims, shape.layout, shape.elements), len(distinct)
        )
        if place == len(distinct):
            distinct.append(shape)
    geometries: dict[object, int] = {}
    geometry = [geometries.setdefault((shape.dims, shape.layout), len(geometries)) for shape in distinct]
    flat_geometry = np.array(geometry, np.int64)
    has_dims = np.array([bool(shape.dims) for shape in distinct], np.bool_)
    of_node = of_key[flat.of_key]
    read, own = of_node[flat.operand], of_node[flat.reader]
    moved = flat.reader[has_dims[read] & (flat_geometry[read] != flat_geometry[own])]
    in_place = np.ones(len(graph), np.bool_)
    in_place[moved] = False
    elements = np.array([shape.element_count for shape in distinct], np.int64)
    return FlatShapes(tuple(distinct), of_key, flat_geometry, elements, in_place[flat.example])


def flat_users(graph: Graph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``Graph.users``: ``[nodes + 1]`` where each list begins, and all of them one after the other."""
    flat, count = flat_graph(graph), len(graph)
    read, user = np.divmod(ascending(flat.operand * count + flat.reader), count)
    return grouped(read, user, count)


def flat_lists(lists: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``[lists + 1]`` where each list begins, and all of them one after the other."""
    start = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(items) for items in lists], out=start[1:])
    return start, np.fromiter(chain.from_iterable(lists), np.int64, int(start[-1]))


def chosen_lists(
    start: NDArray[np.int64], items: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Some of the lists that lie one after the other in ``items``, as :func:`flat_lists` has them."""
    lengths = start[chosen + 1] - start[chosen]
    return np.concatenate([[0], np.cumsum(lengths)]), items[stretches(start[chosen], lengths)]


def stretches(start: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions start[0], start[0] + 1, .. for lengths[0] of them, then those from start[1] on, and so forth."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if ends.size else 0) + np.repeat(start - ends + lengths, lengths)


def ascending(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """``numbers`` sorted, without repeats, in a tenth of the time of ``numpy.unique``."""
    found: NDArray[np.int64] = np.sort(numbers)
    distinct: NDArray[np.int64] = found[np.diff(found, prepend=found[:1] - 1) != 0]
    return distinct


def grouped(
    numbers: NDArray[np.int64], items: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``items`` by their ``numbers``, else in their order: ``[count + 1]`` where those of each begin, and all."""
    start = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(numbers, minlength=count), out=start[1:])
    return start, items[np.argsort(numbers, kind="stable")]
