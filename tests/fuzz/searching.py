"""States of the search, written back as strategies."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.plan import Strategy
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.run import search
from tests.machines import CPU, GPU
from tests.search.cost_models import TrafficCosts
from tests.search.states import Bench

_EVALUATIONS = 60


@dataclass(frozen=True)
class SeededCosts(TrafficCosts):
    """Times that follow from a kernel's ops and a seed, and otherwise make no sense: they lead anywhere."""

    seed: int = 0

    def kernel_ns(self, graph: Graph, inside: set[int], results: Sequence[int]) -> int:
        """By the keys of its ops."""
        keys = sorted(graph.nodes[x].key for x in inside if graph.nodes[x].opcode != "bitcast")
        text = f"{self.seed} {' '.join(keys)}".encode()
        return 20 * len(keys) + blake2b(text, digest_size=1).digest()[0]


def _costs(dice: random.Random) -> TrafficCosts:
    return TrafficCosts() if dice.random() < 0.4 else SeededCosts(seed=dice.randrange(1 << 20))


def after_moves(graph: Graph, start: Strategy, dice: random.Random) -> Strategy:
    """The strategy of a state after random moves."""
    bench = Bench(graph, GPU if graph.backend == "gpu" else CPU, _costs(dice), start)
    bench.random_moves(dice, dice.choice((20, 80, 300)))
    return bench.strategy()


def after_search(graph: Graph, start: Strategy, dice: random.Random) -> Strategy:
    """What a very short joint search returns.

    Raises:
        IllegalStrategyError: the search dropped a strategy that it had found, since it was not legal.
    """
    dropped = _Dropped()
    logger = logging.getLogger("disco_hlo")
    level = logger.level
    logger.addHandler(dropped)
    logger.setLevel(logging.DEBUG)
    try:
        settings = SearchSettings(
            evaluations=_EVALUATIONS, seeds=dice.choice((1, 4)), processes=1, seed=dice.randrange(1 << 20)
        )
        machine = GPU if graph.backend == "gpu" else CPU
        result = search(graph, _costs(dice), machine, start=start, settings=settings)
    finally:
        logger.removeHandler(dropped)
        logger.setLevel(level)
    if dropped.messages:
        raise IllegalStrategyError(dropped.messages[0])
    return dice.choice(result.finalists).strategy if result.finalists else result.strategy


class _Dropped(logging.Handler):
    """Hears of strategies that the search's last check refuses."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what is said of a dropped strategy."""
        message = record.getMessage()
        if "is dropped" in message or "is no strategy" in message:
            self.messages.append(message)
