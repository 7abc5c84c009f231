"""Runs kernels that talk to other GPUs on CPU devices: jax's interpreter of Mosaic GPU, and what it lacks for them.

jax (0.11.2 to 0.12.0) interprets one GPU's kernel: memory, barriers, copies, wgmma, with a detector of races. In
`jax/_src/pallas/mosaic_gpu/interpret/jaxpr_interpret.py`, `JaxprInterpreter.interpret` has no case for `get_global`,
`semaphore_signal`, `semaphore_wait`; in `gpu_callbacks.py`, `_validate_transforms` refuses a `PeerMemRef`; and
`cluster_finished` forgets the clocks of all devices. This module adds

* semaphores, which hand the clock of who signals to who waits, so that races between devices are found too;
* references to the memory of another device;
* the barrier between devices that XLA puts before such a kernel, and none behind it: a write or read of another
  device's that is not known to be over when a kernel ends is an error.

The blocks of one device run one after another: a kernel may wait only for blocks of other devices with its own number
or lower. The cache's and the hardware's own rules of visibility are not modelled.
"""

import contextlib
import dataclasses
import functools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import callback, dispatch
from jax._src import core as jax_core
from jax._src.pallas import primitives
from jax._src.pallas.mosaic_gpu import core as mosaic_gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode
from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu

SECONDS_TO_WAIT = 60.0
THREADS = 64


def environment(devices: int) -> dict[str, str]:
    """What a process needs, before jax has a backend, in which kernels are interpreted on so many devices."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return {**os.environ, "NPROC": str(THREADS), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


@dataclasses.dataclass
class Semaphore:
    """A counter in one device's memory, with the joined clocks of all who have signalled it."""

    count: int = 0
    clock: Any = None


class Peers:
    """What several devices share while one kernel runs on all of them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failures: list[BaseException] = []
        self.forget()

    def forget(self) -> None:
        """Begin with semaphores at zero, as every kernel does."""
        self.semaphores: dict[tuple[int, int], Semaphore] = defaultdict(Semaphore)
        self.last_clocks: dict[int, Any] = {}
        self.running: dict[int, int] = defaultdict(int)

    def signal(self, device: int, key: int, count: int, clock: Any) -> None:
        with self.changed:
            semaphore = self.semaphores[device, key]
            semaphore.count += count
            semaphore.clock = joined(semaphore.clock, clock)
            self.changed.notify_all()

    def wait(self, device: int, key: int, count: int, *, take: bool) -> Any:
        """Wait until the semaphore has reached `count`; returns the clocks of all who have signalled it."""
        shared = gpu_callbacks._get_shared_memory()
        semaphore = self.semaphores[device, key]
        with self.changed:
            for _ in range(int(SECONDS_TO_WAIT / 0.1)):
                if semaphore.count >= count:
                    if take:
                        semaphore.count -= count
                    return semaphore.clock.copy() if semaphore.clock is not None else None
                shared.check_failed()
                self.changed.wait(timeout=0.1)
        raise TimeoutError(
            f"device {device} waits for semaphore {key} to reach {count}; it is at {semaphore.count}"
        )


PEERS = Peers()


def joined(one: Any, other: Any) -> Any:
    """The clock of somebody who has seen what both have seen; either may be None."""
    if one is None or other is None:
        return one if other is None else other.copy()
    one.update(other)
    return one


# --- semaphores ---


class Interpreter(jaxpr_interpret.JaxprInterpreter):
    """jax's interpreter, one equation at a time, and the three primitives that it has no case for."""

    def interpret(self, jaxpr: Any, token: Any, *args: Any) -> tuple[Any, list[Any]]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jax_core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            results = [v for v in equation.outvars if not isinstance(v, jax_core.DropVar)]
            if handle := ADDED.get(equation.primitive):
                token, found = handle(self, token, equation, [read(v) for v in equation.invars])
            else:
                operands = list(
                    dict.fromkeys(v for v in equation.invars if not isinstance(v, jax_core.Literal))
                )
                alone = jaxpr.replace(
                    constvars=[],
                    invars=operands,
                    outvars=results,
                    eqns=[equation],
                    debug_info=jaxpr.debug_info.with_unknown_names(),
                )
                token, found = super().interpret(alone, token, *map(read, operands))
            values.update(zip(results, found, strict=True))
        return token, [read(v) for v in jaxpr.outvars]


# Which numbers an equation's semaphores have; the equations are kept, so that none takes the place of another.
FIRST_KEYS: list[Any] = []
KEYS_OF_ONE = 1 << 16


def get_global(self: Interpreter, token: Any, equation: Any, _: list[Any]) -> tuple[Any, list[Any]]:
    if not any(equation is other for other in FIRST_KEYS):
        FIRST_KEYS.append(equation)
    first = KEYS_OF_ONE * next(i for i, other in enumerate(FIRST_KEYS) if other is equation)
    shape = equation.params["what"].shape
    return token, [np.arange(first, first + int(np.prod(shape)), dtype=np.int32).reshape(shape)]


