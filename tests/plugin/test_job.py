from __future__ import annotations

import jax
import numpy as np
import pytest

from disco_hlo.plugin.xla import jaxlink, job
from disco_hlo.plugin.xla.host_memory import free_host_bytes
from tests.plugin.handled import seen


def test_facts_name_backend_devices_and_versions() -> None:
    facts = seen(job.device_facts, lambda x: x + 1, np.zeros(2, np.float32))
    assert (facts.backend, facts.device_kind) == ("cpu", "cpu")
    assert (facts.device_count, facts.local_device_count) == (1, 1)
    assert (facts.process_index, facts.process_count) == (0, 1)
    assert facts.jax_version == jax.__version__
    assert facts.runtime_version == "cpu"


def test_a_host_says_how_much_memory_is_left() -> None:
    # A CPU device has no memory of its own, the host has.
    assert seen(job.free_device_bytes, lambda x: x + 1, np.zeros(2, np.float32)) is None
    free = free_host_bytes()
    assert free is not None
    assert free > 1 << 20


def test_without_jax_distributed_there_is_no_job() -> None:
    assert job.key_value_store() is None
    assert job.job_id() == ""


def test_only_a_passed_deadline_is_a_timeout() -> None:
    class Client:
        def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
            raise RuntimeError({"late": "DEADLINE_EXCEEDED: waited", "lost": "UNAVAILABLE: gone"}[key])

    store = job.KeyValueStore(Client())
    with pytest.raises(TimeoutError, match=r"key late: not there after 1\.5 s"):
        store.get("late", 1.5)
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        store.get("lost", 1.5)


def test_who_initializes_again_is_in_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import distributed

    def number_with(client: object) -> int:
        monkeypatch.setattr(distributed.global_state, "client", client)
        monkeypatch.setattr(distributed.global_state, "coordinator_address", "host:1234")
        return jaxlink.job_number()

    first, second = object(), object()
    before = number_with(first)
    assert [number_with(one) - before for one in (first, second, second)] == [0, 1, 1]
    assert number_with(None) == 0
    assert number_with(second) == before + 1
