"""Programs of our own, which are neither the user's nor a rewritten step.

They are compiled in a thread without what the user's code has set on its own. Small ones run on each of this process's
devices at once, so that what lies there need not come to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from disco_hlo.plugin.xla import executables, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable

Result = TypeVar("Result")
PerDevice = Sequence[Any]
"""An array for each of the devices, of one shape with at least one dimension."""
_KEPT = 256
"""Programs that are kept, each of a few kernels."""
Fact = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and type of an array on one device."""


def in_clean_thread(work: Callable[[], Result]) -> Result:
    """Run ``work`` without the mesh, guards and precision that the user's code may have set on its thread, and without
    the guard that it may have set on all."""
    import jax

    def marked() -> Result:
        with jaxlink.ours(), jax.transfer_guard("allow"):
            return work()

    with ThreadPoolExecutor(1, "disco-compile") as clean:
        return clean.submit(marked).result()


def on_each_device(
    devices: tuple[Any, ...], function: Callable[..., Any], static: tuple[Any, ...], *arguments: PerDevice
) -> list[list[Any]]:
    """Run ``function(*static, *arrays)`` on each device with its own arrays, and do not wait for it. Types of 64 bits
    are allowed. Arrays of the host are taken as well.

    Args:
        devices: of this process.
        function: returns a tuple of arrays, each with at least one dimension.
        static: hashable.

    Returns:
        ``[output][device]``.
    """
    import jax

    with jax.enable_x64(True), jax.transfer_guard("allow"):
        placed = [
            [
                jax.device_put(one, device) if isinstance(one, np.ndarray) else one
                for one, device in zip(argument, devices, strict=True)
            ]
            for argument in arguments
        ]
        facts = tuple((one[0].shape, np.dtype(one[0].dtype)) for one in placed)
        executable = _compiled(devices, function, static, facts)
        joined = [_joined(devices, one) for one in placed]
        return executables.result_arrays(executables.execute(executable, joined))


def compile_for_each_device(
    devices: tuple[Any, ...], function: Callable[..., Any], static: tuple[Any, ...], *arguments: Fact
) -> None:
    """Have :func:`on_each_device` find this program compiled."""
    _compiled(devices, function, static, tuple((shape, np.dtype(dtype)) for shape, dtype in arguments))


def _joined(devices: tuple[Any, ...], arrays: PerDevice) -> Any:
    import jax

    first, *rest = arrays[0].shape
    shape = (first * len(devices), *rest)
    return jax.make_array_from_single_device_arrays(shape, _sharding(devices), list(arrays))


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

    def compile_it() -> LoadedExecutable:
        with jax.enable_x64(True):
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
            return jax.jit(mapped, keep_unused=True).lower(*taken).compile().runtime_executable()

    return in_clean_thread(compile_it)
