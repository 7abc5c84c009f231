"""The swept lines with the latency that all-reduces have in the step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.profiler.collectives import (
    InStep,
    counted,
    in_the_step,
    with_bytes_of,
    with_latency_of,
    with_total_of,
)

SWEPT = LinearPieces.of((0, 1.0, 2000.0), (5000, 2.0, 4000.0))


def bases(found: LinearPieces) -> list[float]:
    return [piece.offset_ns for piece in found.lines]


def test_sizes_are_counted() -> None:
    assert counted([64, 8, 64, 64]) == ((8, 1), (64, 3))


def test_all_reduces_that_are_quicker_in_the_step_have_less_latency_there() -> None:
    # Swept: 3 x 2100 + 1 x (2 x 6000 + 4000) = 22300. In the step they took 18300, 1000 less each.
    found = with_latency_of(InStep(((100, 3), (6000, 1)), 18300, 5, 24), SWEPT)
    assert bases(found) == [1000.0, 3000.0]
    assert [piece.ns_per_byte for piece in found.lines] == [1.0, 2.0]


def test_all_reduces_that_are_slower_in_the_step_have_more_latency_there() -> None:
    assert bases(with_latency_of(InStep(((100, 2),), 6200, 5, 24), SWEPT)) == [3000.0, 5000.0]


def test_no_more_than_the_latency_goes() -> None:
    found = with_latency_of(InStep(((4000, 2),), 100, 5, 24), SWEPT)
    assert bases(found) == [0.0, 2000.0]
    assert found([0, 100]).tolist() == [0, 100]


def test_a_bucket_that_takes_longer_in_the_step_makes_lines_steeper() -> None:
    # Swept: 2 x 6000 + 4000 = 16000.
    found = with_bytes_of(InStep(((6000, 1),), 22000, 5, 12), SWEPT)
    assert bases(found) == bases(SWEPT)
    assert [piece.ns_per_byte for piece in found.lines] == [2.0, 3.0]


def test_a_bucket_that_is_quicker_in_the_step_makes_lines_flatter_above_the_latency() -> None:
    # Swept: 16000, of which 14000 are above the latency; half of that is there.
    found = with_bytes_of(InStep(((6000, 1),), 9000, 5, 12), SWEPT)
    assert bases(found) == [2000.0, 3000.0]
    assert [piece.ns_per_byte for piece in found.lines] == [0.5, 1.0]
    least = with_bytes_of(InStep(((6000, 1),), 1500, 5, 12), SWEPT)
    assert least([0, 6000, 10**9]).tolist() == [2000, 2000, 2000]


def test_sums_beyond_64_bits_do_not_wrap_around() -> None:
    """A file may say any number of any size: these took nothing, so nothing is left of the lines."""
    many = InStep(((100, 2), (1 << 61, 1 << 61)), 1, 0, 1)
    assert bases(with_latency_of(many, SWEPT)) == [0.0, 2000.0]
    assert with_bytes_of(many, SWEPT)([0, 100, 6000]).tolist() == [2000, 2000, 2000]


def test_a_link_that_is_slower_in_the_step_is_slower_at_everything() -> None:
    # Swept: 2 x 2100 + 16000 = 20200.
    found = with_total_of(InStep(((100, 2), (6000, 1)), 30300, 5, 12), SWEPT)
    assert bases(found) == [3000.0, 6000.0]
    assert [piece.ns_per_byte for piece in found.lines] == [1.5, 3.0]


@given(st.integers(1, 10**8), st.integers(1, 10**8), st.integers(2, 100), st.integers(1, 10_000))
def test_apart_or_together_lines_rise_with_the_size(apart: int, together: int, count: int, size: int) -> None:
    one_by_one = InStep(((size, count),), apart, 0, 12)
    found = in_the_step(SWEPT, one_by_one, InStep(((size * count, 1),), together, 0, 12))
    times = found(sorted([0, 1, size, 4999, 5000, 5001, size * count, 2 * size * count])).tolist()
    assert times[0] >= 0
    assert times == sorted(times)


@given(
    st.lists(st.integers(0, 20_000), min_size=1, max_size=20), st.integers(1, 10**8), st.integers(0, 10_000)
)
def test_they_add_up_to_the_step_and_never_fall(sizes: list[int], total_ns: int, more: int) -> None:
    found = with_latency_of(InStep(counted(sizes), total_ns, 0, 12), SWEPT)
    assert found([0]).tolist()[0] >= 0
    assert found([sizes[0] + more])[0] >= found([sizes[0]])[0]
    if bases(found)[0] > 0:
        assert int(found(sizes).sum()) == pytest.approx(total_ns, abs=len(sizes))


@pytest.mark.parametrize(
    "wrong",
    [
        ((), 5, 0, 1),
        (((8, 1), (8, 1)), 5, 0, 1),
        (((8, 0),), 5, 0, 1),
        (((8, 1),), 0, 0, 1),
        (((8, 1),), 5, 0, 0),
    ],
)
def test_what_cannot_be_is_refused(wrong: tuple[tuple[tuple[int, int], ...], int, int, int]) -> None:
    with pytest.raises(ProfileError, match="all-reduces take"):
        InStep(*wrong)


def test_two_traces_of_the_same_sizes_do_not_tell_latency_from_bytes():
    """Gathers are in buckets of one in either; noise of the second made a byte take a hundred times as long."""
    swept = LinearPieces.of((0, 1.0, 100.0))
    apart, together = InStep(((64, 4),), 4 * 200, 1, 12), InStep(((64, 4),), 4 * 9000, 4000, 12)
    assert in_the_step(swept, apart, together) == with_latency_of(apart, swept)
