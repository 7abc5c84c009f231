"""The profile record, its file, and several profiles as one."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.profiler.collectives import CollectiveFit, InStep, SweepPoint, fit, in_the_step
from disco_hlo.profiler.profile import (
    Collectives,
    Contention,
    Link,
    LoopTime,
    OpTime,
    Platform,
    Profile,
    from_json,
    host_cpu_kind,
    load,
    merge,
    merged,
    save,
    to_json,
)

H200 = Platform("NVIDIA H200", "gpu", "580.159", "0.11.2", "0.11.2")
FIT = CollectiveFit(
    LinearPieces.of((0, 0.0, 9_000.0), (1 << 20, 0.007, 12_500.5)),
    (SweepPoint(1024, 9_000, 20, 9), SweepPoint(1 << 22, 41_000, 90, 9)),
    0.004,
    0.01,
)
PROFILE = Profile(
    platform=H200,
    ops={"abc": OpTime(1500, 20, 9), "g:0": OpTime(0, 0, 3)},
    launch_ns=900,
    memory_bandwidth=4.3e12,
    flops_per_s=3.9e14,
    all_reduce=FIT,
    link=Link(2, 2, "sockets"),
    contention=Contention(1.08, 1.3, 32_000, products=1.5, others=1.0, hold=0.5),
    holds={"abc": 0.97, "def": 0.0},
    noise=0.004,
    in_step=InStep(((64, 3), (4096, 1)), 34_000, 400, 24),
    together=InStep(((4288, 1),), 8_500, 300, 12),
    collectives={"all-gather": Collectives(FIT, None, InStep(((64, 32),), 9_000, 100, 5))},
    loops={"body": LoopTime(16, 300, -20)},
)


def body(**changes):
    found = json.loads(to_json(PROFILE))
    found.update(changes)
    return json.dumps(found)


def swept(lines, points=()):
    named = [dict(zip(("from_bytes", "ns_per_byte", "offset_ns"), line, strict=True)) for line in lines]
    fit = {"line": {"lines": named}, "points": points, "median_error": 0, "maximum_error": 0}
    return body(all_reduce=fit)


def test_a_profile_survives_its_json_and_equal_ones_give_equal_text():
    assert from_json(to_json(PROFILE)) == PROFILE
    bare = Profile(H200, {}, 0, 1e10, 1e11)
    assert from_json(to_json(bare)) == bare
    turned = {name: dict(reversed(getattr(PROFILE, name).items())) for name in ("ops", "holds")}
    assert to_json(replace(PROFILE, **turned)) == to_json(PROFILE)
    assert json.loads(to_json(PROFILE))["ops"] == {"abc": [1500, 20, 9], "g:0": [0, 0, 3]}


def test_a_kind_has_its_own_lines_or_those_that_a_ring_makes_of_all_reduces():
    gathers = CollectiveKind("all-gather")
    bare = replace(PROFILE, together=None, collectives={})
    assert bare.line(ALL_REDUCE) == FIT.line
    assert bare.line(gathers) == FIT.line.over(0.5)
    own = replace(FIT, line=FIT.line.times(3.0))
    assert replace(bare, collectives={"all-gather": Collectives(own)}).line(gathers) == own.line
    # Nobody swept them, but the step shows two of 64 bytes that take twice as long as the ring has it.
    took = InStep(((64, 2),), 4 * int(FIT.line.over(0.5)(64)), 1, 5)
    found = replace(bare, collectives={"all-gather": Collectives(together=took)}).line(gathers)
    assert found(64) == pytest.approx(2 * FIT.line.over(0.5)(64), abs=1)
    assert replace(bare, all_reduce=None).line(gathers) is None


def test_a_profile_of_another_version_is_refused_in_one_line():
    for version in (8, 10, None):
        with pytest.raises(ProfileError, match=rf"expected a disco-hlo profile of version 9, .*{version}"):
            from_json(body(version=version))


def test_transfers_on_cpu_have_the_latency_of_the_step_where_it_is_known():
    profile = replace(PROFILE, platform=replace(H200, backend="cpu"))
    assert replace(profile, in_step=None, together=None).transfers == FIT.line
    found = replace(profile, together=None).transfers
    assert found is not None
    # 4 x 9000 swept, 34000 in the step: 500 less each
    assert [line.offset_ns for line in found.lines] == [8_500.0, 12_000.5]
    assert profile.transfers == in_the_step(FIT.line, profile.in_step, profile.together)
    assert replace(profile, all_reduce=None).transfers is None


def test_transfers_on_a_gpu_are_as_much_slower_as_those_of_the_step():
    assert replace(PROFILE, together=None).transfers == FIT.line
    slower = replace(PROFILE, together=InStep(((4288, 2),), 27_000, 300, 12)).transfers
    assert slower is not None
    assert [line.offset_ns for line in slower.lines] == [13_500.0, 18_750.75]


def test_a_file_round_trip_leaves_nothing_else(tmp_path):
    path = tmp_path / "deep" / "h200.json"
    save(PROFILE, path)
    save(PROFILE, path)
    assert load(path) == PROFILE
    assert os.listdir(path.parent) == ["h200.json"]


def test_files_that_cannot_be_written_or_read_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot write the profile"):
        save(PROFILE, tmp_path / "file" / "h200.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.json", "binary.json"):
        with pytest.raises(ProfileError, match="cannot read the profile"):
            load(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a profile as JSON"),
        (to_json(PROFILE)[:200], "expected a profile as JSON"),
        ("[" * 100_000, "as JSON: something in it is nested too deep"),
        ("[]", "expected a disco-hlo profile of version 9, got format None"),
        ('{"format": "something else"}',
            "expected a disco-hlo profile of version 9, got format 'something else'"),
        (body(platform={**json.loads(body())["platform"], "backend": "tpu"}), "this is one of 'tpu'"),
        (body(holds={"abc": 1.5}), r"Expected `float` <= 1.0 - at `\$.holds\[...\]`"),
        (body(contention={"compute": 1.1, "communication": 1.2, "products": 2.0}),
            "a slow-down factor of matmuls and of others, or neither, is expected"),
        (body(launch_ns=-1), r"Expected `int` >= 0 - at `\$.launch_ns`"),
        (body(launch_ns=1.5), r"\$.launch_ns"),
        (body(launch_ns=True), r"\$.launch_ns"),
        (body(memory_bandwidth=0), r"\$.memory_bandwidth"),
        (body(memory_bandwidth=float("nan")), "JSON is malformed"),
        (body(memory_bandwidth=3350), r"Expected `float` >= 10000000.0 - at `\$.memory_bandwidth`"),
        (body(memory_bandwidth=4e24), r"\$.memory_bandwidth"),
        (body(flops_per_s=989.0), r"\$.flops_per_s"),
        (body(flops_per_s=10**400), "out of range"),
        (body(noise="small"), r"\$.noise"),
        (body(ops={"abc": [5, -1, 3]}), r"Expected `int` >= 0 - at `\$.ops\[...\]\[1\]`"),
        (body(ops={"abc": [1 << 80, 1, 3]}), r"\$.ops\[...\]\[0\]"),
        (body(ops={"abc": [5, 1, 0]}), r"\$.ops\[...\]\[2\]"),
        (body(ops={"abc": [5, 1]}), "length 3"),
        (body(ops=[]), r"Expected `object`, got `array` - at `\$.ops`"),
        (body(in_step=[]), r"\$.in_step"),
        (body(in_step={"sizes": [], "total_ns": 1, "spread_ns": 0, "samples": 1}), "not what a step's"),
        (body(in_step={"sizes": [[64, 1], [8, 1]], "total_ns": 1, "spread_ns": 0, "samples": 1}),
            "not what a step's collectives take"),
        (body(in_step={"sizes": [[64, 0]]}), r"Expected `int` >= 1 - at `\$.in_step.sizes"),
        (body(in_step={"sizes": [[64, 1]], "total_ns": 0}), r"\$.in_step.total_ns"),
        (body(together={"sizes": [[64, 0]]}), r"\$.together.sizes"),
        (body(platform=None), r"\$.platform"),
        (body(platform={"device_kind": 3}), r"\$.platform.device_kind"),
        (body(link={"device_count": 0, "process_count": 1, "label": ""}), r"\$.link.device_count"),
        (body(contention={"compute": 0.5, "communication": 1}), r"\$.contention.compute"),
        (body(contention={"compute": 1, "communication": 1, "transfer_wait_ns": -1}),
            r"\$.contention.transfer_wait_ns"),
        (swept([]), r"start at \[\] bytes"),
        (swept([[5, 1, 1]]), r"start at \[5\] bytes, expected ascending sizes from 0"),
        (swept([[0, 1, 1], [0, 1, 1]]), r"start at \[0, 0\] bytes"),
        (swept([[0, 1, -1]]), "no negative time"),
        (swept([[0, -1, 1]]), "ns_per_byte"),
        (swept([[0, 1, 1]], points=[[1, 0, 0, 1]]), r"\$.all_reduce.points\[0\]\[1\]"),
        (swept([[0, 1, 1]], points=4), r"\$.all_reduce.points"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_with_the_place(text, message):
    with pytest.raises(ProfileError, match=message) as caught:
        from_json(text, "bad.json")
    assert str(caught.value).startswith("bad.json")


def test_a_profile_of_another_device_is_refused():
    PROFILE.require("NVIDIA H200", "gpu")
    with pytest.raises(ProfileError, match=r"taken on NVIDIA H200 \(gpu\), this is NVIDIA A100 \(gpu\)"):
        PROFILE.require("NVIDIA A100", "gpu")


def test_merging_takes_the_median_by_samples():
    times = [OpTime(100, 4, 10), OpTime(110, 6, 10), OpTime(900, 1, 3)]
    assert merged(times) == OpTime(110, 10, 23)
    assert merged(times[:1]) == OpTime(100, 4, 10)


def test_the_cpu_kind_counts_cores():
    assert host_cpu_kind().endswith(f"{len(os.sched_getaffinity(0))} cores")


PLATFORM = Platform("NVIDIA H200", "gpu", "cuda 13000", "0.11.2", "0.11.2")
LINE = tuple(SweepPoint(size, 1000 + size, 5, 7) for size in (1024, 2048, 4096))


def profile(ops: dict[str, OpTime], contention: Contention | None = None) -> Profile:
    link = Link(2, 1, "NCCL_P2P_DISABLE=1")
    return Profile(PLATFORM, ops, 900, 4e12, 4e14, fit(LINE), link, contention, noise=0.01)


def test_ops_rates_and_sweeps_of_several_profiles_are_merged():
    first = profile({"dot": OpTime(100, 2, 5), "tanh": OpTime(10, 1, 5)})
    found = merge([first, profile({"dot": OpTime(110, 2, 5), "exp": OpTime(20, 1, 5)})])
    assert found.ops == {"dot": OpTime(105, 5, 10), "exp": OpTime(20, 1, 5), "tanh": OpTime(10, 1, 5)}
    # What two profiles read from one store counts once.
    found = merge([first, first, profile({"dot": OpTime(130, 2, 5)})])
    assert found.ops["dot"] == OpTime(115, 15, 10)
    assert found.all_reduce == first.all_reduce
    # Rates are medians, and the noise is the largest.
    others = [replace(profile({}), launch_ns=ns, noise=noise) for ns, noise in ((800, 0.02), (2000, 0.3))]
    found = merge([profile({}), *others])
    assert (found.launch_ns, found.noise, found.memory_bandwidth) == (900, 0.3, 4e12)
    longer = tuple(SweepPoint(size, 1000 + size, 5, 7) for size in (8192, 16384, 32768))
    found = merge([profile({}), replace(profile({}), all_reduce=fit(longer))])
    assert [point.size_bytes for point in found.all_reduce.points] == [1024 << power for power in range(6)]


def test_slow_downs_that_no_trace_showed_do_not_count():
    told, silent = Contention(1.25, 1.5), Contention(1.0, 1.0)
    by_kind = [Contention(1.5, 1.5, products=products, others=1.0) for products in (2.0, 4.0)]
    waiting = Contention(1.5, 1.5, 30_000), Contention(1.5, 1.25, 50_001)
    for several, expected in (
        ((silent, told, None), told),
        ((told, Contention(1.5, 1.25)), Contention(1.375, 1.375)),
        ((silent,), silent),
        ((Contention(1.25, 3.0), *waiting), Contention(1.5, 1.375, 40_000)),
        ((told, *by_kind), Contention(1.5, 1.5, products=3.0, others=1.0)),
        ((None,), None),
    ):
        assert merge([profile({}, one) for one in several]).contention == expected


def test_what_one_steps_all_reduces_took_is_merged_and_of_several_steps_nothing_is_said() -> None:
    def took(total_ns: int, size: int = 64) -> Profile:
        return replace(profile({}), in_step=InStep(((size, 2),), total_ns, 4, 24))

    assert merge([took(100), profile({}), took(130)]).in_step == InStep(((64, 2),), 115, 15, 48)
    assert merge([took(100), took(100)]).in_step == InStep(((64, 2),), 100, 4, 24)
    assert merge([took(100), took(100, size=128)]).in_step is None
    assert merge([profile({})]).in_step is None
    together = [InStep(((128, 1),), ns, 4, 12) for ns in (60, 80)]
    both = merge([replace(took(100), together=one) for one in together])
    assert (both.in_step, both.together) == (InStep(((64, 2),), 100, 4, 24), InStep(((128, 1),), 70, 10, 24))


def test_profiles_of_different_links_or_platforms_are_refused():
    for other in ({"link": Link(4, 1)}, {"platform": replace(PLATFORM, jaxlib="0.12.0")}):
        with pytest.raises(ProfileError, match="one platform and link"):
            merge([profile({}), replace(profile({}), **other)])
    with pytest.raises(ProfileError, match="no profile to merge"):
        merge([])
