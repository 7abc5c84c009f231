"""What traces drawn by hand tell of kernels that hold transfers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disco_hlo.profiler.contention import holds
from disco_hlo.profiler.trace import Execution, Trace

MODULE = "jit_step"
ORDER = ("n1", "b0.start", "n2", "b0.done", "n3")
Row = tuple[str, int, int]


def trace(*devices: Sequence[Row]) -> Trace:
    """One run; (op, start, end) in us by device. Ops whose names begin with b are transfers."""
    executions = [
        Execution(
            f"{op}_kernel", MODULE, 0, device, 1000 * start, 1000 * end, "stream", 1000 * end,
            "ncclDevKernel" if op[0] == "b" else op,
        )
        for device, rows in enumerate(devices)
        for op, start, end in rows
    ]  # fmt: skip
    return Trace(tuple(executions), ())


def one(transfer_at: int, before: int = 0) -> list[Row]:
    """A product of 100 us that begins at 50; the transfer could begin ``before`` us earlier."""
    return [("n1", 0, 50 - before), ("n2", 50, 150), ("b0", transfer_at, transfer_at + 40), ("n3", 200, 210)]


def test_a_transfer_behind_the_last_wave_of_a_product_shows_what_that_holds() -> None:
    assert holds(trace(one(137, before=1)), MODULE, ORDER) == {"n2": pytest.approx(0.87)}


def test_a_transfer_that_begins_with_a_kernel_is_not_held() -> None:
    assert holds(trace(one(50)), MODULE, ORDER) == {"n2": 0.0}
    assert holds(trace(one(51)), MODULE, ORDER) == {"n2": 0.0}, "a launch is no hold"


def test_the_device_that_lets_a_transfer_in_last_decides() -> None:
    assert holds(trace(one(51), one(140)), MODULE, ORDER) == {"n2": pytest.approx(0.9)}


def test_a_transfer_whose_turn_comes_beside_a_kernel() -> None:
    order = ("n1", "b0.start", "b1.start", "n2", "b0.done", "b1.done", "n3")
    held = [("n1", 0, 50), ("b0", 50, 70), ("n2", 50, 150), ("b1", 140, 160), ("n3", 200, 210)]
    assert holds(trace(held), MODULE, order)["n2"] == pytest.approx(0.45), "the first at once, the other late"
    # What begins at once late in a kernel may do so behind its hold.
    late = [("n1", 0, 50), ("b0", 45, 120), ("n2", 50, 150), ("b1", 122, 140), ("n3", 200, 210)]
    assert holds(trace(late), MODULE, ("b0.start", *order[2:])) == {}


def test_short_kernels_and_kernels_of_other_modules_tell_nothing() -> None:
    short = [("n1", 0, 50), ("n2", 50, 60), ("b0", 58, 90), ("n3", 100, 110)]
    assert holds(trace(short), MODULE, ORDER) == {}
    assert holds(trace(one(137)), "jit_other", ORDER) == {}
