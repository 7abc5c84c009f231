"""CoCoNet's schedules, hand-solved on a machine without latencies where that is possible."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disco_hlo.whatif import coconet
from disco_hlo.whatif.machine import Matmul, load, matmul_ns

CLUSTER = load("coconet")
RING = replace(
    CLUSTER,
    gpu=replace(CLUSTER.gpu, launch_us=0),
    network=replace(CLUSTER.network, topology="ring", devices=4, link_latency_us=0),
)


def test_a_fused_update_takes_the_ring_and_a_share_of_the_update() -> None:
    elements = 1 << 20
    found = coconet.update_schedules(RING, "Adam", elements)
    ring, update = 2 * 0.75 * 2 * elements / 120, 28 * elements / 900
    assert found["AR-Opt"] == pytest.approx(ring + update)
    assert found["GShard-Eq"] == pytest.approx(ring + update / 4)
    assert found["fuse(RS-Opt-AG)"] == pytest.approx(ring + update / 4)
    assert found["UB"] == pytest.approx(ring)


def test_small_tensors_are_all_reduced_by_trees_and_large_ones_fused() -> None:
    for optimizer in coconet.UPDATE_BYTES:
        small, large = (coconet.update_schedules(CLUSTER, optimizer, 1 << bits) for bits in (10, 30))
        assert min(small, key=small.__getitem__) == "UB"
        assert small["AR-Opt"] < small["fuse(RS-Opt-AG)"] < small["GShard-Eq"]
        assert large["fuse(RS-Opt-AG)"] < large["GShard-Eq"] < large["AR-Opt"]


def test_an_overlap_takes_what_is_longest_and_one_part_of_the_other() -> None:
    matmul = Matmul(8192, 3072, 768)  # three buffer tiles of 16 MB
    found = coconet.matmul_schedules(RING, matmul, 4, pointwise=False)
    ring = 2 * 0.75 * matmul.output_bytes / 120
    product = matmul_ns(RING.gpu, matmul)
    beside = matmul_ns(RING.gpu, matmul, units=72)
    assert found["MM+AR+C"] == pytest.approx(product + ring)
    assert found["OL(MM,fuse(RS+C+AG))"] == pytest.approx(max(0.2 * product + ring, beside + ring / 3))


def test_sliced_sends_move_a_share_and_overlap_with_what_uses_another_link() -> None:
    machine = replace(CLUSTER, gpu=replace(CLUSTER.gpu, launch_us=0))
    elements = 1 << 32  # latencies do not matter
    found = coconet.pipeline_schedules(machine, elements)
    size, rest = 2 * elements, 6 * elements / 900
    half, whole = 15 / 16 * size / 120, 16 * size / 96
    assert found["AR+P2P+C"] == pytest.approx(2 * half + whole + rest, rel=1e-3)
    assert found["AR+P2P+C+AG"] == pytest.approx(3 * half + whole / 16 + rest / 16, rel=1e-3)
    assert found["GShard-Eq"] == pytest.approx(2 * half + whole / 16 + rest / 16, rel=1e-3)
    assert found["OL(RS+C,P2P,AG)"] == pytest.approx(2 * half + rest / 16, rel=1e-2)


def test_who_has_memory_is_who_has_it_in_table_1() -> None:
    has = {
        (system, optimizer, model.name)
        for system in coconet.STATE_BYTES
        for optimizer in coconet.UPDATE_BYTES
        for model in coconet.BERTS
        if coconet.has_memory(CLUSTER, system, optimizer, model)
    }
    everyone = {
        (s, o, m) for s in coconet.STATE_BYTES for o in coconet.UPDATE_BYTES for m in ("336M", "1.2B")
    }
    assert has - everyone == {
        ("ZeRO", "Adam", "3.9B"),
        ("CoCoNet", "Adam", "3.9B"),
        ("CoCoNet", "LAMB", "3.9B"),
    }
    assert everyone <= has


def test_more_micro_batches_cost_more_launches_and_worse_stages() -> None:
    model = coconet.BERTS[1]
    small, large = (coconet.computing_ns(CLUSTER, model, micro, 8192) for micro in (8, 32))
    assert small > large
    after = coconet.training_ns(CLUSTER, "CoCoNet", "Adam", model, 32, 8192) - large
    expected = coconet.update_schedules(CLUSTER, "Adam", int(model.parameters))["fuse(RS-Opt-AG)"]
    assert after == pytest.approx(expected)


def test_who_reduces_buckets_next_to_the_backward_pass_computes_slower() -> None:
    model = coconet.BERTS[0]
    plain, buckets, best = (
        coconet.training_ns(CLUSTER, system, "Adam", model, 32, 8192)
        for system in ("NV BERT", "PyTorch DDP", "CoCoNet")
    )
    assert best < buckets < plain
