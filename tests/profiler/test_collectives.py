"""The lines of collectives: the sweep and its piecewise fit, and what collectives take in the step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.profiler.collectives import (
    InStep,
    Issued,
    SweepPoint,
    fit,
    in_step_by_kind,
    in_the_step,
    issued,
    point_of,
    sweep_sizes,
    with_bytes_of,
    with_latency_of,
    with_total_of,
)
from disco_hlo.profiler.keys import bodies_of, owners, travelling
from tests.modules import ADD, module_of

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


@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (0.02, 0), (0.02, 1), (0.1, 0), (0.1, 2)])
def test_one_line_is_found_as_one(noise, seed):
    found = fit(points(one_line, noise, seed))
    (piece,) = found.line.lines
    assert piece.ns_per_byte == pytest.approx(0.1, rel=0.01 + noise)
    assert piece.offset_ns == pytest.approx(20_000, rel=0.01 + noise)
    assert found.median_error <= 0.001 + noise


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.parametrize(
    ("line", "starts", "slopes"),
    [(two_lines, (0, 65_536), (0.5, 0.05)), (three_lines, (0, 32_768, 4 << 20), (0.2, 0.1, 0.3))],
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


@pytest.mark.parametrize(("index", "left_ns"), [(0, 1), (1, 1000), (12, 1), (35, 1000), (36, 1)])
def test_a_time_that_noise_left_nothing_of_does_not_take_the_line_with_it(index, left_ns):
    """Where compute is subtracted, a small all-reduce may seem to take 1 ns: of that, the others are a millionfold."""
    disturbed = list(points(one_line, 0.02))
    disturbed[index] = replace(disturbed[index], median_ns=left_ns)
    predicted = fit(disturbed).line(SIZES[:-3])
    assert predicted.tolist() == pytest.approx([one_line(size) for size in SIZES[:-3]], rel=0.05)


def test_the_fit_says_how_far_the_points_lie_from_it():
    times = ((1000, 1100), (2000, 2200), (4000, 4400), (8000, 8000))
    measured = [SweepPoint(size, time, 0, 3) for size, time in times]
    found = fit(measured)
    errors = [abs(found.line(point.size_bytes) / point.median_ns - 1) for point in measured]
    assert (found.maximum_error, found.median_error) == pytest.approx((max(errors), np.median(errors)))


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
    with pytest.raises(ProfileError, match="positive times in ns for a collective of 1024 bytes"):
        point_of(1024, times)


def test_two_sizes_make_no_line():
    with pytest.raises(ProfileError, match="needs 3 sizes, the sweep has 2"):
        fit([SweepPoint(64, 5, 0, 1), SweepPoint(64, 6, 0, 1), SweepPoint(128, 7, 0, 1)])


SWEPT = LinearPieces.of((0, 1.0, 2000.0), (5000, 2.0, 4000.0))


def bases(found: LinearPieces) -> list[float]:
    return [piece.offset_ns for piece in found.lines]


@pytest.mark.parametrize(
    ("fitted", "offsets_ns", "slopes"),
    [
        # Swept: 3 x 2100 + 1 x (2 x 6000 + 4000) = 22300. In the step they took 18300, 1000 less each.
        (with_latency_of(InStep(((100, 3), (6000, 1)), 18300, 5, 24), SWEPT), [1000, 3000], [1, 2]),
        (with_latency_of(InStep(((100, 2),), 6200, 5, 24), SWEPT), [3000, 5000], [1, 2]),
        (
            with_latency_of(InStep(((4000, 2),), 100, 5, 24), SWEPT),
            [0, 2000],
            [1, 2],
        ),  # no more than there is
        # Swept: 2 x 6000 + 4000 = 16000, of which 14000 are above the latency; half of that is there.
        (with_bytes_of(InStep(((6000, 1),), 22000, 5, 12), SWEPT), [2000, 4000], [2, 3]),
        (with_bytes_of(InStep(((6000, 1),), 9000, 5, 12), SWEPT), [2000, 3000], [0.5, 1]),
        # Swept: 2 x 2100 + 16000 = 20200.
        (with_total_of(InStep(((100, 2), (6000, 1)), 30300, 5, 12), SWEPT), [3000, 6000], [1.5, 3]),
    ],
    ids=["quicker", "slower", "less than the latency", "steeper", "flatter", "all of it"],
)
def test_what_collectives_take_in_the_step_changes_their_lines(
    fitted: LinearPieces, offsets_ns: list[int], slopes: list[float]
) -> None:
    assert bases(fitted) == offsets_ns
    assert [piece.ns_per_byte for piece in fitted.lines] == slopes


def test_no_bucket_is_quicker_than_the_latency() -> None:
    least = with_bytes_of(InStep(((6000, 1),), 1500, 5, 12), SWEPT)
    assert least([0, 6000, 10**9]).tolist() == [2000, 2000, 2000]


def test_sums_beyond_64_bits_do_not_wrap_around() -> None:
    """A file may say any number of any size: these took nothing, so nothing is left of the lines."""
    many = InStep(((100, 2), (1 << 61, 1 << 61)), 1, 0, 1)
    assert bases(with_latency_of(many, SWEPT)) == [0.0, 2000.0]
    assert with_bytes_of(many, SWEPT)([0, 100, 6000]).tolist() == [2000, 2000, 2000]


def test_sizes_told_apart_tell_a_slower_link_from_more_latency() -> None:
    """Collectives of 8 MiB were a tenth too fast with the rate of large ones."""
    counts = ((100, 2), (1000, 5), (6000, 1))  # 2100, 3000 and 16000 swept
    took = (1050 + 700, 1500 + 700, 8000 + 700)
    total_ns = sum(count * ns for (_, count), ns in zip(counts, took, strict=True))
    found = with_total_of(InStep(counts, total_ns, 5, 12, took), SWEPT)
    assert bases(found) == pytest.approx([1700.0, 2700.0])
    assert [piece.ns_per_byte for piece in found.lines] == pytest.approx([0.5, 1.0])
    # What would take less than nothing is no line: then the sum counts alone.
    steep = with_total_of(InStep(counts, 20_000, 5, 12, (1, 2000, 16_000)), SWEPT)
    assert steep == SWEPT.times(20_000 / (2 * 2100 + 5 * 3000 + 16_000))


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
    found = with_latency_of(InStep(tuple(sorted(Counter(sizes).items())), total_ns, 0, 12), SWEPT)
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
        (((8, 1),), 5, 0, 1, (5, 5)),
    ],
)
def test_what_cannot_be_is_refused(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(ProfileError, match="collectives take"):
        InStep(*wrong)


def test_two_traces_of_the_same_sizes_do_not_tell_latency_from_bytes():
    """Gathers are in buckets of one in either; noise of the second made a byte take a hundred times as long."""
    swept = LinearPieces.of((0, 1.0, 100.0))
    apart, together = InStep(((64, 4),), 4 * 200, 1, 12), InStep(((64, 4),), 4 * 9000, 4000, 12)
    assert in_the_step(swept, apart, together) == with_latency_of(apart, swept)


LOOP = f"""
HloModule jit_step, is_scheduled=true, num_partitions=2

