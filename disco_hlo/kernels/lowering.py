"""A kernel as XLA takes it: the HLO of one device, lowered for CUDA, wherever this runs."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from disco_hlo.errors import ModuleError
from disco_hlo.hlo.proto import DetailedModule, parse, serialize
from disco_hlo.kernels.catalog import AXIS, FUSED
from disco_hlo.kernels.fuse import Shape
from disco_hlo.kernels.pattern import SHORT_NAMES
from disco_hlo.kernels.tiles import MatmulTiles

_LONG_NAMES = {short: name for name, short in SHORT_NAMES.items()}
_BODY = "xla.sdy.manual_computation_body"
"""What JAX calls the computation of a `jax.shard_map`."""


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
