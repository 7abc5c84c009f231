"""From a profile to what the search computes with: a cost model and a machine model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from disco_hlo.estimator.analytic import DeviceModel
from disco_hlo.estimator.calibration import calibrated, measured_ops
from disco_hlo.estimator.gnn import estimator_for
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.profiler.corrections import Seen, corrections
from disco_hlo.profiler.costs import MeasuredCosts
from disco_hlo.profiler.kernel_keys import kernel_keys
from disco_hlo.profiler.profile import Profile
from disco_hlo.simulator.build import groups_ns
from disco_hlo.simulator.costs import CPU, GPU, MachineModel, speed_ppm


def costs_of(profile: Profile, graph: Graph, plans: Sequence[Strategy] = ()) -> MeasuredCosts:
    """Measured times where the profile has them, else the estimator for its device, calibrated by it.

    Args:
        plans: of ``graph``, XLA's own first, then those that searches found. What their measured kernels take
            corrects the estimates of others.
    """
    platform = profile.platform
    base = DeviceModel(profile.memory_bandwidth, profile.flops_per_s, hoists=platform.backend == "cpu")
    times = {key: float(time.median_ns) for key, time in profile.ops.items()}
    device = calibrated(base, measured_ops([graph], times))
    estimator = estimator_for(platform.backend, platform.device_kind, device, times)
    return MeasuredCosts(
        profile, estimator, corrections(graph, seen_kernels(profile, graph, estimator, plans))
    )


def seen_kernels(
    profile: Profile, graph: Graph, estimator: CostModel, plans: Sequence[Strategy]
) -> list[Seen]:
    """The measured kernels of ``plans``, each once; those of all but the first plan count as chosen by a search.

    A kernel of one op is left out: nobody estimates it as a kernel.

    Raises:
        IllegalStrategyError: a plan does not fit the graph.
    """
    if not plans:
        return []
    op_ns = estimator.op_ns(graph)
    found: dict[str, Seen] = {}
    for number, plan in enumerate(plans):
        units = unit_graph(graph, plan)
        estimates, keys = groups_ns(graph, units, estimator, op_ns), kernel_keys(graph, units.kernels)
        for group, key, estimated_ns in zip(plan.groups, keys, estimates.tolist(), strict=True):
            ops = tuple(x for x in group.nodes + group.duplicates if graph.nodes[x].opcode != "bitcast")
            if key in profile.ops and key not in found and len(ops) > 1:
                found[key] = Seen(ops, estimated_ns, profile.ops[key].median_ns, chosen=number > 0)
    return list(found.values())


def machine_of(profile: Profile) -> MachineModel:
    """How this device runs kernels and collectives beside each other.

    No all-reduce counts as a kernel on the compute stream, however small: XLA:GPU makes such kernels before
    the hook, where they are ops like others, and what a plan transfers goes through NCCL.
    """
    machine = GPU if profile.platform.backend == "gpu" else CPU
    machine = replace(
        machine,
        launch_ns=profile.launch_ns,
        memory_bytes_per_us=int(profile.memory_bandwidth / 1e6),
    )
    slowed = profile.contention
    if slowed is None:
        return machine
    return replace(
        machine,
        compute_speed_ppm=speed_ppm(slowed.compute),
        product_speed_ppm=0 if slowed.products is None else speed_ppm(slowed.products),
        other_speed_ppm=0 if slowed.others is None else speed_ppm(slowed.others),
        transfer_speed_ppm=speed_ppm(slowed.communication),
        # Work beside compute, which goes as slowly as the transfer's.
        transfer_wait_ns=round(slowed.transfer_wait_ns / slowed.communication),
    )
