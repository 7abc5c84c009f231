from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from disco_hlo.plugin.xla import jaxlink, job
from disco_hlo.plugin.xla.job import free_host_bytes
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


def test_memory_may_rise_to_a_part_above_the_most_that_was_in_use() -> None:
    def device(peak: int, now: int) -> Any:
        return SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": peak, "bytes_in_use": now})

    request: Any = SimpleNamespace(local_devices=[device(1000, 700), device(1000, 900)])
    assert job.may_rise_bytes(request, 0.1) == 200
    request.local_devices = [SimpleNamespace(memory_stats=lambda: None)]
    assert job.may_rise_bytes(request, 0.1) is None


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
