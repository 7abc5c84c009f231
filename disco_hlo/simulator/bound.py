"""What no order and no bucketing can beat, whatever the search does.

With C the compute of the step alone, M the least communication time of all its bytes, r the
least compute that must precede any collective and q the least that must follow one, every plan
with these kernels takes at least max(C, r + M + q): before the first collective starts at least r
was computed, between it and the end of the last lie at least M, and at least q comes after.
The same holds for every part of the collectives: those before which at least r' must be computed take
at least M' of the link, all of it after r', which is tight where gradients appear together behind a loop. And
where kernels and collectives slow each other down, what hides costs the other side time
(``tight_bound_ns``). The paper's full overlap, FO = max(C, M), is looser. Where collectives block the
compute stream nothing overlaps, and the bound is C + M.

C depends on the kernels, that is on the op groups. For a bound over several plans take the
lowest of theirs (``lowest_bound``); compute of the faster of XLA's plan and ours is the usual choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled
from disco_hlo.hlo.cost_model import CostModel, LinearPieces, never_falls, on_one_line
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.plan import Group
from disco_hlo.plan.variants import unfused
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import PPM, PRODUCT, MachineModel
from disco_hlo.simulator.problem import Problem

_MOST_TRANSFERS: Final = 2048
"""From more than so many the tighter bound is not asked: it is made of what each task is to each collective."""
_MOST_RELEASES: Final = 512
"""Moments from which on it looks at collectives."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The parts of the bound; all times in ns."""

    compute_ns: int
    """C: all kernels, one after the other."""
    before_ns: int
    """r: least compute that must have finished before a collective can start."""
    communication_ns: int
    """M: least time that the channel needs for all bytes, however they are bucketed."""
    after_ns: int
    """q: least compute that can start only after a collective."""
    overlaps: bool
    """Whether compute and communication can run at once."""
    tight_ns: int = 0
    """What :func:`tight_bound_ns` says, where it was asked."""

    @property
    def makespan_ns(self) -> int:
        """What no plan with these kernels can beat."""
        return max(self.plain_ns, self.tight_ns)

    @property
    def plain_ns(self) -> int:
        """max(C, r + M + q), which knows of no contention."""
        if not self.overlaps:
            return self.compute_ns + self.communication_ns
        return max(self.compute_ns, self.before_ns + self.communication_ns + self.after_ns)

    @property
    def full_overlap_ns(self) -> int:
        """FO, the paper's bound: all communication hidden, or all compute."""
        return max(self.compute_ns, self.communication_ns)


def bound_of_kernels(
    graph: Graph,
    groups: Sequence[Group],
    costs: CostModel,
    machine: MachineModel,
) -> Bound:
    """What no plan with these op groups can beat, whatever its buckets and order.

    Raises:
        IllegalStrategyError: the groups do not fit the graph.
    """
    line, size_bytes = on_one_line(graph, costs)
    sizes = size_bytes[list(graph.collectives)].tolist()
    least_ns = least_communication_ns(sizes, line) if sizes else 0
    built = build(graph, unfused(graph, groups), costs, machine)
    found = bound(built.problem, least_ns, machine.asynchronous)
    if not sizes or not machine.asynchronous:
        return found
    units = [built.units.units[unit] for unit in built.unit_of]
    moved = [
        int(size_bytes[list(unit.nodes)].sum())
        for unit, communicates in zip(units, built.problem.communicates, strict=True)
        if communicates
    ]
    return replace(found, tight_ns=tight_bound_ns(built.problem, moved, line, machine))


def lowest_bound(
    graph: Graph,
    kernels: Iterable[tuple[Group, ...]],
    costs: CostModel,
    machine: MachineModel,
) -> Bound:
    """The lowest of the bounds of several plans' op groups; arguments and errors as of :func:`bound_of_kernels`."""
    found = [bound_of_kernels(graph, groups, costs, machine) for groups in dict.fromkeys(kernels)]
    return min(found, key=lambda one: one.makespan_ns)


