"""What kernels lose beside transfers, on traces drawn by hand; tests/profiler/test_contention.py has more of them."""

from __future__ import annotations

import pytest

from disco_hlo.profiler.contention import SlowDowns, slow_downs
from disco_hlo.profiler.trace import Trace, moved_ns
from tests.profiler.test_contention import both, trace

ALONE = both(*(trace(("p0", 0, 100), ("b0", 100, 160), ("g1", 160, 260), device=device) for device in (0, 1)))


def read(beside: Trace) -> SlowDowns:
    return slow_downs(ALONE, beside, "jit_step", "jit_step", {"p0"}, moved_ns(beside, "jit_step"))


def test_a_product_counts_if_a_transfer_was_there_when_it_began() -> None:
    found = read(both(*(trace(("b0", 0, 80), ("p0", 1, 131), device=device) for device in (0, 1))))
    assert found.products == pytest.approx(79 / (79 - 30))
    later = read(both(*(trace(("p0", 0, 110), ("b0", 40, 120), device=device) for device in (0, 1))))
    assert later.products is None
    assert later.all_kernels == pytest.approx(70 / (70 - 10))


def test_a_transfer_is_there_when_a_product_begins_if_it_needs_but_its_launch() -> None:
    """vgg19 over NVLink: 3 us behind a product whose time it took by 1.3 ms."""
    found = read(both(*(trace(("p0", 0, 130), ("b0", 3, 83), device=device) for device in (0, 1))))
    assert found.products == pytest.approx(80 / (80 - 30))


def test_what_a_kernel_loses_to_a_transfer_that_waits_counts_by_the_time_in_which_data_moves() -> None:
    """The transfer is 60 us early on the first device, and costs its product 20 us there, nothing on the other."""
    early = trace(("b0", 0, 120), ("p0", 1, 121))
    late = trace(("b0", 60, 120), ("g1", 61, 161), device=1)
    found = read(both(early, late))
    assert found.products == pytest.approx(60 / (60 - 20))
    assert found.others == pytest.approx(1.0)


def test_a_product_takes_twice_its_time_at_most() -> None:
    """One more round of thread blocks, whatever it shared with the transfer."""
    found = read(both(*(trace(("b0", 0, 80), ("p0", 1, 171), device=device) for device in (0, 1))))
    assert found.products == 2.0
    assert found.all_kernels == pytest.approx(79 / (79 - 70))


def test_one_disturbed_run_does_not_matter() -> None:
    runs = [
        trace(("b0", 0, 80), ("p0", 1, 101 + lost), device=device, run=run)
        for run, lost in enumerate((30, 32, 900))
        for device in (0, 1)
    ]
    assert read(both(*runs)).products == pytest.approx(79 / (79 - 32))
