"""What the traces of a step tell of how kernels and transfers slow each other, and what its time says of that."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.opcodes import PRODUCTS
from disco_hlo.optimize.costs import costs_of, machine_of
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import in_every_region, one_at_a_time, varied, varied_buckets
from disco_hlo.plugin.measuring.known_times import KnownTimes
from disco_hlo.plugin.measuring.step_traces import (
    ALONE,
    BESIDE,
    _alike,
    _held_by_ops,
    _slow_downs,
    adding_up,
    larger,
    step_profile,
)
from disco_hlo.plugin.measuring.traced_modules import Findings
from disco_hlo.profiler import trace as tracing
from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.collectives import InStep, SweepPoint
from disco_hlo.profiler.profile import Contention, Link, Profile, load
from disco_hlo.profiler.store import ProfileStore
from disco_hlo.simulator.build import build, holds_product
from disco_hlo.simulator.orders import beside_transfers
from disco_hlo.simulator.timeline import simulate

ROOT = Path(__file__).parents[2]
SLOWED = Contention(1.3, 1.6, 0, products=1.4, others=1.2)


@pytest.fixture(scope="module")
def source() -> CanonicalModule:
    return canonicalize(gzip.decompress((ROOT / "tests/data/h200_models/vgg19.hlo.pb.gz").read_bytes()))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return replace(load(ROOT / "disco_hlo/data/profiles/nvidia-h200-nvlink.json"), contention=SLOWED)


def step_ns(profile: Profile, source: CanonicalModule, strategy: Strategy) -> int:
    costs = costs_of(profile, source, [read(source)])
    return simulate(build(source.graph, strategy, costs, machine_of(profile)).problem).makespan_ns


def beside_ns(profile: Profile, source: CanonicalModule, slowed: Contention) -> int:
    beside = beside_transfers(source.graph, varied_buckets(read(source)))
    return step_ns(replace(profile, contention=slowed), source, beside)


def alone_ns(profile: Profile, source: CanonicalModule) -> int:
    return step_ns(profile, source, one_at_a_time(source.graph, varied_buckets(read(source))))


def test_slow_downs_that_explain_the_step_stay(source: CanonicalModule, profile: Profile) -> None:
    alone, beside = alone_ns(profile, source), beside_ns(profile, source, SLOWED)
    for taken_ns in (beside, round(1.009 * beside), round(0.9 * beside)):
        assert adding_up(profile, source, read(source), alone, taken_ns) == SLOWED


def test_slow_downs_that_the_step_shows_larger_are(source: CanonicalModule, profile: Profile) -> None:
    """rnnlm's step took 1.5 % longer, over NVLink on two H100s, than was simulated by its traces."""
    alone, wanted = alone_ns(profile, source), larger(SLOWED, 2.0)
    taken_ns = beside_ns(profile, source, wanted)
    assert taken_ns > 1.011 * beside_ns(profile, source, SLOWED)
    found = adding_up(profile, source, read(source), alone, taken_ns)
    assert beside_ns(profile, source, found) == pytest.approx(taken_ns, rel=1e-3)
    assert found.others == pytest.approx(wanted.others, rel=0.01)
    # A machine on which both steps are slower alike says nothing of slow-downs.
    again = adding_up(profile, source, read(source), alone + 1_000_000, taken_ns + 1_000_000)
    assert again.others == pytest.approx(found.others, rel=0.01)