def pick(keys: Any, transforms: tuple[Any, ...]) -> Any:
    """The number of the one semaphore that a reference names."""
    for transform in transforms:
        keys = jax.numpy.asarray(keys)[tuple(transform.indices)]
    return keys


def semaphore_signal(
    self: Interpreter, token: Any, equation: Any, values: list[Any]
) -> tuple[Any, list[Any]]:
    keys, transforms, count, device, _ = jax.tree.unflatten(equation.params["args_tree"], values)
    token = callback.io_callback(
        _signal,
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        thread=self.thread,
        key=pick(keys, transforms),
        count=count,
        device=self.device_info.device_id if device is None else device,
    )
    return token, []


def semaphore_wait(self: Interpreter, token: Any, equation: Any, values: list[Any]) -> tuple[Any, list[Any]]:
    keys, transforms, count, take = jax.tree.unflatten(equation.params["args_tree"], values)
    token = callback.io_callback(
        _wait,
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        thread=self.thread,
        key=pick(keys, transforms),
        count=count,
        take=take,
    )
    return token, []


ADDED: dict[Any, Callable[..., tuple[Any, list[Any]]]] = {
    primitives.get_global_p: get_global,
    primitives.semaphore_signal_p: semaphore_signal,
    primitives.semaphore_wait_p: semaphore_wait,
}


@gpu_callbacks.fail_on_exception
def _signal(*, token: Any, thread: Any, key: Any, count: Any, device: Any) -> Any:
    shared = gpu_callbacks._get_shared_memory()
    clock = shared.incr_clock(thread) if shared.detect_races else None
    PEERS.signal(number(device), int(key), int(count), clock)
    return token


@gpu_callbacks.fail_on_exception
def _wait(*, token: Any, thread: Any, key: Any, count: Any, take: Any) -> Any:
    shared = gpu_callbacks._get_shared_memory()
    clock = PEERS.wait(int(thread.device_id), int(key), int(count), take=bool(take))
    if clock is not None:
        with shared.lock:
            shared.clocks[thread].update(clock)
    return token


def number(device: Any) -> int:
    """A device's number from how a kernel names it: a number, or a position on the only axis of its mesh."""
    if isinstance(device, Mapping):
        (device,) = device.values()
    return int(device)


# --- memory of other devices ---


def of_peers(function: Callable[..., Any], *prefixes: str) -> Callable[..., Any]:
    """Let the references of a callback be to other devices: the same buffer there, without the transform."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        names = function.__wrapped__.__code__.co_varnames  # type: ignore[attr-defined]
        given = dict(zip(names, args, strict=False)) | kwargs
        for prefix in prefixes:
            key, transforms = f"{prefix}allocation_key_as_array", f"{prefix}transforms"
            given[key], given[transforms] = there(given[key], given[transforms])
        return function(**given)

    return wrapper


def there(key: Any, transforms: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    peers = [t for t in transforms if isinstance(t, mosaic_gpu_core.PeerMemRef)]
    if peers:
        (peer,) = peers
        host = memory.HostAllocationKey.from_array(np.asarray(key))
        key = dataclasses.replace(host, device_id=number(peer.device_id)).as_np_array
    return key, tuple(t for t in transforms if not isinstance(t, mosaic_gpu_core.PeerMemRef))


# --- beginning and end of a kernel ---


def before_the_kernel(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wait for all devices where a kernel begins: the first of the two times that a device comes here."""
    begun: set[tuple[int, int]] = set()

    @gpu_callbacks.fail_on_exception
    def meet(token: Any, device: Any) -> None:
        shared = gpu_callbacks._get_shared_memory()
        here = (id(shared), int(device.device_id))
        if here in begun:
            begun.discard(here)
            return
        begun.add(here)
        if shared.barrier.wait() == 0:
            PEERS.forget()
        shared.barrier.wait()

    def wrapper(token: Any, device: Any) -> Any:
        meet(token, device)
        return original(token, device)

    return wrapper


def after_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """Check that no barrier is left when all devices are done, not while another is still at work."""

    @gpu_callbacks.fail_on_exception
    def meet(token: Any) -> None:
        gpu_callbacks._get_shared_memory().barrier.wait()

    def wrapper(token: Any) -> Any:
        meet(token)
        return original(token)

    return wrapper


