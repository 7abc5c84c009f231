"""What a fused kernel refuses, in one line each: XLA's own kernels take over there."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from disco_hlo.errors import UnsupportedError

OLDEST_JAX = (0, 11, 2)
HOPPER = "9.0"
MOST_DEVICES = 8
_ANY = "a fused kernel"


class KernelRefusedError(UnsupportedError):
    """A fused kernel does not take these arrays, tiles or devices."""


def require(met: bool, kernel: str, what: str) -> None:
    """Refuse, unless `met`.

    Raises:
        KernelRefusedError: with the kernel's name and `what`: what was expected and what came.
    """
    if not met:
        raise KernelRefusedError(f"{kernel}: {what}; XLA's separate kernels can do it")


def devices_along(axis_name: str, kernel: str) -> int:
    """How many devices work together along `axis_name`. Devices that are no GPUs pass: XLA refuses those itself.

    Raises:
        KernelRefusedError: an older jax, several processes, another GPU than Hopper, a mesh of several axes, or not
            two to eight devices.
    """
    _require_process(kernel)
    capability = getattr(jax.devices()[0], "compute_capability", HOPPER)
    require(
        capability == HOPPER, kernel, f"needs a GPU of compute capability {HOPPER}, this one has {capability}"
    )
    count: int = lax.axis_size(axis_name)
    require(
        2 <= count <= MOST_DEVICES,
        kernel,
        f"works with 2 to {MOST_DEVICES} devices, axis {axis_name!r} has {count}",
    )
    size = jax.sharding.get_abstract_mesh().size
    require(
        size == count,
        kernel,
        f"axis {axis_name!r} of {count} devices must be the only one of a mesh of {size}",
    )
    return count


def multiple(kernel: str, name: str, size: int, of: int, what: str) -> None:
    """Refuse a size that is not a multiple of what a tile or the devices divide it by.

    Raises:
        KernelRefusedError: it is not.
    """
    require(size > 0 and size % of == 0, kernel, f"{name} = {size} must be a multiple of {of} ({what})")


def one_dtype(kernel: str, arrays: dict[str, jax.Array], allowed: tuple[jnp.dtype, ...]) -> None:
    """Refuse arrays of different dtypes, or of another than the allowed.

    Raises:
        KernelRefusedError: they are.
    """
    names = " or ".join(dtype.name for dtype in allowed)
    came = ", ".join(f"{name} {array.dtype.name}" for name, array in arrays.items())
    (first, *_) = arrays.values()
    met = first.dtype in allowed and all(array.dtype == first.dtype for array in arrays.values())
    require(met, kernel, f"all arrays must be {names}, got {came}")


def refuse_machine(devices: Sequence[Any]) -> None:
    """Refuse where no fused kernel runs.

    Args:
        devices: those of the step, in the order of its partitions.

    Raises:
        KernelRefusedError: an older jax, no Hopper GPUs, several processes, not all devices of the process or in
            another order, no peer access or none wanted, or multicast on.
    """
    _require_process(_ANY)
    capability = getattr(devices[0], "compute_capability", "")
    found = f"compute capability {capability}" if capability else devices[0].platform
    require(capability == HOPPER, _ANY, f"needs GPUs of compute capability {HOPPER}, these are {found}")
    ids = [device.id for device in devices]
    require(
        ids == list(range(jax.device_count())),
        _ANY,
        f"runs on all {jax.device_count()} devices in order, the step on {ids}",
    )
    require(
        os.environ.get("NCCL_NVLS_ENABLE") == "0",
        _ANY,
        "was never run with NVLink multicast; NCCL_NVLS_ENABLE=0 turns that off",
    )
    require(
        os.environ.get("NCCL_P2P_DISABLE", "0") in ("", "0"),
        _ANY,
        "would reach the other GPUs' memory, which NCCL_P2P_DISABLE forbids",
    )
    apart = _without_peer_access([int(device.local_hardware_id) for device in devices])
    require(not apart, _ANY, f"needs peer access between all GPUs, there is none between {apart}")


def _require_process(kernel: str) -> None:
    require(
        jax.__version_info__ >= OLDEST_JAX,
        kernel,
        f"needs jax {'.'.join(map(str, OLDEST_JAX))} or newer, this is {jax.__version__}",
    )
    processes = jax.process_count()
    require(processes == 1, kernel, f"all GPUs must belong to one process, these belong to {processes}")


def _without_peer_access(ordinals: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of GPUs of which one does not reach the other's memory, as CUDA's driver says."""
    driver = ctypes.CDLL("libcuda.so.1")
    apart = []
    for one in ordinals:
        for other in ordinals:
            reaches = ctypes.c_int(0)
            if one != other and (
                driver.cuDeviceCanAccessPeer(ctypes.byref(reaches), one, other) or not reaches.value
            ):
                apart.append((one, other))
    return apart
