"""What everybody who knows how long things take is asked, whether that was measured, estimated or made up.

The simulator and the search ask a :class:`CostModel`; profiler and estimator are such models, and know nothing of
plans. All times are of what runs alone, in whole nanoseconds, launch not included. DisCo, section 4.2: kernels are
looked up or estimated, a collective of x bytes takes T = C x + D, with C and D of its kind.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import ArrayLike, NDArray

from disco_hlo.errors import DiscoError, ProfileError
from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind, collective_kind, moved_bytes, ring_share
from disco_hlo.hlo.graph import Graph, chosen_lists, flat_lists
from disco_hlo.hlo.opcodes import COLLECTIVE

MOST_NS = 1 << 62
"""More than any step takes; 64 bits hold it."""


class FlatKernels(NamedTuple):
    """Kernels as compiled code takes them: number i computes ``members[member_at[i] : member_at[i + 1]]``, ascending,
    duplicates included, and returns ``results[result_at[i] : result_at[i + 1]]``, ascending."""

    member_at: NDArray[np.int64]
    members: NDArray[np.int64]
    result_at: NDArray[np.int64]
    results: NDArray[np.int64]
    tiled: NDArray[np.bool_]
    """``[kernels]``: emitted by Triton, which computes every value once."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """A batch of kernels of one graph. What a kernel returns depends on who else reads its nodes, that is on the whole
    strategy, so it is given."""

    flat: FlatKernels
    emitters: tuple[str, ...] = ()
    """What tells kernels of equal structure apart where XLA can emit them in several ways: ``triton`` and its tiles;
    empty for the default emitters, which are chosen from the structure. Nothing at all where no kernel has any."""

    def __len__(self) -> int:
        return len(self.flat.tiled)

    @staticmethod
    def of_lists(
        members: Sequence[Sequence[int]], results: Sequence[Sequence[int]], emitters: Sequence[str] = ()
    ) -> Kernels:
        """From the members and the results of each kernel, both ascending."""
        return Kernels.of_arrays(*flat_lists(members), *flat_lists(results), emitters)

    @staticmethod
    def of_arrays(
        member_at: NDArray[np.int64],
        members: NDArray[np.int64],
        result_at: NDArray[np.int64],
        results: NDArray[np.int64],
        emitters: Sequence[str] = (),
    ) -> Kernels:
        """From arrays as :class:`FlatKernels` has them."""
        named = tuple(emitters) if any(emitters) else ()
        tiled = np.array([*map(bool, named)]) if named else np.zeros(len(member_at) - 1, np.bool_)
        return Kernels(FlatKernels(member_at, members, result_at, results, tiled), named)

    def chosen(self, numbers: NDArray[np.int64]) -> Kernels:
        """The kernels with these numbers, in this order."""
        flat = self.flat
        return Kernels(
            FlatKernels(
                *chosen_lists(flat.member_at, flat.members, numbers),
                *chosen_lists(flat.result_at, flat.results, numbers),
                flat.tiled[numbers],
            ),
            tuple(self.emitters[number] for number in numbers.tolist()) if self.emitters else (),
        )


def triton_emitter(config: str) -> str:
    """The emitter of a Triton kernel with these settings: they are part of what it is."""
    return f"triton {config}"


class Line(Struct, frozen=True, forbid_unknown_fields=True):
    """T = ``ns_per_byte`` * bytes + ``offset_ns`` from ``from_bytes`` up to the next line."""

    from_bytes: Annotated[int, Meta(ge=0, lt=1 << 62)]
    ns_per_byte: Annotated[float, Meta(ge=0)]
    offset_ns: float
    """May be negative as long as no time is."""


def never_falls(lines: Sequence[Line]) -> bool:
    """Whether no larger collective takes less time than a smaller one."""
    return all(
        right.ns_per_byte * right.from_bytes + right.offset_ns
        >= left.ns_per_byte * right.from_bytes + left.offset_ns
        for left, right in pairwise(lines)
    )


@dataclass(frozen=True, slots=True)
class LinearPieces:
    """Time of a collective T = Cx + D, with its own C and D from each of some sizes on.

    One piece is the paper's regression (section 4.2); devices switch algorithms with size, so
    a fit may need several.
    """

    lines: tuple[Line, ...]
    """By ascending size, the first from 0 bytes on."""

    def __post_init__(self) -> None:
        starts = [line.from_bytes for line in self.lines]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise DiscoError(f"Collective pieces start at {starts} bytes, expected ascending sizes from 0.")
        for line in self.lines:
            at_start = line.ns_per_byte * line.from_bytes + line.offset_ns
            if not (math.isfinite(at_start) and line.ns_per_byte >= 0 and at_start >= -0.5):
                raise DiscoError(
                    f"Collective piece from {line.from_bytes} bytes: C = {line.ns_per_byte} ns per byte, "
                    f"D = {line.offset_ns} ns; expected finite numbers, C not negative, and no negative time."
                )

    @staticmethod
    def of(*lines: tuple[int, float, float]) -> LinearPieces:
        """From (bytes from which on, ns per byte, ns) of each piece."""
        return LinearPieces(tuple(Line(*line) for line in lines))

    @property
    def array(self) -> NDArray[np.float64]:
        """``[3, lines]``: what :class:`Line` has."""
        rows = zip(*((line.from_bytes, line.ns_per_byte, line.offset_ns) for line in self.lines), strict=True)
        return np.array([*rows], np.float64)

    def exact(self, sizes_bytes: ArrayLike) -> NDArray[np.float64]:
        """Time of a collective of each size in ns, same shape."""
        sizes, (starts, slopes, offsets) = np.asarray(sizes_bytes), self.array
        piece = np.searchsorted(starts, sizes, side="right") - 1
        times: NDArray[np.float64] = slopes[piece] * sizes + offsets[piece]
        return times

    def __call__(self, sizes_bytes: ArrayLike) -> NDArray[np.int64]:
        """And rounded to whole nanoseconds."""
        return np.minimum(np.rint(self.exact(sizes_bytes)), MOST_NS).astype(np.int64)

    def sizes(self, times_ns: ArrayLike) -> NDArray[np.int64]:
        """Bytes of the collective whose time is next to each of these, same shape, for lines that never fall: 0 for
        less than the least time, and the smallest where many take as long."""
        times, (starts, slopes, offsets) = np.asarray(times_ns, np.float64), self.array
        ends = np.append(starts[1:] - 1, float(MOST_NS))
        found = np.zeros(times.shape)
        for start, end, slope, offset in zip(starts, ends, slopes, offsets, strict=True):
            first_ns = slope * start + offset
            more = (times - first_ns) / slope if slope > 0 else np.zeros(times.shape)
            found = np.where(times >= first_ns, np.clip(start + more, start, end), found)
        return np.rint(found).astype(np.int64)

    def over(self, share: float) -> LinearPieces:
        """As a function of bytes of which each counts as ``share`` of a byte, 0 to 1, here."""
        if share <= 0:
            return LinearPieces.of((0, 0.0, self.lines[0].offset_ns))
        return LinearPieces.of(
            *(
                (math.ceil(one.from_bytes / share), share * one.ns_per_byte, one.offset_ns)
                for one in self.lines
            )
        )

    def down_to(self, least_ns: float, from_bytes: int) -> LinearPieces:
        """The same from so many bytes on, at least 2; below it times fall evenly, to ``least_ns`` at one byte."""
        # Short of the line by what rounding may put it above; and no time is negative, nor does one fall.
        evenly = (1 - 1e-9) * (float(self.exact(from_bytes)) - least_ns) / (from_bytes - 1)
        ramp = max(0.0, min(evenly, least_ns))
        first = max(number for number, line in enumerate(self.lines) if line.from_bytes <= from_bytes)
        same = [
            (max(one.from_bytes, from_bytes), one.ns_per_byte, one.offset_ns) for one in self.lines[first:]
        ]
        return LinearPieces.of((0, ramp, least_ns - ramp), *same)

    def times(self, factor: float) -> LinearPieces:
        """All of it so many times as long."""
        return LinearPieces.of(
            *((line.from_bytes, factor * line.ns_per_byte, factor * line.offset_ns) for line in self.lines)
        )


class CostModel(ABC):
    """Times of what runs alone. Measured, else estimated, else analytical: models are layers of one stack."""

    @abstractmethod
    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        """Time of each node as a kernel of its own, ``[len(graph)]``; 0 where it takes none."""

    @abstractmethod
    def kernels_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        """Time of each kernel, ``[len(kernels)]``."""

    def moving_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        """The least it takes each kernel to read and write memory, ``[len(kernels)]``; 0 where nobody knows."""
        del graph  # nobody does unless a model says so
        return np.zeros(len(kernels), np.int64)

    def temporary_bytes(self, graph: Graph) -> Mapping[int, int]:
        """Memory that ops need while they run, beside what they are given and return; 0 for ops not named."""
        del graph  # no op runs a region unless a model says so
        return {}

    def first_collective_ns(self, graph: Graph) -> Mapping[int, int]:
        """Of ops that run collectives of their own, such as a loop: how long after the op's beginning the first of
        them begins."""
        del graph  # likewise
        return {}

    def collective(self, kind: CollectiveKind) -> LinearPieces:
        """Time of a collective over its bytes (:func:`~disco_hlo.hlo.collectives.collective_bytes`).

        Raises:
            ProfileError: nobody measured it, nor what it could be derived from.
        """
        raise ProfileError(f"nothing is known of {kind}; measure a sweep on the job's devices")

    def read_classes(self, graph: Graph) -> NDArray[np.int64]:
        """``[len(graph)]``: equal numbers where it makes no difference, shapes apart, which of two nodes a kernel
        reads. All alike unless a model looks at what made an array."""
        return np.zeros(len(graph), np.int64)

    def transfers_ns(self, graph: Graph) -> Mapping[int, int]:
        """Of nodes that travel what those take whose kind and bytes do not say it."""
        del graph  # all go by their kind's line unless a model knows better
        return {}

    def hold_shares(self, graph: Graph) -> NDArray[np.float64]:
        """Of each node as a kernel of its own, the share of its time that must be done before a collective begins
        during it, ``[len(graph)]``. None unless that was measured."""
        return np.zeros(len(graph))


def by_ring(kind: CollectiveKind, all_reduce: LinearPieces) -> LinearPieces:
    """Time of a kind that nobody measured: of an all-reduce between all devices that moves as much around a ring."""
    return all_reduce if kind == ALL_REDUCE else all_reduce.over(ring_share(kind))


class OnOneLine(NamedTuple):
    """What the collectives of a graph take, as bytes of collectives of one kind."""

    line: LinearPieces
    """Of the kind that most of the graph's bytes go through, of those that may share a bucket where there are such."""
    size_bytes: NDArray[np.int64]
    """``[len(graph)]``: of each node that travels, the collective of that kind that takes as long; 0 of all others."""

    def of(self, nodes: Sequence[int]) -> list[int]:
        """Bytes of these nodes."""
        return [int(self.size_bytes[node]) for node in nodes]