@gpu_callbacks.fail_on_exception
def thread_finished(*, token: Any, mesh_location: Any, thread: Any) -> Any:
    """Remember what a thread has seen; forget the device's clocks when the last thread of a block has ended."""
    shared = gpu_callbacks._get_shared_memory()
    shared.kernel_thread_finished(thread)
    device = int(thread.device_id)
    threads = [t for t in shared.all_concurrent_threads if t.device_id == device]
    with shared.lock:
        PEERS.last_clocks[device] = joined(PEERS.last_clocks.get(device), shared.clocks[thread].copy())
        PEERS.running[device] += 1
        if PEERS.running[device] % (shared.num_blocks_per_cluster * shared.num_pallas_threads_per_block):
            return token
        for one in threads:
            shared.clocks[one] = shared.VectorClock(shared.vector_clock_size)
            shared.pending_smem_to_gmem_read_clocks[one].clear()
            shared.pending_smem_to_gmem_write_clocks[one].clear()
    return token


def output_read(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where the kernel's results are read: nobody else may still be at work in this device's memory."""

    def wrapper(token: Any, mesh_location: Any, thread: Any, key: Any, *rest: Any, **more: Any) -> Any:
        if thread is None and gpu_callbacks._get_shared_memory().detect_races:
            nobody_is_at_work_beside(token, memory.HostAllocationKey.from_array(np.asarray(key)))
        return original(token, mesh_location, thread, key, *rest, **more)

    return wrapper


@gpu_callbacks.fail_on_exception
def nobody_is_at_work_beside(token: Any, buffer: Any) -> None:
    device = int(buffer.device_id)
    races, seen = gpu_callbacks.get_races(), PEERS.last_clocks[device].generic_clock
    with races.lock:
        accesses = [
            (what, key, *access)
            for what, table in (("writes", races.writes), ("reads", races.reads))
            for key, found in table.items()
            if key.device_id == device
            for access in found
        ]
    for what, key, thread, clock, _, frame in accesses:
        if thread.device_id != device and not clock.ordered(seen):
            races.races_found = True
            raise RuntimeError(
                f"RACE DETECTED\n  {thread} {what} {key}, {frame}, and device {device} may have ended"
            )


def failed(original: Callable[..., None]) -> Callable[..., None]:
    """Keep what went wrong first: XLA may raise what another device had to say about it."""

    def wrapper(shared: Any, error: BaseException, *rest: Any, **more: Any) -> None:
        PEERS.failures.append(error)
        original(shared, error, *rest, **more)

    return wrapper


class JaxOnOneMultiprocessor:
    """jax as JAX's own kernel sees it: its blocks wait for all of the neighbour's, so here it may have only one."""

    core_count = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def devices(self) -> list[Any]:
        return [self]


@contextlib.contextmanager
def interpreted(*, detect_races: bool = True) -> Iterator[None]:
    """Have every Mosaic GPU kernel that is traced and run inside interpreted on CPU devices.

    Raises, from the run: RuntimeError with "RACE DETECTED" where two accesses are not ordered and one writes.
    """
    global PEERS
    PEERS = Peers()
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    replaced = {
        (jaxpr_interpret, "JaxprInterpreter"): Interpreter,
        (gpu_callbacks, "_get"): output_read(of_peers(gpu_callbacks._get, "")),
        (gpu_callbacks, "_swap"): of_peers(gpu_callbacks._swap, ""),
        (gpu_callbacks, "copy_smem_to_gmem"): of_peers(gpu_callbacks.copy_smem_to_gmem, "dst_"),
        (gpu_callbacks, "copy_gmem_to_smem"): of_peers(gpu_callbacks.copy_gmem_to_smem, "src_"),
        (gpu_callbacks, "_update_clocks_for_device_barrier"): before_the_kernel(
            gpu_callbacks._update_clocks_for_device_barrier
        ),
        (gpu_callbacks, "_assert_no_barriers_allocated"): after_all(
            gpu_callbacks._assert_no_barriers_allocated
        ),
        (gpu_callbacks, "kernel_thread_finished"): thread_finished,
        (memory.GPUSharedMemory, "set_failed"): failed(memory.GPUSharedMemory.set_failed),
        (gpu_callbacks, "cluster_finished"): lambda *, token: token,
        (collective_matmul_mgpu, "jax"): JaxOnOneMultiprocessor(),
    }
    originals = {place: getattr(*place) for place in replaced}
    try:
        for (module, name), new in replaced.items():
            setattr(module, name, new)
        # Few copies share an entry of the clocks: one that does passes for done when a later one is waited for.
        params = InterpretGPUParams(detect_races=detect_races, num_tma_threads_per_device=512)
        with force_gpu_interpret_mode(params):
            yield
    except RuntimeError as error:
        if not PEERS.failures:
            raise
        raise RuntimeError(str(PEERS.failures[0])) from error
    finally:
        for (module, name), old in originals.items():
            setattr(module, name, old)
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        # The order of callbacks is kept by tokens: those of a run that failed would fail the next one, too.
        dispatch.runtime_tokens.clear()
