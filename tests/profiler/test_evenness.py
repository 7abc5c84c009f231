"""A device that holds up the step, told by traces drawn by hand and by times that were seen."""

from __future__ import annotations

from dataclasses import replace

from disco_hlo.profiler.contention import computed_ns, uneven
from tests.profiler.test_command_buffers import trace

H100S = {
    "device 0": [47_950_000, 51_240_000, 49_740_000, 46_960_000, 79_950_000],
    "device 1": [45_430_000, 45_390_000, 45_400_000, 45_350_000, 45_460_000],
}
"""bert's kernels on two H100s, 2026-11-25."""


def test_two_gpus_of_which_one_lowers_its_clock_are_uneven() -> None:
    found = uneven(H100S)
    assert found is not None
    assert str(found) == (
        "the step's kernels take 46.96 to 79.95 ms on device 0, 45.35 to 45.46 ms on device 1"
    )


def test_two_gpus_that_are_well_are_even() -> None:
    """transformer's kernels on the same pair, minutes later."""
    steady = {
        "device 0": [15_800_000, 15_840_000, 15_770_000],
        "device 1": [15_900_000, 15_890_000, 15_910_000],
    }
    assert uneven(steady) is None
    assert uneven({"device 0": [10_000_000], "device 1": [10_500_000]}) is None
    assert uneven({"device 0": [10_000_000], "device 1": [10_600_000]}) is not None
    assert uneven({"device 0": [50_000], "device 1": [60_000]}) is None  # of a step of 50 us that is little
    assert uneven({}) is None


def test_a_device_that_is_slow_now_and_then_is_uneven_though_its_median_is_not() -> None:
    found = uneven({"device 0": [900_000, 900_000, 900_000], "device 1": [900_000, 900_000, 1_200_000]})
    assert found is not None
    assert (found.slow, found.fast) == ("device 1", "device 0")
    alone = uneven({"device 0": [1_000_000, 1_000_000, 1_300_000]})
    assert str(alone) == "the step's kernels take 1.00 to 1.30 ms on device 0"


def test_waiting_in_a_transfer_is_no_computing() -> None:
    """The faster device waits there for the slower one."""
    step = [
        ("n1_dot", "gemm", 0, 10),
        ("b0.all-reduce.1", "ncclDevKernel_AllReduce", 10, 40),
        ("g0_fusion", "g0_fusion", 40, 45),
    ]
    first, second = (trace("jit_a", step, step, device=device) for device in (0, 1))
    both = replace(first, executions=first.executions + second.executions)
    assert computed_ns(both, "jit_a") == {"device 0": [15_000, 15_000], "device 1": [15_000, 15_000]}
    assert computed_ns(both, "jit_b") == {}
