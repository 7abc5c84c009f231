"""The few numbers of a device that no training step shows cleanly: bandwidth, flop rate, launch cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from disco_hlo.plugin.runner import in_clean_thread
from disco_hlo.plugin.session import Session
from disco_hlo.profiler.calibrate import DeviceConstants, device_constants
from disco_hlo.profiler.profile import OpTime

_REPEATS = 7
_LAUNCH, _MOVE, _COMPUTE = "device:launch", "device:2^30 bytes", "device:2^40 flops"
"""Keys under which a store of times keeps the constants: as times of a fixed amount of work."""


def measure_constants(session: Session) -> DeviceConstants:
    """Constants of this process's first device of the step. Takes a second or two, on all ranks at once."""
    device = session.request.local_devices[0]
    return in_clean_thread(lambda: _measure(device))


def as_times(constants: DeviceConstants) -> dict[str, OpTime]:
    """The constants as times of fixed amounts of work, which a profile store can keep."""
    times = {
        _LAUNCH: constants.launch_ns,
        _MOVE: round(2**30 * 1e9 / constants.memory_bandwidth),
        _COMPUTE: round(2**40 * 1e9 / constants.flops_per_s),
    }
    return {key: OpTime(ns, round(ns * constants.noise), _REPEATS) for key, ns in times.items()}


def constants_in(times: Mapping[str, OpTime]) -> DeviceConstants | None:
    """The constants among stored times; None where they are not (all) there."""
    launch, move, compute = (times.get(key) for key in (_LAUNCH, _MOVE, _COMPUTE))
    if launch is None or move is None or compute is None or 0 in (move.median_ns, compute.median_ns):
        return None
    return DeviceConstants(
        launch_ns=launch.median_ns,
        memory_bandwidth=2**30 * 1e9 / move.median_ns,
        flops_per_s=2**40 * 1e9 / compute.median_ns,
        noise=compute.spread_ns / compute.median_ns,
    )


def is_constant(key: str) -> bool:
    """Whether a stored time is one of the device's constants."""
    return key in (_LAUNCH, _MOVE, _COMPUTE)


def _measure(device: Any) -> DeviceConstants:
    import jax
    import jax.numpy as jnp

    def timed(function: Callable[..., Any], *arguments: Any) -> Sequence[int]:
        compiled = jax.jit(function).lower(*arguments).compile()
        jax.block_until_ready(compiled(*arguments))
        times = []
        for _ in range(_REPEATS):
            started = time.perf_counter_ns()
            jax.block_until_ready(compiled(*arguments))
            times.append(time.perf_counter_ns() - started)
        return times

    def copy(size_bytes: int) -> Sequence[int]:
        vector = jax.device_put(jnp.ones(size_bytes // 8, jnp.float32), device)
        return timed(lambda x: x + 1.0, vector)

    def matmul(width: int) -> Sequence[int]:
        matrix = jax.device_put(jnp.ones((width, width), jnp.float32), device)
        return timed(lambda a: a @ a, matrix)

    def chain(length: int) -> Sequence[int]:
        """Links that no compiler merges: each sorts what the one before sorted."""
        vector = jax.device_put(jnp.arange(4, dtype=jnp.float32), device)

        def links(x: Any) -> Any:
            for _ in range(length):
                x = jnp.sort(-x)
            return x

        return timed(links, vector)

    return device_constants(copy, matmul, chain, matmul_widths=(256, 512, 1024), chain_lengths=(8, 32, 128))
