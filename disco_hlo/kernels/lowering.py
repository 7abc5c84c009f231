"""A kernel as XLA takes it: the HLO of one device, lowered for CUDA, wherever this runs."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from disco_hlo.errors import ModuleError
from disco_hlo.hlo.proto import DetailedModule, parse, serialize
from disco_hlo.kernels.catalog import AXIS, FUSED
from disco_hlo.kernels.fuse import Shape
from disco_hlo.kernels.pattern import SHORT_NAMES
from disco_hlo.kernels.refusals import HOPPER, OLDEST_JAX, require
from disco_hlo.kernels.tiles import MatmulTiles

_LONG_NAMES = {short: name for name, short in SHORT_NAMES.items()}
_BODY = "xla.sdy.manual_computation_body"
"""What JAX calls the computation of a `jax.shard_map`."""
_ANY = "a fused kernel"


@functools.lru_cache(maxsize=256)
def lowered(kernel: str, tiles: MatmulTiles, devices: int, shapes: tuple[Shape, ...]) -> bytes:
    """A kernel of the catalog for arrays of these shapes on each device: a serialized HloModuleProto.

    The bytes depend on the arguments and on jax alone: a thread of its own has no mesh, precision or flags of the user.

    Raises:
        KernelRefusedError: the kernel does not take these arrays, tiles or devices.
        ModuleError: JAX lowers it to something else than expected.
    """
    with ThreadPoolExecutor(1, "disco-lower") as pool:
        return pool.submit(_lowered, kernel, tiles, devices, shapes).result()


def _lowered(kernel: str, tiles: MatmulTiles, devices: int, shapes: tuple[Shape, ...]) -> bytes:
    local = functools.partial(FUSED[kernel].kernel, axis_name=AXIS, tiles=tiles)
    mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
    # All arrays are sharded along their first dimension: what matters is what one device has.
    rows = PartitionSpec(AXIS)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    arrays = [jax.ShapeDtypeStruct((devices * d[0], *d[1:]), _LONG_NAMES[name]) for d, name in shapes]
    with jax.enable_x64(False):
        program = jax.jit(mapped).trace(*arrays).lower(lowering_platforms=("cuda",)).compiler_ir("hlo")
    module = parse(program.as_serialized_hlo_module_proto(), DetailedModule)
    bodies = [one for one in module.computations if one.name.startswith(_BODY)]
    if len(bodies) != 1:
        raise ModuleError(f"{kernel}: JAX lowers it to {len(bodies)} computations {_BODY}, expected one")
    module.entry_computation_id = bodies[0].id
    return serialize(module)


def refuse_machine(devices: Sequence[Any]) -> None:
    """Refuse where no fused kernel runs.

    Args:
        devices: those of the step, in the order of its partitions.

    Raises:
        KernelRefusedError: an older jax, no Hopper GPUs, several processes, not all devices of the process or in
            another order, no peer access, or multicast on.
    """
    require(
        jax.__version_info__ >= OLDEST_JAX,
        _ANY,
        f"needs jax {'.'.join(map(str, OLDEST_JAX))} or newer, this is {jax.__version__}",
    )
    capability = getattr(devices[0], "compute_capability", "")
    found = f"compute capability {capability}" if capability else devices[0].platform
    require(capability == HOPPER, _ANY, f"needs GPUs of compute capability {HOPPER}, these are {found}")
    processes = jax.process_count()
    require(processes == 1, _ANY, f"all GPUs must belong to one process, these belong to {processes}")
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
    apart = _without_peer_access([int(device.local_hardware_id) for device in devices])
    require(not apart, _ANY, f"needs peer access between all GPUs, there is none between {apart}")


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
