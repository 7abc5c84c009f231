"""Copies of arrays in the host's memory, for what must leave the devices or survive there (``docs/calls.md``).

On a GPU large ones lie in memory that the devices themselves read and write, all at once: what Python copies by itself
took ten times as long, and a training stood still meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.backends import backend_of
from disco_hlo.plugin.logs import LOGGER, one_line

_PINNED = "pinned_host"
_LARGE_BYTES = 1 << 20
_PIECE_BYTES = 64 << 20
_WRITTEN_BYTES = 1 << 20
_GETS_MORE_S = 0.1
"""To fill a piece of memory that is there already takes a few ms."""
_LOOK_S = 0.2
_PLAIN = frozenset("biufc")
"""Kinds of numbers of whole bytes."""


class Buffers:
    """Memory of the host for copies that numpy makes, which is got beside a training and used again: what is got while
    a call is held takes three times as long to copy to, as the system hands out each page when it is first written."""

    def __init__(self) -> None:
        """None is there."""
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def get_ready(self, sizes_bytes: Iterable[int], over: Callable[[], bool]) -> None:
        """Get one of each of these sizes, in small pieces, until it is ``over``."""
        for size in sizes_bytes:
            buffer = np.empty(size, np.uint8)
            for first in range(0, size, _WRITTEN_BYTES):
                if over():
                    return
                buffer[first : first + _WRITTEN_BYTES].fill(0)
            self._free.setdefault(size, []).append(buffer)

    def copy(self, values: NDArray[Any]) -> NDArray[Any]:
        """A copy in one of them, or in new memory."""
        free = self._free.get(values.nbytes)
        buffer = free.pop() if free else np.empty(values.nbytes, np.uint8)
        copy: NDArray[Any] = buffer.view(values.dtype).reshape(values.shape)
        np.copyto(copy, values)
        return copy

    def take_back(self, copies: Iterable[Any]) -> None:
        """Those of :meth:`copy` that nobody reads any more, nor a device; others are left alone."""
        for copy in copies:
            buffer = copy.base if isinstance(copy, np.ndarray) else None
            if isinstance(buffer, np.ndarray) and buffer.dtype == np.uint8:
                self._free.setdefault(copy.nbytes, []).append(buffer)

    def clear(self) -> None:
        """Give the memory back."""
        self._free.clear()


def copied(arrays: Sequence[Any], buffers: Buffers | None = None) -> list[Any]:
    """A copy of each, numpy's or in memory that devices reach (:func:`on_device`, :func:`as_numpy`).

    Args:
        arrays: each of a single device; copies that are there already are given back as they are.
        buffers: for numpy's, of arrays of devices that have the host's memory.
    """
    import jax

    # JAX keeps what it copies for Python with the array that was asked: not with the training's own.
    own = [one if is_copy(one) else _alone(one) for one in arrays]
    found: list[Any] = [one if is_copy(one) else None for one in own]
    try:
        with jax.enable_x64(True), jax.transfer_guard("allow"):
            # The largest first: what is free lies in pieces, and to get more takes a second a gigabyte.
            for place, one in sorted(enumerate(own), key=lambda each: -each[1].nbytes):
                if found[place] is None and _is_reached(one):
                    there = one.sharding.with_memory_kind(_PINNED)
                    found[place] = jax.device_put(one, there, may_alias=False)
            jax.block_until_ready([one for one in found if one is not None])
    except Exception as error:
        LOGGER.debug("no memory of the host that devices write by themselves: %s", one_line(error))
        found = [one if is_copy(one) else None for one in own]
    rest = [one for one, copy in zip(own, found, strict=True) if copy is None]
    for one in rest:
        one.copy_to_host_async()  # all of them at once
    by_python = iter([_by_python(one, Buffers() if buffers is None else buffers) for one in rest])
    return [next(by_python) if copy is None else copy for copy in found]


def reserve(
    devices: Sequence[Any], bytes_each: int, share: float, over: Callable[[], bool]
) -> tuple[list[float], int]:
    """Have so much memory ready that these devices reach, until it is ``over``; for how many seconds each time nothing
    else could reach the devices, and how many bytes each device has.

    To get it for the first time takes a second a gigabyte, in which the driver starts no kernel, and XLA gets twice as
    much each time. So it pauses until that has taken no more than a ``share`` of the time.
    """
    import jax
    from jax.sharding import SingleDeviceSharding

    there = [SingleDeviceSharding(device, memory_kind=_PINNED) for device in devices]
    piece, got, stood_s = np.zeros(_PIECE_BYTES, np.uint8), list[Any](), list[float]()
    try:
        with jax.transfer_guard("allow"):
            for one in there * -(-bytes_each // _PIECE_BYTES):
                began_s = time.monotonic()
                got.append(jax.block_until_ready(jax.device_put(piece, one)))
                ended_s = time.monotonic()
                if (took_s := ended_s - began_s) > _GETS_MORE_S:
                    stood_s.append(took_s)
                    while time.monotonic() < ended_s + took_s * (1 / share - 1) and not over():
                        time.sleep(_LOOK_S)
                if over():
                    break
    except Exception as error:
        LOGGER.debug("%d pieces of memory that devices reach, and no more: %s", len(got), one_line(error))
    return stood_s, min(bytes_each, len(got) // len(there) * _PIECE_BYTES)


def is_copy(array: Any) -> bool:
    """Whether it lies in the host's memory, as of :func:`copied`."""
    return isinstance(array, np.ndarray) or array.sharding.memory_kind == _PINNED


def on_device(copy: Any, device: Any) -> Any:
    """An array of a device with the values of a copy."""
    import jax
    from jax.sharding import SingleDeviceSharding

    there = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    with jax.enable_x64(True), jax.transfer_guard("allow"):
        return jax.device_put(copy, there, may_alias=False)


def as_numpy(array: Any) -> Any:
    """A copy as a numpy array; what is no copy as it is."""
    return np.asarray(array) if is_copy(array) else array


def _alone(array: Any) -> Any:
    import jax

    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])


def _has_own_memory(array: Any) -> bool:
    [device] = array.devices()
    return backend_of(device.platform).queues


def _is_reached(array: Any) -> bool:
    dtype = np.dtype(array.dtype)
    plain = dtype.kind in _PLAIN or dtype.name == "bfloat16"
    return plain and array.nbytes >= _LARGE_BYTES and _has_own_memory(array)


def _by_python(array: Any, buffers: Buffers) -> NDArray[Any]:
    values = np.asarray(array)
    # It was the array itself, which a call takes over.
    return values if _has_own_memory(array) else buffers.copy(values)
