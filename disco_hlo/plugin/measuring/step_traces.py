"""What the traces of a step tell, on rank 0 (DisCo, sections 4.2 and 5.2).

Up to three modules of one step were traced: unfused, with XLA's kernels and transfers alone, and with transfers beside
these kernels (GPU). Their times go among what is known of the platform; how kernels and transfers slow each other is
read from the last two together.

That is read from a few traced runs. Which of two that could begin at once comes first is chance, and a profiler that
writes between kernels biases it. So both steps are timed untraced, too, many runs of each. How much longer the second
takes is what hiding transfers costs; where the simulator says less, by more than a hundredth of the step, all
slow-downs are taken larger alike until it does not. Where that takes more than can be believed, or the simulator says
more than the step takes, they stay: it is wrong about something else there, and with too small ones a search would hide
transfers under whatever they cost most.

A step that moves data for more than a third of its time waits for its channel, and what it takes longer is the
transfers': a trace shows how long each moves data beside kernels, not that the next one begins some us after it, later
where a kernel's thread blocks come first, and only once the other device is there, too. So theirs alone is taken larger
then, if the link is steady: if its transfers vary less from run to run than the difference.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from disco_hlo.backends import BACKENDS
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.opcodes import PRODUCTS
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.regions import step_times
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import in_every_region, one_at_a_time, varied, varied_buckets
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring.known_times import KnownTimes
from disco_hlo.plugin.measuring.traced_modules import Findings
from disco_hlo.profiler.collectives import InStep, in_step_by_kind
from disco_hlo.profiler.contention import MOST, MUCH_MOVED, contention, holds
from disco_hlo.profiler.keys import travelling
from disco_hlo.profiler.profile import Contention, OpTime, Profile
from disco_hlo.simulator.build import holds_product
from disco_hlo.simulator.orders import beside_transfers

UNFUSED, ALONE, BESIDE = "unfused step", "XLA's kernels", "transfers beside XLA's kernels"
"""The modules, by the names that findings go by."""
_NO_CONTENTION = Contention(1.0, 1.0)
_RIGHT = 0.01
"""Of a step: as far off the simulator may be for other reasons."""
_MOST_TIMES = 3.0
"""What slow-downs cost is believed to be up to so many times what traces say."""
_CLEARLY = 3
"""Spreads of what all transfers take in one run; a difference of fewer may be the link's."""
_HALVINGS = 10


def take_in(
    known: KnownTimes,
    source: CanonicalModule,
    xla: Strategy,
    taken: Mapping[str, Findings],
    wanted: Mapping[str, Any],
) -> Contention | None:
    """Add what the traces tell of what is ``wanted`` (:meth:`KnownTimes.lacks`) to what is known, but for how
    kernels and transfers slow each other, which is returned; None where it was not asked for, or not shown."""
    fingerprint = source.graph.fingerprint
    if not all(one.as_run for one in taken.values()):
        known.keep_no_more()
    if (gap_ns := taken[ALONE].gap_ns) is not None:
        known.add_gap(fingerprint, gap_ns)
    # What one of them would have shown is asked for again if it could not be traced.
    whole = all(taken[name].trace is not None for name in (UNFUSED, ALONE))
    if times := op_times(taken):
        known.add_ops(fingerprint, times, taken[UNFUSED].walls_ns if whole else ())
        known.add_facts(fingerprint, loops=dict(taken[ALONE].loops or taken[UNFUSED].loops))
    if wanted["ops"] and not BACKENDS[source.graph.backend].asynchronous and whole:
        known.add_facts(fingerprint, apart=in_step(taken[ALONE]), together=in_step(taken[UNFUSED]))
    if not wanted["contention"] or any(taken[name].trace is None for name in (ALONE, BESIDE)):
        return None
    alike = _alike(taken)
    held = _held_by_ops(source, xla, alike[BESIDE])
    known.add_holds(held)
    known.add_facts(fingerprint, apart={}, together=in_step(alike[ALONE]))
    slowed = _slow_downs(alike, _products(source, xla))
    return replace(slowed, hold=median(held.values()) if held else 0.0)


def _alike(taken: Mapping[str, Findings]) -> Mapping[str, Findings]:
    """All traces as training runs the modules, or none: kernels take other times outside of command buffers."""
    if all(one.as_run for one in taken.values()):
        return taken
    return {name: replace(one, trace=one.by_name, moved=one.moved_by_name) for name, one in taken.items()}


def in_step(found: Findings) -> dict[str, InStep]:
    """What the collectives of each kind took in a trace, by its name."""
    return in_step_by_kind(found.issued, found.moved)


def op_times(taken: Mapping[str, Findings]) -> dict[str, OpTime]:
    """Times of ops and of XLA's kernels, by cost key."""
    return {**taken[UNFUSED].times, **taken[ALONE].times}


def _products(source: CanonicalModule, xla: Strategy) -> frozenset[str]:
    """Tokens of XLA's kernels that hold a product; buckets do not matter to them."""
    return frozenset(
        prefix + unit.token
        for prefix, graph, one in _by_prefix(source, xla)
        for unit in unit_graph(graph, one).units
        if holds_product(graph, unit)
    )


def _by_prefix(source: CanonicalModule, strategy: Strategy) -> list[tuple[str, Graph, Strategy]]:
    """How names begin in a module, the graph, and what the strategy says of it: of the entry and of each region, once
    for each place that has it."""
    found = [("", source.graph, strategy)]
    sources = {region.name: region.sources for region in source.regions}
    for name, one in strategy.regions:
        found += [
            (f"{name}_{number + 1}_" if number else f"{name}_", region.graph, one)
            for number, region in enumerate(sources[name])
        ]
    return found