def bound(problem: Problem, communication_ns: int, overlaps: bool) -> Bound:
    """Bound of every order and bucketing of a problem in which no collectives are bucketed.

    Args:
        problem: every collective a task of its own; its order does not matter.
        communication_ns: M, from :func:`least_communication_ns`.
        overlaps: :attr:`MachineModel.asynchronous`.
    """
    compute_ns = np.where(problem.communicates, 0, problem.duration_ns)
    total = int(compute_ns.sum())
    if not communication_ns:
        return Bound(total, 0, 0, 0, overlaps)
    transfers = np.flatnonzero(problem.communicates)
    needed, following = problem.predecessors, problem.successors
    before = _behind_ns(compute_ns, transfers, needed.offset, needed.member)
    after = _behind_ns(compute_ns, transfers, following.offset, following.member)
    return Bound(total, int(before), communication_ns, int(after), overlaps)


@compiled
def _behind_ns(compute_ns: Any, transfers: Any, offset: Any, member: Any) -> Any:
    """The least that any of the collectives has behind it: the time of all tasks that one reaches through
    ``member``."""
    seen, stack = np.full(compute_ns.size, -1), np.empty(compute_ns.size, np.int64)
    least = np.int64(-1)
    for number in range(transfers.size):
        total = np.int64(0)
        seen[transfers[number]] = number
        stack[0], waiting = transfers[number], 1
        while waiting > 0:  # ends: every task is put there once
            waiting -= 1
            task = stack[waiting]
            for e in range(offset[task], offset[task + 1]):
                other = member[e]
                if seen[other] != number:
                    seen[other] = number
                    total += compute_ns[other]
                    stack[waiting] = other
                    waiting += 1
            if least >= 0 and total >= least:  # no less than another one's
                break
        if least == -1 or total < least:
            least = total
    return least


