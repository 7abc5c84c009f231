"""What no training step shows cleanly of its devices: bandwidth, flop rate, launch cost, and how long collectives take
over what connects them (DisCo, section 4.2).

A kernel's own time is measured apart from its launch (on GPU command buffers launch it): so the launch cost is
what lies between two kernels of a chain, not what one more link takes.

Rewritten all-reduces are always the communication library's: XLA:GPU's own kernels for small ones
(one-shot, two-shot, up to 4 MiB) are made by passes that run before the hook. So they are switched
off while sweeping, or the line would tell of transfers that no plan contains.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from disco_hlo.backends import BACKENDS, Backend
from disco_hlo.cores import own_cores
from disco_hlo.errors import ProfileError
from disco_hlo.hlo.collectives import CollectiveKind
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring.inputs.arguments import Together
from disco_hlo.plugin.measuring.lockstep import repeated
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest, OwnTrace
from disco_hlo.plugin.xla.own_programs import Chain, compile_chain
from disco_hlo.profiler import trace as tracing
from disco_hlo.profiler.calibrate import DeviceConstants, device_constants
from disco_hlo.profiler.contention import launch_gap_ns
from disco_hlo.profiler.trace import Execution, Trace, is_transfer

REPEATS, _SLICED_REPEATS = 7, 3
"""Runs of which the median counts: in a row, and between the steps of a training."""
_ATTEMPTS = 4
_CHAIN_MODULE = "jit_links"
_CHAINS = (8, 32, 128)
_SMALL: Mapping[str, Sequence[int]] = {
    "copy_bytes": (1 << 24, 1 << 25, 1 << 26), "matmul_widths": (256, 512, 1024),
}  # fmt: skip
_LARGE: Mapping[str, Sequence[int]] = {
    "copy_bytes": (1 << 28, 1 << 29, 1 << 30), "matmul_widths": (2048, 4096, 8192),
}  # fmt: skip
"""A GPU does in 10 us what calling it takes: only work of this size shows its rates."""
_LARGE_BESIDE: Mapping[str, Sequence[int]] = {
    "copy_bytes": (1 << 26, 1 << 27, 1 << 28), "matmul_widths": (2048, 4096),
}  # fmt: skip
"""Where a training has its memory."""
_CALLS = 8
_LINK_ELEMENTS, _LONG_LINK_ELEMENTS = 4, 1 << 24
"""Elements of the chain whose launches are traced. On a GPU a link must take longer (here some 30 us) than the host
needs to launch the next one: after a shorter link the device waits for the host, in a real step it does not."""
Repeat = Callable[[Callable[[], Any], int], list[Any]]
"""Runs something so many times, and returns what that returned."""
AFTER_COMPUTE = "after compute"
"""Label of the CPU's link: collectives were measured as a step has them, each after compute."""
_NOT_A_LINK = ("NCCL_DEBUG", "NCCL_VERSION")
_LONG_CHAIN_BYTES = 1 << 20
_ROUNDS, _STEP_CHAIN = 9, 6
_TOGETHER_BYTES = 1 << 24
"""Larger messages are not kept in memory beside others, but measured one size after another."""
TRACED_CHAIN = 5
_CHAIN, _LONG_CHAIN = 3, 16
"""Collectives in one run, each waiting for the one before: more of them where one is over in microseconds."""
Chains = dict[tuple[CollectiveKind, int], tuple[Runner, Runner]]
"""By kind and size: compute alone, and with a collective after each piece of it."""


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
            constants = _measure(device, backend, repeat, sliced)
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
    repeats = _SLICED_REPEATS if beside else REPEATS
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
    found = device_constants(copy, matmul, chain, **sizes, chain_lengths=_CHAINS)
    return found if gap_ns is None else replace(found, launch_ns=gap_ns)


def _gap_ns(run: Callable[[], int], repeats: int) -> int | None:
    """Time between two kernels (CPU: thunks) of the chain that ``run`` runs; None where no trace tells, and that of a
    link counts."""
    try:
        return launch_gap_ns(tracing.read(tracing.collect(OwnTrace(), run, repeats)), _CHAIN_MODULE)
    except ProfileError as error:
        LOGGER.debug("the launch cost is that of a link of the chain: %s", error)
        return None


# --- collectives ----------------------------------------------------------------------------------


def in_a_row(run: Callable[[], Any], count: int) -> list[Any]:
    """Without a pause."""
    return [run() for _ in range(count)]


def link_label() -> str:
    """What the environment says of the link between GPUs: NCCL's settings, which choose between NVLink,
    shared memory and sockets. Times measured under others are of another link."""
    settings = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("NCCL_") and not name.startswith(_NOT_A_LINK)
    )
    return ",".join(settings)


