"""The few numbers of a device that no training step shows cleanly: bandwidth, flop rate, launch cost;
and how a store keeps them, and what transfers and kernels cost each other.

A kernel's own time is measured apart from its launch (on GPU command buffers launch it): so the launch cost is
what lies between two kernels of a chain, not what one more link takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from disco_hlo.errors import ProfileError
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla.clean_thread import in_clean_thread
from disco_hlo.profiler import trace as tracing
from disco_hlo.profiler.calibrate import DeviceConstants, device_constants
from disco_hlo.profiler.contention import launch_gap_ns
from disco_hlo.profiler.profile import Contention, Link, OpTime

_REPEATS = 7
_ATTEMPTS = 4
_LAUNCH, _MOVE, _COMPUTE = "device:launch", "device:2^30 bytes", "device:2^40 flops"
"""Keys under which a store of times keeps the constants: as times of a fixed amount of work."""
_GAP = "device:launch in steps"
_NO_LINK = Link(1, 1)
_LINK = "link:"
_CHAIN_MODULE = "jit_links"
_CHAINS = (8, 32, 128)
_CPU_SIZES: Mapping[str, Sequence[int]] = {
    "copy_bytes": (1 << 24, 1 << 25, 1 << 26),
    "matmul_widths": (256, 512, 1024),
    "chain_lengths": _CHAINS,
}
_GPU_SIZES: Mapping[str, Sequence[int]] = {
    "copy_bytes": (1 << 28, 1 << 29, 1 << 30),
    "matmul_widths": (2048, 4096, 8192),
    "chain_lengths": _CHAINS,
}
"""A GPU does in 10 us what calling it takes: only work of this size shows its rates."""
_GPU_CALLS = 8
_LINK_ELEMENTS, _GPU_LINK_ELEMENTS = 4, 1 << 24
"""Elements of the chain whose launches are traced. On a GPU a link must take longer (here some 30 us) than the host
needs to launch the next one: after a shorter link the device waits for the host, in a real step it does not."""


def measure_constants(session: Session) -> DeviceConstants | None:
    """Constants of this process's first device of the step. Takes a second or two, on all ranks at once.

    A disturbed measurement is repeated. On ranks other than 0, whose constants nobody reads, one that stays
    disturbed is None.

    Raises:
        ProfileError: it stays disturbed.
    """
    device = session.request.local_devices[0]
    for left in reversed(range(_ATTEMPTS)):
        try:
            constants: DeviceConstants = in_clean_thread(lambda: _measure(device))
            return constants
        except ProfileError as error:  # other programs on the machine
            LOGGER.debug("device constants: %s", error)
            if not left and session.leads:
                raise
    return None


def as_times(constants: DeviceConstants) -> dict[str, OpTime]:
    """The constants as times of fixed amounts of work, which a profile store can keep."""
    times = {
        _LAUNCH: constants.launch_ns,
        _MOVE: round(2**30 * 1e9 / constants.memory_bandwidth),
        _COMPUTE: round(2**40 * 1e9 / constants.flops_per_s),
    }
    return {key: OpTime(ns, round(ns * constants.noise), _REPEATS) for key, ns in times.items()}


def gap_as_times(link: Link, fingerprint: str, gap_ns: int) -> dict[str, OpTime]:
    """What lies between two kernels of a training step, as a time: of this step on this link, and of the device."""
    return dict.fromkeys((_gap_key(link, fingerprint), _GAP), OpTime(gap_ns, 0, 1))


def _gap_key(link: Link, fingerprint: str) -> str:
    return f"{_GAP} {_step_on(link, fingerprint)}"


def constants_in(
    times: Mapping[str, OpTime], link: Link = _NO_LINK, fingerprint: str = ""
) -> DeviceConstants | None:
    """The constants among stored times; None where they are not (all) there.

    The launch cost is that of the step with this fingerprint on ``link``, where it was timed, else of other steps, else
    the chain's: on H200s its links lay 0.0 to 2.1 us apart where a step's kernels lay 0.2 to 0.9.
    """
    launch, move, compute = (times.get(key) for key in (_LAUNCH, _MOVE, _COMPUTE))
    if launch is None or move is None or compute is None or 0 in (move.median_ns, compute.median_ns):
        return None
    return DeviceConstants(
        launch_ns=times.get(_gap_key(link, fingerprint), times.get(_GAP, launch)).median_ns,
        memory_bandwidth=2**30 * 1e9 / move.median_ns,
        flops_per_s=2**40 * 1e9 / compute.median_ns,
        noise=compute.spread_ns / compute.median_ns,
    )


def is_constant(key: str) -> bool:
    """Whether a stored time is one of the device's constants, or tells of one of its links."""
    return key in (_LAUNCH, _MOVE, _COMPUTE) or key.startswith((_GAP, _LINK))


def contention_as_times(contention: Contention, link: Link, fingerprint: str) -> dict[str, OpTime]:
    """The slow-downs of one step's kernels on ``link`` as times of what takes a second alone, and a transfer's wait."""
    compute, communication, wait, hold, *kinds = _contention_keys(link, fingerprint)
    by_kind = dict(zip(kinds, (contention.products, contention.others), strict=True))
    return {
        hold: _of_a_second(contention.hold),
        compute: OpTime(round(1e9 * contention.compute), 0, 1),
        communication: OpTime(round(1e9 * contention.communication), 0, 1),
        wait: OpTime(contention.transfer_wait_ns, 0, 1),
        **{key: OpTime(round(1e9 * slowed), 0, 1) for key, slowed in by_kind.items() if slowed is not None},
    }


