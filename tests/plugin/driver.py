"""A GPU's driver that copies within the host's memory, for tests without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from disco_hlo.plugin.xla import gpu_copies, host_memory, own_programs
from disco_hlo.plugin.xla.gpu_copies import GpuCopies

INVALID_VALUE = 1


class FakeDriver:
    """As ``libcuda``: what lies in two pieces of registered memory is not copied at once."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        """Sizes of pieces by their address."""
        self.copied: list[tuple[str, int]] = []
        self.fails: str = ""
        """A call that is refused."""
        self.awaited = 0
        """How often the stream was."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        own = {
            "cuGetErrorName": self._name,
            "cuMemHostRegister_v2": self._register,
            "cuMemHostUnregister": self._unregister,
            "cuMemcpyDtoHAsync_v2": self._to_host,
            "cuMemcpyHtoDAsync_v2": self._to_gpu,
            "cuStreamSynchronize": self._await,
        }
        return (lambda *_: INVALID_VALUE) if name == self.fails else own.get(name, lambda *_: 0)

    def _await(self, _: Any) -> int:
        self.awaited += 1
        return 0

    def _name(self, _: int, words: Any) -> int:
        words._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0

    def _register(self, address: Any, size: Any, _: int) -> int:
        self.registered[address.value] = size.value
        return 0

    def _unregister(self, address: Any) -> int:
        return 0 if self.registered.pop(address.value, 0) else INVALID_VALUE

    def _to_host(self, to: Any, source: Any, size: Any, _: Any) -> int:
        return self._copy("to the host", to.value, to.value, source.value, size.value)

    def _to_gpu(self, to: Any, source: Any, size: Any, _: Any) -> int:
        return self._copy("to the GPU", source.value, to.value, source.value, size.value)

    def _copy(self, way: str, on_host: int, to: int, source: int, size: int) -> int:
        for first, length in self.registered.items():
            if (first <= on_host < first + length) != (first < on_host + size <= first + length):
                return INVALID_VALUE
        ctypes.memmove(to, source, size)
        self.copied.append((way, size))
        return 0


def copied_by_driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Have all devices be copied to and from by one such driver."""
    driver = FakeDriver()
    monkeypatch.setattr(gpu_copies.ctypes, "CDLL", lambda _: driver)
    copies = GpuCopies("libcuda.so.1", 0)
    monkeypatch.setattr(host_memory, "copies_of", lambda _: copies)
    own_programs._compiled.cache_clear()
    return driver