def tight_bound_ns(
    problem: Problem, sizes_bytes: Sequence[int], pieces: LinearPieces, machine: MachineModel
) -> int:
    """What contention, and collectives that cannot start before some moment, make every plan with these kernels take.

    A collective starts after all compute it depends on, r of it. Of those with r from some time on, the
    first starts then at the earliest; their bytes take at least M' of the link; and behind the one that
    ends last comes at least the least compute that must follow any of them, q. A bucket may carry earlier
    gradients too, which makes it no shorter unless larger collectives can be faster: then M' is what the
    bytes take at the best rate of any bucket.

    The rest of the compute, C - r - q, overlaps with these collectives and holds them up, or runs while there are
    none, and then takes its own time: it costs its time times the smaller of (1 - collective speed) / compute speed
    and 1. In the same way all collectives together cost the compute stream at least M times the smaller of
    (1 - compute speed) / collective speed and 1. The compute speed is that of the kernels which lose least.

    A matmul that holds a collective which begins during it then goes at full speed, and pays for its hold: each saves
    some of either cost, once (:func:`_saved_ns`).

    Nor do the other, earlier collectives come for nothing. Such a one runs before r, slows what computes there, and
    needs what is computed for it alone by then, which could else overlap with the late ones; or it runs after r and
    takes its time of the link there, unless that lies behind the last of the late ones, beside their q.

    Args:
        problem: as for :func:`bound`, on a machine where collectives overlap. Of more than ``_MOST_TRANSFERS``
            nothing is said, which is 0.
        sizes_bytes: of every task of the problem that communicates, in their order.
    """
    compute_ns = np.where(problem.communicates, 0, problem.duration_ns)
    total_ns = int(compute_ns.sum())
    transfers = np.flatnonzero(problem.communicates)
    if transfers.size > _MOST_TRANSFERS:
        return 0
    needed = reaches(problem, transfers, forward=True)
    before = compute_ns @ needed
    following = reaches(problem, transfers, forward=False)
    after = compute_ns @ following
    own = np.where(needed.sum(axis=1) == 1, compute_ns, 0) @ needed
    sizes = np.array(sizes_bytes, np.int64)
    largest = None if never_falls(pieces.lines) else int(sizes.sum())
    more_ns = sizes * _least_ns_per_byte(sizes_bytes, pieces, largest)
    compute_speed, transfer_speed = machine.fastest_ppm / PPM, machine.transfer_speed_ppm / PPM
    held_up = min(1.0, (1 - transfer_speed) / compute_speed)
    slowed = min(1.0, (1 - compute_speed) / transfer_speed)
    beside_none = needed.all(axis=1) | following.all(axis=1)
    saved_ns = _saved_ns(problem, ~beside_none, held_up, slowed, transfer_speed)
    hidden_ns = slowed * least_communication_ns(sizes.tolist(), pieces, largest)
    found = total_ns + max(0, int(hidden_ns - saved_ns))
    releases = np.unique(before)
    # The largest of fewer bounds is one, too.
    for release in releases[:: max(1, -(-releases.size // _MOST_RELEASES))].tolist():
        late = before >= release
        link_ns = least_communication_ns(sizes[late].tolist(), pieces, largest)
        last_ns = int(after[late].min())
        beside_ns = total_ns - release - last_ns
        early_ns = np.minimum(more_ns, slowed * more_ns + (1 - held_up) * own)[~late].sum()
        behind_ns = (1 - held_up) * (last_ns - int(after.min()))
        cost_ns = held_up * beside_ns + max(0.0, early_ns - behind_ns) - saved_ns
        found = max(found, release + link_ns + last_ns + int(max(cost_ns, (1 - transfer_speed) * beside_ns)))
    return found


def _saved_ns(
    problem: Problem, may_run_beside: NDArray[np.bool_], held_up: float, slowed: float, transfer_speed: float
) -> float:
    """What all matmuls together that may overlap with a collective can at most save of what contention costs, by
    holding collectives.

    One of d ns that holds h of them, and pays p for it, takes d + p, of which d - h + p during the collective. It does
    not lose what ``slowed`` says of so much collective, only p; nor does it hold the link up by ``held_up`` of its
    time, but by h, in which nothing is transferred, and by what the collective loses of its speed in the rest.
    """
    first = problem.products & (problem.hold_ns > 0) & may_run_beside
    long_ns, held_ns = problem.duration_ns[first], problem.hold_ns[first]
    paid_ns = held_ns * (PPM - problem.speed_ppm[PRODUCT, 1:2]) // 2 / PPM
    at_once_ns = long_ns - held_ns + paid_ns
    of_compute_ns = slowed * transfer_speed * at_once_ns - paid_ns
    of_link_ns = held_up * long_ns - held_ns - (1 - transfer_speed) * at_once_ns
    return float(np.maximum(0.0, np.maximum(of_compute_ns, of_link_ns)).sum())


def _least_ns_per_byte(sizes_bytes: Sequence[int], pieces: LinearPieces, largest_bytes: int | None) -> float:
    """By how much a byte more lengthens the collectives that there are, at least; arguments as for
    :func:`least_communication_ns`, which says what the first bytes take."""
    if largest_bytes is not None:
        return least_communication_ns(sizes_bytes, pieces, largest_bytes) / max(1, sum(sizes_bytes))
    return max(0.0, min(line.ns_per_byte for line in pieces.lines))


def least_communication_ns(
    sizes_bytes: Sequence[int], pieces: LinearPieces, largest_bytes: int | None = None
) -> int:
    """M: a lower bound of the time that the channel spends on collectives, over all bucketings.

    A bucketing with sizes x costs the sum of T(x), which is at least the number of bytes times
    the least T(x) / x that any bucket can have; on a line that is at one of its ends. With one
    piece, C * (all bytes) + D: everything in one bucket.

    Args:
        largest_bytes: most bytes that one bucket can carry, where that is not the sum of these sizes.
    """
    if not sizes_bytes:
        return 0
    smallest, largest = min(sizes_bytes), largest_bytes or sum(sizes_bytes)
    ratios = []
    ends = [line.from_bytes - 1 for line in pieces.lines[1:]]
    for line, end in zip(pieces.lines, [*ends, largest], strict=True):
        low, high = max(line.from_bytes, smallest), min(end, largest)
        # Times are rounded to whole nanoseconds, down by half of one at most.
        ratios += [line.ns_per_byte + (line.offset_ns - 0.5) / size for size in (low, high) if low <= high]
    return int(sum(sizes_bytes) * max(min(ratios), 0.0))


def reaches(problem: Problem, transfers: NDArray[np.intp], forward: bool) -> NDArray[np.bool_]:
    """Whether each task must precede (else: follow) each collective, ``[tasks, collectives]``."""
    found = np.zeros((len(problem), len(transfers)), np.bool_)
    found[transfers, np.arange(len(transfers))] = True
    order = problem.topological
    neighbours = problem.successors if forward else problem.predecessors
    for task in reversed(order) if forward else order:
        if len(neighbours[task]):
            found[task] |= found[neighbours[task]].any(axis=0)
    return found
