"""Where a module runs: facts about its devices, and the memory they have left."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from disco_hlo.backends import backend_of
from disco_hlo.plugin.xla.jaxlink import CompileRequest


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a module was compiled for, and with what."""

    backend: str
    """Its name."""
    device_kind: str
    device_count: int
    local_device_count: int
    process_index: int
    process_count: int
    runtime_version: str
    """PJRT platform version; on GPU it names the CUDA version."""
    jax_version: str
    jaxlib_version: str


def device_facts(request: CompileRequest) -> DeviceFacts:
    """Facts about the devices of ``request``."""
    import jax

    return DeviceFacts(
        backend=backend_of(request.backend.platform).name,
        device_kind=str(request.devices[0].device_kind),
        device_count=len(request.devices),
        local_device_count=len(request.local_devices),
        process_index=int(request.backend.process_index()),
        process_count=len(request.process_indices),
        runtime_version=str(request.backend.platform_version),
        jax_version=jax.__version__,
        jaxlib_version=version("jaxlib"),
    )


def free_device_bytes(request: CompileRequest) -> int | None:
    """Memory a further allocation may take on each local device; None where they have none of their own."""
    known = [amount for amount in map(_free_device_bytes, request.local_devices) if amount is not None]
    return min(known, default=None)


def may_rise_bytes(request: CompileRequest, share: float) -> int | None:
    """By how much more the memory in use may grow on each local device until it is this part above the most that was
    ever in use; None where devices have none of their own."""
    every = [device.memory_stats() or {} for device in request.local_devices]
    known = [
        int((1 + share) * one["peak_bytes_in_use"]) - int(one["bytes_in_use"])
        for one in every
        if "peak_bytes_in_use" in one and "bytes_in_use" in one
    ]
    return min(known, default=None)


def _free_device_bytes(device: Any) -> int | None:
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
