"""What connects the devices, and the time of an all-reduce over it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from disco_hlo.profiler.profile import Contention, Link
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.plugin.jaxlink import CompileRequest, Handler
from disco_hlo.plugin.links import REPEATS, all_reduce_times, link_label
from disco_hlo.plugin.microbenchmarks import contention_as_times, contention_in, is_constant


def test_the_label_names_the_settings_that_choose_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_VERSION", "2.28")
    assert link_label() == ""
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert link_label() == "NCCL_P2P_DISABLE=1,NCCL_SHM_DISABLE=1"


def test_slow_downs_are_kept_for_each_link_and_step_apart() -> None:
    fast, slow = Link(2, 1), Link(2, 1, "NCCL_P2P_DISABLE=1")
    times = contention_as_times(Contention(1.25, 1.5), fast, "f00d") | contention_as_times(
        Contention(1.0, 1.0625), slow, "f00d"
    )
    assert contention_in(times, fast, "f00d") == Contention(1.25, 1.5)
    assert contention_in(times, slow, "f00d") == Contention(1.0, 1.0625)
    assert contention_in(times, Link(4, 1), "f00d") is None
    assert contention_in(times, fast, "beef") is None
    assert all(map(is_constant, times))


@pytest.mark.parametrize("without_call", [False, True])
def test_an_all_reduce_is_timed_over_the_devices_of_the_request(
    without_call: bool, compile_with: Callable[[str, Handler], list[CompileRequest]]
) -> None:
    found: list[int] = []

    def timed_step(x: jax.Array) -> jax.Array:
        return x + 1

    def handle(request: CompileRequest) -> None:
        found.extend(all_reduce_times(request, 4096, 0, without_call=without_call))

    compile_with("timed_step", handle)
    split = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data"))
    jax.jit(timed_step, in_shardings=split)(np.full((2, 3), 1 + without_call, np.float32))
    assert len(found) == REPEATS
    assert min(found) >= 1
