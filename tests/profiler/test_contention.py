"""What kernels and transfers cost each other, and which devices are uneven: traces drawn by hand."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.profiler.collectives import InStep, Issued, in_step_by_kind
from disco_hlo.profiler.contention import (
    SlowDowns,
    computed_ns,
    contention,
    gap_in_step_ns,
    holds,
    launch_gap_ns,
    slow_downs,
    transfer_launch_ns,
    undisturbed,
    uneven,
)
from disco_hlo.profiler.profile import Contention
from disco_hlo.profiler.trace import Execution, Trace, least, moved_ns


def trace(*kernels: tuple[str, int, int], device: int = 0, run: int = 0) -> Trace:
    """Kernels as (instruction, start, end) in microseconds; instructions called b..., or loop2_b..., are transfers."""
    return Trace(
        tuple(
            Execution(
                op, "jit_step", run, device, 1000 * start, 1000 * end,
                "ncclDevKernel_AllReduce" if op.removeprefix("loop2_").startswith("b") else f"{op}_kernel",
            )
            for op, start, end in sorted(kernels, key=lambda kernel: kernel[1])
        ),
        (),
    )  # fmt: skip


def both(*traces: Trace) -> Trace:
    return Trace(tuple(item for one in traces for item in one.executions), ())


ALONE = trace(("g0", 0, 100), ("b0", 100, 200), ("g1", 200, 240), ("g2", 240, 300))


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        # Kernels are held against themselves alone, and so is the transfer.
        (
            [("g0", 0, 100), ("b0", 100, 230), ("g1", 105, 155), ("g2", 155, 227)],
            (122 / 100, 122 / (122 - 30)),
        ),
        # 30 of the 45 us that g2 shares are lost: it takes another round of thread blocks.
        ([("g0", 0, 100), ("b0", 100, 200), ("g1", 105, 155), ("g2", 155, 245)], (95 / (40 + 15), 1.0)),
        # A kernel with hardly anything beside it does not count,
        ([("g0", 0, 100), ("b0", 100, 200), ("g1", 105, 155), ("g2", 198, 400)], (50 / 40, 1.0)),
        # and a transfer with little beside it tells of noise only.
        ([("b0", 100, 900), ("g1", 105, 155), ("g2", 155, 230)], (125 / 100, 1.0)),
        # No slow-down is less than none.
        ([("b0", 100, 180), ("g1", 105, 135)], (1.0, 1.0)),
    ],
)
def test_what_ran_beside_each_other_is_held_against_itself_alone(
    beside: list[tuple[str, int, int]], expected: tuple[float, float]
) -> None:
    assert contention(ALONE, trace(*beside), "jit_step") == Contention(*expected)
    assert contention(ALONE, ALONE, "jit_step") is None, "a link too fast to disturb anything says nothing"


def test_a_kernel_that_lost_to_a_transfer_is_as_long_as_it_would_be_alone() -> None:
    called = trace(("g0", 0, 100), ("b0", 90, 150), ("g1", 100, 150), ("g2", 150, 200))
    found = undisturbed(called, "jit_step", moved_ns(called, "jit_step"), Contention(1.25, 1.0))
    assert [(one.op, one.end_ns - one.start_ns) for one in found.executions] == [
        ("g0", 98_000), ("b0", 60_000), ("g1", 40_000), ("g2", 50_000),
    ]  # fmt: skip
    # Of a transfer that waits for the other device nothing is lost.
    late = undisturbed(called, "jit_step", {(0, "b0", 0): 10_000}, Contention(1.25, 1.0))
    assert [one.end_ns - one.start_ns for one in late.executions] == [100_000, 60_000, 48_000, 50_000]


def test_a_machine_that_was_slower_in_one_of_the_traces_is_no_contention() -> None:
    # Everything takes a tenth longer in the second; g1 beside b0, 60 of its 143 us, loses 33.
    alone = trace(("g0", 0, 2000), ("b0", 2000, 2060), ("g1", 2060, 2160))
    beside = trace(("g0", 0, 2200), ("b0", 2200, 2260), ("g1", 2200, 2343))
    assert contention(alone, beside, "jit_step") == Contention(pytest.approx(60 / (60 - 33)), 1.0)


def test_what_products_lose_is_told_apart_from_what_others_lose() -> None:
    # g1, a product, loses 30 of 60 us beside b0, g2 nothing of 60.
    alone = trace(("g0", 0, 100), ("b0", 100, 200), ("g1", 200, 230), ("g2", 230, 290))
    beside = trace(("g0", 0, 100), ("b0", 100, 220), ("g1", 100, 160), ("g2", 160, 220))
    found = contention(alone, beside, "jit_step", products={"g1"})
    assert found == Contention(120 / 90, 1.2, 0, products=60 / 30, others=1.0)
    assert contention(alone, beside, "jit_step") == Contention(120 / 90, 1.2)
    little = trace(("g0", 0, 100), ("b0", 100, 220), ("g1", 100, 160), ("g2", 210, 270))
    unknown = contention(alone, little, "jit_step", products={"g1"})
    assert unknown is not None
    # g2, with 10 us, says nothing of others: they go by all kernels, of which it is one.
    assert (unknown.compute, unknown.products, unknown.others) == (70 / 40, 60 / 30, 70 / 40)


def test_products_of_which_nothing_is_known_are_not_believed_to_lose_more_than_others_can() -> None:
    # g1, no product, loses 48 of 60 us beside b0, and nothing else is there.
    alone = trace(("g0", 0, 100), ("b0", 100, 200), ("g1", 200, 212), ("g2", 212, 290))
    beside = trace(("g0", 0, 100), ("b0", 100, 160), ("g1", 100, 160), ("g2", 160, 238))
    found = contention(alone, beside, "jit_step", products={"g2"})
    assert found == Contention(5.0, 1.0, 0, products=2.0, others=5.0)


def test_of_a_transfer_the_time_of_the_last_device_counts() -> None:
    early = trace(("g0", 0, 50), ("b0", 50, 220), ("g1", 60, 100), ("g2", 100, 160), device=1)
    late = trace(("g0", 0, 100), ("b0", 100, 220), ("g1", 105, 145), ("g2", 145, 205))
    assert contention(ALONE, both(early, late), "jit_step") == Contention(1.0, 100 / (100 - 20))


VARIED_US = (20, 25, 30, 45, 70, 90, 130, 180, 260, 400)


def steps(alone_us: Sequence[float], beside_us: Sequence[float]) -> tuple[Trace, Trace]:
    """Transfers alone, and each right behind the other under one kernel that takes as long as all of them."""

    def one(times_us: Sequence[float], kernel_us: Sequence[float]) -> Trace:
        kernels, now = [], 0
        for i, (us, under) in enumerate(zip(times_us, kernel_us, strict=True)):
            kernels.append((f"b{i}", now, now + round(us)))
            now += round(us) if under else round(us) + 10
        kernels += [("g0", 0, now)] if any(kernel_us) else [("g0", now, now + round(sum(beside_us)))]
        return trace(*kernels)

    return one(alone_us, [0] * len(alone_us)), one(beside_us, [1] * len(beside_us))


@pytest.mark.parametrize(
    ("times", "factor", "wait_us"),
    [(1, 1.5, 30), (1, 1.0, 60), (10, 1.5, 0)],
    ids=["both", "wait", "slow-down"],
)
def test_transfers_of_many_sizes_tell_their_wait_from_their_slow_down(
    times: int, factor: float, wait_us: int
) -> None:
    alone_us = [times * us for us in VARIED_US]
    found = contention(*steps(alone_us, [wait_us + factor * us for us in alone_us]), "jit_step")
    assert found is not None
    assert found.communication == pytest.approx(factor, abs=0.02)
    assert found.transfer_wait_ns == pytest.approx(1000 * wait_us, abs=1000)


@pytest.mark.parametrize("seed", range(6))
def test_noise_and_disturbed_transfers_leave_wait_and_slow_down_near_and_the_sum_right(seed: int) -> None:
    random = Random(seed)
    alone = [random.choice(VARIED_US) for _ in range(60)]
    beside = [(40 + 1.5 * us) * random.uniform(0.9, 1.1) for us in alone]
    beside[7] *= 2
    found = contention(*steps(alone, beside), "jit_step")
    assert found is not None
    assert found.communication == pytest.approx(1.5, abs=0.15)
    assert found.transfer_wait_ns == pytest.approx(40_000, abs=12_000)
    explained_ns = 1000 * found.communication * sum(alone) + found.transfer_wait_ns * len(alone)
    assert explained_ns == pytest.approx(1000 * sum(beside), rel=0.01)


@pytest.mark.parametrize(
    "alone_us",
    [
        [100.0] * 12,  # all of one size
        [100.0] * 11 + [400.0],  # all but one
        [20, 40, 80, 100, 140, 200, 400],  # few
    ],
)
def test_from_transfers_alike_or_few_only_a_slow_down_is_read(alone_us: list[float]) -> None:
    beside_us = [60 + us for us in alone_us]
    found = contention(*steps(alone_us, beside_us), "jit_step")
    assert found == Contention(1.0, pytest.approx(sum(beside_us) / sum(alone_us)), 0)


def test_a_wait_that_explains_no_more_than_noise_is_not_believed() -> None:
    # Every other one takes 40 % longer or shorter than 1.5 times alone: the line that fits best begins above 0.
    beside_us = [us * (2.1 if i % 2 else 0.9) for i, us in enumerate(VARIED_US[::-1])]
    found = contention(*steps(VARIED_US[::-1], beside_us), "jit_step")
    assert found is not None
    assert found.transfer_wait_ns == 0


def test_what_lies_between_two_collectives_is_read_where_nothing_runs_meanwhile() -> None:
    # Behind b0 lies a launch; b2 came behind g0's thread blocks, b3 had to be issued first.
    beside = trace(
        ("b0", 0, 50), ("b1", 54, 100), ("g0", 60, 110), ("b2", 112, 150), ("b3", 900, 950), ("b4", 956, 960),
        ("g1", 957, 990),
    )  # fmt: skip
    assert transfer_launch_ns(beside, "jit_step") == 5000  # of 4 and 6 us
    assert transfer_launch_ns(ALONE, "jit_step") == 0
    alone = trace(("b0", 0, 50), ("b1", 60, 100), ("g0", 110, 150))
    beside = trace(("b0", 0, 60), ("b1", 64, 110), ("g0", 66, 106))
    found = contention(alone, beside, "jit_step")
    assert found is not None
    assert found.transfer_launch_ns == 4000


def test_a_number_that_xla_added_to_a_name_does_not_matter() -> None:
    alone = trace(("b0.all-reduce.1", 100, 200), ("g1_fusion", 200, 240), ("g2_fusion", 240, 300))
    beside = trace(("b0.all-reduce", 100, 230), ("g1_fusion.3", 105, 155), ("g2_fusion", 155, 227))
    assert contention(alone, beside, "jit_step") == Contention(122 / 100, 122 / (122 - 30))


@pytest.mark.parametrize(
    ("kernels", "gap_ns"),
    [
        ([("g0", 0, 10), ("g1", 11, 20), ("g2", 23, 30), ("g3", 80, 90)], 2000),  # a wait is no gap,
        (
            [("g0", 0, 10), ("b0", 15, 18), ("g1", 19, 20), ("g2", 21, 30)],
            1000,
        ),  # nor what is beside a transfer,
        ([("g0", 0, 10), ("g1", 5, 8), ("g2", 12, 30)], 2000),  # and kernels that overlap leave none
    ],
)
def test_the_gap_between_kernels_is_the_mean_of_launches(
    kernels: list[tuple[str, int, int]], gap_ns: int
) -> None:
    assert launch_gap_ns(trace(*kernels), "jit_step") == gap_ns


def test_what_a_step_takes_beyond_its_kernels_is_shared_out_among_them() -> None:
    first = both(
        trace(("g0", 0, 10), ("b0", 12, 20), ("g1", 22, 30)),
        trace(("g0", 0, 11), ("b0", 13, 19), ("g1", 22, 30), device=1),
    )
    second = trace(("g0", 0, 12), ("b0", 12, 18), ("g1", 17, 25), run=1)  # as long together
    third = trace(("g0", 0, 10), ("b0", 12, 20), ("g1", 22, 31), run=2)
    assert gap_in_step_ns(both(first, second, third), "jit_step", 30_000) == 2000
    assert gap_in_step_ns(third, "jit_step", 26_000) == 0
    with pytest.raises(ProfileError, match="holds nothing of jit_other"):
        gap_in_step_ns(third, "jit_other", 30_000)


def test_an_instruction_is_launched_once_and_a_loop_with_each_of_its_kernels() -> None:
    # g0 has two kernels, the loop's body three: 1 + 3 launches of the 8 us that are left.
    one = trace(("g0", 0, 10), ("g0", 11, 20), ("in_0", 22, 24), ("in_0", 25, 27), ("in_1", 28, 30))
    assert gap_in_step_ns(one, "jit_step", 33_000, {"in_0": "n3_while", "in_1": "n3_while"}) == 2000


def test_what_is_no_launch_does_not_count_for_one() -> None:
    # Of a step that is mostly transfers the rest says what these took longer; 30 us is a wait.
    kernels = ("g0", 0, 10), ("g1", 20, 30)
    assert gap_in_step_ns(trace(*kernels, ("b0", 30, 70)), "jit_step", 64_000) is None
    assert gap_in_step_ns(trace(*kernels), "jit_step", 24_000) == 2000
    assert gap_in_step_ns(trace(*kernels), "jit_step", 80_000) is None


def test_a_step_on_a_device_that_lowers_its_clock_tells_nothing_of_launches() -> None:
    """What bert took on it beyond a median run was shared out as 12.5 us for each of its launches."""
    steady = [trace(("g0", 0, 1000), ("g1", 1002, 2000), run=run) for run in range(3)]
    slower = trace(("g0", 0, 1400), ("g1", 1402, 2400), run=3)
    assert gap_in_step_ns(both(*steady), "jit_step", 2_008_000) == 5000
    assert gap_in_step_ns(both(*steady, slower), "jit_step", 2_008_000) is None


def test_a_trace_of_another_module_is_refused() -> None:
    with pytest.raises(ProfileError, match="holds no two kernels of jit_other in a row"):
        launch_gap_ns(ALONE, "jit_other")


BUCKETS = (Issued(frozenset({"b0"}), "all-reduce", (256,)), Issued(frozenset({"b1"}), "all-reduce", (64,)))


def test_buckets_take_what_they_take_on_the_device_that_arrives_last() -> None:
    early = trace(("g0", 0, 50), ("b0.all-reduce", 50, 220), ("b1", 300, 340), device=1)
    late = trace(("g0", 0, 100), ("b0.all-reduce.3", 100, 220), ("b1", 290, 340), ("n7.all-gather", 400, 500))
    second = trace(("b0", 600, 700), ("b1", 700, 730), run=1)
    cut_off = trace(("b0", 900, 1000), run=2)
    found = in_step_by_kind(BUCKETS, moved_ns(both(early, late, second, cut_off), "jit_step"))
    total_ns, each_ns = (160_000 + 130_000) // 2, (35_000, 110_000)
    assert found == {"all-reduce": InStep(((64, 1), (256, 1)), total_ns, 15_000, 2, each_ns)}
    assert in_step_by_kind(BUCKETS, moved_ns(ALONE, "jit_other")) == {}


def test_processes_with_a_device_each_tell_one_another_how_long_transfers_wait() -> None:
    """Rank 0's kernels are faster; its transfers waited for the other's, and were taken to be as long as that."""
    alone = [
        trace(("g0", 0, us), ("b0", us, 200), ("g1", 200, 240), ("g2", 240, 300), device=0)
        for us in (90, 100)
    ]
    beside = [
        trace(("b0", begins, 130), ("g1", 5, 55), ("g2", 55, 127), ("g0", 140, 140 + us), device=0)
        for begins, us in ((-20, 90), (0, 100))
    ]
    moved = tuple(least([moved_ns(one, "jit_step") for one in traces]) for traces in (alone, beside))
    told = [in_step_by_kind(BUCKETS[:1], one)["all-reduce"].total_ns for one in moved]
    assert told == [100_000, 130_000]
    fast, slow = (contention(*pair, "jit_step", moved=moved) for pair in zip(alone, beside, strict=True))  # type: ignore[arg-type]
    assert fast == slow == contention(alone[1], beside[1], "jit_step")
    assert fast != contention(alone[0], beside[0], "jit_step")


def on_both(*kernels: tuple[str, int, int], run: int = 0) -> Trace:
    return both(*(trace(*kernels, device=device, run=run) for device in (0, 1)))


BOTH_ALONE = on_both(("p0", 0, 100), ("b0", 100, 160), ("g1", 160, 260))


def lost(beside: Trace) -> SlowDowns:
    return slow_downs(BOTH_ALONE, beside, "jit_step", "jit_step", {"p0"}, moved_ns(beside, "jit_step"))


def test_a_product_counts_if_a_transfer_was_there_when_it_began() -> None:
    found = lost(on_both(("b0", 0, 80), ("p0", 1, 131)))
    assert found.products == pytest.approx(79 / (79 - 30))
    later = lost(on_both(("p0", 0, 110), ("b0", 40, 120)))
    assert later.products is None
    assert later.all_kernels == pytest.approx(70 / (70 - 10))


def test_a_transfer_is_there_when_a_product_begins_if_it_needs_but_its_launch() -> None:
    """vgg19 over NVLink: 3 us behind a product whose time it took by 1.3 ms."""
    found = lost(on_both(("p0", 0, 130), ("b0", 3, 83)))
    assert found.products == pytest.approx(80 / (80 - 30))


def test_what_a_kernel_loses_to_a_transfer_that_waits_counts_by_the_time_in_which_data_moves() -> None:
    """The transfer is 60 us early on the first device, and costs its product 20 us there, nothing on the other."""
    early = trace(("b0", 0, 120), ("p0", 1, 121))
    late = trace(("b0", 60, 120), ("g1", 61, 161), device=1)
    found = lost(both(early, late))
    assert found.products == pytest.approx(60 / (60 - 20))
    assert found.others == pytest.approx(1.0)


def test_a_product_takes_twice_its_time_at_most() -> None:
    """One more round of thread blocks, whatever it shared with the transfer."""
    found = lost(on_both(("b0", 0, 80), ("p0", 1, 171)))
    assert found.products == 2.0
    assert found.all_kernels == pytest.approx(79 / (79 - 70))


def test_one_disturbed_run_does_not_matter() -> None:
    runs = [on_both(("b0", 0, 80), ("p0", 1, 101 + us), run=run) for run, us in enumerate((30, 32, 900))]
    assert lost(both(*runs)).products == pytest.approx(79 / (79 - 32))


ORDER = ("n1", "b0.start", "n2", "b0.done", "n3")
Row = tuple[str, int, int]


def one_run(*devices: Sequence[Row]) -> Trace:
    """One run, by device."""
    named = [[(f"{op}_kernel", start, end) for op, start, end in rows] for rows in devices]
    return both(*(trace(*rows, device=device) for device, rows in enumerate(named)))


def one(transfer_at: int, before: int = 0) -> list[Row]:
    """A product of 100 us that begins at 50; the transfer could begin ``before`` us earlier."""
    return [("n1", 0, 50 - before), ("n2", 50, 150), ("b0", transfer_at, transfer_at + 40), ("n3", 200, 210)]


@pytest.mark.parametrize(
    ("devices", "share"),
    [([one(137, before=1)], 0.87), ([one(50)], 0.0), ([one(51)], 0.0), ([one(51), one(140)], 0.9)],
    ids=["behind the last wave", "at once", "a launch is no hold", "the device that lets it in last decides"],
)
def test_a_transfer_shows_how_long_a_product_holds_it(devices: list[list[Row]], share: float) -> None:
    assert holds(one_run(*devices), "jit_step", ORDER) == {"n2": pytest.approx(share)}


def test_a_transfer_whose_turn_comes_beside_a_kernel() -> None:
    order = ("n1", "b0.start", "b1.start", "n2", "b0.done", "b1.done", "n3")
    held = [("n1", 0, 50), ("b0", 50, 70), ("n2", 50, 150), ("b1", 140, 160), ("n3", 200, 210)]
    # The first at once, the other late.
    assert holds(one_run(held), "jit_step", order)["n2"] == pytest.approx(0.45)
    # What begins at once late in a kernel may do so behind its hold.
    late = [("n1", 0, 50), ("b0", 45, 120), ("n2", 50, 150), ("b1", 122, 140), ("n3", 200, 210)]
    assert holds(one_run(late), "jit_step", ("b0.start", *order[2:])) == {}


def test_short_kernels_and_kernels_of_other_modules_tell_nothing() -> None:
    short = [("n1", 0, 50), ("n2", 50, 60), ("b0", 58, 90), ("n3", 100, 110)]
    assert holds(one_run(short), "jit_step", ORDER) == {}
    assert holds(one_run(one(137)), "jit_other", ORDER) == {}


def test_each_turn_of_a_loop_shows_what_its_products_hold() -> None:
    """On H200s the one product of a scanned step's entry held nothing in one profile, three quarters in the next, and
    bodies were not looked at."""
    turns = [(137, 0), (1139, 1000), (2138, 2000)]
    rows = [
        (f"loop2_{op}", at + start, at + end)
        for begins_at, at in turns
        for op, start, end in (("n1", 0, 20), ("n1", 25, 49), *one(begins_at - at, before=1)[1:])
    ]
    elsewhere = [("n2", 3000, 3100), ("loop1_n2", 3200, 3300), ("loop2_2_n2", 3400, 3500)]
    beside = one_run([*rows, *elsewhere])
    assert holds(beside, "jit_step", ORDER, "loop2_") == {"n2": pytest.approx(0.88)}
    assert holds(beside, "jit_step", ORDER) == {}
    assert holds(beside, "jit_step", ORDER, "loop3_") == {}


def test_what_unpacks_a_bucket_holds_nothing() -> None:
    """Its name begins with the number of a collective, as if it were a unit: of a loop with a bucket of two gradients
    there was no profile, but a KeyError."""
    rows = [("n9_unpack", 50, 150), *one(137)]
    turns = [(f"loop2_{op}", at + start, at + end) for at in (0, 1000) for op, start, end in rows]
    order = ("n1", "b0.start", "n2", "b0.done", "n3")
    unpacks = [("n1", 0, 50), ("n9_unpack", 50, 150), ("b0", 137, 160), ("n3", 200, 210)]
    assert holds(one_run(unpacks), "jit_step", order) == {}
    assert set(holds(one_run(turns), "jit_step", order, "loop2_")) == {"n2"}


def test_a_unit_that_did_not_run_alike_in_all_turns_tells_nothing() -> None:
    rows = [
        (f"loop2_{op}", at + start, at + end) for at in (0, 1000) for op, start, end in one(137, before=1)
    ]
    assert holds(one_run([*rows, ("loop2_n2", 1150, 1160)]), "jit_step", ORDER, "loop2_") == {}


H100S = {
    "device 0": [47_950_000, 51_240_000, 49_740_000, 46_960_000, 79_950_000],
    "device 1": [45_430_000, 45_390_000, 45_400_000, 45_350_000, 45_460_000],
}
"""bert's kernels on two H100s, 2026-11-25."""


