"""All-reduces on a network to imagine."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.errors import DiscoError
from disco_hlo.optimize.costs import Network, formula


def test_two_devices_use_a_ring() -> None:
    # 2 (N - 1) a = 20 µs, and 2 (N - 1)/N S/B = 1 s for 10 GB at 10 GB/s.
    line = formula(Network(2, 10.0, 10.0))
    assert line(np.array([0, 10**10])).tolist() == [20_000, 1_000_020_000]
    assert [piece.from_bytes for piece in line.lines] == [0]


def test_many_devices_use_trees_for_small_messages_and_a_ring_for_large_ones() -> None:
    line = formula(Network(64, 12.5, 5.0))
    # Trees: 2 * 6 * 5 µs = 60 µs. Ring: 2 * 63 * 5 µs = 630 µs, but 2 * 63/64 instead of 2 bytes a byte.
    assert int(line(np.array([0]))[0]) == 60_000
    assert int(line(np.array([125_000]))[0]) == 60_000 + 20_000
    large = 10**11
    assert int(line(np.array([large]))[0]) == round(630_000 + 2 * 63 / 64 * large / 12.5)


@given(st.integers(2, 4096), st.floats(0.1, 1000), st.floats(0, 1000), st.integers(0, 10**12))
def test_it_is_the_faster_of_both(devices: int, gigabytes: float, latency: float, size: int) -> None:
    ring = 2 * (devices - 1) * latency * 1e3 + 2 * (devices - 1) / devices * size / gigabytes
    tree = 2 * math.ceil(math.log2(devices)) * latency * 1e3 + 2 * size / gigabytes
    time_ns = int(formula(Network(devices, gigabytes, latency))(np.array([size]))[0])
    assert time_ns == pytest.approx(min(ring, tree), rel=1e-6, abs=2)


def test_trees_are_faster_at_every_size_where_a_message_takes_minutes() -> None:
    line = formula(Network(1 << 20, 1e6, 1e9))  # a ring would be faster from 1e30 bytes on, no 64-bit size
    assert line(np.array([0])).tolist() == [2 * 20 * 10**12]
    assert [piece.from_bytes for piece in line.lines] == [0]


def test_one_device_has_nothing_to_reduce_with() -> None:
    with pytest.raises(DiscoError, match="expected at least 2"):
        Network(1, 1.0, 1.0)
