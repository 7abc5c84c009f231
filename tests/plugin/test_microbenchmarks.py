"""Constants of a device, what connects the devices, and the time of collectives over it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.errors import ProfileError, UnsupportedError
from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind
from disco_hlo.plugin.measuring import microbenchmarks
from disco_hlo.plugin.measuring.inputs.made_up import synthetic_values
from disco_hlo.plugin.measuring.microbenchmarks import (
    REPEATS,
    TRACED_CHAIN,
    Sweep,
    TransferChains,
    _added_ns,
    link_label,
    traced_transfers,
)
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.xla.executables import Parameter
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.plugin.xla.own_programs import Chain
from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.trace import Execution, Trace
from tests.outputs import Outputs, outputs_of
from tests.plugin.sessions import fake_session
from tests.steps.intercept import intercept

CONSTANTS = DeviceConstants(launch_ns=412, memory_bandwidth=21.5e9, flops_per_s=96.5e9, noise=0.02)
HALVES = ((0, 3), (1, 2))
RING = ((0, 1), (1, 2), (2, 3), (3, 0))


def test_between_the_steps_of_a_training_ranks_measure_again_where_rank_0_was_disturbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes part in the slices of the others, or they wait for each other."""
    said = iter([True, True, False])
    made: list[bool] = []

    def measure(_device: object, _backend: object, _repeat: object, beside: bool) -> DeviceConstants:
        made.append(beside)
        if len(made) == 3:
            raise ProfileError("the time of a copy does not grow with its size")
        return CONSTANTS

    monkeypatch.setattr(microbenchmarks, "_measure", measure)
    session = fake_session(
        request=SimpleNamespace(local_devices=["cpu"]), leads=False, between_steps=lambda _: None,
        tell=lambda _value, _tag: next(said),
    )  # fmt: skip
    assert microbenchmarks.measure_constants(session) == CONSTANTS
    assert made == [True] * 3


