"""What is known of a device, a link and a step, with and without a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from disco_hlo.hlo.collectives import CollectiveKind
from disco_hlo.plugin.measuring.known_times import KnownTimes
from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.collectives import InStep, SweepPoint
from disco_hlo.profiler.profile import Contention, Link, LoopTime, Platform
from disco_hlo.profiler.store import ProfileStore

GPU = Platform("some gpu", "gpu", "", "0.12.0", "0.12.0")
NVLINK, SOCKETS = Link(2, 1, "nvlink"), Link(2, 1, "sockets")
CONSTANTS = DeviceConstants(launch_ns=412, memory_bandwidth=21.5e9 / 7, flops_per_s=96.5e9, noise=0.02)

GATHER = "all-gather {0,1},{2,3}"
GATHERED = tuple(SweepPoint(1 << k, 100 + k, 1, 7) for k in (10, 11, 12))


def test_a_second_search_computes_with_the_very_numbers_of_the_first(tmp_path: Path) -> None:
    kind = CollectiveKind("all-gather", ((0, 1), (2, 3)))
    with ProfileStore(tmp_path / "times.sqlite") as store:
        first = KnownTimes(GPU, NVLINK, store)
        first.add_constants(CONSTANTS)
        first.add_gap("f00d", 123)
        first.add_contention(Contention(1.1, 4 / 3, 300, products=1.7, others=1.0, hold=1 / 3), "f00d")
        first.add_holds({"dot": 1 / 3})
        first.add_holds({"convolution": 0.5})
        apart = {GATHER: InStep(((64, 2),), 500, 3, 5)}
        first.add_collectives("f00d", apart, {"all-reduce": InStep(((16, 1),), 1000, 100, 3)})
        first.add_loops("f00d", {"body": LoopTime(16, 300, -20)})
        first.add_sweep(GATHERED, kind)
        told = first.profile("f00d", [kind])
        assert KnownTimes(GPU, NVLINK, store).profile("f00d", [kind]) == told
    assert told.holds == {"dot": 1 / 3, "convolution": 0.5}
    assert (told.launch_ns, told.memory_bandwidth, told.noise) == (123, 21.5e9 / 7, 0.02)
    assert told.in_step is None, "the trace did not tell"
    assert told.together is not None
    assert (told.together.sizes, told.together.total_ns) == (((16, 1),), 1000)
    assert told.all_reduce is None, "no sweep of all-reduces is known"
    assert list(told.collectives) == [GATHER]
    assert told.collectives[GATHER].in_step == apart[GATHER]
    assert told.collectives[GATHER].swept is not None
    assert told.collectives[GATHER].swept.points == GATHERED
    assert told.loops == {"body": LoopTime(16, 300, -20)}


def test_the_launch_cost_is_that_of_the_step_before_it_is_any_others(tmp_path: Path) -> None:
    with ProfileStore(tmp_path / "times.sqlite") as store:
        KnownTimes(GPU, NVLINK, store).add_constants(CONSTANTS)
        assert KnownTimes(GPU, NVLINK, store).launch_ns("f00d") == 412, "a chain's"
        for link, step, gap_ns in ((NVLINK, "f00d", 100), (SOCKETS, "f00d", 300), (NVLINK, "cafe", 700)):
            KnownTimes(GPU, link, store).add_gap(step, gap_ns)
        steps = (NVLINK, "f00d"), (SOCKETS, "f00d"), (NVLINK, "cafe"), (NVLINK, "beef"), (SOCKETS, "cafe")
        found = [KnownTimes(GPU, link, store).launch_ns(step) for link, step in steps]
    assert found == [100, 300, 700, 700, 700]


@pytest.mark.parametrize("link", [SOCKETS, Link(4, 1, "nvlink")])
def test_slow_downs_and_holds_are_of_one_link(tmp_path: Path, link: Link) -> None:
    with ProfileStore(tmp_path / "times.sqlite") as store:
        first = KnownTimes(GPU, NVLINK, store)
        first.add_constants(CONSTANTS)
        first.add_contention(Contention(1.5, 1.25), "f00d")
        first.add_holds({"dot": 0.9})
        other = KnownTimes(GPU, link, store).profile("f00d")
        assert (other.contention, other.holds) == (None, {})
        assert first.profile("cafe").contention is None
        assert first.profile("f00d").contention == Contention(1.5, 1.25)


def test_what_is_not_as_training_runs_it_is_not_kept(tmp_path: Path) -> None:
    with ProfileStore(tmp_path / "times.sqlite") as store:
        mine = KnownTimes(GPU, NVLINK, store)
        mine.add_constants(CONSTANTS)
        mine.keep_no_more()
        mine.add_holds({"dot": 0.9})
        mine.add_gap("f00d", 5)
        assert (mine.launch_ns("f00d"), mine.profile("f00d").holds) == (5, {"dot": 0.9})
        assert KnownTimes(GPU, NVLINK, store).launch_ns("f00d") == 412


def test_without_constants_there_is_no_launch_cost() -> None:
    mine = KnownTimes(GPU, NVLINK, None)
    mine.add_gap("f00d", 5)
    assert mine.launch_ns("f00d") == 0
