"""Programs of our own, which are neither the user's nor a rewritten step.

Small ones run on each of this process's devices at once, so that what lies there need not come to the host. Chains of
collectives of one kind and size are there to be timed (DisCo, section 4.2: T = Cx + D).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from disco_hlo.backends import backend_of
from disco_hlo.errors import UnsupportedError
from disco_hlo.hlo.collectives import CollectiveKind, Groups
from disco_hlo.hlo.opcodes import COLLECTIVE
from disco_hlo.hlo.proto import parse
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.xla import executables, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable, read_executable
from disco_hlo.plugin.xla.host_memory import is_copy, is_reached, overwrite
from disco_hlo.plugin.xla.jaxlink import CompileRequest

PerDevice = Sequence[Any]
"""An array for each of the devices, of one shape with at least one dimension."""
_KEPT = 256
"""Programs that are kept, each of a few kernels."""
_SMALL_BYTES = 1 << 13
_SMALL_KEPT = 1 << 12
"""Arrays of so many bytes that are kept on the devices."""
Fact = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and type of an array on one device."""
_KEPT_APART = (
    "all-reduce-simplifier", "all-reduce-folder", "all-reduce-reassociate", "all-reduce-splitter",
    "all-gather-simplifier", "all-gather-dynamic-slice-simplifier", "all-gather-broadcast-reorder",
    "reduce-scatter-combiner", "reduce-scatter-reassociate", "collective-permute-combiner",
)  # fmt: skip
"""Passes that would make fewer of several in a row."""
_AXIS = "device"
_WORK_WIDTH = 384
"""Rows and columns of the matrix whose square is the work between two collectives."""


def on_each_device(
    devices: tuple[Any, ...], function: Callable[..., Any], static: tuple[Any, ...], *arguments: PerDevice
) -> list[list[Any]]:
    """Run ``function(*static, *arrays)``, which returns a tuple of arrays with at least one dimension each, on each
    of these devices of this process with its own arrays, those of the host taken as well, and do not wait for it;
    returns ``[output][device]``. Types of 64 bits are allowed."""
    import jax

    with jaxlink.ours(), jax.enable_x64(True):
        facts = tuple((one[0].shape, np.dtype(one[0].dtype)) for one in arguments)
        executable = _compiled(devices, function, static, facts)
        joined = [_joined(devices, one) for one in arguments]
        return executables.result_arrays(executables.execute(executable, joined))


def compile_for_each_device(
    devices: tuple[Any, ...], function: Callable[..., Any], static: tuple[Any, ...], *arguments: Fact
) -> None:
    """Have :func:`on_each_device` find this program compiled, and what brings its arguments to the devices."""
    facts = tuple((shape, np.dtype(dtype)) for shape, dtype in arguments)
    _compiled(devices, function, static, facts)
    for one in facts:
        compile_for_copies(devices, one)


def run_nothing(devices: tuple[Any, ...]) -> Any:
    """The token of a program that does next to nothing, on each of these devices of this process."""
    executable = _compiled(devices, _blank, ((1,), np.dtype(np.int32)), ())
    return executables.token_of(executables.execute(executable, []))


def compile_for_copies(devices: tuple[Any, ...], fact: Fact) -> None:
    """Have :func:`on_devices` find compiled what it runs for such copies."""
    if is_reached(*fact, devices[0]):
        _compiled(devices, _blank, fact, ())


def on_devices(devices: tuple[Any, ...], copies: PerDevice) -> list[Any]:
    """For each of these devices of this process an array with the values of its copy (``host_memory``); what is no
    copy as it is."""
    import jax
    from jax.sharding import SingleDeviceSharding

    fact, every = (copies[0].shape, np.dtype(copies[0].dtype)), list(zip(devices, copies, strict=True))
    with jaxlink.ours(), jax.enable_x64(True):
        # In numpy's own order.
        if all(
            is_copy(one) and one.flags.c_contiguous and is_reached(*fact, device) for device, one in every
        ):
            arrays: list[Any] = []
            try:
                arrays = on_each_device(devices, _blank, fact)[0]
                overwrite(arrays, copies)
                return arrays
            except Exception as error:  # a training cannot go on without them
                LOGGER.debug("%s", one_line(error))
            for blank in arrays:  # there may be no room for two
                blank.delete()
        there = [SingleDeviceSharding(device, memory_kind=device.default_memory().kind) for device in devices]
        return [
            jax.device_put(one, place, may_alias=False) if is_copy(one) else one
            for place, (_, one) in zip(there, every, strict=True)
        ]


