"""Local search from one state: random moves, kept while they do not make it worse by more than allowed.

Threshold accepting (Dueck and Scheuer): annealing without random acceptance, in whole numbers. A
kernel whose cost is not known is put on a list; the move is tried again once the cost is there, so
that a cost model is asked for many kernels at a time. Of two moves of one unit the cost is not asked at
once: where the first is kept, the second makes another kernel.

Between climbs the state gets buckets and order by rule for the kernels it has (:meth:`Climber.reschedule`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import Ints, Row, compiled, inner
from disco_hlo.core.reasons import fresh_stamp
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.variants import collective_depths
from disco_hlo.search import layout as at
from disco_hlo.search.arrange import contiguous_buckets, gradients_ready, list_order, regroup
from disco_hlo.search.costs import UnitCosts, Unknown, has_place, price_changed, unit_of_step
from disco_hlo.search.hashing import Generator, Table, claim, draw, find, mixed, new_table, seeded, with_room
from disco_hlo.search.interpreter import Halted, interruptible
from disco_hlo.search.layout import GraphView, Pools, ScratchView, StateView, open_draws, open_views
from disco_hlo.search.moves.table import MOVES, ONLY_ORDER, make_move, random_move, second_unit
from disco_hlo.search.segments import (
    ORDER_DIGEST,
    Segments,
    SegmentsView,
    catch_up,
    count_all,
    new_segments,
    open_segments,
    run_order,
    segments_ns,
)
from disco_hlo.search.state import (
    MAXIMUM_MEMBERS,
    Scratch,
    State,
    copy_state,
    has_room,
    new_scratch,
    roll_back,
)
from disco_hlo.search.step import Step
from disco_hlo.search.strategies import Starts, to_strategy
from disco_hlo.simulator.costs import MAX_TOTAL, MachineModel, coarse

MOST_DRAWS: Final = 4
SMALL_BYTES: Final = (1 << 16, 1 << 20)
"""Of a gradient that may come last: the link has it in less time than a kernel computes it in, mostly."""
BUCKET_ROUNDS: Final = 2
"""How often buckets are computed again for the order that the previous ones led to."""

# Climb.control
LEFT: Final = 0
"""Proposals still to be made."""
THRESHOLD: Final = 1
"""By how much the state may be worse than before a move that is kept."""
CURRENT: Final = 2
"""Score of the state."""
BEST: Final = 3
"""Score of the best state since the log was empty; the log leads back to it. ``UNSCORED``: a climb begins."""
EVALUATED: Final = 4
"""Candidates whose score was found, so far."""
DISTINCT: Final = 5
"""How many of them were never seen before."""
LISTED: Final = 6
"""Kernels in ``unknown``."""
WAITING: Final = 7
"""Moves in ``waiting`` that need the cost of one of them."""
RETRIES: Final = 8
"""Moves in ``waiting`` whose costs have been asked for."""
RETRIED: Final = 9
"""How many of those have been tried again."""
ORDERED: Final = 10
"""1: the score is the makespan of the state's order, as ``segments`` has it. 0: it is the sum of all times."""
HALT: Final = 11
"""Not 0: end at once. Set from outside while the code runs."""
CONTROLS: Final = 12
MOST_WAITING: Final = 128
"""Moves that wait at most. Of a longer list more are refused when their turn comes, others having been kept by then."""
COMPUTE_SHARE: Final = 1024
UNSCORED: Final = -1


def apart(gradients: NDArray[np.int64]) -> list[list[int]]:
    """Each in a bucket of its own."""
    return [[x] for x in gradients.tolist()]


