"""Several profiles of one machine as one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.profiler.collectives import InStep, SweepPoint, fit
from disco_hlo.profiler.profile import Contention, Link, OpTime, Platform, Profile, merge

PLATFORM = Platform("NVIDIA H200", "gpu", "cuda 13000", "0.11.2", "0.11.2")
LINE = tuple(SweepPoint(size, 1000 + size, 5, 7) for size in (1024, 2048, 4096))


def profile(ops: dict[str, OpTime], contention: Contention | None = None) -> Profile:
    link = Link(2, 1, "NCCL_P2P_DISABLE=1")
    return Profile(PLATFORM, ops, 900, 4e12, 4e14, fit(LINE), link, contention, noise=0.01)


def test_ops_of_all_models_are_there_and_those_of_several_are_merged() -> None:
    first = profile({"dot": OpTime(100, 2, 5), "tanh": OpTime(10, 1, 5)})
    second = profile({"dot": OpTime(110, 2, 5), "exp": OpTime(20, 1, 5)})
    found = merge([first, second])
    assert found.ops == {"dot": OpTime(105, 5, 10), "exp": OpTime(20, 1, 5), "tanh": OpTime(10, 1, 5)}


def test_what_two_profiles_read_from_one_store_counts_once() -> None:
    first = profile({"dot": OpTime(100, 2, 5)})
    found = merge([first, first, profile({"dot": OpTime(130, 2, 5)})])
    assert found.ops == {"dot": OpTime(115, 15, 10)}
    assert found.all_reduce == first.all_reduce


def test_rates_are_medians_and_the_noise_is_the_largest() -> None:
    others = [replace(profile({}), launch_ns=ns, noise=noise) for ns, noise in ((800, 0.02), (2000, 0.3))]
    found = merge([profile({}), *others])
    assert (found.launch_ns, found.noise, found.memory_bandwidth) == (900, 0.3, 4e12)


def test_sweeps_are_fitted_together() -> None:
    longer = tuple(SweepPoint(size, 1000 + size, 5, 7) for size in (8192, 16384, 32768))
    found = merge([profile({}), replace(profile({}), all_reduce=fit(longer))])
    assert found.all_reduce is not None
    assert [point.size_bytes for point in found.all_reduce.points] == [1024, 2048, 4096, 8192, 16384, 32768]


def test_slow_downs_that_no_trace_showed_do_not_count() -> None:
    told, silent = Contention(1.25, 1.5), Contention(1.0, 1.0)
    assert merge([profile({}, silent), profile({}, told), profile({})]).contention == told
    assert merge([profile({}, told), profile({}, Contention(1.5, 1.25))]).contention == Contention(
        1.375, 1.375
    )
    assert merge([profile({}, silent)]).contention == silent
    apart = [profile({}, Contention(1.5, 1.5, 30_000)), profile({}, Contention(1.5, 1.25, 50_001))]
    assert merge([profile({}, Contention(1.25, 3.0)), *apart]).contention == Contention(1.5, 1.375, 40_000)
    by_kind = [Contention(1.5, 1.5, products=products, others=1.0) for products in (2.0, 4.0)]
    assert merge([profile({}, told), *(profile({}, one) for one in by_kind)]).contention == Contention(
        1.5, 1.5, products=3.0, others=1.0
    )
    assert merge([profile({})]).contention is None


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


def test_profiles_of_different_links_or_platforms_are_refused() -> None:
    with pytest.raises(ProfileError, match="one platform and link"):
        merge([profile({}), replace(profile({}), link=Link(4, 1))])
    with pytest.raises(ProfileError, match="one platform and link"):
        merge([profile({}), replace(profile({}), platform=replace(PLATFORM, jaxlib="0.12.0"))])
    with pytest.raises(ProfileError, match="no profile to merge"):
        merge([])