@dataclass(frozen=True)
class Sweep:
    """Collectives of one kind over the devices of a request, to be timed (DisCo, section 4.2: T = Cx + D). In a
    multi-process job every process does the same with the same arguments; errors are those of
    :func:`~disco_hlo.plugin.xla.own_programs.compile_chain`."""

    request: CompileRequest
    kind: CollectiveKind
    seed: int = 0
    together: Together = contextlib.nullcontext
    """How runners are made where a rank that cannot must not leave the others in a collective."""
    repeat: Repeat = in_a_row

    def compiled(self, size_bytes: int, repeats: int, chain: Chain = Chain.TIGHT) -> LoadedExecutable:
        """What :meth:`chain` runs."""
        element = np.dtype(np.float32)
        count = max(1, -(-size_bytes // element.itemsize))
        return compile_chain(self.request, self.kind, count, element, repeats, chain)

    def chain(
        self, size_bytes: int, repeats: int, chain: Chain = Chain.TIGHT, inputs_of: Runner | None = None
    ) -> Runner:
        """A runner of ``repeats`` collectives, each waiting for the one before. What each device reads or gets,
        whichever is more, is ``size_bytes``, rounded up to whole elements of f32."""
        with self.together():
            executable = self.compiled(size_bytes, repeats, chain)
            return Runner(self.request, executable, self.seed, inputs_of=inputs_of, of_step=False)

    def times(self, size_bytes: int, *, without_call: bool) -> Sequence[int]:
        """Repeated times in ns of a collective for ``size_bytes`` a device.

        Args:
            without_call: leave out what calling an executable costs, by subtracting runs with one collective from
                runs with several. A GPU's link is done with a small one sooner than its host with the call.
        """
        length = _LONG_CHAIN if without_call and size_bytes <= _LONG_CHAIN_BYTES else _CHAIN
        chain = self.chain(size_bytes, length + without_call)
        if not without_call:
            return [max(1, ns // length) for ns in self.repeat(chain.run, 1 + REPEATS)[1:]]
        single = self.chain(size_bytes, 1, inputs_of=chain)
        pairs = self.repeat(lambda: (single.run(), chain.run()), 1 + REPEATS)[1:]
        call_ns = median(alone for alone, _ in pairs)
        return [max(1, round((whole - call_ns) / length)) for _, whole in pairs]

    def times_in_steps(
        self, sizes_bytes: Sequence[int], kept: Chains | None = None
    ) -> dict[int, Sequence[int]]:
        """Repeated times in ns of collectives where they block the rank that issues them (CPU), by size. Chains of
        an earlier call that were ``kept`` are run again; those made now are added.

        What one adds to a step is measured: a chain in which compute on all cores stands before each, less the same
        compute without them; up to a half more than back to back. Whether a waiting rank is woken at once (0.3 ms)
        or at the scheduler's next tick (3 ms) stays alike for seconds: so the sizes take turns.
        """
        small = [size for size in sizes_bytes if size <= _TOGETHER_BYTES]
        batches = [small, *([size] for size in sizes_bytes if size > _TOGETHER_BYTES)]
        found: dict[int, Sequence[int]] = {}
        for batch in batches:
            found |= self._in_turn(batch, {} if kept is None else kept)
        return found

    def _in_turn(self, sizes_bytes: Sequence[int], pairs: Chains) -> dict[int, Sequence[int]]:
        for size in sizes_bytes:
            if (self.kind, size) in pairs:
                continue
            chain = self.chain(size, _STEP_CHAIN, Chain.AFTER_WORK)
            work = self.chain(size, _STEP_CHAIN, Chain.WORK_ALONE, inputs_of=chain)
            pairs[self.kind, size] = work, chain
            for runner in pairs[self.kind, size]:
                self.repeat(runner.run, 1)
        times: dict[int, list[tuple[int, int]]] = {size: [] for size in sizes_bytes}
        turns = itertools.cycle(sizes_bytes)

        def run() -> None:
            size = next(turns)
            work, chain = pairs[self.kind, size]
            times[size].append((work.run(), chain.run()))

        self.repeat(run, _ROUNDS * len(sizes_bytes))
        return {size: _added_ns(taken) for size, taken in times.items()}


def _added_ns(taken: Sequence[tuple[int, int]]) -> Sequence[int]:
    """What each collective of a chain added to the compute's own time."""
    work_ns = median(alone for alone, _ in taken)
    return [max(1, round((whole - work_ns) / _STEP_CHAIN)) for _, whole in taken]


class TransferChains:
    """A chain of collectives for each size, run one size after the other."""

    def __init__(self, sweep: Sweep, sizes_bytes: Sequence[int]) -> None:
        self.sizes_bytes = tuple(sizes_bytes)
        request = sweep.request
        with sweep.together():
            with ThreadPoolExecutor(len(own_cores()), "disco-compile") as pool:
                made = [pool.submit(sweep.compiled, size, TRACED_CHAIN) for size in sizes_bytes]
            self._runners = [Runner(request, one.result(), sweep.seed, of_step=False) for one in made]

    def run(self) -> int:
        """Wall time in ns."""
        return sum(runner.run() for runner in self._runners)


def traced_transfers(trace: Trace, sizes_bytes: Sequence[int], runs: int) -> dict[int, Sequence[int]]:
    """Times in ns of the transfers that a trace of :class:`TransferChains` shows, by size. Raises ProfileError: it
    holds another number of transfers than ``runs`` runs make.

    No host's clock is in them. Of a chain's first, which waits for the later device, nothing is said; of the others
    the time on the device that arrived last counts.
    """
    by_device: dict[int, list[Execution]] = {}
    for item in sorted(trace.executions, key=lambda item: item.start_ns):
        if is_transfer(item):
            by_device.setdefault(item.device, []).append(item)
    expected = runs * len(sizes_bytes) * TRACED_CHAIN
    counts = {device: len(items) for device, items in by_device.items()}
    if not counts or set(counts.values()) != {expected}:
        raise ProfileError(f"expected {expected} transfers on each device in the trace, found {counts}")
    lengths = np.array([[item.end_ns - item.start_ns for item in items] for items in by_device.values()])
    shaped = lengths.min(axis=0).reshape(runs, len(sizes_bytes), TRACED_CHAIN)[:, :, 1:]
    return {size: [max(1, int(ns)) for ns in shaped[:, i].flat] for i, size in enumerate(sizes_bytes)}
