"""What connects the devices, and the time of an all-reduce over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.collectives import ALL_REDUCE
from disco_hlo.plugin.measuring.microbenchmarks import (
    REPEATS,
    TRACED_CHAIN,
    _added_ns,
    collective_times,
    collective_times_in_steps,
    link_label,
    traced_transfers,
)
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.profiler.trace import Execution, Trace
from tests.steps.intercept import intercept


def test_the_label_names_the_settings_that_choose_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_VERSION", "2.28")
    assert link_label() == ""
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert link_label() == "NCCL_P2P_DISABLE=1,NCCL_SHM_DISABLE=1"


def on_two_devices(look: Callable[[CompileRequest], Any]) -> Any:
    split = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data"))
    return intercept(jax.jit(lambda x: x + 1, in_shardings=split), (np.ones((2, 3), np.float32),), look)


@pytest.mark.parametrize("without_call", [False, True])
def test_an_all_reduce_is_timed_over_the_devices_of_the_request(without_call: bool) -> None:
    found = on_two_devices(
        lambda request: collective_times(request, ALL_REDUCE, 4096, 0, without_call=without_call)
    )
    assert len(found) == REPEATS
    assert min(found) >= 1


def chains_trace(lengths: dict[int, list[int]]) -> Trace:
    """By device, the times of its transfers one after another, with a kernel of another kind after each."""
    found = []
    for device, taken in lengths.items():
        start = 0
        for ns in taken:
            found.append(
                Execution(
                    "all-reduce", "jit", 0, device, start, start + ns, "", start, "ncclDevKernel_AllReduce"
                )
            )
            found.append(
                Execution("copy", "jit", 0, device, start + ns, start + ns + 1, "", start, "MemcpyD2D")
            )
            start += ns + 10
    return Trace(tuple(found), ())


def test_of_traced_transfers_the_first_of_a_chain_and_the_earlier_device_say_nothing() -> None:
    small, large = [900, 10, 11, 12, 13], [800, 100, 110, 120, 130]
    waited = [ns + 5 for ns in small + large]
    trace = chains_trace({0: (small + large) * 2, 1: waited * 2})
    assert TRACED_CHAIN == 5
    assert traced_transfers(trace, (64, 4096), runs=2) == {64: small[1:] * 2, 4096: large[1:] * 2}


def test_a_trace_that_lost_transfers_is_not_read() -> None:
    trace = chains_trace({0: [900, 10, 11, 12]})
    with pytest.raises(ProfileError, match=r"expected 5 transfers on each device.*found \{0: 4\}"):
        traced_transfers(trace, (64,), runs=1)


def test_all_reduces_of_a_step_are_timed_by_size() -> None:
    found = on_two_devices(lambda request: collective_times_in_steps(request, ALL_REDUCE, [1024, 1 << 16], 0))
    assert sorted(found) == [1024, 1 << 16]
    assert all(len(times) == 9 and min(times) >= 1 for times in found.values())


def test_the_compute_between_all_reduces_does_not_count() -> None:
    # Six all-reduces in 2.0 ms of compute (a disturbed round takes 8).
    taken = [(2_000_000, 3_200_000), (8_000_000, 2_600_000), (2_000_000, 1_900_000)]
    assert _added_ns(taken) == [200_000, 100_000, 1]
