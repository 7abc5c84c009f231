"""T3: hand-solved runs of one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disco_hlo.whatif.dram import Access, ResultCost, access_cycles
from disco_hlo.whatif.machine import Machine, Matmul, Stages, load, memory_reads, stages
from disco_hlo.whatif.t3 import (
    LARGER,
    SMALLER,
    Arbitration,
    Model,
    cases,
    element_ns,
    fused_ns,
    last_sum_ns,
    layers,
    sliced,
    sub_layer,
)


def machine(link: float, memory: float, latency_us: float = 0.0) -> Machine:
    t3 = load("t3")
    network = replace(t3.network, link_gb_per_s=link, link_latency_us=latency_us)
    return replace(t3, gpu=replace(t3.gpu, memory_gb_per_s=memory), network=network)


def test_a_matmul_is_stages_of_tiles_with_bursts_of_writes() -> None:
    gpu = replace(load("t3").gpu, compute_units=4, clock_ghz=1, flops_per_cycle=128, matmul_efficiency=0.5)
    gpu = replace(gpu, memory_gb_per_s=1024, cache_mb=1000, cache_gb_per_s=2048, stage_us=1)
    matmul = Matmul(256, 512, 64)  # 4 tiles in one stage
    found = stages(gpu, matmul)
    assert found.count == 1
    assert found.products_ns == 2 * 128 * 256 * 64 / 64 + 1000
    assert found.write_bytes == 2 * 256 * 512
    assert found.write_ns == 128
    assert stages(gpu, matmul, around_cache=True).write_ns == 256
    assert found.read_bytes == 2 * (256 + 512) * 64
    assert stages(gpu, matmul, units=2).count == 2


def test_what_the_cache_does_not_hold_is_read_again() -> None:
    gpu = replace(load("t3").gpu, cache_mb=0.5)
    matmul = Matmul(1024, 2048, 1024)  # 2 and 4 MB; stages of 8 tiles are one row, so there are 8 sweeps
    passed = 2 * 2**20 + 2**19
    expected = 6 * 2**20 + 7 * (1 - 2**19 / passed) * 2 * 2**20
    assert memory_reads(gpu, matmul, 8, around_cache=True) == pytest.approx(expected)
    assert memory_reads(gpu, matmul, 8, around_cache=False) > expected


def test_a_ring_s_reduce_scatter_adds_at_last_what_came() -> None:
    # Chunks of 2 MB: 15 steps at 75 GB/s and 500 ns; two read and one written at 1 TB/s at the end.
    matmul = Matmul(4096, 4096, 128)
    chunk, t3 = 2 * 4096 * 4096 / 16, load("t3")
    found = sub_layer(t3, matmul, 16)
    cycles = access_cycles((Access.READ, Access.READ, Access.WRITE))
    assert 3 < cycles < 5
    assert found.near_memory_scatter_ns == found.gather_ns == pytest.approx(15 * (chunk / 75 + 500))
    assert found.scatter_ns - found.near_memory_scatter_ns == pytest.approx(cycles * chunk / 1000)
    assert cycles * chunk / 1000 < chunk / 75  # so a step waits for the link, not for the memory
    assert last_sum_ns(t3, 16 * chunk, 16) == pytest.approx(cycles * chunk / 1000)


@pytest.mark.parametrize("arbitration", Arbitration)
def test_a_long_matmul_hides_all_but_the_last_piece(arbitration: Arbitration) -> None:
    # 8 stages of 1000 ns, one piece each; a message takes 1 ns, memory next to nothing. The last chunk stays: at 8000
    # only the matmul's last stage is waited for, all copies from the neighbour having come.
    matmul = Stages(8, 1000.0, 0.0, 100.0, 0.0)
    found = fused_ns(machine(100, 1e6), matmul, 2, arbitration)
    assert found == pytest.approx(8000, abs=5)


def test_a_short_matmul_leaves_the_ring_alone() -> None:
    # Two devices: each sends its first chunk of 400 bytes at 0.1 GB/s, begun with the first of 8 stages of 1 ns.
    matmul = Stages(8, 1.0, 0.0, 100.0, 0.0)
    assert fused_ns(machine(0.1, 1e6), matmul, 2, Arbitration.COMPUTE_FIRST) == pytest.approx(4001, abs=2)


def test_under_round_robin_a_stalled_matmul_waits_for_what_memory_serves() -> None:
    # 16 stages of 1000 ns. The neighbour's copy of the second chunk: 8 pieces of 100 bytes at 1 byte a ns. The last
    # comes when its own chunk is computed, so all 8 stall the matmul.
    matmul = Stages(16, 1000.0, 0.0, 100.0, 0.0)
    found = fused_ns(machine(1000, 1), matmul, 2, Arbitration.ROUND_ROBIN)
    assert found == pytest.approx(16_800, abs=5)
    first = fused_ns(machine(1000, 1), matmul, 2, Arbitration.COMPUTE_FIRST)
    assert first == pytest.approx(16_000, abs=5)


def test_updates_that_cost_more_lengthen_the_matmul_s_writes() -> None:
    matmul = Stages(8, 1000.0, 0.0, 100.0, 100.0)
    found = fused_ns(machine(100, 1e6), matmul, 2, Arbitration.COMPUTE_FIRST, ResultCost(2.0, 3.0))
    assert found == pytest.approx(8 * 1200, abs=5)


def test_updates_among_a_matmul_s_reads_stall_it_for_what_they_cost_there() -> None:
    # As under round robin above: 8 pieces of 100 bytes stall the matmul, each for three times as long.
    matmul = Stages(16, 1000.0, 0.0, 100.0, 0.0)
    found = fused_ns(machine(1000, 1), matmul, 2, Arbitration.ROUND_ROBIN, ResultCost(2.0, 3.0))
    assert found == pytest.approx(16_000 + 8 * 300, abs=5)


def test_a_matmul_whose_operands_stay_in_the_cache_does_not_stand_still() -> None:
    # As under round robin above, but nothing is read again: only bursts of writes would take turns, and there are none.
    matmul = Stages(16, 1000.0, 0.0, 100.0, 0.0, reads_once=True)
    assert fused_ns(machine(1000, 1), matmul, 2, Arbitration.ROUND_ROBIN) == pytest.approx(16_000, abs=5)
    gpu = load("t3").gpu  # 16 MB: T-NLG's IP on 16 devices has 13 MB of activations, FC-1 17 MB
    reads_once = {
        name: stages(gpu, sliced(SMALLER[1], name, 16), around_cache=True) for name in ("IP", "FC-1")
    }
    assert [one.reads_once for one in reads_once.values()] == [True, False]


def test_activations_are_read_again_and_weights_once() -> None:
    gpu = replace(load("t3").gpu, cache_mb=0.001)
    few, many = (memory_reads(gpu, Matmul(4096, 512 * n, 256), 32, around_cache=True) for n in (1, 2))
    assert few == pytest.approx(2 * 4096 * 256 * 2 + 2 * 512 * 256, rel=1e-3)
    assert many == pytest.approx(4 * 4096 * 256 * 2 + 2 * 1024 * 256, rel=1e-3)


@pytest.mark.parametrize("degree", [8, 16])
def test_traffic_is_what_the_paper_counts(degree: int) -> None:
    # Section 6.2: 2.5 and 2.2 times fewer reads of the reduce-scatter; 14 and 7 % fewer writes.
    found = sub_layer(load("t3"), sliced(SMALLER[0], "FC-2", degree), degree)
    before, after = found.sequential_traffic, found.fused_traffic
    assert before.scatter_reads / after.scatter_reads == pytest.approx((2 * degree - 1) / (degree - 2))
    written = (before.matmul_writes + before.scatter_writes) / (after.matmul_writes + after.scatter_writes)
    assert written == pytest.approx(degree / (degree - 1))
    assert before.gather_reads == after.gather_reads


@pytest.mark.parametrize("model", [*SMALLER, *LARGER], ids=lambda model: model.name)
def test_no_arbitration_beats_the_ideal_and_none_is_slower_than_one_after_the_other(model: Model) -> None:
    degree = model.degrees[-1]
    found = sub_layer(load("t3"), sliced(model, "OP", degree), degree)
    slowest, fastest = (found.t3_ns(arbitration) for arbitration in Arbitration)
    near_memory_ns = max(found.matmul_ns, found.near_memory_scatter_ns) + found.gather_ns
    assert near_memory_ns <= fastest * 1.0001
    assert fastest <= slowest * 1.002  # where the ring takes longest, taking turns may help it a little
    assert slowest < found.sequential_ns


def test_the_rest_of_an_iteration_leaves_communication_the_share_that_the_paper_says() -> None:
    t3 = load("t3")
    found = cases(t3, SMALLER)
    for phase, said in (("training", 0.34), ("prompt", 0.43)):
        of = layers(t3, found, phase)
        rest = element_ns(of, phase)
        totals = [one.sequential_ns + one.matmuls_ns + rest * one.elements for one in of]
        shares = [one.communication_ns / total for one, total in zip(of, totals, strict=True)]
        assert max(shares) == pytest.approx(said)
        assert len(of) == 4
        slow, fast = (max(one.speed_up(by, rest) for one in of) for by in Arbitration)
        assert 1 < slow < fast < 1.2
        most = max(of, key=lambda one: one.communication)
        saved = most.sequential_ns - most.t3_ns[Arbitration.COMPUTE_FIRST]
        total = most.communication_ns / said
        assert most.speed_up(Arbitration.COMPUTE_FIRST, rest) == pytest.approx(total / (total - saved))