def on_one_line(graph: Graph, model: CostModel) -> OnOneLine:
    """Every collective as one of the same kind, for who computes with one line and one number of bytes a node.

    Exact for what travels alone. In a bucket bytes add up: there it is exact for that kind, and for kinds that have
    their time from it; others are off by what the two kinds' latencies differ. Where something takes less than the
    least of that kind, the line falls below the smallest size that there is of it.

    Raises:
        ProfileError: as :meth:`CostModel.collective`.
    """
    if not graph.collectives:
        return OnOneLine(LinearPieces.of((0, 0.0, 0.0)), np.zeros(len(graph), np.int64))
    exact, sizes = moved_bytes(graph), np.zeros(len(graph), np.int64)
    nodes: dict[CollectiveKind, list[int]] = {}
    for node in graph.collectives:
        nodes.setdefault(collective_kind(graph.nodes[node]), []).append(node)
    lines = {kind: model.collective(kind) for kind in nodes}

    def suits(kind: CollectiveKind) -> tuple[bool, bool, int]:
        """On a line that ends flat, as where a step has small ones of a kind alone, no size takes longer than another.
        What travels alone is exact on any other line, and permutations mostly do: where they share, they are few."""
        rises, known = lines[kind].lines[-1].ns_per_byte > 0, COLLECTIVE[kind.opcode]
        return rises, known.shares and not known.names_pairs, int(exact[nodes[kind]].sum())

    chosen = max(nodes, key=suits)
    line, smallest = lines[chosen], int(exact[nodes[chosen]].min())
    times_ns = np.zeros(len(graph))
    for kind, members in nodes.items():
        times_ns[members] = lines[kind].exact(exact[members])
    others = model.transfers_ns(graph)
    times_ns[list(others)] = list(others.values())
    least_ns = max(0.0, float(times_ns[list(graph.collectives)].min()))
    if smallest > 1 and least_ns < line.exact(0):
        line = line.down_to(least_ns, smallest)
    as_they_are = [node for node in nodes.pop(chosen) if node not in others]
    sizes[as_they_are] = exact[as_they_are]
    as_long = sorted({*graph.collectives} - {*as_they_are})
    # What takes no more than the least one is one of a byte still: no bytes mean no collective.
    sizes[as_long] = np.maximum(line.sizes(times_ns[as_long]), np.minimum(exact[as_long], 1))
    return OnOneLine(line, sizes)
