"""What the traces of a step tell, on rank 0 (DisCo, sections 4.2 and 5.2).

Up to three modules of one step were traced: unfused, with XLA's kernels and transfers alone, and with transfers beside
these kernels (GPU). Their times go among what is known of the platform; how kernels and transfers slow each other is
read from the last two together, and held against what both take untraced.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from disco_hlo.backends import BACKENDS
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.opcodes import PRODUCTS
from disco_hlo.plan.baselines import varied_buckets
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring.known_times import KnownTimes
from disco_hlo.plugin.measuring.slow_downs import adding_up
from disco_hlo.plugin.measuring.traced_modules import Findings
from disco_hlo.profiler.bodies import travelling
from disco_hlo.profiler.collectives import in_step_by_kind
from disco_hlo.profiler.contention import contention
from disco_hlo.profiler.holds import holds
from disco_hlo.profiler.in_step import InStep
from disco_hlo.profiler.profile import Contention, OpTime, Profile
from disco_hlo.simulator.build import holds_product
from disco_hlo.simulator.orders import beside_transfers

UNFUSED, ALONE, BESIDE = "unfused step", "XLA's kernels", "transfers beside XLA's kernels"
"""The modules, by the names that findings go by."""
_NO_CONTENTION = Contention(1.0, 1.0)


def take_in(
    known: KnownTimes,
    source: CanonicalModule,
    xla: Strategy,
    taken: Mapping[str, Findings],
    wanted: Mapping[str, Any],
) -> Contention | None:
    """Add what the traces tell to what is known, but for how kernels and transfers slow each other, which is returned;
    None where it was not asked for, or not shown.

    Args:
        wanted: as of :meth:`KnownTimes.lacks`.
    """
    fingerprint = source.graph.fingerprint
    if not all(one.as_run for one in taken.values()):
        known.keep_no_more()
    if (gap_ns := taken[ALONE].gap_ns) is not None:
        known.add_gap(fingerprint, gap_ns)
    # What one of them would have shown is asked for again if it could not be traced.
    whole = all(taken[name].trace is not None for name in (UNFUSED, ALONE))
    if wanted["ops"]:
        known.add_ops(fingerprint, op_times(taken), taken[UNFUSED].walls_ns if whole else ())
    if wanted["ops"]:
        known.add_loops(fingerprint, taken[ALONE].loops or taken[UNFUSED].loops)
    if wanted["ops"] and not BACKENDS[source.graph.backend].asynchronous and whole:
        known.add_collectives(fingerprint, in_step(taken[ALONE]), in_step(taken[UNFUSED]))
    if not wanted["contention"] or any(taken[name].trace is None for name in (ALONE, BESIDE)):
        return None
    alike = _alike(taken)
    held = _held_by_ops(source, xla, alike[BESIDE])
    known.add_holds(held)
    known.add_collectives(fingerprint, {}, in_step(alike[ALONE]))
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
    found = [("", source.graph, xla)]
    sources = {region.name: region.sources for region in source.regions}
    for name, one in xla.regions:
        found += [
            (f"{name}_{number + 1}_" if number else f"{name}_", region.graph, one)
            for number, region in enumerate(sources[name])
        ]
    return frozenset(
        prefix + unit.token
        for prefix, graph, one in found
        for unit in unit_graph(graph, one).units
        if holds_product(graph, unit)
    )


def _held_by_ops(source: CanonicalModule, xla: Strategy, beside: Findings) -> dict[str, float]:
    """What products keep transfers from beginning beside them, by cost key; in the module traced buckets are varied."""
    if beside.trace is None:
        return {}
    graph, ran = source.graph, beside_transfers(source.graph, varied_buckets(xla))
    units = unit_graph(graph, ran)
    found: dict[str, list[float]] = {}
    for token, share in holds(beside.trace, beside.module_name, ran.order).items():
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
    known.add_contention(slowed, graph.fingerprint)
    return as_known()