def _blank(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any]:
    import jax.numpy as jnp

    return (jnp.zeros(shape, dtype),)


def _joined(devices: tuple[Any, ...], arrays: PerDevice) -> Any:
    import jax

    if all(isinstance(one, np.ndarray) and one.nbytes <= _SMALL_BYTES for one in arrays):
        values = tuple(one.tobytes() for one in arrays)
        return _small(devices, arrays[0].shape, arrays[0].dtype, values)
    placed = on_devices(devices, arrays)
    first, *rest = placed[0].shape
    shape = (first * len(devices), *rest)
    return jax.make_array_from_single_device_arrays(shape, _sharding(devices), placed)


@functools.lru_cache(maxsize=_SMALL_KEPT)
def _small(
    devices: tuple[Any, ...], shape: tuple[int, ...], dtype: np.dtype[Any], values: tuple[bytes, ...]
) -> Any:
    """Small arrays of the host on the devices. What a program is told is the same for many arrays, and many times: to
    bring it there takes longer than the program."""
    import jax

    arrays = [np.frombuffer(one, dtype).reshape(shape) for one in values]
    return jax.device_put(np.concatenate(arrays), _sharding(devices))


@functools.lru_cache(maxsize=_KEPT)
def _sharding(devices: tuple[Any, ...]) -> Any:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    return NamedSharding(Mesh(np.array(devices, dtype=object), ("device",)), PartitionSpec("device"))


@functools.lru_cache(maxsize=_KEPT)
def _compiled(
    devices: tuple[Any, ...],
    function: Callable[..., Any],
    static: tuple[Any, ...],
    facts: tuple[Fact, ...],
) -> LoadedExecutable:
    import jax

    sharding = _sharding(devices)

    def disco_on_each_device(*arrays: Any) -> Any:
        return function(*static, *arrays)

    with jaxlink.ours(), jax.enable_x64(True):
        mapped = jax.shard_map(
            disco_on_each_device,
            mesh=sharding.mesh,
            in_specs=sharding.spec,
            out_specs=sharding.spec,
            check_vma=False,
        )
        taken = [
            jax.ShapeDtypeStruct((shape[0] * len(devices), *shape[1:]), dtype, sharding=sharding)
            for shape, dtype in facts
        ]
        # Untuned they need no device to compile, and no call of a training is held for it.
        untuned = dict(backend_of(devices[0].platform).untuned)
        lowered = jax.jit(mapped, keep_unused=True).lower(*taken)
        return lowered.compile(compiler_options=untuned).runtime_executable()


# --- chains of collectives ------------------------------------------------------------------------


class Chain(enum.Enum):
    """What stands between the collectives of a chain."""

    TIGHT = "nothing"
    AFTER_WORK = "compute before each"
    """As in a training step: the ranks meet with busy cores, one of them later than the other."""
    WORK_ALONE = "the same compute, without the collectives"


@jaxlink.ours()
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
    if COLLECTIVE[kind.opcode].along or COLLECTIVE[kind.opcode].parted:
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
    if not kind.groups or COLLECTIVE[kind.opcode].names_pairs:
        return (everyone,)
    listed = tuple(sorted(device for row in kind.groups for device in row))
    alone = not COLLECTIVE[kind.opcode].leaves_out or len(kind.groups) == 1
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
        return jax.lax.pbroadcast(value, (_AXIS,), 0)  # by one name alone JAX looks for its letters
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
    (``measuring/microbenchmarks``)."""
    for name, value in backend_of(request.backend.platform).all_reduce_kernels:
        try:
            return lowered.compile(compiler_options={**options, name: value})
        except Exception as error:
            if "No such compile option" not in str(error):
                raise
    return lowered.compile(compiler_options=options)
