"""Chains of collectives of one kind and size, to be timed (DisCo, section 4.2: T = Cx + D)."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from disco_hlo.backends import backend_of
from disco_hlo.errors import UnsupportedError
from disco_hlo.hlo.collectives import CollectiveKind, Groups
from disco_hlo.hlo.proto import parse
from disco_hlo.plugin.xla.executables import LoadedExecutable, read_executable
from disco_hlo.plugin.xla.jaxlink import CompileRequest

_KEPT_APART = (
    "all-reduce-simplifier", "all-reduce-folder", "all-reduce-reassociate", "all-reduce-splitter",
    "all-gather-simplifier", "all-gather-dynamic-slice-simplifier", "all-gather-broadcast-reorder",
    "reduce-scatter-combiner", "reduce-scatter-reassociate", "collective-permute-combiner",
)  # fmt: skip
"""Passes that would make fewer of several in a row."""
_SHARED_OUT = ("all-gather", "all-to-all", "reduce-scatter")
"""Collectives in which each device of a group has a share of the bytes."""
_AXIS = "device"
_WORK_WIDTH = 384
"""Rows and columns of the matrix whose square is the work between two all-reduces."""


class Chain(enum.Enum):
    """What stands between the collectives of a chain."""

    TIGHT = "nothing"
    AFTER_WORK = "compute before each"
    """As in a training step: the ranks meet with busy cores, one of them later than the other."""
    WORK_ALONE = "the same compute, without the collectives"


def compile_chain(
    request: CompileRequest,
    kind: CollectiveKind,
    count: int,
    element: np.dtype[Any],
    repeats: int,
    chain: Chain,
) -> LoadedExecutable:
    """So many collectives over the request's devices, each waiting for the one before. ``count`` elements are what each
    is for (:func:`~disco_hlo.hlo.collectives.collective_bytes`), rounded up where each device has a share.

    On GPU they go through the communication library, as those of a plan do.

    Raises:
        UnsupportedError: XLA did not keep them apart, or this kind's groups are no rows of equal length that hold every
            device.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    rows = _rows(request, kind)
    members = len(rows[0])
    # Devices stay in the request's order, in which a runner hands over what each of them reads.
    mesh = Mesh(np.array(request.devices, dtype=object), (_AXIS,))
    if kind.opcode in _SHARED_OUT:
        count = -(-count // members) * members
    everywhere = PartitionSpec(_AXIS)

    def disco_collective(value: Any) -> Any:
        for _ in range(repeats):
            if chain is not Chain.TIGHT:
                value = value + _some_work(value)
            value = _one(kind, value, rows, alone=chain is Chain.WORK_ALONE)
        return value

    mapped = jax.shard_map(
        disco_collective, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    argument = jax.ShapeDtypeStruct(
        (count * len(request.devices),), element, sharding=NamedSharding(mesh, everywhere)
    )
    options: dict[str, str | bool] = {"xla_disable_hlo_passes": ",".join(_KEPT_APART)}
    compiled = _compile_without_kernels(jax.jit(mapped).lower(argument), options, request)
    executable: LoadedExecutable = compiled.runtime_executable()
    found = sum(
        one.opcode.removesuffix("-start") == kind.opcode
        for computation in parse(read_executable(executable)).computations
        for one in computation.instructions
    )
    expected = 0 if chain is Chain.WORK_ALONE else repeats
    if found != expected:
        raise UnsupportedError(f"expected XLA to keep {expected} of {kind} apart, it made {found}")
    return executable


def _rows(request: CompileRequest, kind: CollectiveKind) -> Groups:
    """The places, among the request's devices, of those that take part together."""
    everyone = tuple(range(len(request.devices)))
    if not kind.groups or kind.opcode == "collective-permute":
        return (everyone,)
    listed = tuple(sorted(device for row in kind.groups for device in row))
    alone = kind.opcode != "collective-broadcast" or len(kind.groups) == 1
    if len({len(row) for row in kind.groups}) != 1 or listed != everyone or not alone:
        raise UnsupportedError(
            f"{kind}: expected groups of one size that hold each of {len(everyone)} devices once"
        )
    return kind.groups


def _one(kind: CollectiveKind, value: Any, rows: Groups, *, alone: bool) -> Any:
    """The value, or as many elements, behind one collective; ``alone``: behind what is computed around one."""
    import jax

    members = len(rows[0])
    share = value.size // members
    groups = [list(row) for row in rows] if len(rows) > 1 else None
    if kind.opcode == "all-gather":
        own = value[-share:]
        if alone:
            return jax.numpy.tile(own, members)
        return jax.lax.all_gather(own, _AXIS, axis_index_groups=groups, tiled=True)
    if kind.opcode == "reduce-scatter":
        if alone:
            return jax.numpy.tile(value[:share], members)
        own = jax.lax.psum_scatter(value, _AXIS, axis_index_groups=groups, tiled=True)
        return jax.numpy.tile(own, members)
    if alone:
        return value
    if kind.opcode == "all-to-all":
        return jax.lax.all_to_all(value, _AXIS, 0, 0, axis_index_groups=groups, tiled=True)
    if kind.opcode == "collective-permute":
        pairs = kind.groups or [(i, (i + 1) % members) for i in range(members)]
        return jax.lax.ppermute(value, _AXIS, pairs)
    if kind.opcode == "collective-broadcast":
        return jax.lax.pbroadcast(value, _AXIS, 0)
    return jax.lax.psum(value, _AXIS, axis_index_groups=groups)


def _some_work(value: Any) -> Any:
    """A scalar of ``value``'s type that takes a millisecond of all cores, and that no compiler sees through."""
    import jax

    first = value[0].astype(jax.numpy.float32)
    places = jax.lax.iota(jax.numpy.float32, _WORK_WIDTH**2).reshape(_WORK_WIDTH, _WORK_WIDTH)
    matrix = jax.numpy.cos(places + first)
    return (matrix @ matrix).max().astype(value.dtype)


def _compile_without_kernels(lowered: Any, options: dict[str, str | bool], request: CompileRequest) -> Any:
    """Compile with XLA:GPU's own all-reduce kernels off, by the option that this version has for it: no plan has any
    (``links``)."""
    for name, value in backend_of(request.backend.platform).all_reduce_kernels:
        try:
            return lowered.compile(compiler_options={**options, name: value})
        except Exception as error:
            if "No such compile option" not in str(error):
                raise
    return lowered.compile(compiler_options=options)
