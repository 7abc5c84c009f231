"""The few numbers of a device that no training step shows cleanly: bandwidth, flop rate, launch cost.

A kernel's own time is measured apart from its launch (on GPU command buffers launch it): so the launch cost is
what lies between two kernels of a chain, not what one more link takes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from disco_hlo.backends import BACKENDS, Backend
from disco_hlo.errors import ProfileError
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring.links import Repeat, in_a_row
from disco_hlo.plugin.measuring.lockstep import repeated
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla.own_programs import in_clean_thread
from disco_hlo.profiler import trace as tracing
from disco_hlo.profiler.calibrate import DeviceConstants, device_constants
from disco_hlo.profiler.contention import launch_gap_ns

_REPEATS, _SLICED_REPEATS = 7, 3
"""Runs of which the median counts: in a row, and between the steps of a training."""
_ATTEMPTS = 4
_CHAIN_MODULE = "jit_links"
_CHAINS = (8, 32, 128)
_SMALL: Mapping[str, Sequence[int]] = {
    "copy_bytes": (1 << 24, 1 << 25, 1 << 26),
    "matmul_widths": (256, 512, 1024),
    "chain_lengths": _CHAINS,
}
_LARGE: Mapping[str, Sequence[int]] = {
    "copy_bytes": (1 << 28, 1 << 29, 1 << 30),
    "matmul_widths": (2048, 4096, 8192),
    "chain_lengths": _CHAINS,
}
"""A GPU does in 10 us what calling it takes: only work of this size shows its rates."""
_LARGE_BESIDE: Mapping[str, Sequence[int]] = {
    "copy_bytes": (1 << 26, 1 << 27, 1 << 28),
    "matmul_widths": (2048, 4096),
    "chain_lengths": _CHAINS,
}
"""Where a training has its memory."""
_CALLS = 8
_LINK_ELEMENTS, _LONG_LINK_ELEMENTS = 4, 1 << 24
"""Elements of the chain whose launches are traced. On a GPU a link must take longer (here some 30 us) than the host
needs to launch the next one: after a shorter link the device waits for the host, in a real step it does not."""


def measure_constants(session: Session) -> DeviceConstants | None:
    """Constants of this process's first device of the step. Takes a second or two, on all ranks at once.

    A disturbed measurement is repeated. On ranks other than 0, whose constants nobody reads, one that stays
    disturbed is None. Between the steps of a training ranks measure in the same slices, and again where rank 0's was
    disturbed.

    Raises:
        ProfileError: it stays disturbed.
    """
    device, backend = session.request.local_devices[0], BACKENDS[session.facts.backend]
    sliced = session.between_steps is not None
    repeat: Repeat = functools.partial(repeated, session, "device constants") if sliced else in_a_row
    constants: DeviceConstants | None = None
    for left in reversed(range(_ATTEMPTS)):
        disturbed: ProfileError | None = None
        try:
            constants = in_clean_thread(lambda: _measure(device, backend, repeat, sliced))
        except ProfileError as error:  # other programs on the machine
            LOGGER.debug("device constants: %s", error)
            disturbed = error
        if not (session.tell(disturbed is not None, "disturbed") if sliced else disturbed):
            break
        if disturbed is not None and not left and session.leads:
            raise disturbed
    return constants


def _measure(device: Any, backend: Backend, repeat: Repeat, beside: bool) -> DeviceConstants:
    import jax
    import jax.numpy as jnp

    calls = _CALLS if backend.queues else 1
    repeats = _SLICED_REPEATS if beside else _REPEATS
    sizes = _SMALL if not backend.queues else _LARGE_BESIDE if beside else _LARGE

    def calling(function: Callable[..., Any], *arguments: Any) -> Callable[[], int]:
        compiled = jax.jit(function).lower(*arguments).compile()

        def run() -> int:
            started = time.perf_counter_ns()
            # Queued one behind the other, so that a busy host delays the device once, not with every call.
            for _ in range(calls - 1):
                compiled(*arguments)
            jax.block_until_ready(compiled(*arguments))
            return (time.perf_counter_ns() - started) // calls

        return run

    def timed(function: Callable[..., Any], *arguments: Any) -> Sequence[int]:
        return repeat(calling(function, *arguments), 1 + repeats)[1:]

    def copy(size_bytes: int) -> Sequence[int]:
        vector = jax.device_put(jnp.ones(size_bytes // 8, jnp.float32), device)
        return timed(lambda x: x + 1.0, vector)

    def matmul(width: int) -> Sequence[int]:
        matrix = jax.device_put(jnp.ones((width, width), jnp.float32), device)
        return timed(lambda a: a @ a, matrix)

    def links_of(length: int, elements: int) -> tuple[Callable[..., Any], Any]:
        """Links that no compiler merges: where barriers go early, each sorts what the one before sorted."""
        vector = jax.device_put(jnp.arange(elements, dtype=jnp.float32), device)

        def links(x: Any) -> Any:  # see _CHAIN_MODULE
            for _ in range(length):
                x = jax.lax.optimization_barrier(x * 0.5) if backend.keeps_barriers else jnp.sort(-x)
            return x

        return links, vector

    def chain(length: int) -> Sequence[int]:
        return timed(*links_of(length, _LINK_ELEMENTS))

    run = calling(*links_of(_CHAINS[-1], _LONG_LINK_ELEMENTS if backend.queues else _LINK_ELEMENTS))
    [gap_ns] = repeat(lambda: _gap_ns(run, 1 if backend.queues else repeats), 1)
    found = device_constants(copy, matmul, chain, **sizes)
    return found if gap_ns is None else replace(found, launch_ns=gap_ns)


def _gap_ns(run: Callable[[], int], repeats: int) -> int | None:
    """Time between two kernels (CPU: thunks) of the chain that ``run`` runs; None where no trace tells, and that of a
    link counts."""
    try:
        return launch_gap_ns(tracing.read(tracing.collect(run, repeats)), _CHAIN_MODULE)
    except ProfileError as error:
        LOGGER.debug("the launch cost is that of a link of the chain: %s", error)
        return None
