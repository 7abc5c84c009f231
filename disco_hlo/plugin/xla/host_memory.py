"""Copies of arrays in the host's memory, for what must leave the devices or survive there (``docs/calls.md``).

They are numpy's, in memory of our own that is got beside a training and used again: what is got while a call is held
takes three times as long to copy to, as the system hands out each page when it is first written. A GPU's driver copies
there by itself, all GPUs at once: what Python copies takes ten times as long.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.backends import backend_of
from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.xla.gpu_copies import Copy, GpuCopies, copies_of

_PIECE_BYTES = 32 << 20
"""Made known to GPUs at once."""
_WRITTEN_BYTES = 1 << 20
_BEGINS_AT_BYTES = 256
_LARGE_BYTES = 1 << 20
"""An array of fewer is copied by JAX."""
_PLAIN = frozenset("biufc")
"""Kinds of numbers of whole bytes."""
_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK, for which Python has no name."""
_Place = tuple[int, int]
"""Where bytes begin and end."""


class HostMemory:
    """Memory of the host for copies, in one piece. A copy's place is free again once no array reads it any more."""

    def __init__(self) -> None:
        """None is there."""
        self._lock = threading.Lock()
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._free: list[_Place] = []
        """In order, apart from each other."""
        self._left = deque[tuple[int, _Place]]()
        """By copies that nobody reads any more, of this memory or of one before it."""
        self._age = 0
        self._known: list[tuple[GpuCopies, int]] = []
        """Addresses of pieces that GPUs reach."""
        self._stuck: list[NDArray[np.uint8]] = []
        """Memory that a driver has not let go: it would take whatever is there next for the same."""

    def get_ready(self, size_bytes: int, copier: GpuCopies | None, over: Callable[[], bool]) -> int:
        """Get so much in the place of what was there, in small pieces, until it is ``over``; how much is ready.

        Args:
            copier: of one of the GPUs that shall reach it; None where there is none.
        """
        self.clear()
        with self._lock:
            own = mmap.mmap(-1, max(1, size_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # A fork of the training would get all of it copied, or leave GPUs the pages that are its own from then on.
            with contextlib.suppress(OSError):  # a kernel before Linux 4.14
                own.madvise(_WIPE_ON_FORK)
            self._bytes = np.frombuffer(own, np.uint8)[:size_bytes]
        for first in range(0, size_bytes, _PIECE_BYTES):
            end = min(first + _PIECE_BYTES, size_bytes)
            for written in range(first, end, _WRITTEN_BYTES):
                if over():
                    return first
                self._bytes[written : min(written + _WRITTEN_BYTES, end)].fill(0)
            if copier is not None:
                try:
                    copier.register(self._address(first), end - first)
                    self._known.append((copier, self._address(first)))
                except UnsupportedError as error:
                    LOGGER.debug("copies go through memory of the driver's own: %s", one_line(error))
                    copier = None
            with self._lock:
                self._give_back((first, end))
        return size_bytes

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array in the smallest free place that does, or in new memory."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._lock:
            while self._left:
                age, place = self._left.popleft()
                if age == self._age:
                    self._give_back(place)
            takes = -(-size // _BEGINS_AT_BYTES) * _BEGINS_AT_BYTES
            places = [one for one in self._free if one[1] - one[0] >= takes]
            if not size or not places:
                return np.empty(shape, dtype)
            first, end = min(places, key=lambda one: one[1] - one[0])
            number = self._free.index((first, end))
            self._free[number : number + 1] = [(first + takes, end)] if first + takes < end else []
            # Whatever is cut from it keeps this array, and not only the memory behind it.
            own = np.frombuffer(memoryview(self._bytes)[first : first + size], np.uint8)
            weakref.finalize(own, self._left.append, (self._age, (first, first + takes))).atexit = False
        return own.view(dtype).reshape(shape)

    def pieces(self, values: NDArray[Any]) -> list[_Place]:
        """In which addresses of an array's bytes are copied at once: no GPU copies across the end of a piece."""
        found, first = [], values.ctypes.data
        end, own = first + values.nbytes, self._address(0) if self._bytes.size else 0
        while first < end:
            inside = own <= first < own + self._bytes.size
            last = min(end, own + ((first - own) // _PIECE_BYTES + 1) * _PIECE_BYTES) if inside else end
            found.append((first, last))
            first = last
        return found

    def clear(self) -> None:
        """Give the memory back; the last of it when no copy is read any more."""
        with self._lock:
            for copier, address in self._known:
                try:
                    copier.unregister(address)
                except UnsupportedError as error:
                    LOGGER.debug("memory of the host is kept: %s", one_line(error))
                    self._stuck.append(self._bytes)
            self._known, self._free, self._bytes = [], [], np.empty(0, np.uint8)
            self._age += 1

    def _address(self, offset: int) -> int:
        return int(self._bytes.ctypes.data) + offset

    def _give_back(self, place: _Place) -> None:
        merged: list[_Place] = []
        for first, end in sorted([*self._free, place]):
            if merged and merged[-1][1] == first:
                merged[-1] = merged[-1][0], end
            else:
                merged.append((first, end))
        self._free = merged


MEMORY = HostMemory()
"""Of this process."""


def copied(arrays: Sequence[Any]) -> list[Any]:
    """A copy of each, a numpy array; what is one already is given back as it is.

    Args:
        arrays: each of a single device.
    """
    import jax

    # JAX keeps what it copies for Python with the array that was asked: not with the training's own.
    own = [
        one if is_copy(one) else jax.make_array_from_single_device_arrays(one.shape, one.sharding, [one])
        for one in arrays
    ]
    found: list[Any] = [one if is_copy(one) else None for one in own]
    asked = {place: copier for place, one in enumerate(own) if (copier := _copier_of(one)) is not None}
    jax.block_until_ready([own[place] for place in asked])
    try:
        copies = {place: MEMORY.empty(own[place].shape, np.dtype(own[place].dtype)) for place in asked}
        _copy([(copier, copies[place], own[place]) for place, copier in asked.items()], to_host=True)
        for place, copy in copies.items():
            found[place] = copy
    except UnsupportedError as error:
        LOGGER.debug("%s", one_line(error))
    rest = [place for place, copy in enumerate(found) if copy is None]
    for place in rest:
        own[place].copy_to_host_async()  # all of them at once
    for place in rest:
        found[place] = _by_python(own[place])
    return found


def overwrite(arrays: Sequence[Any], copies: Sequence[NDArray[Any]]) -> None:
    """Have arrays that nobody else reads, each of a GPU (:func:`is_reached`), hold what copies do, each in numpy's own
    order. Raises UnsupportedError: a driver refuses, or an array lies there in another order."""
    import jax

    jax.block_until_ready(list(arrays))
    every = []
    for one, copy in zip(arrays, copies, strict=True):
        if (copier := _copier_of(one)) is None:
            raise UnsupportedError(f"the driver copies no array that lies there as {one.format}")
        every.append((copier, copy, one))
    _copy(every, to_host=False)


def is_copy(array: Any) -> bool:
    """Whether it lies in the host's memory, as of :func:`copied`."""
    return isinstance(array, np.ndarray)


def is_reached(shape: tuple[int, ...], dtype: np.dtype[Any], device: Any) -> bool:
    """Whether a GPU's driver copies an array of this shape there and back."""
    plain = dtype.kind in _PLAIN or dtype.name == "bfloat16"
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return plain and size >= _LARGE_BYTES and copies_of(device) is not None


def _copier_of(array: Any) -> GpuCopies | None:
    if is_copy(array):
        return None
    [device] = array.devices()
    in_order = _are_in_order(array)
    return copies_of(device) if in_order and is_reached(array.shape, np.dtype(array.dtype), device) else None


def _are_in_order(array: Any) -> bool:
    """Whether its numbers lie on the device as numpy's do, the last dimension's side by side."""
    layout = array.format.layout
    return tuple(layout.major_to_minor) == tuple(range(array.ndim)) and not layout.tiling


def _copy(every: Sequence[tuple[GpuCopies, NDArray[Any], Any]], *, to_host: bool) -> None:
    """For each GPU, copies and its arrays, all GPUs at once. Raises UnsupportedError, once nothing is copied any more:
    what still goes on writes to these arrays."""
    by_gpu = defaultdict[GpuCopies, list[Copy]](list)
    for copier, copy, array in every:
        by_gpu[copier] += _copies(copy, array, to_host=to_host)
    begun = [copier.begin(each, every) for copier, each in by_gpu.items()]
    told = [str(error) for one in begun if (error := one.exception()) is not None]
    if told:
        raise UnsupportedError(told[0])  # not theirs, whose frames would keep the arrays


def _copies(copy: NDArray[Any], array: Any, *, to_host: bool) -> list[Copy]:
    begins, there = copy.ctypes.data, array.unsafe_buffer_pointer()
    return [
        Copy(first, there + first - begins, end - first, True)
        if to_host
        else Copy(there + first - begins, first, end - first, False)
        for first, end in MEMORY.pieces(copy)
    ]


def _by_python(array: Any) -> NDArray[Any]:
    values, [device] = np.asarray(array), array.devices()
    if backend_of(device.platform).queues:  # it has memory of its own
        return values
    copy = MEMORY.empty(values.shape, values.dtype)  # it was the array itself, which a call takes over
    np.copyto(copy, values)
    return copy
