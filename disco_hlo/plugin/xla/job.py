"""Where a module runs: facts about its devices, the memory they have left, and the job's key-value store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.jaxlink import CompileRequest


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a module was compiled for, and with what."""

    backend: str
    """``cpu`` or ``gpu``."""
    device_kind: str
    device_count: int
    local_device_count: int
    process_index: int
    process_count: int
    runtime_version: str
    """PJRT platform version; on GPU it names the CUDA version."""
    jax_version: str
    jaxlib_version: str


def device_facts(request: CompileRequest) -> DeviceFacts:
    """Facts about the devices of ``request``."""
    import jax

    return DeviceFacts(
        backend="gpu" if request.backend.platform in ("gpu", "cuda") else str(request.backend.platform),
        device_kind=str(request.devices[0].device_kind),
        device_count=len(request.devices),
        local_device_count=len(request.local_devices),
        process_index=int(request.backend.process_index()),
        process_count=len(request.process_indices),
        runtime_version=str(request.backend.platform_version),
        jax_version=jax.__version__,
        jaxlib_version=version("jaxlib"),
    )


@dataclass(frozen=True, slots=True)
class KeyValueStore:
    """The key-value store of a ``jax.distributed`` job."""

    client: Any

    def put(self, key: str, value: bytes) -> None:
        """Store ``value``; a key can be stored once."""
        self.client.key_value_set_bytes(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for ``key``. Raises TimeoutError if nobody stores it within ``timeout_s``."""
        with _timeouts(f"key {key}", timeout_s):
            return bytes(self.client.blocking_key_value_get_bytes(key, max(1, int(timeout_s * 1000))))

    def delete(self, key: str) -> None:
        """Forget ``key``."""
        self.client.key_value_delete(key)

    def barrier(self, name: str, process_indices: Sequence[int], timeout_s: float) -> None:
        """Wait until all of ``process_indices`` are at barrier ``name``. Raises TimeoutError."""
        with _timeouts(f"barrier {name}", timeout_s):
            self.client.wait_at_barrier(name, max(1, int(timeout_s * 1000)), list(process_indices))


@contextlib.contextmanager
def _timeouts(what: str, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if "DEADLINE_EXCEEDED" in str(error):
            raise TimeoutError(f"{what}: not there after {timeout_s:g} s") from error
        raise


def key_value_store() -> KeyValueStore | None:
    """The store of this job, or None where ``jax.distributed`` is not initialized."""
    job = jaxlink.distributed_job()
    return None if job is None else KeyValueStore(job.client)


def job_id() -> str:
    """A name that the processes of one ``jax.distributed`` job share (its coordinator's address), or ""."""
    job = jaxlink.distributed_job()
    return "" if job is None else job.address


def free_device_bytes(request: CompileRequest) -> int | None:
    """Memory a further allocation may take on each local device; None where they have none of their own."""
    known = [amount for amount in map(_free_device_bytes, request.local_devices) if amount is not None]
    return min(known, default=None)


def _free_device_bytes(device: Any) -> int | None:
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
