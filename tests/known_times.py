"""Made-up times of this machine, so that a search in a test does not measure what the test is not about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import jax

from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind
from disco_hlo.plugin.measuring.known_times import STORE_NAME
from disco_hlo.plugin.measuring.microbenchmarks import AFTER_COMPUTE
from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.collectives import SweepPoint
from disco_hlo.profiler.profile import DeviceFacts, Link, Platform, host_cpu_kind
from disco_hlo.profiler.store import ProfileStore

PLATFORM = Platform(host_cpu_kind(), "cpu", "", jax.__version__, version("jaxlib"))
CONSTANTS = DeviceConstants(launch_ns=400, memory_bandwidth=2e10, flops_per_s=1e11, noise=0.01)
SWEEP = tuple(SweepPoint(1 << octave, 300_000 + (1 << octave), 5_000, 7) for octave in range(10, 18))


def know_device(directory: Path, *, launch_ns: int = CONSTANTS.launch_ns) -> None:
    """The constants of this machine's CPU are known to ``directory``, a plan directory. Where a launch takes long,
    whatever can be fused is."""
    directory.mkdir(parents=True, exist_ok=True)
    with ProfileStore(directory / STORE_NAME) as store:
        store.change(
            PLATFORM, DeviceFacts, "", lambda _: DeviceFacts(replace(CONSTANTS, launch_ns=launch_ns))
        )


def know_all(
    directory: Path,
    *,
    devices: int,
    processes: int,
    launch_ns: int = CONSTANTS.launch_ns,
    kinds: Sequence[CollectiveKind] = (ALL_REDUCE,),
) -> None:
    """Beside the constants, collectives of kilobytes over a job's devices: only a step's ops are left to profile."""
    know_device(directory, launch_ns=launch_ns)
    link = Link(devices, processes, AFTER_COMPUTE if processes > 1 else "")
    with ProfileStore(directory / STORE_NAME) as store:
        for kind in kinds:
            store.add_sweep(PLATFORM, link, SWEEP, kind)
