"""What the ops of an early module cost, for the choice of what is kept (``disco_hlo.structure.choose``)."""

from __future__ import annotations

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.collectives import collective_bytes, collective_kind
from disco_hlo.optimize.costs import Costs
from disco_hlo.optimize.regions import calls_by_caller, regions_callees_first
from disco_hlo.structure.choose import Prices


def prices_of(costs: Costs, module: bytes) -> Prices:
    """Times of all ops by themselves, as far as ``costs`` knows them measured, else estimated; of collectives by the
    line of their kind, of loops the ops inside as often as they turn.

    Raises:
        ModuleError: the module cannot be read.
        ProfileError: nothing is known of the time of a collective.
    """
    source = canonicalize(module)
    called = calls_by_caller(source)
    ns: dict[str, dict[str, float]] = {}
    taken_ns: dict[str, float] = {}
    for name, region in regions_callees_first(source):
        graph = region.graph
        times = [float(one) for one in costs.op_ns(graph)]
        for node in graph.collectives:
            kind = collective_kind(graph.nodes[node])
            times[node] = float(costs.collective(kind)(collective_bytes(graph, node)))
        for callee, call in called[name]:
            times[call.node] += (call.trips or 1) * taken_ns[callee]
        taken_ns[name] = sum(times)
        sources = next((one.sources for one in source.regions if one.name == name), (source,))
        for alike in sources:
            inside = alike.index.computation(alike.computation).name
            ns[inside] = {node.name: times[node.id] for node in alike.graph.nodes}
    return Prices(ns, 1e9 / costs.profile.memory_bandwidth)
