"""Copies between an NVIDIA GPU and the host's memory by its driver (``docs/calls.md``).

XLA's allocator of memory that GPUs reach gets twice as much each time, starts no kernel meanwhile, half a second a
gigabyte, and gives nothing back. Memory of our own is written first, and then made known to the driver in small pieces,
each of which takes it two milliseconds (one H100, ``docs/benchmarks/llama.md``).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from disco_hlo.backends import backend_of
from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin.logs import LOGGER, one_line

_FOR_ALL_GPUS = 1
"""CU_MEMHOSTREGISTER_PORTABLE."""
_WAITS_FOR_NONE = 1
"""CU_STREAM_NON_BLOCKING: it does not wait for what other streams do."""


@dataclass(frozen=True)
class Copy:
    """Bytes from one address to another, of which one is the host's."""

    to: int
    source: int
    size_bytes: int
    to_host: bool


class GpuCopies:
    """What copies to and from one GPU, on a thread of its own: XLA keeps in mind which GPU is current on each of its
    threads, and must find that one."""

    def __init__(self, driver: str, ordinal: int) -> None:
        """For the GPU of this number in this process. Raises OSError: there is no such driver; UnsupportedError: it
        refuses."""
        self._driver = ctypes.CDLL(driver)
        self._thread = ThreadPoolExecutor(1, "disco-copies")
        self._stream = ctypes.c_void_p()
        self._do(lambda: self._begin(ordinal))

    def register(self, address: int, size_bytes: int) -> None:
        """Let all GPUs reach this memory of the host, which was written before. Raises UnsupportedError."""
        self._do(
            lambda: self._call(
                "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _FOR_ALL_GPUS
            )
        )

    def unregister(self, address: int) -> None:
        """The opposite, of what began here. Raises UnsupportedError."""
        self._do(lambda: self._call("cuMemHostUnregister", ctypes.c_void_p(address)))

    def begin(self, copies: Sequence[Copy], arrays: Sequence[Any]) -> Future[None]:
        """Begin to copy; the result is there when nothing is copied any more, or says UnsupportedError.

        Args:
            copies: none may lie in two pieces that were registered one by one.
            arrays: whose memory that is; they are kept so long, whoever waits, or no longer does, as after Ctrl-C.

        Raises:
            UnsupportedError: the interpreter ends.
        """
        return self._submit(lambda: self._copy(copies, arrays))

    def _begin(self, ordinal: int) -> None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(self._stream), _WAITS_FOR_NONE)

    def _copy(self, copies: Sequence[Copy], _arrays: Sequence[Any]) -> None:
        try:
            for one in copies:
                size = ctypes.c_size_t(one.size_bytes)
                if one.to_host:
                    to, source = ctypes.c_void_p(one.to), ctypes.c_uint64(one.source)
                    self._call("cuMemcpyDtoHAsync_v2", to, source, size, self._stream)
                else:
                    there, values = ctypes.c_uint64(one.to), ctypes.c_void_p(one.source)
                    self._call("cuMemcpyHtoDAsync_v2", there, values, size, self._stream)
        finally:  # what was begun before one was refused goes on, too
            self._call("cuStreamSynchronize", self._stream)

    def _do(self, work: Callable[[], None]) -> None:
        self._submit(work).result()

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        try:
            return self._thread.submit(work)
        except RuntimeError as error:  # at the end of the interpreter no thread takes anything any more
            raise UnsupportedError(str(error)) from None

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            words = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(words))
            told = (words.value or str(code).encode()).decode()
            raise UnsupportedError(f"the GPU's driver refuses {name}: {told}")


@functools.cache
def copies_of(device: Any) -> GpuCopies | None:
    """What copies to and from a device; None where no driver does."""
    driver = backend_of(device.platform).driver
    if not driver:
        return None
    try:
        return GpuCopies(driver, device.local_hardware_id)
    except (OSError, UnsupportedError) as error:
        LOGGER.debug("copies go through Python: %s", one_line(error))
        return None
