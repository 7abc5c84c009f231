"""A problem simulated, and what is said of it: spans, overlap, peak memory.

DisCo, section 4.4, with XLA's own semantics in place of the ready queue. The engine (:func:`evaluate`) goes through an
explicit order once: a collective begins once the compute stream has reached the place where it is issued and its
channel is free; a wait holds the stream until a collective has finished. ``contention`` has what they cost each other.
Nothing is checked here: ``build`` did.

The makespan is the cost that the search minimises; the rest is for people. The peak of memory follows XLA, which
assigns buffers along its schedule, not along the clock: a buffer lives from the entry that makes it to the last entry
that needs it, and the operand of a collective to the entry that waits for the collective. So it depends on the order
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled
from disco_hlo.simulator.contention import NOW, compute, issue, new_progress, open_progress, restart, wait
from disco_hlo.simulator.costs import COMPUTE, PRODUCT, Pace
from disco_hlo.simulator.problem import Problem


@dataclass(frozen=True, eq=False)
class Timeline:
    """What a simulated step does when.

    ``makespan_ns == compute_ns + exposed_ns``: at every instant something runs.
    """

    problem: Problem
    makespan_ns: int
    spans_ns: NDArray[np.int64]
    """``[2, tasks]``: start and end of each task."""
    started: tuple[int, ...]
    """Tasks in the order in which they were issued."""

    @cached_property
    def compute_ns(self) -> int:
        """Time during which the compute stream computes; collectives that block it do not count."""
        return covered_ns(self.spans_ns[:, ~self.problem.communicates])

    @cached_property
    def communication_ns(self) -> int:
        """Time during which at least one collective runs."""
        return covered_ns(self.spans_ns[:, self.problem.communicates])

    @property
    def overlap_ns(self) -> int:
        """Time during which compute and communication both run."""
        return self.compute_ns + self.communication_ns - covered_ns(self.spans_ns)

    @property
    def exposed_ns(self) -> int:
        """Communication during which nothing is computed."""
        return self.communication_ns - self.overlap_ns

    @cached_property
    def peak_bytes(self) -> int:
        """Most memory in use at any moment, parameters and constants included."""
        return peak_bytes(self.problem)


def simulate(problem: Problem) -> Timeline:
    """The timeline of a problem in its order."""
    unit_ns = problem.unit_ns
    progress = new_progress(len(problem), Pace(problem.speed_ppm, problem.transfer_wait_ns // unit_ns))
    makespan = evaluate(
        problem.order,
        problem.duration_ns // unit_ns,
        problem.resource,
        problem.products,
        problem.hold_ns // unit_ns,
        progress,
    )
    issued = tuple(problem.order[problem.order >= 0].tolist())
    return Timeline(problem, int(makespan) * unit_ns, progress.spans_ns * unit_ns, issued)


def covered_ns(spans_ns: NDArray[np.int64]) -> int:
    """Length of the union of intervals ``[2, n]``."""
    start, end = spans_ns[:, np.argsort(spans_ns[0], kind="stable")]
    if not start.size:
        return 0
    reached = np.concatenate([start[:1], np.maximum.accumulate(end)[:-1]])
    return int(np.maximum(end - np.maximum(start, reached), 0).sum())


@compiled
def evaluate(order: Any, duration_ns: Any, resource: Any, products: Any, hold_ns: Any, progress: Any) -> Any:
    """Makespan of ``order`` in ns; ``progress.spans_ns`` has start and end of each task.

    Args:
        order: ``int32[entries]``: ``i`` runs or issues task i, ``~i`` waits for collective i.
        duration_ns, resource, products, hold_ns: ``[tasks]``, as a problem has them.
        progress: :class:`~disco_hlo.simulator.contention.Progress` with room for all tasks.
    """
    p = open_progress(progress)
    restart(p)
    for entry in order:
        if entry < 0:
            wait(p, ~entry)
        elif resource[entry] > 0:
            issue(p, entry, duration_ns[entry])
        else:
            p.start_ns[entry] = p.number[NOW]
            row = PRODUCT if products[entry] else COMPUTE
            compute(p, duration_ns[entry], hold_ns[entry], row, products[entry])
            p.end_ns[entry] = p.number[NOW]
    return p.number[NOW]


def peak_bytes(problem: Problem) -> int:
    """Peak memory of a problem in its order, parameters and constants included."""
    buffers = problem.buffers
    if not len(buffers.size_bytes):
        return problem.resident_bytes
    return problem.resident_bytes + int(
        peak_of_order(
            problem.order,
            problem.resource,
            buffers.size_bytes,
            buffers.producer,
            buffers.readers.offset,
            buffers.readers.member,
            buffers.returned,
        )
    )


@compiled
def peak_of_order(
    order: Any, resource: Any, size_bytes: Any, producer: Any, offset: Any, member: Any, returned: Any
) -> Any:
    """Most bytes that the buffers take up at any entry of ``order``.

    Args:
        order: ``int32[entries]``, as the engine takes it.
        resource: ``int32[tasks]``.
        size_bytes, producer, returned: ``[buffers]``, int64, int32, bool.
        offset, member: readers of each buffer in compressed rows, ``int32[buffers + 1]``, ``int32[]``.
    """
    issued, settled = np.empty(resource.size, np.int64), np.full(resource.size, order.size)
    for at in range(order.size):
        entry = order[at]
        if entry < 0:
            settled[~entry] = at  # where it is waited for more than once, others keep its buffers
            continue
        issued[entry] = at
        if resource[entry] == 0:
            settled[entry] = at
    change = np.zeros(order.size + 2, np.int64)
    for buffer in range(size_bytes.size):
        change[issued[producer[buffer]]] += size_bytes[buffer]
        if returned[buffer]:
            continue
        last = settled[producer[buffer]]
        for k in range(offset[buffer], offset[buffer + 1]):
            last = max(last, settled[member[k]])
        change[last + 1] -= size_bytes[buffer]
    live, peak = np.int64(0), np.int64(0)
    for at in range(order.size):
        live += change[at]
        peak = max(peak, live)
    return peak
