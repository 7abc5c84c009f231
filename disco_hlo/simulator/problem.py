"""What the engine runs: tasks on a compute stream and on a channel, as arrays.

A problem knows no HLO. It has an explicit order, as XLA's schedule does. Nothing is checked here: ``build`` did, the
order, the cost model's times and the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import flat_lists, grouped


@dataclass(frozen=True, eq=False)
class Lists:
    """A list of integers for each of some items, in compressed rows."""

    offset: NDArray[np.int32]
    """``[items + 1]``: the list of item i is ``member[offset[i]:offset[i + 1]]``."""
    member: NDArray[np.int32]

    @staticmethod
    def of(rows: Iterable[Iterable[int]]) -> Lists:
        """Compressed rows of ordinary lists."""
        offset, member = flat_lists([list(row) for row in rows])
        return Lists(offset.astype(np.int32), member.astype(np.int32))

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __getitem__(self, item: int) -> NDArray[np.int32]:
        return self.member[self.offset[item] : self.offset[item + 1]]

    def reversed(self, items: int) -> Lists:
        """For each of ``items`` members, the items in whose lists it stands, ascending."""
        owner = np.repeat(np.arange(len(self)), np.diff(self.offset))
        offset, member = grouped(self.member.astype(np.int64), owner, items)
        return Lists(offset.astype(np.int32), member.astype(np.int32))


@dataclass(frozen=True, eq=False)
class Buffers:
    """What tasks leave in memory: allocated when the producer is issued, freed after the last reader."""

    size_bytes: NDArray[np.int64]
    producer: NDArray[np.int32]
    """Task that allocates each buffer."""
    readers: Lists
    """Tasks that must have finished before a buffer is freed; the producer always must."""
    returned: NDArray[np.bool_]
    """Buffers that are never freed."""

    @staticmethod
    def of(rows: Sequence[tuple[int, int, Iterable[int], bool]]) -> Buffers:
        """Buffers from rows of (bytes, producer, readers, returned)."""
        return Buffers(
            np.array([row[0] for row in rows], np.int64),
            np.array([row[1] for row in rows], np.int32),
            Lists.of(row[2] for row in rows),
            np.array([row[3] for row in rows], np.bool_),
        )


@dataclass(frozen=True, eq=False)
class Problem:
    """Tasks, where they run, what they wait for, and how they are ordered."""

    names: tuple[str, ...]
    """Name of each task, for timelines."""
    duration_ns: NDArray[np.int64]
    """``[tasks]``: time of each task when it runs alone."""
    resource: NDArray[np.int32]
    """``[tasks]``: 0 for the compute stream, 1 for the channel."""
    predecessors: Lists
    """For each task, the tasks that must have finished before it starts."""
    communicates: NDArray[np.bool_]
    """``[tasks]``: counted as communication; always so on the channel."""
    speed_ppm: NDArray[np.int64]
    """``[4, 2]``, or ``[4, 1]`` without a channel: speeds alone and beside a running collective, of compute, of a
    collective while the compute stream idles, of one while it computes, and of :attr:`products`."""
    products: NDArray[np.bool_]
    """``[tasks]``: tasks on the compute stream that go at the speeds of the last row if a collective ran when they
    began, at full speed if none did, and pay for what they hold (:mod:`disco_hlo.simulator.contention`)."""
    hold_ns: NDArray[np.int64]
    """``[tasks]``: how much of a task on the compute stream must be done before one on the channel can begin during it,
    less than all, so that one which is held to the end begins during it, too."""
    order: NDArray[np.int32]
    """What the compute stream goes through: ``i`` runs task i, or issues it to the channel; ``~i``
    waits until collective i has finished, which it must do once at least."""
    transfer_wait_ns: int = 0
    """What a task on the channel has more to do, unless the compute stream idles when it begins."""
    buffers: Buffers = field(default_factory=lambda: Buffers.of(()))
    resident_bytes: int = 0
    """Memory in use throughout: parameters and constants."""
    unit_ns: int = 1
    """What time is counted in: all durations, holds and the wait are multiples of it."""

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def successors(self) -> Lists:
        """The reverse of :attr:`predecessors`."""
        return self.predecessors.reversed(len(self))

    @cached_property
    def topological(self) -> tuple[int, ...]:
        """All tasks, each after its predecessors."""
        missing = np.diff(self.predecessors.offset).tolist()
        found = [task for task, count in enumerate(missing) if count == 0]
        for task in found:  # grows as it goes
            for successor in self.successors[task].tolist():
                missing[successor] -= 1
                if missing[successor] == 0:
                    found.append(successor)
        return tuple(found)