class Climber:
    """A state with everything that climbs need."""

    def __init__(
        self, graph: Graph, model: CostModel, machine: MachineModel, starts: Starts, start: int, seed: int
    ) -> None:
        self.unit_ns = unit_of_step(graph, model)
        """What every time of a state counts: of a step of minutes not every nanosecond does."""
        model, machine = coarse(model, machine, self.unit_ns)
        self.graph, self.machine, self.model = graph, machine, model
        self.step, self.kept = starts.step, starts.kept
        self.costs = UnitCosts(self.graph, self.step, self.model, self.machine, self.kept)
        self.scratch = new_scratch(self.step)
        # A restart's seed is the user's times a million.
        self.generator = seeded(int(mixed(np.array([seed % 2**64], np.uint64))[0]))
        node = self.step.node
        self.fusible = np.flatnonzero(node[at.FLAGS, : len(self.graph)] & at.FUSIBLE).astype(np.int64)
        ranked = np.array(sorted(self.graph.collectives, key=lambda x: node[at.RANK, x]), np.int64)
        self.pools = (self.fusible, ranked)
        self.seen = {ordered: new_table(1) for ordered in (False, True)}
        self.waiting = np.zeros((MOST_WAITING, 3), np.int64)
        self.segments = new_segments(self.step, ranked, self.machine)
        self.control = np.zeros(CONTROLS, np.int64)
        self.depths = collective_depths(self.graph)
        self.state = copy_state(starts.states[start])
        self.costs.price_all(self.state, self.scratch)
        self.given_runs = _runs_of(self.state, ranked)

    @property
    def evaluations(self) -> int:
        """Candidates looked at."""
        return int(self.control[EVALUATED])

    @property
    def distinct(self) -> int:
        """Candidates that had not been looked at before."""
        return int(self.control[DISTINCT])

    def draw_by_time(self) -> None:
        """Propose moves of a unit the more often the longer it takes now: there most is to be gained.

        A fusible op is drawn as often as the time of its unit has that of the average unit in it, at least once
        and at most ``MOST_DRAWS`` times as often as others.
        """
        unit = self.state.word[at.OWNER, self.fusible]
        times_ns = self.state.times[:, at.MAIN]
        average_ns = max(1, self.total() // max(1, int(self.state.word[at.TOTAL, at.UNITS])))
        draws = np.clip(times_ns[unit] // average_ns, 1, MOST_DRAWS)
        self.pools = (np.repeat(self.fusible, draws), self.pools[1])

    def draw_alike(self) -> None:
        """Propose moves of every op equally often."""
        self.pools = (self.fusible, self.pools[1])

    def total(self) -> int:
        """Time of all units one after the other, in ``unit_ns``."""
        total = self.state.word[at.TOTAL]
        return int(total[at.COMPUTE_NS] + total[at.TRANSFER_NS])

    def makespan_ns(self) -> int:
        """Time of the state in its order."""
        if not self.machine.asynchronous:
            return self.total() * self.unit_ns
        made = run_order(self.step, self.state, self.scratch, self.segments)
        return int(made[0]) * self.unit_ns

    def strategy(self, state: State) -> Strategy:
        """What a state stands for, with its order."""
        _, count = run_order(self.step, state, self.scratch, self.segments)
        started = self.segments.started[:count]
        return to_strategy(self.graph, self.step, state, self.kept, started, self.machine.asynchronous)

    def climb(
        self,
        moves: Mapping[int, int],
        proposals: int,
        threshold: int,
        *,
        ordered: bool,
        halted: Halted = None,
    ) -> None:
        """Make proposals; the state becomes the best that was met.

        Args:
            threshold: by how much the state may be worse than before a move that is kept, in ``unit_ns``.
            halted: see ``interruptible``.
        """
        control, scratch = self.control, self.scratch
        self.seen[ordered] = with_room(self.seen[ordered], proposals + MOST_WAITING)
        scratch.number[at.LOGGED] = 0
        control[[LEFT, THRESHOLD, ORDERED, BEST]] = proposals, threshold, ordered, UNSCORED
        control[[LISTED, WAITING, RETRIES, RETRIED, HALT]] = 0
        weights = np.zeros(len(MOVES), np.int64)
        for kind, weight in moves.items():
            weights[kind] = weight

        def go_on() -> int:
            listed: int = climb(
                self.step, self.state, scratch, self.generator, self.pools, weights, self.costs.prices,
                self.costs.unknown, self.waiting, self.seen[ordered], self.segments, control,
            )  # fmt: skip
            return listed

        # Ends: each time the first of the moves that waited is decided, as nothing else was decided before it.
        while listed := interruptible(go_on, control, HALT, halted):
            self.costs.ask(listed)
            control[RETRIES] = control[WAITING]
            control[[LISTED, WAITING, RETRIED]] = 0

    def reschedule(self, *, small_last: bool = False, halted: Halted = None) -> None:
        """Give the state's kernels the best buckets and order at hand, if these are better than its own.

        Args:
            small_last: also try what brings the large gradients forward. Takes three times as long.
            halted: asked after what is tried first, the order with the buckets as they are.
        """
        best, best_ns = self.state, self.makespan_ns()
        for state in self._arranged(small_last):
            self.state = state
            found_ns = self.makespan_ns()
            if found_ns < best_ns:
                best, best_ns = state, found_ns
            if halted is not None and halted():
                break
        self.state = best

    def _arranged(self, small_last: bool) -> Iterator[State]:
        """The state in the order of a list schedule, as it is and with other buckets (see ``schedule``).

        After each the state must be run in its order: the next buckets depend on when gradients appeared.
        """
        own = self.state
        listed = copy_state(own)
        if not list_order(self.step, listed, self.scratch):
            return
        yield listed
        ranked = self.pools[1]
        if ranked.size < 2:
            return
        for first in (apart(ranked), *(self._small_ones_last(ranked) if small_last else ())):
            runs = first
            for _ in range(1 + BUCKET_ROUNDS):
                state = self._with_buckets(own, runs)
                if state is None:
                    break
                yield state
                runs = self._neighbours_together(ranked)

    def _small_ones_last(self, ranked: NDArray[np.int64]) -> Iterator[list[list[int]]]:
        """All small gradients in one bucket, which waits for the last of them: so what computes them comes last, and
        runs beside the transfer of large ones that else nothing would hide (an embedding's, whose gradient is complete
        only at the end)."""
        sizes, channel = self.costs.sizes, self.step.node[at.CHANNEL]
        for limit in SMALL_BYTES:
            small: dict[tuple[int, int], list[int]] = {}
            for x in ranked[sizes[ranked] <= limit].tolist():
                small.setdefault((int(channel[x]), self.depths[x]), []).append(x)
            if small and any(sizes[x] > limit for x in ranked):
                yield [*apart(ranked[sizes[ranked] > limit]), *small.values()]

    def take_given_buckets(self) -> None:
        """Give the state's kernels the buckets of the start, in the order of a list schedule, if they can have them."""
        if len(self.given_runs) > 1:
            self.state = self._with_buckets(self.state, self.given_runs) or self.state

    def _with_buckets(self, own: State, runs: Sequence[Sequence[int]]) -> State | None:
        """A state with other buckets, in the order of a list schedule; None where a kernel reads one member of a
        bucket and makes another, so that they cannot wait for each other."""
        state = copy_state(own)
        members = np.concatenate([np.sort(run) for run in runs]).astype(np.int64)
        regroup(self.step, state, self.scratch, members, np.cumsum([0, *map(len, runs)], dtype=np.int64))
        self.costs.price_changed(state, self.scratch)
        self.scratch.number[at.LOGGED] = 0
        return state if list_order(self.step, state, self.scratch) else None

    def _neighbours_together(self, ranked: NDArray[np.int64]) -> list[list[int]]:
        """The best runs of gradients, in the order in which they appeared when the state was run last."""
        if not ranked.size:  # a step without gradients
            return []
        ready = gradients_ready(self.step, self.state, self.segments.ends_ns, ranked)
        by_time = np.lexsort((ranked, ready))
        gradients = ranked[by_time]
        channel = self.step.node[at.CHANNEL]
        kinds = [(int(channel[x]), self.depths[x]) for x in gradients.tolist()]
        runs = contiguous_buckets(
            ready[by_time].tolist(),
            self.costs.collectives.size_bytes[gradients].tolist(),
            kinds,
            self.costs.collectives.line,
            self.machine.pace().wait_ns,
        )
        return [gradients[run].tolist() for run in runs]


def _runs_of(state: State, ranked: NDArray[np.int64]) -> list[list[int]]:
    """The members of each bucket."""
    runs: dict[int, list[int]] = {}
    for x, bucket in zip(ranked.tolist(), state.word[at.OWNER, ranked].tolist(), strict=True):
        runs.setdefault(bucket, []).append(x)
    return list(runs.values())


@compiled
def climb(
    step: Step,
    state: State,
    scratch: Scratch,
    generator: Generator,
    pools: Pools,
    weights: Ints,
    prices: Table,
    unknown: Unknown,
    waiting: Ints,
    seen: Table,
    segments: Segments,
    control: Ints,
) -> Any:
    """Make proposals until none are left or the cost model must be asked.

    Args:
        weights: ``[moves]`` int64, how often each is proposed.
        waiting: ``[MOST_WAITING, 3]`` int64.
        seen: table of the scores of candidates by digest; has room for the proposals left.
        segments: made anew where a climb begins whose score is that of the order.

    Returns:
        The number of units listed as unknown; 0 when all proposals are made, the state then being
        the best one.
    """
    g, s, w = open_views(step, state, scratch)
    c = open_segments(segments)
    source, pool = open_draws(generator, pools)
    total = 0
    for weight in weights:
        total += weight
    waits = fresh_stamp(w)
    if control[BEST] == UNSCORED:
        if control[ORDERED]:
            count_all(g, s, c)
        control[CURRENT] = control[BEST] = _score_of(g, s, c, control)
    while True:  # ends: each pass makes one of the proposals left, or tries one of those again that waited
        if control[HALT] != 0:
            control[LISTED] = 0
            break
        if control[RETRIED] < control[RETRIES]:
            row = control[RETRIED]
            kind, a, b = waiting[row, 0], waiting[row, 1], waiting[row, 2]
            control[RETRIED] += 1
        elif (
            control[LEFT] == 0
            or control[WAITING] == MOST_WAITING
            or not has_place(unknown, control[LISTED], 4 * MAXIMUM_MEMBERS)
        ):
            break
        else:
            kind = _random_kind(source, weights, total)
            a, b = random_move(kind, g, s, w, source, pool)
            control[LEFT] -= 1
        if not has_room(g, w):
            roll_back(w, 0)
            control[CURRENT] = control[BEST]
        _consider(g, s, w, kind, a, b, prices, unknown, waiting, seen, c, waits, control)
    if control[LISTED] == 0:
        roll_back(w, 0)
        control[CURRENT] = control[BEST]
    return control[LISTED]


@inner
def _random_kind(generator: Row, weights: Ints, total: int) -> Any:
    drawn = draw(generator, total)
    kind = 0
    while drawn >= weights[kind]:  # ends: the weights add up to more than was drawn
        drawn -= weights[kind]
        kind += 1
    return kind


@inner
def _consider(
    g: GraphView,
    s: StateView,
    w: ScratchView,
    kind: int,
    a: int,
    b: int,
    prices: Table,
    unknown: Unknown,
    waiting: Ints,
    seen: Table,
    c: SegmentsView,
    waits: int,
    control: Ints,
) -> None:
    """Try one move. What is still to be priced waits, its units marked in row ``awaited`` with ``waits``; and so does,
    untried, what comes to the same units after it."""
    if a < 0:
        return
    other = second_unit(s, kind, b)
    waiting_too = not ONLY_ORDER[kind] and (
        w.awaited[s.owner[a]] == waits or (other >= 0 and w.awaited[other] == waits)
    )
    if waiting_too:
        _wait(waiting, kind, a, b, control)
        return
    mark = w.number[at.LOGGED]
    if not make_move(g, s, w, kind, a, b):
        return
    control[LISTED] = price_changed(g, s, w, prices, unknown, control[LISTED], False)
    if w.number[at.CHANGES] != 0:
        roll_back(w, mark)
        for i in range(w.number[at.CHANGES]):
            w.awaited[s.owner[w.changed[i]]] = waits
        w.number[at.CHANGES] = 0
        _wait(waiting, kind, a, b, control)
        return
    if s.total[at.COMPUTE_NS] + s.total[at.TRANSFER_NS] > MAX_TOTAL:  # no order of it can be simulated
        roll_back(w, mark)
        return
    if control[ORDERED]:
        catch_up(g, s, w, c, mark)
    score = _score(g, s, c, seen, control)
    if score > control[CURRENT] + control[THRESHOLD]:
        roll_back(w, mark)
        return
    control[CURRENT] = score
    if score < control[BEST]:
        control[BEST] = score
        w.number[at.LOGGED] = 0


@inner
def _wait(waiting: Ints, kind: int, a: int, b: int, control: Ints) -> None:
    if control[WAITING] < MOST_WAITING:
        row = control[WAITING]
        waiting[row, 0], waiting[row, 1], waiting[row, 2] = kind, a, b
        control[WAITING] += 1


@inner
def _score(g: GraphView, s: StateView, c: SegmentsView, seen: Table, control: Ints) -> Any:
    """Score of the state; looked up where the candidate was seen before."""
    control[EVALUATED] += 1
    digest = s.total[at.DIGEST_SUM]
    if control[ORDERED]:
        digest += c.number[ORDER_DIGEST]
    slot = find(seen, digest)
    if slot >= 0:
        return seen.value[slot, 0]
    control[DISTINCT] += 1
    score = _score_of(g, s, c, control)
    seen.value[claim(seen, digest), 0] = score
    return score


@inner
def _score_of(g: GraphView, s: StateView, c: SegmentsView, control: Ints) -> Any:
    if control[ORDERED]:
        # Of two orders that take equally long, the one with less compute leaves more to be gained.
        return segments_ns(g, s, c) + s.total[at.COMPUTE_NS] // COMPUTE_SHARE
    return s.total[at.COMPUTE_NS] + s.total[at.TRANSFER_NS]