{ADD}

%gathering (part: f32[4]) -> f32[8] {{
  %part = f32[4]{{0}} parameter(0)
  ROOT %inner = f32[8]{{0}} all-gather(%part), channel_id=1, replica_groups={{{{0,1}}}}, use_global_device_ids=true,
    dimensions={{0}}
}}, execution_thread="main"

%turn (state: (s32[], f32[8], f32[4])) -> (s32[], f32[8], f32[4]) {{
  %state = (s32[], f32[8]{{0}}, f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8]{{0}} get-tuple-element(%state), index=1
  %w = f32[4]{{0}} get-tuple-element(%state), index=2
  %begun = ((f32[4]{{0}}), f32[8]{{0}}) async-start(%w), async_execution_thread="main", calls=%gathering
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %whole = f32[8]{{0}} async-done(%begun)
  %y = f32[8]{{0}} add(%x, %whole)
  ROOT %out = (s32[], f32[8]{{0}}, f32[4]{{0}}) tuple(%next, %y, %w)
}}

%more (state: (s32[], f32[8], f32[4])) -> pred[] {{
  %state = (s32[], f32[8]{{0}}, f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %all = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %all), direction=LT
}}

ENTRY %main (p: f32[8], q: f32[4]) -> (f32[8], f32[8], f32[4]) {{
  %p = f32[8]{{0}} parameter(0)
  %q = f32[4]{{0}} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{{0}}, f32[4]{{0}}) tuple(%zero, %p, %q)
  %loop = (s32[], f32[8]{{0}}, f32[4]{{0}}) while(%start), condition=%more, body=%turn,
    backend_config={{"known_trip_count":{{"n":"3"}}}}
  %last = f32[8]{{0}} get-tuple-element(%loop), index=1
  %both = (f32[8]{{0}}, f32[4]{{0}}) all-reduce(%last, %q), channel_id=2, replica_groups={{{{0,1}}}},
    use_global_device_ids=true, to_apply=%add
  %big = f32[8]{{0}} get-tuple-element(%both), index=0
  %small = f32[4]{{0}} get-tuple-element(%both), index=1
  ROOT %out = (f32[8]{{0}}, f32[8]{{0}}, f32[4]{{0}}) tuple(%last, %big, %small)
}}
"""


def step() -> tuple[CanonicalModule, bytes]:
    module = module_of(LOOP)
    return canonicalize(module), module


def test_collectives_are_known_by_what_traces_call_them() -> None:
    source, module = step()
    (body,) = bodies_of(source)
    assert (body.turns, body.around, body.repeats) == (3, None, True)
    assert body.owner["inner"] == "begun"
    assert body.owner["y"] == "y"
    assert "less" not in body.owner, "of the condition"
    assert issued(body.canonical, body.owner) == (
        Issued(frozenset({"begun", "inner", "part"}), "all-gather", (32,)),
    )
    # XLA:CPU transfers the arrays of one all-reduce one after the other.
    (both,) = issued(source, owners(module))
    assert "both" in both.units
    assert (both.kind, both.sizes_bytes) == ("all-reduce", (32, 16))
    assert {str(kind): sorted(sizes) for kind, sizes in travelling(source).items()} == {
        "all-reduce": [16, 32],
        "all-gather": [32],
    }


def test_what_a_kind_takes_counts_every_turn() -> None:
    found = (
        Issued(frozenset({"begun", "inner"}), "all-gather", (32,)),
        Issued(frozenset({"both"}), "all-reduce", (32, 16)),
    )
    moved = {
        (run, "inner", turn): 10 + run + turn for run in range(3) for turn in range(3)
    } | {(run, "both", 0): 100 * (run + 1) for run in range(2)}  # fmt: skip
    assert in_step_by_kind(found, moved) == {
        "all-gather": InStep(((32, 3),), 36, 3, 3, (12,)),  # 33, 36 and 39
        "all-reduce": InStep(((16, 1), (32, 1)), 150, 50, 2),  # the third run was cut off
    }
