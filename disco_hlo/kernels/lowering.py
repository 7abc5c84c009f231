"""A kernel as XLA takes it: the HLO of one device, lowered for CUDA, wherever this runs."""

from __future__ import annotations

import functools
import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mosaic
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, PartitionSpec

from disco_hlo.backends import GPU
from disco_hlo.errors import ModuleError
from disco_hlo.hlo.opcodes import MOSAIC_GPU
from disco_hlo.hlo.proto import DetailedModule, parse, serialize
from disco_hlo.kernels.catalog import AXIS, FUSED
from disco_hlo.kernels.fuse import Shape
from disco_hlo.kernels.normed_update import recipe_update
from disco_hlo.kernels.pattern import SHORT_NAMES
from disco_hlo.kernels.refusals import KernelRefusedError
from disco_hlo.kernels.update_pattern import Recipe

_LONG_NAMES = {short: name for name, short in SHORT_NAMES.items()} | {"f32": "float32"}
_DUMP_NAME = "mosaic_gpu.dump_basename"
_BODY = "xla.sdy.manual_computation_body"
"""What JAX calls the computation of a `jax.shard_map`."""


@functools.lru_cache(maxsize=256)
def lowered(
    kernel: str, tiles: Any, devices: int, shapes: tuple[Shape, ...], recipe: Recipe | None = None, /
) -> bytes:
    """A kernel of the catalog for arrays of these shapes on each device: a serialized HloModuleProto. An update needs a
    recipe.

    The bytes depend on the arguments and on jax alone: a thread of its own has no mesh, precision or flags of the user.

    Raises:
        KernelRefusedError: the kernel does not take these arrays, tiles or devices, or JAX does not.
        ModuleError: JAX lowers it to something else than expected.
    """
    with ThreadPoolExecutor(1, "disco-lower") as pool:
        try:
            return pool.submit(_lowered, kernel, tiles, devices, shapes, recipe).result()
        except (NotImplementedError, ValueError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise KernelRefusedError(f"{kernel}: JAX does not lower it with {tiles}: {why}") from error


def _lowered(
    kernel: str, tiles: Any, devices: int, shapes: tuple[Shape, ...], recipe: Recipe | None
) -> bytes:
    if recipe is not None:
        local = functools.partial(recipe_update, axis_name=AXIS, tiles=tiles, recipe=recipe)
    else:
        local = functools.partial(FUSED[kernel].kernel, axis_name=AXIS, tiles=tiles)
    # Of real devices: jax 0.11 leaves an abstract mesh's out of the kernel's attributes, and XLA asks for them.
    mesh = Mesh(jax.devices()[:devices], (AXIS,), axis_types=(AxisType.Auto,))
    # All arrays are sharded along their first dimension: what matters is what one device has.
    rows = PartitionSpec(AXIS)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    arrays = [jax.ShapeDtypeStruct((devices * d[0], *d[1:]), _LONG_NAMES[name]) for d, name in shapes]
    with jax.enable_x64(False):
        program = (
            jax.jit(mapped).trace(*arrays).lower(lowering_platforms=GPU.platforms[:1]).compiler_ir("hlo")
        )
    module = parse(program.as_serialized_hlo_module_proto(), DetailedModule)
    bodies = [one for one in module.computations if one.name.startswith(_BODY)]
    if len(bodies) != 1:
        raise ModuleError(f"{kernel}: JAX lowers it to {len(bodies)} computations {_BODY}, expected one")
    module.entry_computation_id = bodies[0].id
    for one in bodies[0].instructions:
        if one.custom_call_target == MOSAIC_GPU:
            one.backend_config = _unnumbered(one.backend_config)
    return serialize(module)


def _unnumbered(config: bytes) -> bytes:
    """A kernel's attributes without the number that jax 0.11 gives every kernel of a process, for dumps: a plan is
    enacted by other processes, which lower other kernels before."""
    dialects: Any = mosaic  # it exports them by name alone
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        dialects.dialect.register_dialect(context)
        parsed: Any = mlir.ir.DictAttr(mlir.ir.Attribute.parse(config.decode()))
        attributes = {one.name: one.attr for one in parsed}
        module = mlir.ir.Module.parse(attributes["module"].value_bytes)
        if _DUMP_NAME in module.operation.attributes:
            del module.operation.attributes[_DUMP_NAME]
        written = io.BytesIO()
        module.operation.write_bytecode(written, desired_version=0)
        attributes["module"] = mlir.ir.StringAttr.get(written.getvalue())
        attributes["kernel_hash"] = mlir.ir.StringAttr.get(hashlib.sha256(written.getvalue()).digest())
        return str(mlir.ir.DictAttr.get(attributes)).encode()
