"""What is known of a device, a link and a step, with and without a store: nothing is measured twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import CollectiveKind
from disco_hlo.hlo.graph import Kind
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import by_graph
from disco_hlo.plugin.measuring.known_times import KnownTimes, _kernel_keys, _node_keys
from disco_hlo.plugin.measuring.microbenchmarks import AFTER_COMPUTE
from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.collectives import InStep, SweepPoint
from disco_hlo.profiler.keys import kernel_keys
from disco_hlo.profiler.profile import Contention, Link, LoopTime, OpTime, Platform
from disco_hlo.profiler.store import ProfileStore
from tests.steps.intercept import captured_step

CPU = Platform("some cpu", "cpu", "", "0.12", "0.12")
GPU = Platform("some gpu", "gpu", "", "0.12", "0.12")
NVLINK, SOCKETS = Link(2, 1, "nvlink"), Link(2, 1, "sockets")
CONSTANTS = DeviceConstants(launch_ns=412, memory_bandwidth=21.5e9 / 7, flops_per_s=96.5e9, noise=0.02)

GATHER = "all-gather {0,1},{2,3}"
GATHERED = tuple(SweepPoint(1 << k, 100 + k, 1, 7) for k in (10, 11, 12))


@pytest.fixture
def step() -> CanonicalModule:
    return captured_step("mlp")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ProfileStore]:
    with ProfileStore(tmp_path / "profile.sqlite") as opened:
        yield opened


def points(*sizes: int) -> tuple[SweepPoint, ...]:
    return tuple(SweepPoint(size, 1000 + size // 10, 5, 7) for size in sizes)


def test_a_second_search_computes_with_the_very_numbers_of_the_first(store: ProfileStore) -> None:
    kind = CollectiveKind("all-gather", ((0, 1), (2, 3)))
    first = KnownTimes(GPU, NVLINK, store)
    first.add_constants(CONSTANTS)
    first.add_gap("f00d", 123)
    first.add_facts("f00d", contention=Contention(1.1, 4 / 3, 300, products=1.7, others=1.0, hold=1 / 3))
    first.add_holds({"dot": 1 / 3})
    first.add_holds({"convolution": 0.5})
    apart = {GATHER: InStep(((64, 2),), 500, 3, 5)}
    first.add_facts("f00d", apart=apart, together={"all-reduce": InStep(((16, 1),), 1000, 100, 3)})
    first.add_facts("f00d", loops={"body": LoopTime(16, 300, -20)})
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


def test_the_launch_cost_is_that_of_the_step_before_it_is_any_others(store: ProfileStore) -> None:
    KnownTimes(GPU, NVLINK, store).add_constants(CONSTANTS)
    assert KnownTimes(GPU, NVLINK, store).launch_ns("f00d") == 412, "a chain's"
    for link, step, gap_ns in ((NVLINK, "f00d", 100), (SOCKETS, "f00d", 300), (NVLINK, "cafe", 700)):
        KnownTimes(GPU, link, store).add_gap(step, gap_ns)
    steps = (NVLINK, "f00d"), (SOCKETS, "f00d"), (NVLINK, "cafe"), (NVLINK, "beef"), (SOCKETS, "cafe")
    found = [KnownTimes(GPU, link, store).launch_ns(step) for link, step in steps]
    assert found == [100, 300, 700, 700, 700]


@pytest.mark.parametrize("link", [SOCKETS, Link(4, 1, "nvlink")])
def test_slow_downs_and_holds_are_of_one_link(store: ProfileStore, link: Link) -> None:
    first = KnownTimes(GPU, NVLINK, store)
    first.add_constants(CONSTANTS)
    first.add_facts("f00d", contention=Contention(1.5, 1.25))
    first.add_holds({"dot": 0.9})
    other = KnownTimes(GPU, link, store).profile("f00d")
    assert (other.contention, other.holds) == (None, {})
    assert first.profile("cafe").contention is None
    assert first.profile("f00d").contention == Contention(1.5, 1.25)


def test_what_is_not_as_training_runs_it_is_not_kept(store: ProfileStore) -> None:
    mine = KnownTimes(GPU, NVLINK, store)
    mine.add_constants(CONSTANTS)
    mine.keep_no_more()
    mine.add_holds({"dot": 0.9})
    mine.add_gap("f00d", 5)
    mine.add_ops("f00d", {"dot": OpTime(5, 0, 1)}, [700])
    told = mine.profile("f00d")
    assert (told.launch_ns, told.holds, told.ops) == (5, {"dot": 0.9}, {"dot": OpTime(5, 0, 1)})
    assert KnownTimes(GPU, NVLINK, store).launch_ns("f00d") == 412
    assert (store.ops(GPU), store.step(GPU, "f00d")) == ({}, None)


def test_without_constants_there_is_no_launch_cost() -> None:
    mine = KnownTimes(GPU, NVLINK, None)
    mine.add_gap("f00d", 5)
    assert mine.launch_ns("f00d") == 0


def test_nothing_is_measured_twice(step: CanonicalModule, store: ProfileStore) -> None:
    first = KnownTimes(CPU, Link(2, 1), store)
    lacking = first.lacks(step, read(step))
    assert lacking["device"] is True
    assert lacking["ops"] is True
    assert lacking["collectives"]["all-reduce"][0] == 1024
    first.add_constants(CONSTANTS)
    # A trace that shows one op of many: another trace of the same step would show no more.
    first.add_ops(step.graph.fingerprint, {"dot": OpTime(100, 1, 12)}, [5000, 5100, 5050])
    first.add_sweep(points(*lacking["collectives"]["all-reduce"]))
    second = KnownTimes(CPU, Link(2, 1), store)
    assert not any(second.lacks(step, read(step)).values())
    assert second.profile("f00d") == first.profile("f00d")
    assert set(second.profile("f00d").ops) == {"dot"}


def test_what_a_steps_all_reduces_took_in_it_is_asked_once_of_processes_on_cpu(
    step: CanonicalModule, store: ProfileStore
) -> None:
    fingerprint, link = step.graph.fingerprint, Link(2, 2, AFTER_COMPUTE)
    first = KnownTimes(CPU, link, store)
    first.add_constants(CONSTANTS)
    first.add_ops(fingerprint, {"dot": OpTime(100, 1, 12)}, [5000, 5100, 5050])
    assert first.lacks(step, read(step))["ops"] is True
    apart, together = InStep(((8, 1), (64, 2)), 4000, 1000, 3), InStep(((136, 1),), 700, 100, 3)
    first.add_facts(fingerprint, apart={"all-reduce": apart}, together={"all-reduce": together})
    second = KnownTimes(CPU, link, store)
    assert second.lacks(step, read(step))["ops"] is False
    found = second.profile(fingerprint)
    assert (found.in_step, found.together) == (apart, together)
    assert set(found.ops) == {"dot"}
    assert (second.profile("f00d").in_step, second.profile("f00d").together) == (None, None)
    # Where the traces of a step tell nothing of all-reduces, they are not taken again.
    second.add_facts(fingerprint, apart={}, together={})
    assert second.lacks(step, read(step))["ops"] is False
    assert second.profile(fingerprint).in_step is None


def test_the_noise_is_that_of_the_whole_step(step: CanonicalModule, store: ProfileStore) -> None:
    fingerprint = step.graph.fingerprint
    first = KnownTimes(CPU, Link(2, 1), store)
    first.add_constants(CONSTANTS)
    assert first.profile(fingerprint).noise == CONSTANTS.noise
    first.add_ops(fingerprint, {"dot": OpTime(100, 1, 12)}, [4000, 5000, 5200, 5100, 4900])
    assert first.profile(fingerprint).noise == 100 / 5000
    assert KnownTimes(CPU, Link(2, 1), store).profile(fingerprint).noise == 100 / 5000


def test_another_step_is_traced(step: CanonicalModule, store: ProfileStore) -> None:
    known = KnownTimes(CPU, Link(2, 1), store)
    known.add_ops("0" * 64, {"dot": OpTime(100, 1, 12)}, [5000])
    assert known.lacks(step, read(step))["ops"] is True


def test_a_larger_step_extends_the_sweep(step: CanonicalModule, store: ProfileStore) -> None:
    known = KnownTimes(CPU, Link(2, 1), store)
    known.add_sweep(points(1024, 2048, 4096))
    lacking = known.lacks(step, read(step))["collectives"]["all-reduce"]
    assert lacking
    assert min(lacking) > 4096
    assert max(lacking) == 1 << 16


def test_on_one_device_no_all_reduce_is_measured(step: CanonicalModule, store: ProfileStore) -> None:
    assert KnownTimes(CPU, Link(1, 1), store).lacks(step, read(step))["collectives"] == {}


def test_without_a_store_a_search_still_has_its_numbers() -> None:
    known = KnownTimes(CPU, Link(2, 1), None)
    known.add_constants(CONSTANTS)
    known.add_sweep(points(1024, 2048, 4096))
    profile = known.profile("f00d")
    assert profile.launch_ns == 412
    assert profile.all_reduce is not None
    assert profile.ops == {}


def test_what_xlas_buckets_took_on_gpus_is_asked_once_for_a_step(
    step: CanonicalModule, store: ProfileStore
) -> None:
    platform, link, fingerprint = GPU, Link(2, 1), step.graph.fingerprint
    first = KnownTimes(platform, link, store)
    first.add_constants(CONSTANTS)
    first.add_facts(fingerprint, contention=Contention(1.1, 1.2))
    assert first.lacks(step, read(step))["contention"] is True
    first.add_facts(fingerprint, apart={}, together={"all-reduce": InStep(((64, 3),), 700, 100, 3)})
    assert first.lacks(step, read(step))["contention"] is True, "measured before sizes were told apart"
    first.add_facts(fingerprint, together={"all-reduce": InStep(((64, 3),), 700, 100, 3, (233,))})
    second = KnownTimes(platform, link, store)
    assert second.lacks(step, read(step))["contention"] is False
    found = second.profile(fingerprint)
    assert found.together is not None
    assert found.together.total_ns == 700
    assert found.in_step is None


def test_a_training_does_not_wait_for_what_other_steps_on_its_link_tell(
    step: CanonicalModule, store: ProfileStore
) -> None:
    first = KnownTimes(GPU, NVLINK, store)
    for number, factor in enumerate((1.3, 1.2, 1.9)):
        first.add_facts(
            f"f00{number}", contention=Contention(factor, 1.1), loops={f"loop{number}": LoopTime(2, 5, 0)}
        )
    known = KnownTimes(GPU, NVLINK, store)
    assert known.lacks(step, read(step))["contention"] is True
    other = replace(step, graph=replace(step.graph, fingerprint="f00d"))
    assert known.lacks(other, read(other), step, beside_training=True)["contention"] is False
    assert known.contention("f00d") == known.contention(step.graph.fingerprint) == Contention(1.3, 1.1)
    known.add_constants(CONSTANTS)
    assert set(known.profile(step.graph.fingerprint).loops) == {"loop0", "loop1", "loop2"}
    first.add_facts(step.graph.fingerprint, contention=Contention(1.4, 1.1), together={})
    own = KnownTimes(GPU, NVLINK, store)
    assert own.lacks(step, read(step), beside_training=True)["contention"] is False
    assert own.contention(step.graph.fingerprint) == Contention(1.4, 1.1)
    elsewhere = KnownTimes(GPU, Link(4, 1), store)
    assert elsewhere.lacks(step, read(step), beside_training=True)["contention"] is True


def test_a_training_does_not_wait_for_a_few_ops(step: CanonicalModule, store: ProfileStore) -> None:
    known = KnownTimes(CPU, Link(2, 1), store)
    kernels = _kernel_keys(step, read(step))
    keys = sorted(_node_keys(step, read(step)) - kernels)
    times = dict.fromkeys(kernels, OpTime(1000, 0, 5))
    few = int(0.05 * len(keys))
    assert few
    known.add_ops("f00d", times | dict.fromkeys(keys[few:], OpTime(1000, 0, 5)), ())
    assert known.lacks(step, read(step))["ops"] is True
    assert known.lacks(step, read(step), beside_training=True)["ops"] is False
    fewer = KnownTimes(CPU, Link(2, 1), None)
    fewer.add_ops("f00d", times | dict.fromkeys(keys[2 * few + 2 :], OpTime(1000, 0, 5)), ())
    assert fewer.lacks(step, read(step), beside_training=True)["ops"] is True


def test_another_structure_takes_over_what_its_collectives_and_kernels_cost_each_other(
    step: CanonicalModule, store: ProfileStore
) -> None:
    """Read from its own traces, a structure's transfers waited 0.42 ms each where the step's did not wait."""
    own = Contention(1.26, 1.04, 423_562)
    other = replace(step, graph=replace(step.graph, fingerprint="f00d"))
    first = KnownTimes(GPU, NVLINK, store)
    first.add_facts(step.graph.fingerprint, contention=Contention(1.2, 1.25), together={})
    first.add_facts("f00d", contention=own, together={})
    again = KnownTimes(GPU, NVLINK, store)
    wanted = again.lacks(other, read(other), step)
    assert (wanted["ops"], wanted["contention"]) == (True, False)
    again.add_constants(CONSTANTS)
    assert again.profile("f00d").contention == Contention(1.2, 1.25)
    kernels = {
        key for graph, plan in by_graph(other, read(other))
        for key in kernel_keys(graph, unit_graph(graph, plan).kernels(graph))
    }  # fmt: skip
    again.add_ops("f00d", {key: OpTime(1000, 0, 5) for key in kernels}, ())
    assert again.lacks(other, read(other), step)["ops"] is False, "its single ops are estimated"
    assert again.lacks(other, read(other))["ops"] is True
    assert KnownTimes(GPU, NVLINK, store).profile("f00d").contention == own, "nothing was written"


def test_of_a_step_whose_ops_are_known_the_unfused_one_is_not_traced(
    step: CanonicalModule, store: ProfileStore
) -> None:
    """A loop takes no time of its own, and no trace shows what waits for another instruction."""
    nodes = [replace(node, key=f"{node.opcode} {node.id}") for node in step.graph.nodes]
    nodes[-1] = replace(nodes[-1], opcode="while", kind=Kind.FIXED)
    nodes[-2] = replace(nodes[-2], opcode="async-done", kind=Kind.FIXED)
    other = replace(step, graph=replace(step.graph, nodes=tuple(nodes), fingerprint="f00d"))
    known = KnownTimes(GPU, NVLINK, store)
    known.add_ops("another", {node.key: OpTime(100, 1, 5) for node in nodes[:-2]}, ())
    wanted = known.lacks(other, read(step))
    assert (wanted["ops"], wanted["unfused ops"], wanted["contention"]) == (True, False, True)
    known.add_facts("f00d", contention=Contention(1.2, 1.25), together={})
    assert known.lacks(other, read(step))["ops"] is False, "its kernels were traced with its contention"
    fusible = [node.key for node in nodes if node.kind is Kind.FUSIBLE]
    del known._ops[fusible[0]]
    assert known.lacks(other, read(step))["unfused ops"] is False, "so few are estimated"
    for key in fusible[1 : 1 + len(nodes) // 10]:
        del known._ops[key]
    assert known.lacks(other, read(step))["unfused ops"] is True
