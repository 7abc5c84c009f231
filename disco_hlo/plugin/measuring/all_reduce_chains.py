"""Chains of all-reduces of one size, to be timed (DisCo, section 4.2: T = Cx + D)."""

from __future__ import annotations

import enum
import re
from typing import Any

import numpy as np

from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest

_KERNELS_OFF = (
    ("xla_gpu_experimental_use_collective_kernels", ""),
    ("xla_gpu_unsupported_use_all_reduce_one_shot_kernel", False),
)
"""What XLA:GPU's own all-reduce kernels are switched off by, in one version or another: no plan has any (``links``)."""
_WORK_WIDTH = 384
"""Rows and columns of the matrix whose square is the work between two all-reduces."""


class Chain(enum.Enum):
    """What stands between the all-reduces of a chain."""

    TIGHT = "nothing"
    AFTER_WORK = "compute before each"
    """As in a training step: the ranks meet with busy cores, one of them later than the other."""
    WORK_ALONE = "the same compute, without the all-reduces"


def compile_all_reduces(
    request: CompileRequest, count: int, element: np.dtype[Any], repeats: int, chain: Chain
) -> LoadedExecutable:
    """So many all-reduces of ``count`` elements a device, over the request's devices, each waiting for the one before.

    On GPU they go through the communication library, as those of a plan do.

    Raises:
        UnsupportedError: XLA did not keep the all-reduces apart.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(request.devices, dtype=object), ("device",))
    everywhere = PartitionSpec("device")

    def disco_all_reduce(value: Any) -> Any:
        for _ in range(repeats):
            if chain is not Chain.TIGHT:
                value = value + _some_work(value)
            if chain is not Chain.WORK_ALONE:
                value = jax.lax.psum(value, "device")
        return value

    mapped = jax.shard_map(
        disco_all_reduce, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    argument = jax.ShapeDtypeStruct(
        (count * len(request.devices),), element, sharding=NamedSharding(mesh, everywhere)
    )
    passes = "all-reduce-simplifier,all-reduce-folder,all-reduce-reassociate,all-reduce-splitter"
    options: dict[str, str | bool] = {"xla_disable_hlo_passes": passes}
    compiled = _compile_without_kernels(jax.jit(mapped).lower(argument), options, request)
    executable: LoadedExecutable = compiled.runtime_executable()
    found = len(re.findall(r"\ball-reduce(?:-start)?\(", executable.hlo_modules()[0].to_string()))
    expected = 0 if chain is Chain.WORK_ALONE else repeats
    if found != expected:
        raise UnsupportedError(f"expected XLA to keep {expected} all-reduces apart, it made {found}")
    return executable


def _some_work(value: Any) -> Any:
    """A scalar of ``value``'s type that takes a millisecond of all cores, and that no compiler sees through."""
    import jax

    first = value[0].astype(jax.numpy.float32)
    places = jax.lax.iota(jax.numpy.float32, _WORK_WIDTH**2).reshape(_WORK_WIDTH, _WORK_WIDTH)
    matrix = jax.numpy.cos(places + first)
    return (matrix @ matrix).max().astype(value.dtype)


def _compile_without_kernels(lowered: Any, options: dict[str, str | bool], request: CompileRequest) -> Any:
    """Compile with XLA:GPU's own all-reduce kernels off, by the option that this version has for it."""
    switches = () if request.backend.platform == "cpu" else _KERNELS_OFF
    for name, value in switches:
        try:
            return lowered.compile(compiler_options={**options, name: value})
        except Exception as error:
            if "No such compile option" not in str(error):
                raise
    return lowered.compile(compiler_options=options)