def test_two_gpus_of_which_one_lowers_its_clock_are_uneven() -> None:
    found = uneven(H100S)
    assert found is not None
    assert str(found) == (
        "the step's kernels take 46.96 ms to 79.95 ms on device 0, 45.35 ms to 45.46 ms on device 1"
    )


def test_two_gpus_that_are_well_are_even() -> None:
    """transformer's kernels on the same pair, minutes later."""
    steady = [15_800_000, 15_840_000, 15_770_000], [15_900_000, 15_890_000, 15_910_000]
    assert uneven(dict(zip(("device 0", "device 1"), steady, strict=True))) is None
    assert uneven({"device 0": [10_000_000], "device 1": [10_500_000]}) is None
    assert uneven({"device 0": [10_000_000], "device 1": [10_600_000]}) is not None
    assert uneven({"device 0": [50_000], "device 1": [60_000]}) is None  # of a step of 50 us that is little
    assert uneven({}) is None


def test_a_device_that_is_slow_now_and_then_is_uneven_though_its_median_is_not() -> None:
    found = uneven({"device 0": [900_000, 900_000, 900_000], "device 1": [900_000, 900_000, 1_200_000]})
    assert found is not None
    assert (found.slow, found.fast) == ("device 1", "device 0")
    alone = uneven({"device 0": [1_000_000, 1_000_000, 1_300_000]})
    assert str(alone) == "the step's kernels take 1 ms to 1.3 ms on device 0"


def test_waiting_in_a_transfer_is_no_computing() -> None:
    """The faster device waits there for the slower one."""
    step = ("n1_dot", 0, 10), ("b0.all-reduce.1", 10, 40), ("g0_fusion", 40, 45)
    runs = both(on_both(*step), on_both(*step, run=1))
    assert computed_ns(runs, "jit_step") == {"device 0": [15_000, 15_000], "device 1": [15_000, 15_000]}
    assert computed_ns(runs, "jit_b") == {}