def contention_in(times: Mapping[str, OpTime], link: Link, fingerprint: str) -> Contention | None:
    """The slow-downs of one step's kernels on ``link`` among stored times; None where they are not there."""
    compute, communication, wait, hold, *kinds = (
        times.get(key) for key in _contention_keys(link, fingerprint)
    )
    if compute is None or communication is None or wait is None or hold is None:
        return None
    by_kind = [_slow_down(one) for one in kinds if one is not None]
    products, others = by_kind if len(by_kind) == len(kinds) else (None, None)
    return Contention(
        _slow_down(compute), _slow_down(communication), wait.median_ns, products, others, _share(hold)
    )


def holds_as_times(holds: Mapping[str, float], link: Link) -> dict[str, OpTime]:
    """What ops hold of transfers on ``link``, by cost key, as times of what takes a second."""
    return {f"{_holds_on(link)}{key}": _of_a_second(share) for key, share in holds.items()}


def holds_in(times: Mapping[str, OpTime], link: Link) -> dict[str, float]:
    """The shares that ops hold of transfers on ``link``, by cost key, among stored times."""
    name = _holds_on(link)
    return {key.removeprefix(name): _share(time) for key, time in times.items() if key.startswith(name)}


def _holds_on(link: Link) -> str:
    return f"{_LINK}{link.label} {link.device_count}/{link.process_count}: held by a second of "


def _of_a_second(share: float) -> OpTime:
    return OpTime(round(1e9 * share), 0, 1)


def _share(of_a_second: OpTime) -> float:
    return min(of_a_second.median_ns / 1e9, 1.0)


def _slow_down(of_a_second: OpTime) -> float:
    return max(1.0, of_a_second.median_ns / 1e9)


def _contention_keys(link: Link, fingerprint: str) -> tuple[str, ...]:
    """Kernels differ in what they share with transfers: convolutions were slowed by a third where a
    transformer's matmuls were not. (Older stores have ``a second of compute``, of kernels shorter than what was beside
    them alone, and ``a second of transfers``, which holds their wait too.)"""
    name = _step_on(link, fingerprint)
    return (
        f"{name}: a second of compute beside transfers",
        f"{name}: a second of transfers begun",
        f"{name}: a transfer's wait",
        f"{name}: held by a second of a product",
        f"{name}: a second of products beside transfers",
        f"{name}: a second of other kernels beside transfers",
    )


def waits_key(link: Link, fingerprint: str, together: bool = False, varied: bool = False) -> str:
    """Under which a store keeps what all all-reduces of one step take in it: one by one, ``together``, or in buckets
    of ``varied`` sizes (GPU; older stores have XLA's buckets there, under ``together``)."""
    how = " in buckets of varied sizes" if varied else " together" if together else ""
    return f"{_step_on(link, fingerprint)}: its all-reduces{how}"


def _step_on(link: Link, fingerprint: str) -> str:
    return f"{_LINK}{link.label} {link.device_count}/{link.process_count} {fingerprint[:16]}"


def _measure(device: Any) -> DeviceConstants:
    import jax
    import jax.numpy as jnp

    on_cpu = device.platform == "cpu"
    calls = 1 if on_cpu else _GPU_CALLS

    def timed(function: Callable[..., Any], *arguments: Any) -> Sequence[int]:
        compiled = jax.jit(function).lower(*arguments).compile()
        jax.block_until_ready(compiled(*arguments))
        times = []
        for _ in range(_REPEATS):
            started = time.perf_counter_ns()
            # Queued one behind the other, so that a busy host delays the device once, not with every call.
            for _ in range(calls - 1):
                compiled(*arguments)
            jax.block_until_ready(compiled(*arguments))
            times.append((time.perf_counter_ns() - started) // calls)
        return times

    def copy(size_bytes: int) -> Sequence[int]:
        vector = jax.device_put(jnp.ones(size_bytes // 8, jnp.float32), device)
        return timed(lambda x: x + 1.0, vector)

    def matmul(width: int) -> Sequence[int]:
        matrix = jax.device_put(jnp.ones((width, width), jnp.float32), device)
        return timed(lambda a: a @ a, matrix)

    def chain(length: int, elements: int = _LINK_ELEMENTS) -> Sequence[int]:
        """Links that no compiler merges: on CPU, which takes barriers out early, each sorts what the one
        before sorted."""
        vector = jax.device_put(jnp.arange(elements, dtype=jnp.float32), device)

        def links(x: Any) -> Any:  # see _CHAIN_MODULE
            for _ in range(length):
                x = jnp.sort(-x) if on_cpu else jax.lax.optimization_barrier(x * 0.5)
            return x

        return timed(links, vector)

    found = device_constants(copy, matmul, chain, **(_CPU_SIZES if on_cpu else _GPU_SIZES))

    def traced() -> None:
        chain(_CHAINS[-1], _LINK_ELEMENTS if on_cpu else _GPU_LINK_ELEMENTS)

    return replace(found, launch_ns=_launch_ns(traced, found.launch_ns))


def _launch_ns(run: Callable[[], None], otherwise_ns: int) -> int:
    """Time between two kernels (CPU: thunks) of the chain that ``run`` runs; of a link where no trace tells."""
    try:
        return launch_gap_ns(tracing.read(tracing.collect(run, 1)), _CHAIN_MODULE)
    except ProfileError as error:
        LOGGER.debug("the launch cost is that of a link of the chain: %s", error)
        return otherwise_ns
