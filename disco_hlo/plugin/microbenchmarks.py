"""The few numbers of a device that no training step shows cleanly: bandwidth, flop rate, launch cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from disco_hlo.plugin.runner import in_clean_thread
from disco_hlo.plugin.session import Session
from disco_hlo.profiler.calibrate import DeviceConstants, device_constants

_REPEATS = 7


def measure_constants(session: Session) -> DeviceConstants:
    """Constants of this process's first device of the step. Takes a second or two; all ranks do it at once."""
    device = session.request.local_devices[0]
    return in_clean_thread(lambda: _measure(device))


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
