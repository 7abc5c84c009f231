"""What was measured besides the times of ops, as a store keeps it: of a device, of a link, of a step on a link."""

from __future__ import annotations

from msgspec import Struct

from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.fields import Nanoseconds, Share
from disco_hlo.profiler.in_step import InStep
from disco_hlo.profiler.profile import Contention, Link, LoopTime


class DeviceFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """Of a kind of device. None where it was not measured, here and below."""

    constants: DeviceConstants | None = None
    launch_ns: Nanoseconds | None = None
    """What lies between two kernels in the training step that was timed last: on H200s a chain's links lay 0.0 to 2.1
    us apart where a step's kernels lay 0.2 to 0.9."""


class LinkFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """Of all steps whose collectives go over one link."""

    holds: dict[str, Share] = {}
    """As :attr:`~disco_hlo.profiler.profile.Profile.holds`."""


class StepFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """Of one step on one link."""

    launch_ns: Nanoseconds | None = None
    """What lies between two of its kernels."""
    contention: Contention | None = None
    """Kernels differ in what they share with collectives: convolutions were slowed by a third where a transformer's
    matmuls were not."""
    apart: dict[str, InStep] | None = None
    """All of its collectives of each kind in one run, one by one; none of a kind: the trace did not tell, nor will
    another one."""
    together: dict[str, InStep] | None = None
    """The same in one bucket (CPU), or in buckets of varied sizes (GPU)."""
    loops: dict[str, LoopTime] | None = None
    """As :attr:`~disco_hlo.profiler.profile.Profile.loops`."""


def place_of(link: Link, fingerprint: str = "") -> str:
    """Under which a store keeps the facts of a link, or of a step on it."""
    return f"{link.label} {link.device_count}/{link.process_count} {fingerprint[:16]}"