@pytest.mark.parametrize(("rank", "disturbed"), [(0, 2), (1, 2), (1, 9)])
def test_a_disturbed_measurement_is_repeated_and_fails_on_rank_0_alone(
    rank: int, disturbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def measure(device: object, *_: object) -> DeviceConstants:
        calls.append(device)
        if len(calls) <= disturbed:
            raise ProfileError("the time of a copy does not grow with its size")
        return CONSTANTS

    monkeypatch.setattr(microbenchmarks, "_measure", measure)
    devices, facts = SimpleNamespace(local_devices=["one"]), SimpleNamespace(backend="cpu")
    session = fake_session(request=devices, leads=rank == 0, facts=facts)
    found = microbenchmarks.measure_constants(session)
    assert found == (CONSTANTS if disturbed == 2 else None)
    if rank == 0:
        calls.clear()
        disturbed = 9
        with pytest.raises(ProfileError, match="does not grow"):
            microbenchmarks.measure_constants(session)


def test_the_label_names_the_settings_that_choose_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_VERSION", "2.28")
    assert link_label() == ""
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert link_label() == "NCCL_P2P_DISABLE=1,NCCL_SHM_DISABLE=1"


def over(devices: list[Any], look: Callable[[CompileRequest], Any]) -> Any:
    """What ``look`` returns of a step on these devices."""
    split = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
    step = jax.jit(lambda x: x.sum(), in_shardings=split)
    return intercept(step, (jax.ShapeDtypeStruct((12,), np.float32),), look, devices=len(devices))


@pytest.mark.parametrize("without_call", [False, True])
def test_an_all_reduce_is_timed_over_the_devices_of_the_request(without_call: bool) -> None:
    found = over(
        jax.devices()[:2], lambda request: Sweep(request, ALL_REDUCE).times(4096, without_call=without_call)
    )
    assert len(found) == REPEATS
    assert min(found) >= 1


def chains_trace(lengths: dict[int, list[int]]) -> Trace:
    """By device, the times of its transfers one after another, with a kernel of another kind after each."""
    found = []
    for device, taken in lengths.items():
        start = 0
        for ns in taken:
            end = start + ns
            ran = ("all-reduce", start, end, "ncclDevKernel_AllReduce"), ("copy", end, end + 1, "MemcpyD2D")
            found += [Execution(op, "jit", 0, device, *at, kernel) for op, *at, kernel in ran]
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


def test_chains_to_be_traced_are_compiled_at_once_and_run_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    both, ran = threading.Barrier(2), list[tuple[int, ...]]()
    really, really_run = Sweep.compiled, Runner.run

    def compiled(*given: Any) -> Any:
        both.wait(60)
        return really(*given)

    def run(runner: Runner) -> int:
        ran.append(runner.runs_on.parameters[0].shape)
        return really_run(runner)

    monkeypatch.setattr(microbenchmarks, "own_cores", lambda: [0, 1])
    monkeypatch.setattr(Sweep, "compiled", compiled)
    monkeypatch.setattr(Runner, "run", run)
    took_ns = over(
        jax.devices()[:2], lambda request: TransferChains(Sweep(request, ALL_REDUCE), [1024, 4096]).run()
    )
    assert ran == [(256,), (1024,)]
    assert took_ns > 0


def test_all_reduces_of_a_step_are_timed_by_size() -> None:
    found = over(
        jax.devices()[:2], lambda request: Sweep(request, ALL_REDUCE).times_in_steps([1024, 1 << 16])
    )
    assert sorted(found) == [1024, 1 << 16]
    assert all(len(times) == 9 and min(times) >= 1 for times in found.values())


def test_the_compute_between_all_reduces_does_not_count() -> None:
    # Six all-reduces in 2.0 ms of compute (a disturbed round takes 8).
    taken = [(2_000_000, 3_200_000), (8_000_000, 2_600_000), (2_000_000, 1_900_000)]
    assert _added_ns(taken) == [200_000, 100_000, 1]


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_chain_sums_over_the_devices_of_the_request(repeats: int) -> None:
    def look(request: CompileRequest) -> Outputs:
        sweep = Sweep(request, ALL_REDUCE, seed=5).chain(4096, repeats)
        assert sweep.run() > 0
        return outputs_of(sweep)

    with jax.default_matmul_precision("float32"), jax.transfer_guard("disallow_explicit"):
        made = over(jax.devices()[1:4], look)
    parameter = Parameter((1024,), np.dtype(np.float32), sharded=True)
    inputs = [synthetic_values(parameter, 5, 0, place).astype(np.float64) for place in range(3)]
    assert [len(per_device) for per_device in made] == [3]
    for found in made[0]:
        np.testing.assert_allclose(found.astype(np.float64), sum(inputs) * 3 ** (repeats - 1), rtol=1e-2)


@pytest.mark.parametrize(
    "kind",
    [
        CollectiveKind("all-reduce", HALVES),
        CollectiveKind("all-gather"),
        CollectiveKind("all-gather", HALVES),
        CollectiveKind("reduce-scatter"),
        CollectiveKind("all-to-all", HALVES),
        CollectiveKind("collective-permute", RING),
    ],
    ids=str,
)
def test_every_kind_has_a_chain_of_its_own(kind: CollectiveKind) -> None:
    """A chain whose collectives XLA merged or left out would be refused."""

    def look(request: CompileRequest) -> list[int]:
        chains = [Chain.AFTER_WORK, Chain.WORK_ALONE] if kind.opcode == "reduce-scatter" else [Chain.TIGHT]
        return [Sweep(request, kind).chain(4096, 3, one).run() for one in chains]

    found = over(jax.devices()[:4], look)
    assert min(found) > 0


def test_groups_that_leave_devices_out_cannot_be_swept() -> None:
    def look(request: CompileRequest) -> None:
        Sweep(request, CollectiveKind("all-gather", ((0, 1), (2,)))).chain(4096, 1)

    with pytest.raises(UnsupportedError, match="expected groups of one size that hold each of 4 devices"):
        over(jax.devices()[:4], look)
