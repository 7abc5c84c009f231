"""The search as the rest of the project sees it: settings in, a strategy with its record out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from disco_hlo.plan.plan import Strategy


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How to search. The defaults are the paper's recommendation (section 6.7)."""

    method: str = "joint"
    """``joint``, or ``backtracking``: the paper's Algorithm 1, which alpha, beta and moves are
    for."""
    alpha: float = 1.05
    """A candidate is explored further while its cost is at most alpha times the best."""
    beta: int = 10
    """A method is applied 0 to beta times, both included, before the result is evaluated."""
    seed: int = 0
    unchanged: int = 1000
    """Stop after this many candidates in a row that did not improve the best."""
    moves: tuple[str, ...] = ()
    """Methods of Algorithm 1, in the order in which each step applies them; none named: fuse, duplicate and merge, and
    other moves that say so (``moves.table``)."""
    evaluations: int | None = None
    """Budget of candidates; None for no limit."""
    seconds: float | None = None
    """Budget of wall time; None for no limit. Results under it depend on the machine's speed."""
    finalists: int = 5
    """How many of the best distinct strategies to return."""
    seeds: int = 4
    """Independent searches of the joint method; the budget of evaluations is divided among them. Every fourth
    begins with the unfused step, the others with what the search is given."""
    processes: int | None = None
    """How many of them run at once, each in a process of its own; None for as many as there are cores. The result
    does not depend on it unless the budget is one of time."""
    memory_limit_bytes: int | None = None
    """Most device memory that a strategy may be predicted to need; of the joint method."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """The best predicted step time went down."""

    evaluation: int
    seconds: float
    cost_ns: int


@dataclass(frozen=True, slots=True)
class Finalist:
    """One of the best strategies found."""

    strategy: Strategy
    predicted_ns: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a search stands."""

    evaluations: int
    start_ns: int
    best_ns: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Candidates that the search took for good ones, and that are no plans."""

    count: int = 0
    reason: str = ""
    """Of the first."""

    def __add__(self, other: Dropped) -> Dropped:
        """Both together."""
        return Dropped(self.count + other.count, self.reason or other.reason)

    def sentence(self) -> str:
        """What to tell the user of them, if there are any."""
        many = (
            f"{self.count} candidates of the search are" if self.count > 1 else "a candidate of the search is"
        )
        return f"{many} left out, being no plan of this step: {self.reason}"


@dataclass(frozen=True)
class SearchResult:
    """What a search found, and how."""

    strategy: Strategy
    predicted_ns: int
    start_ns: int
    """Predicted time of the strategy the search started from."""
    trace: tuple[Improvement, ...]
    evaluations: int
    """Candidates, repeated ones included."""
    distinct_evaluations: int
    wall_s: float
    stopped: str
    """Why it ended: ``unchanged``, ``empty``, ``evaluations``, ``seconds``, ``stop`` or ``interrupted``."""
    finalists: tuple[Finalist, ...] = field(default=())
    """The best distinct strategies, best first; the first is the result itself."""
    dropped: Dropped = field(default_factory=Dropped)


OnProgress = Callable[[Progress], None]
OnBest = Callable[[Finalist], None]
"""Told of every new best strategy, which is legal and within the memory limit."""
Stop = Callable[[], bool]
