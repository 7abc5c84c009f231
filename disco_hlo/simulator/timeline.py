"""Simulate a problem and say what happened: spans, overlap, critical path, peak memory.

DisCo, section 4.4. The makespan is the cost that the search minimises; the rest is for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from disco_hlo.simulator.contention import new_progress
from disco_hlo.simulator.costs import Pace
from disco_hlo.simulator.engine import evaluate
from disco_hlo.simulator.memory import peak_bytes
from disco_hlo.simulator.problem import Problem


@dataclass(frozen=True, slots=True)
class Span:
    """One task on its resource."""

    task: int
    start_ns: int
    end_ns: int


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
        return _covered_ns(self.spans_ns[:, ~self.problem.communicates])

    @cached_property
    def communication_ns(self) -> int:
        """Time during which at least one collective runs."""
        return _covered_ns(self.spans_ns[:, self.problem.communicates])

    @property
    def overlap_ns(self) -> int:
        """Time during which compute and communication both run."""
        return self.compute_ns + self.communication_ns - _covered_ns(self.spans_ns)

    @property
    def exposed_ns(self) -> int:
        """Communication during which nothing is computed."""
        return self.communication_ns - self.overlap_ns

    @cached_property
    def peak_bytes(self) -> int:
        """Most memory in use at any moment, parameters and constants included."""
        return peak_bytes(self.problem)

    def spans(self, resource: int) -> tuple[Span, ...]:
        """What runs on the compute stream (0) or on a channel (1..), in time order."""
        return tuple(
            Span(task, int(self.spans_ns[0, task]), int(self.spans_ns[1, task]))
            for task in self.started
            if self.problem.resource[task] == resource
        )


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


def _covered_ns(spans_ns: NDArray[np.int64]) -> int:
    """Length of the union of intervals ``[2, n]``."""
    start, end = spans_ns[:, np.argsort(spans_ns[0], kind="stable")]
    if not start.size:
        return 0
    reached = np.concatenate([start[:1], np.maximum.accumulate(end)[:-1]])
    return int(np.maximum(end - np.maximum(start, reached), 0).sum())