def _held_by_ops(source: CanonicalModule, xla: Strategy, beside: Findings) -> dict[str, float]:
    """What products keep transfers from beginning beside them, by cost key; in the module traced buckets are varied.

    In a step whose layers are a loop nearly all products are in its bodies.
    """
    if beside.trace is None:
        return {}
    found: dict[str, list[float]] = {}
    for prefix, graph, one in _by_prefix(source, xla):
        ran = beside_transfers(graph, varied_buckets(one))
        units = unit_graph(graph, ran)
        for token, share in holds(beside.trace, beside.module_name, ran.order, prefix).items():
            for node in units.units[units.index[token]].nodes:
                if graph.nodes[node].opcode in PRODUCTS:
                    found.setdefault(graph.nodes[node].key, []).append(share)
    return {key: median(found[key]) for key in sorted(found)}


def _slow_downs(taken: Mapping[str, Findings], products: frozenset[str]) -> Contention:
    """How XLA's kernels slow transfers and transfers slow them, from two orders of the same step."""
    alone, beside = taken[ALONE], taken[BESIDE]
    if alone.trace is None or beside.trace is None:
        return _NO_CONTENTION
    moved = alone.moved, beside.moved
    found = contention(alone.trace, beside.trace, alone.module_name, beside.module_name, products, moved)
    if found is None:
        LOGGER.info(
            "no trace shows a collective that overlaps a kernel: it is assumed that neither slows the other"
        )
    return found or _NO_CONTENTION


def step_profile(
    known: KnownTimes,
    source: CanonicalModule,
    xla: Strategy,
    slowed: Contention | None,
    alone_ns: int,
    beside_ns: int,
) -> Profile:
    """All that is known of the step.

    Args:
        slowed: how kernels and transfers slow each other by the traces; None where that was known.
        alone_ns: what the step took untraced with transfers alone; 0 where that is not known.
        beside_ns: and with transfers beside kernels, on a GPU as warm as when the other was timed.
    """
    graph = source.graph
    as_known = functools.partial(known.profile, graph.fingerprint, travelling(source))
    if slowed is None:
        return as_known()
    if alone_ns and beside_ns:
        slowed = adding_up(replace(as_known(), contention=slowed), source, xla, alone_ns, beside_ns)
    known.add_facts(graph.fingerprint, contention=slowed)
    return as_known()


def adding_up(
    profile: Profile, source: CanonicalModule, xla: Strategy, alone_ns: int, beside_ns: int
) -> Contention:
    """The profile's slow-downs, as traces show them, or larger ones that explain what XLA's kernels took:
    ``alone_ns`` in the order in which transfers run alone, ``beside_ns`` in the order in which they run beside;
    buckets of varied sizes in both."""
    found = profile.contention or Contention(1.0, 1.0)
    one_by_one = in_every_region(source, varied(source, xla), one_at_a_time)
    overlapping = in_every_region(source, varied(source, xla), beside_transfers)
    costs = costs_of(profile, source, [xla])
    by_itself = step_times(source, one_by_one, costs)
    least_ns, waits = _RIGHT * beside_ns, by_itself.communication_ns > MUCH_MOVED * alone_ns
    if waits:
        spread_ns = _spread_ns(profile)
        if spread_ns is None:
            return found
        least_ns = max(least_ns, _CLEARLY * spread_ns)
    # What is wrong about the step with collectives alone is nothing that slow-downs could mend.
    taken_ns = beside_ns - alone_ns + by_itself.makespan_ns

    def simulated_ns(slowed: Contention) -> int:
        return step_times(source, overlapping, costs.slowed(slowed)).makespan_ns

    off = (simulated_ns(found) - taken_ns) / beside_ns
    LOGGER.debug("transfers beside XLA's kernels: simulated %+.1f %% of what the step took", 100 * off)
    if off * beside_ns >= -least_ns:
        return found
    if simulated_ns(larger(found, _MOST_TIMES, kernels=not waits)) < taken_ns - least_ns:
        LOGGER.info(
            "where collectives overlap kernels the step takes %.1f %% longer than simulated, more than contention "
            "explains",
            -100 * off,
        )
        return found
    least, most = 1.0, _MOST_TIMES
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        mended = larger(found, middle, kernels=not waits)
        least, most = (middle, most) if simulated_ns(mended) < taken_ns else (least, middle)
    LOGGER.info(
        "a step loses %.1f %% more to overlapping collectives than its trace shows: the simulator multiplies the "
        "measured contention%s by %.2f",
        -100 * off, " of collectives" * waits, most,
    )  # fmt: skip
    return larger(found, most, kernels=not waits)


def _spread_ns(profile: Profile) -> int | None:
    """By how much all collectives of a step together vary from run to run; None where no trace showed them."""
    of_kinds = (profile.together, *(one.together for one in profile.collectives.values()))
    told = [one.spread_ns for one in of_kinds if one is not None]
    return sum(told) if told else None


def larger(slowed: Contention, times: float, *, kernels: bool = True) -> Contention:
    """Slow-downs that cost so many times as much beyond 1, within what is believed of any.

    Args:
        kernels: those of kernels, too, not of collectives alone.

    Products may lose more than :data:`~disco_hlo.profiler.contention.MOST_OF_PRODUCTS`: that is what one loses beside a
    transfer as long as itself, and beside a short one its last thread blocks wait for the whole of it.
    """

    def more(factor: float) -> float:
        return min(1 + times * (factor - 1), MOST)

    moved = replace(
        slowed,
        communication=more(slowed.communication),
        transfer_wait_ns=round(times * slowed.transfer_wait_ns),
    )
    if not kernels:
        return moved
    return replace(
        moved,
        compute=more(slowed.compute),
        products=None if slowed.products is None else more(slowed.products),
        others=None if slowed.others is None else more(slowed.others),
    )
