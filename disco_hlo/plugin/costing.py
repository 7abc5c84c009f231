"""From a profile to what the search computes with: a cost model and a machine model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from disco_hlo.estimator.analytic import DeviceModel
from disco_hlo.estimator.calibration import calibrated, measured_ops
from disco_hlo.estimator.gnn import estimator_for
from disco_hlo.hlo.graph import Graph
from disco_hlo.profiler.costs import MeasuredCosts
from disco_hlo.profiler.profile import Profile
from disco_hlo.simulator.costs import CPU, GPU, LinearPieces, MachineModel, speed_ppm


def costs_of(profile: Profile, graphs: Sequence[Graph]) -> MeasuredCosts:
    """Measured times where the profile has them, else the estimator for its device, calibrated by it."""
    platform = profile.platform
    base = DeviceModel(profile.memory_bandwidth, profile.flops_per_s, hoists=platform.backend == "cpu")
    times = {key: float(time.median_ns) for key, time in profile.ops.items()}
    device = calibrated(base, measured_ops(graphs, times))
    return MeasuredCosts(profile, estimator_for(platform.backend, platform.device_kind, device, times))


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
        transfer_speed_ppm=speed_ppm(slowed.communication),
        # Work beside compute, which goes as slowly as the transfer's.
        transfer_wait_ns=round(slowed.transfer_wait_ns / slowed.communication),
    )


def pieces_of(profile: Profile) -> LinearPieces | None:
    """The all-reduce lines as the bound takes them."""
    fitted = profile.transfers
    if fitted is None:
        return None
    return LinearPieces(
        tuple(piece.from_bytes for piece in fitted.pieces),
        tuple(piece.ns_per_byte for piece in fitted.pieces),
        tuple(piece.base_ns for piece in fitted.pieces),
    )
