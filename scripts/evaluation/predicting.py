"""What the simulator says of the rows of a cell: by the profile, and by the link as it was in the rounds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind, collective_bytes, collective_kind
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.optimize.costs import Costs
from disco_hlo.optimize.regions import step_times
from disco_hlo.plan.plan import Bucket, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.variants import one_at_a_time
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.step import Step
from disco_hlo.profiler.collectives import InStep
from disco_hlo.profiler.profile import Collectives, Profile
from disco_hlo.simulator.bound import lowest_bound
from evaluation.record import ALONE_XLA, OK, Record
from evaluation.step import FoundPlans, costs
from evaluation.tables import step_ms

_LEAST_SHARE = 0.4
"""Of a step in which nothing runs beside transfers. Kernels are known to 2.5 %, so transfers are by 3.7 % then; over
sockets these changed by 12 to 17 % between profile and rounds."""
python_at_once = threading.Lock()
"""Held by what runs Python for seconds beside compiles: a cost model works in one place in memory, and threads that all
run Python only wait for each other."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What was compiled for a row."""

    source: CanonicalModule
    strategy: Strategy
    as_compiled: bool = False
    """Whether it is a module of XLA's own, with the kernels that only repeat others."""


def xla_ran(module: CanonicalModule) -> Ran:
    """A module of XLA's own."""
    return Ran(module, read(module), as_compiled=True)


def predict_in_rounds(
    record: Record, captured: Step, profile: Profile, plans: FoundPlans, ran: Mapping[str, Ran]
) -> None:
    """Note in the record, where the link's rate decides, what is predicted of rows by the rate that it had in the
    rounds.

    Args:
        ran: the rows by name.
    """
    in_rounds = _transfers_in_the_rounds(record, captured.source, costs(profile, captured, plans))
    if in_rounds is None:
        return
    again = costs(in_rounds, captured, plans)
    timed = {name: one for name, one in ran.items() if record.row(name).get("status") == OK}
    record.update_all({name: {"predicted_in_rounds": noted(again, one)} for name, one in timed.items()})
    record.note(bounds_in_rounds=lowest_of(captured.source, again, plans))


def _transfers_in_the_rounds(record: Record, source: CanonicalModule, known: Costs) -> Profile | None:
    """The profile with what the step's transfers took in the rounds, by the row in which nothing runs beside them: what
    that took beyond its kernels. None where transfers are too small a part of it, and an error of the kernels would
    count as theirs.

    Links through a network change by the minute: one over sockets was a sixth slower in the rounds than in the profile.
    The row's time is taken as all tables take times, by its ratio to the default: medians of their own of two rows were
    6 % apart where the ratios of the rounds told them alike.
    """
    alone_ms, row = step_ms(record.data, ALONE_XLA), record.row(ALONE_XLA)
    if alone_ms is None or row.get("status") != OK:
        return None
    alone = one_at_a_time(source.graph, read(source))
    kernels_ms = predicted(known, Ran(source, alone))["compute_ms"]
    transfers_ms = alone_ms - kernels_ms
    if transfers_ms < _LEAST_SHARE * alone_ms:
        return None
    took = InStep(((0, 1),), int(1e6 * transfers_ms), int(1e6 * row["spread_ms"]), len(row["times_ms"]))
    return with_took(known, source.graph, alone.buckets, took)


def with_took(known: Costs, graph: Graph, buckets: Sequence[Bucket], took: InStep) -> Profile | None:
    """The profile of these costs with lines by which the buckets take together what they ``took``, whose sizes are not
    looked at: those of every kind so much longer alike. None of no buckets."""
    sizes: dict[CollectiveKind, list[int]] = {}
    for bucket in buckets:
        kind = collective_kind(graph.nodes[bucket.collectives[0]])
        sizes.setdefault(kind, []).append(sum(collective_bytes(graph, node) for node in bucket.collectives))
    known_ns = {kind: int(known.collective(kind)(some).sum()) for kind, some in sizes.items()}
    if not (all_ns := sum(known_ns.values())):
        return None
    profile = known.profile
    kinds = dict(profile.collectives)
    for kind, some in sizes.items():
        total_ns = max(1, round(took.total_ns * known_ns[kind] / all_ns))
        one = replace(took, sizes=tuple(sorted(Counter(some).items())), total_ns=total_ns)
        if kind == ALL_REDUCE:
            profile = replace(profile, together=one)
        else:
            kinds[str(kind)] = replace(kinds.get(str(kind), Collectives()), together=one)
    return replace(profile, collectives=kinds)


def noted(known: Costs, ran: Ran) -> dict[str, Any]:
    """What is predicted of a row, or why nothing can be."""
    try:
        return predicted(known, ran)
    except DiscoError as error:
        return {"error": one_line(error)[:500]}


def predicted(known: Costs, ran: Ran) -> dict[str, Any]:
    """Simulated step time and what it consists of, in ms, with the number of kernels and buckets. Loop bodies and
    branches count as often as they run.

    Raises:
        DiscoError: the strategy does not fit the graph.
    """
    with python_at_once:
        times = step_times(ran.source, ran.strategy, known, as_compiled=ran.as_compiled)
    strategies = [one.strategy for one in times.predicted.values()]
    communication_ns, exposed_ns = times.communication_ns, times.exposed_ns
    return {
        "step_ms": times.makespan_ns / 1e6,
        "compute_ms": (times.makespan_ns - exposed_ns) / 1e6,
        "communication_ms": communication_ns / 1e6,
        "hidden_ms": (communication_ns - exposed_ns) / 1e6,
        "exposed_ms": exposed_ns / 1e6,
        "peak_bytes": times.predicted[ENTRY].timeline.peak_bytes,
        "groups": sum(len(one.groups) for one in strategies),
        "buckets": sum(len(one.buckets) for one in strategies),
    }


def bounds_of(plans: FoundPlans) -> dict[str, float]:
    """The search's own word."""
    found = plans.prediction
    return {
        "full_overlap_ms": found.full_overlap_ns / 1e6,
        "bound_ms": found.bound_ns / 1e6,
        "predicted_plan_ms": found.plan_ns / 1e6,
        "predicted_default_ms": found.default_ns / 1e6,
    }


def other_searches(plans: FoundPlans) -> dict[str, dict[str, float]]:
    """What each other search says of itself."""
    return {
        name: {
            "predicted_ms": one.predicted_ns / 1e6,
            "evaluations": one.evaluations,
            "search_s": one.search_s,
        }
        for name, one in plans.others.items()
    }


def lowest_of(source: CanonicalModule, known: Costs, plans: FoundPlans) -> dict[str, float]:
    """The bound and full overlap of XLA's kernels or the plan's, whichever allow less."""
    kernels = (read(source).groups, plans.searched[0].groups)
    found = lowest_bound(source.graph, kernels, known, known.machine)
    return {"bound_ms": found.makespan_ns / 1e6, "full_overlap_ms": found.full_overlap_ns / 1e6}
