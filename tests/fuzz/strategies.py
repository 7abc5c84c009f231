"""Strategies to try on a program: XLA's own, plain ones, random ones, and what the search makes of its states."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from hashlib import blake2b

from disco_hlo.errors import DiscoError, IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Kind
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.legal import check_strategy
from disco_hlo.plan.plan import Group, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import normal_form, one_bucket, unfused, without_unfit
from tests.steps.strategies import random_order, random_strategy

KINDS = ("default", "xla", "unfused", "one-kernel", "one-bucket", "random", "order", "moves", "search")
"""``default`` is none: XLA's module as it is, before the last gate."""
PLAIN = ("xla", "unfused", "one-kernel", "one-bucket")
"""Kinds of which there is one."""
SEARCHED = ("moves", "search")
"""Kinds that need the search's compiled code."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which strategy to try: a kind, and a seed where the kind has many."""

    kind: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}"


class LostError(Exception):
    """A state of the search that is no strategy."""


def wanted(seed: int, count: int, searched: bool) -> list[Wanted]:
    """XLA's default, and about ``count`` strategies to try on the program of this seed."""
    found = [Wanted("xla"), Wanted("unfused"), Wanted("one-kernel"), Wanted("one-bucket")]
    kinds = ("random", "order", "random", "moves", "order", "moves", "random", "search")
    usable = [kind for kind in kinds if searched or kind not in SEARCHED]
    while len(found) < count:
        number = len(found) - 4
        found.append(Wanted(usable[number % len(usable)], seed * 1000 + number))
    return [Wanted("default"), *found[:count]]


def strategy_of(source: CanonicalModule, one: Wanted) -> Strategy:
    """The strategy that is meant, on this module: in its entry, and in its loop bodies, branches and calls. Where there
    are many of a kind, one region of six stays as XLA compiled it.

    Raises:
        LostError: the search came to a state that is no strategy.
        DiscoError: the module cannot be read.
    """
    if one.kind == "xla":
        return read(source)
    dice = random.Random(one.seed)
    regions = []
    for number, region in enumerate(source.regions):
        if one.kind in PLAIN or dice.random() < 5 / 6:
            within = Wanted(one.kind, one.seed + number + 1)
            regions.append((region.name, _strategy_of_region(region.source, within)))
    return replace(_strategy_of_region(source, one), regions=tuple(sorted(regions)))


def _strategy_of_region(source: CanonicalModule, one: Wanted) -> Strategy:
    graph = source.graph
    if one.kind == "unfused":
        return unfused(graph)
    if one.kind == "one-bucket":
        return _in_one_bucket(source)
    if one.kind == "one-kernel":
        return one_kernel(source)
    if one.kind == "random":
        return random_strategy(source, one.seed, attempts=60)
    if one.kind == "order":
        return in_random_order(source, one.seed)
    if one.kind in SEARCHED:
        return _searched(source, one)
    raise ValueError(f"strategy {one.kind!r}: expected one of {', '.join(KINDS)}")


def _in_one_bucket(source: CanonicalModule) -> Strategy:
    """XLA's kernels with as few buckets as can be; those that such buckets leave no place for go."""
    return without_unfit(source, one_bucket(source.graph, read(source).groups))


def one_kernel(source: CanonicalModule) -> Strategy:
    """As much as may be in one kernel, from the last op on."""
    graph = source.graph
    best = unfused(graph)
    inside: tuple[int, ...] = ()
    for node in reversed(graph.nodes):
        if node.kind is not Kind.FUSIBLE:
            continue
        grown = tuple(sorted((*inside, node.id)))
        candidate = replace(best, groups=(Group(grown),))
        if not inside or _is_legal(source, candidate):
            inside = grown
            if len(grown) > 1:
                best = candidate
    return best


def _is_legal(source: CanonicalModule, strategy: Strategy) -> bool:
    graph = source.graph
    try:
        check_strategy(graph, strategy, unit_graph(graph, strategy), attested_groups(source))
    except IllegalStrategyError:
        return False
    return True


def in_random_order(source: CanonicalModule, seed: int) -> Strategy:
    """Kernels as some other strategy has them, in an order drawn from all that are legal."""
    graph, dice = source.graph, random.Random(seed)
    plain = (unfused(graph), read(source), _in_one_bucket(source))
    strategy = dice.choice(plain) if dice.random() < 0.6 else random_strategy(source, seed, attempts=60)
    units = unit_graph(graph, strategy)
    return replace(strategy, order=random_order(units, graph.backend == "gpu", dice))


# The search --------------------------------------------------------------------------------------


def _searched(source: CanonicalModule, one: Wanted) -> Strategy:
    """What the search writes a state of its own as: after random moves, or after a short joint search."""
    # Imported here: numba takes a while, and a run without the search does without it.
    from disco_hlo.optimize.pipeline import searchable
    from tests.fuzz.searching import after_moves, after_search

    graph, dice = source.graph, random.Random(one.seed)
    start = unfused(graph) if dice.random() < 0.4 else searchable(graph, read(source))
    try:
        found = (after_moves if one.kind == "moves" else after_search)(graph, start, dice)
        return normal_form(graph, found)
    except (DiscoError, KeyError, IndexError, AssertionError) as error:
        raise LostError(f"{type(error).__name__}: {error}") from error


def digest(module: bytes) -> bytes:
    """What tells modules apart."""
    return blake2b(module, digest_size=16).digest()
