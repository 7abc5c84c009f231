"""What search tests share: the moves by name, a state under random moves, and what must hold of it."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled
from disco_hlo.core.legality import group_refusal
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph, kernel_nodes
from disco_hlo.plan.legal import bucket_refusal, check_order
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import unfused
from disco_hlo.search import layout as at
from disco_hlo.search.costs import UnitCosts
from disco_hlo.search.kernels import unit_refusal
from disco_hlo.search.layout import open_views
from disco_hlo.search.moves.table import MOVES, NUMBERS, make_move
from disco_hlo.search.ready_queue import schedule
from disco_hlo.search.segments import Segments, catch_up, count_all, open_segments, segments_ns
from disco_hlo.search.state import Scratch, State, copy_state, new_scratch, roll_back
from disco_hlo.search.step import Step
from disco_hlo.search.strategies import members_of, prepare, to_strategy
from disco_hlo.simulator.contention import new_progress
from disco_hlo.simulator.costs import MachineModel
from tests.machines import CPU, GPU
from tests.search.cost_models import TrafficCosts
from tests.search.steps import random_step

FUSE = NUMBERS["fuse"]
DUPLICATE = NUMBERS["duplicate"]
UNFUSE = NUMBERS["unfuse"]
SPLIT = NUMBERS["split"]
REORDER = NUMBERS["reorder"]
SIBLING = NUMBERS["sibling"]


@compiled
def made(step: Step, state: State, scratch: Scratch, kind: int, a: int, b: int) -> Any:
    """Make a move, as a climb does; whether it was made."""
    g, s, w = open_views(step, state, scratch)
    return make_move(g, s, w, kind, a, b)


@compiled
def refusal_of(step: Step, state: State, scratch: Scratch, unit: int) -> Any:
    """Why the unit with this head may not stand as it is, 0 where it may (see ``legality``)."""
    g, s, w = open_views(step, state, scratch)
    return unit_refusal(g, s, w, unit)


@compiled
def count_order(step: Step, state: State, scratch: Scratch, segments: Segments) -> Any:
    """What the order of a priced state takes by its segments, which are then ready to follow its changes."""
    g, s, _ = open_views(step, state, scratch)
    c = open_segments(segments)
    count_all(g, s, c)
    return segments_ns(g, s, c)


@compiled
def recount_order(step: Step, state: State, scratch: Scratch, segments: Segments, mark: int) -> Any:
    """The same after changes, which the log has from entry ``mark`` on."""
    g, s, w = open_views(step, state, scratch)
    c = open_segments(segments)
    catch_up(g, s, w, c, mark)
    return segments_ns(g, s, c)


@compiled
def undo(step: Step, state: State, scratch: Scratch, mark: int) -> None:
    """Undo all writes since the log had ``mark`` entries, and forget the noted changes."""
    _, _, w = open_views(step, state, scratch)
    roll_back(w, mark)
    w.number[at.CHANGES] = 0


def ranked(step: Step, graph: Graph) -> NDArray[np.int64]:
    """The all-reduces in production order."""
    return np.array(sorted(graph.collectives, key=lambda x: step.node[at.RANK, x]), np.int64)


class Bench:
    """One state on one graph, with everything that a search has at hand."""

    def __init__(
        self,
        graph: Graph,
        machine: MachineModel = CPU,
        costs: CostModel | None = None,
        start: Strategy | None = None,
    ) -> None:
        self.graph, self.machine = graph, machine
        self.model = costs or TrafficCosts()
        start = start or unfused(graph)
        starts = prepare(graph, [start])
        self.step, self.kept = starts.step, starts.kept
        self.scratch = new_scratch(self.step)
        self.costs = UnitCosts(graph, self.step, self.model, machine, self.kept)
        (self.state,) = starts.states
        self.costs.price_all(self.state, self.scratch)
        self.ranked = ranked(self.step, graph)
        self.progress = new_progress(len(graph), machine.pace())
        self.started = np.zeros(4 * len(graph) + 4, np.int64)

    def heads(self) -> list[int]:
        """The units."""
        owner = self.state.word[at.OWNER]
        return [x for x in range(len(self.graph)) if owner[x] == x]

    def move(self, method: int, a: int, b: int) -> bool:
        """Try one move."""
        return bool(made(self.step, self.state, self.scratch, method, a, b))

    def random_arguments(self, random: Random, method: int) -> tuple[int, int]:
        """What a move may be asked for, by what its record says of its arguments."""
        move, reduces = MOVES[method], self.graph.collectives
        a, b = self.random_pair(random)
        if not move.of_unit:
            a = random.choice(reduces) if reduces else -1
        if not move.with_unit and a >= 0:
            owned, copies = members_of(self.state, int(self.state.word[at.OWNER, a]))
            number = random.choice((random.randrange(len(self.graph)), random.randrange(len(reduces) + 1)))
            b = random.choice((b, random.choice((*owned, *copies)), number))
        return a, b

    def random_pair(self, random: Random) -> tuple[int, int]:
        """Two units, mostly a reader and what it reads."""
        owner = self.state.word[at.OWNER]
        read = [
            (x, o) for x, n in enumerate(self.graph.nodes) for o in n.operands if owner[x] != -1 != owner[o]
        ]
        if read and random.random() < 0.8:
            x, operand = random.choice(read)
            return int(owner[x]), int(owner[operand])
        return random.choice(self.heads()), random.choice(self.heads())

    def random_moves(self, random: Random, count: int, methods: int = len(MOVES)) -> int:
        """Try random moves between random units; how many were made: none where nothing runs."""
        made = 0
        if not self.heads():
            return made
        for _ in range(count):
            method = random.randrange(methods)
            made += self.move(method, *self.random_arguments(random, method))
        self.costs.price_changed(self.state, self.scratch)
        return made

    def makespan_ns(self) -> int:
        """Cost by the ready queue."""
        return int(schedule(self.step, self.state, self.scratch, self.progress, self.started)[0])

    def strategy(self) -> Strategy:
        """What the state stands for, in the order of the ready queue."""
        _, count = schedule(self.step, self.state, self.scratch, self.progress, self.started)
        return to_strategy(
            self.graph, self.step, self.state, self.kept, self.started[:count], self.machine.asynchronous
        )

    def fresh(self) -> State:
        """The same strategy as a state made from scratch."""
        other = Bench(self.graph, self.machine, self.model, self.strategy())
        return other.state


def moved(
    seed: int,
    count: int,
    machine: MachineModel = CPU,
    costs: CostModel | None = None,
    *,
    moves: int | None = None,
    methods: int = len(MOVES),
) -> tuple[Bench, Random]:
    """A random step of about ``count`` ops after random moves, as many unless ``moves`` says otherwise."""
    random = Random(seed)
    bench = Bench(random_step(random, count, backend=machine.name), machine, costs)
    bench.random_moves(random, count if moves is None else moves, methods)
    return bench, random


def check_legal(bench: Bench) -> None:
    """The strategy of the state is one that XLA could execute."""
    graph, strategy = bench.graph, bench.strategy()
    units = unit_graph(graph, strategy)
    check_order(units, strategy.order, bench.machine.asynchronous)
    results: dict[int, list[int]] = {}
    for value in units.values:
        results.setdefault(value.producer, []).append(value.node)
    for number, group in enumerate(strategy.groups):
        returned = results[units.index[f"g{number}"]]
        assert group_refusal(graph, kernel_nodes(graph, group.ops), returned) is None
    assert not [bucket for bucket in strategy.buckets if bucket_refusal(graph, bucket)]


def check_consistent(bench: Bench) -> None:
    """What the state keeps beside the strategy is what a state made from scratch would keep."""
    state, other = bench.state, bench.fresh()
    for row in (at.OWNER, at.NEXT, at.COUNT):
        nodes = len(bench.graph)
        assert state.word[row, :nodes].tolist() == other.word[row, :nodes].tolist()
    for head in bench.heads():
        for row in (at.DIGEST, at.WAITS, at.COMPUTED, at.RETURNED_SUM):
            assert state.word[row, head] == other.word[row, head], (row, head)
        for x in members_of(state, head)[0]:
            assert state.word[at.LEAVES, x] == other.word[at.LEAVES, x], x
        assert state.times[head].tolist() == other.times[head].tolist(), head
    assert state.word[at.TOTAL, at.DIGEST_SUM] == other.word[at.TOTAL, at.DIGEST_SUM]
    order = [x for x in state.word[at.ORDER, : state.word[at.TOTAL, at.SLOTS]].tolist() if x != -1]
    assert sorted(order) == bench.heads()
    check_topological(bench)
    assert len(order) == state.word[at.TOTAL, at.UNITS]


def check_topological(bench: Bench) -> None:
    """Every unit stands behind all it waits for."""
    graph, strategy = bench.graph, bench.strategy()
    units = unit_graph(graph, strategy)
    owner = bench.state.word[at.OWNER]
    heads = [max(owner[x] for x in unit.nodes) for unit in units.units]
    place = [int(bench.state.word[at.PLACE, head]) for head in heads]
    for unit, needed in enumerate(units.dependencies):
        assert all(place[other] < place[unit] for other in needed)


MACHINES = (CPU, GPU)


def snapshot(bench: Bench) -> bytes:
    """Everything the state consists of."""
    return copy_state(bench.state).word.tobytes()