def test_what_no_slow_downs_explain_changes_none(
    source: CanonicalModule, profile: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    alone, most = alone_ns(profile, source), beside_ns(profile, source, larger(SLOWED, 3.0))
    found = adding_up(profile, source, read(source), alone, round(1.005 * most))
    assert found.others == pytest.approx(1.6, abs=0.01)
    with caplog.at_level("INFO", "disco_hlo"):
        assert adding_up(profile, source, read(source), alone, round(1.1 * most)) == SLOWED
    assert "more than contention explains" in caplog.text
    none = replace(profile, contention=Contention(1.0, 1.0))
    assert adding_up(none, source, read(source), alone, most) == Contention(1.0, 1.0)


def test_a_larger_slow_down_costs_as_many_times_as_much() -> None:
    assert larger(Contention(1.5, 4.0, 1000), 2.0) == Contention(2.0, 7.0, 2000)
    assert larger(Contention(1.5, 4.0), 5.0).communication == 10.0


def test_a_link_whose_rate_changes_from_run_to_run_says_nothing_of_slow_downs(
    source: CanonicalModule, profile: Profile
) -> None:
    """Over sockets resnet50's step once took 9 % longer than simulated, and slow-downs were taken for three times."""
    slow = load(ROOT / "disco_hlo/data/profiles/nvidia-h200-sockets.json")
    slow = replace(slow, contention=SLOWED)
    alone, beside = alone_ns(slow, source), beside_ns(slow, source, SLOWED)
    assert adding_up(slow, source, read(source), alone, round(1.09 * beside)) == SLOWED


@pytest.mark.parametrize(("spread_ns", "is_steady"), [(100_000, True), (20_000_000, False)])
def test_a_step_that_waits_for_a_steady_link_shows_what_its_collectives_take_longer(
    source: CanonicalModule, spread_ns: int, is_steady: bool
) -> None:
    """FSDP over staged links took 2.6 % longer than simulated, and its plans up to a tenth."""
    slow = load(ROOT / "disco_hlo/data/profiles/nvidia-h200-sockets.json")
    assert slow.transfers is not None
    total_ns = int(slow.transfers(1 << 24))
    slow = replace(slow, contention=SLOWED, together=InStep(((1 << 24, 1),), total_ns, spread_ns, 5))
    wanted = larger(SLOWED, 2.0, kernels=False)
    assert wanted == replace(SLOWED, communication=2.2)
    alone, taken_ns = alone_ns(slow, source), beside_ns(slow, source, wanted)
    assert taken_ns > 1.02 * beside_ns(slow, source, SLOWED)
    found = adding_up(slow, source, read(source), alone, taken_ns)
    assert replace(found, communication=1.6) == SLOWED
    assert found.communication == pytest.approx(2.2 if is_steady else 1.6, rel=0.01)


def test_a_search_that_is_repeated_sees_the_slow_downs_that_add_up(
    source: CanonicalModule, profile: Profile, tmp_path: Path
) -> None:
    """A store keeps the mean of what it is told: it was told the traces' slow-downs first."""
    link, fingerprint, xla = Link(2, 1, "nvlink"), source.graph.fingerprint, read(source)
    sweep = tuple(SweepPoint(size, 20_000 + size // 300, 5, 7) for size in (1 << 10, 1 << 20, 1 << 29))
    with ProfileStore(tmp_path / "profile.sqlite") as store:
        first = KnownTimes(profile.platform, link, store)
        first.add_constants(DeviceConstants(400, 3e12, 4e14, 0.01))
        first.add_sweep(sweep)
        told = replace(first.profile(fingerprint), contention=SLOWED)
        alone, beside = alone_ns(told, source), beside_ns(told, source, larger(SLOWED, 2.5))
        found = step_profile(first, source, xla, SLOWED, alone, beside).contention
        assert found is not None
        assert beside_ns(told, source, found) == pytest.approx(beside, rel=1e-3)
        again = KnownTimes(profile.platform, link, store)
        assert step_profile(again, source, xla, None, 0, 0).contention == found


def test_where_a_step_was_not_timed_the_traces_slow_downs_count(
    source: CanonicalModule, profile: Profile
) -> None:
    known = KnownTimes(profile.platform, Link(2, 1, "nvlink"), None)
    known.add_constants(DeviceConstants(400, 3e12, 4e14, 0.01))
    assert step_profile(known, source, read(source), SLOWED, 0, 90_000_000).contention == SLOWED


def test_modules_compiled_at_once_are_held_against_each_other_by_their_own_names() -> None:
    def taken(name: str, *kernels: tuple[str, int, int]) -> Findings:
        return Findings(
            tracing.Trace(
                tuple(
                    tracing.Execution(op, name, 0, 0, 1000 * start, 1000 * end, kernel)
                    for op, start, end in kernels
                    for kernel in ("nccl" if op == "b0" else op,)
                ),
                (),
            ),
            name,
        )

    alone = taken("jit_step", ("b0", 0, 100), ("g0", 100, 180))
    beside = taken("jit_step__disco_2", ("b0", 0, 120), ("g0", 10, 110))
    assert _slow_downs({ALONE: alone, BESIDE: beside}, frozenset()) == Contention(100 / 80, 100 / 80)


def test_where_one_module_has_no_names_in_command_buffers_all_are_held_against_each_other_without() -> None:
    """Kernels in command buffers were held against the same without, which take longer."""
    with_buffers, without, beside = (tracing.Trace((), ()) for _ in range(3))
    alone = Findings(with_buffers, "jit_a", without)
    fallen_back = Findings(beside, "jit_b", beside)
    assert (alone.as_run, fallen_back.as_run, Findings(with_buffers, "jit_a").as_run) == (True, False, True)
    alike = _alike({ALONE: alone, BESIDE: fallen_back})
    assert [alike[name].trace for name in (ALONE, BESIDE)] == [without, beside]
    assert _alike({ALONE: alone})[ALONE].trace is with_buffers


def test_products_of_a_loops_body_show_what_they_hold() -> None:
    """A scanned step was told by the one product of its entry, which held nothing on two H200s and most of it on two
    H100s."""
    module = ROOT / "tests/data/h100_llama/dp_scan.hlo.pb.gz"
    step = canonicalize(gzip.decompress(module.read_bytes()))
    xla, graph = read(step), step.computations["loop2"].graph
    ran = dict(in_every_region(step, varied(step, xla), beside_transfers).regions)["loop2"]
    units = unit_graph(graph, ran)
    rows, now_us = list[tracing.Execution](), 0

    def took(op: str, start_us: int, end_us: int, kernel: str) -> None:
        rows.append(tracing.Execution(op, "jit_step", 0, 0, 1000 * start_us, 1000 * end_us, kernel))

    for _ in range(3):
        for token in ran.order:
            unit, _, part = token.partition(".")
            if part == "start":  # behind three quarters of the product that comes next
                took(f"loop2_{token}", now_us + 75, now_us + 76, "nccl")
            elif not part and holds_product(graph, units.units[units.index[unit]]):
                took(f"loop2_{unit}_kernel", now_us, now_us + 100, unit)
                now_us += 100
        now_us += 1000
    rows.sort(key=lambda one: one.start_ns)
    held = _held_by_ops(step, xla, Findings(tracing.Trace(tuple(rows), ()), "jit_step"))
    assert {*held} <= {node.key for node in graph.nodes if node.opcode in PRODUCTS}
    assert held
    assert list(held.values()) == pytest.approx([0.75] * len(held))
