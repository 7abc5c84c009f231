"""The all-reduce sweep and its piecewise fit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.profiler.collectives import SweepPoint, fit, point_of, sweep_sizes

SIZES = sweep_sizes()


def points(line, noise=0.0, seed=0):
    random = np.random.default_rng(seed)
    return tuple(
        point_of(size, [max(1, int(line(size) * (1 + noise * random.standard_normal()))) for _ in range(9)])
        for size in SIZES
    )


def one_line(size):
    return 20_000 + 0.1 * size


def two_lines(size):
    return 5_000 + 0.5 * size if size < 65_536 else 60_000 + 0.05 * size


def three_lines(size):
    if size < 32_768:
        return 3_000 + 0.2 * size
    return 15_000 + 0.1 * size if size < 4 << 20 else 400_000 + 0.3 * size


def test_sizes_are_geometric_and_inclusive():
    assert sweep_sizes(1024, 8192, 1) == (1024, 2048, 4096, 8192)
    assert SIZES[0] == 1 << 10
    assert SIZES[-1] == 1 << 28
    assert len(SIZES) == 37
    assert all(size % 64 == 0 for size in SIZES)


@pytest.mark.parametrize("arguments", [(0, 100, 1), (4096, 4096, 1), (64, 128, 0)])
def test_impossible_sizes_are_refused(arguments):
    with pytest.raises(ProfileError, match="minimum < maximum"):
        sweep_sizes(*arguments)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_line_is_found_as_one(noise, seed):
    found = fit(points(one_line, noise, seed))
    (piece,) = found.line.lines
    assert piece.ns_per_byte == pytest.approx(0.1, rel=0.01 + noise)
    assert piece.offset_ns == pytest.approx(20_000, rel=0.01 + noise)
    assert found.median_error <= 0.001 + noise


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.parametrize(
    ("line", "starts", "slopes"),
    [
        (two_lines, (0, 65_536), (0.5, 0.05)),
        (three_lines, (0, 32_768, 4 << 20), (0.2, 0.1, 0.3)),
    ],
)
def test_broken_lines_are_found_where_they_break(line, starts, slopes, noise):
    pieces = fit(points(line, noise, seed=3)).line.lines
    assert tuple(piece.from_bytes for piece in pieces) == starts
    assert tuple(piece.ns_per_byte for piece in pieces) == pytest.approx(slopes, rel=0.01 + 2 * noise)


def test_outliers_do_not_move_the_line():
    disturbed = list(points(one_line, 0.02))
    for index in (3, 17, 30):
        disturbed[index] = replace(disturbed[index], median_ns=disturbed[index].median_ns * 5)
    (piece,) = fit(disturbed).line.lines
    assert piece.ns_per_byte == pytest.approx(0.1, rel=0.03)
    assert piece.offset_ns == pytest.approx(20_000, rel=0.03)


@pytest.mark.parametrize("index", [0, 1, 12, 35, 36])
@pytest.mark.parametrize("left_ns", [1, 1000])
def test_a_time_that_noise_left_nothing_of_does_not_take_the_line_with_it(index, left_ns):
    """Where compute is subtracted, a small all-reduce may seem to take 1 ns: of that, the others are a millionfold."""
    disturbed = list(points(one_line, 0.02))
    disturbed[index] = replace(disturbed[index], median_ns=left_ns)
    predicted = fit(disturbed).line(SIZES[:-3])
    assert predicted.tolist() == pytest.approx([one_line(size) for size in SIZES[:-3]], rel=0.05)


def test_residuals_are_reported_per_point():
    measured = [
        SweepPoint(size, time, 0, 3)
        for size, time in ((1000, 1100), (2000, 2200), (4000, 4400), (8000, 8000))
    ]
    found = fit(measured, maximum_pieces=1)
    residuals = dict(found.residuals())
    assert residuals.keys() == {1000, 2000, 4000, 8000}
    assert found.maximum_error == pytest.approx(max(abs(error) for error in residuals.values()))


def test_a_line_never_falls_even_where_the_points_do():
    falling = [SweepPoint(size, 10_000 - index, 0, 3) for index, size in enumerate(SIZES[:12])]
    predicted = fit(falling).line(SIZES)
    assert np.all(np.diff(predicted) >= 0)


def test_prediction_reaches_beyond_the_sweep():
    found = fit(points(one_line))
    assert found.line([0, 1 << 30]).tolist() == pytest.approx([20_000, 20_000 + 0.1 * (1 << 30)], rel=1e-3)


@pytest.mark.parametrize(("slope", "base"), [(1e200, 0.0), (0.0, 1e19), (1e12, 1e18)])
def test_a_time_beyond_64_bits_is_a_long_one(slope, base):
    line = LinearPieces.of((0, slope, base))
    assert np.all(line([1 << 20, 1 << 40]) >= 10**18)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=3, max_size=12), st.randoms(use_true_random=False))
def test_predictions_never_fall_nor_turn_negative(times, random):
    sizes = sorted(random.sample(range(1, 10**6), len(times)))
    found = fit([SweepPoint(size, time, 0, 1) for size, time in zip(sizes, times, strict=True)])
    predicted = found.line(np.arange(0, 2 * 10**6, 997))
    assert predicted[0] >= 0
    assert np.all(np.diff(predicted) >= 0)


def test_the_same_points_in_any_order_give_the_same_fit():
    measured = points(two_lines, 0.1)
    assert fit(measured[::-1]) == fit(measured)


@pytest.mark.parametrize("times", [[], [0], [-5, 5], [float("nan")], [float("inf")]])
def test_times_that_are_none_are_refused(times):
    with pytest.raises(ProfileError, match="positive times in ns for an all-reduce of 1024 bytes"):
        point_of(1024, times)


def test_two_sizes_make_no_line():
    with pytest.raises(ProfileError, match="needs 3 sizes, the sweep has 2"):
        fit([SweepPoint(64, 5, 0, 1), SweepPoint(64, 6, 0, 1), SweepPoint(128, 7, 0, 1)])
