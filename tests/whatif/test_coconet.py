"""CoCoNet's schedules, hand-solved on a machine without latencies where that is possible."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disco_hlo.whatif import coconet
from disco_hlo.whatif.machine import Matmul, collective_ns, load, matmul_ns

CLUSTER = load("coconet")
RING = replace(
    CLUSTER,
    gpu=replace(CLUSTER.gpu, launch_us=0),
    network=replace(CLUSTER.network, topology="ring", devices=4, link_latency_us=0),
)


def test_a_fused_update_takes_the_ring_and_a_share_of_the_update() -> None:
    elements = 1 << 20
    found = coconet.update_schedules(RING, "Adam", elements)
    ring, update = 2 * 0.75 * 2 * elements / 120, 28 * elements / 790
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
    beside = matmul_ns(RING.gpu, matmul, units=48)
    assert found["MM+AR+C"] == pytest.approx(product + ring)
    assert found["OL(MM,fuse(RS+C+AG))"] == pytest.approx(max(0.2 * product + ring, beside + ring / 3))


def test_sliced_sends_move_a_share_and_overlap_with_what_uses_another_link() -> None:
    machine = replace(CLUSTER, gpu=replace(CLUSTER.gpu, launch_us=0))
    elements = 1 << 32  # latencies do not matter
    found = coconet.pipeline_schedules(machine, elements)
    size, rest = 2 * elements, 6 * elements / 790
    half, whole = 15 / 16 * size / 120, 16 * size / 83.4
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


def test_a_part_takes_three_matmuls_a_layer_and_the_scores_and_what_a_kernel_takes() -> None:
    model = coconet.BERTS[1]
    small, large = (coconet.computing_ns(CLUSTER, model, micro, 8192) for micro in (8, 32))
    layers, kernel_ns = 24, 17.90e3
    assert small - large > 3 * layers * 84 * kernel_ns  # four parts, not one
    part = coconet.computing_ns(CLUSTER, model, 8, 8 * 256)
    assert small == pytest.approx(4 * part)
    tokens, width, words = 8 * 128, 2048, 30528

    def linear(columns: int, depth: int) -> float:
        three = ((tokens, columns, depth), (tokens, depth, columns), (depth, columns, tokens))
        return sum(matmul_ns(CLUSTER.gpu, Matmul(*one)) for one in three)

    rate = 80 * 1.53 * 1024 * 0.915
    products = (
        4 * linear(2048, 2048) + linear(8192, 2048) + linear(2048, 8192) + 12 * tokens * 128 * 2048 / rate
    )
    moved = 218 * tokens * width + 44 * tokens * 128 * 32
    scores = linear(words, 2048) + (18 * tokens + 8 * 2048) * words / 790
    assert part == pytest.approx(
        1.141 * (layers * (products + moved / 790) + scores) + 84 * layers * kernel_ns
    )


def test_the_two_numbers_of_a_part_are_those_that_nvidia_s_two_throughputs_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, added_ns = coconet.BERTS[0], 10 * 336e6 / 790
    times = [1e9 * micro / rate - added_ns for micro, rate in ((16, 125.44), (64, 171.52))]
    monkeypatch.setattr(coconet, "SLOWDOWN", 1.0)
    monkeypatch.setattr(coconet, "KERNEL_US", 0.0)
    needed = [coconet.computing_ns(CLUSTER, model, micro, 256 * micro) for micro in (16, 64)]
    slowdown = (times[1] - times[0]) / (needed[1] - needed[0])
    kernel_us = (times[1] - slowdown * needed[1]) / (84 * 24) / 1e3
    monkeypatch.undo()
    assert pytest.approx((slowdown, kernel_us), rel=1e-3) == (coconet.SLOWDOWN, coconet.KERNEL_US)


@pytest.mark.parametrize(
    ("system", "optimizer", "element_bytes"),
    [
        ("NV BERT", "Adam", 6 + 3 * 10 + 12 + 34),
        ("NV BERT", "LAMB", 6 + 3 * 10 + 12 + 58),
        ("ZeRO", "Adam", 4 * 8 + 4 + 28 / 256),
        ("ZeRO", "LAMB", 4 * 6 + 12 + 42),
        ("CoCoNet", "Adam", 4 * 6 + 28 / 256),
        ("CoCoNet", "LAMB", 4 * 6 + 40 / 256),
    ],
)
def test_each_system_moves_the_bytes_of_its_source(
    system: str, optimizer: coconet.Optimizer, element_bytes: float
) -> None:
    machine = replace(
        CLUSTER,
        gpu=replace(CLUSTER.gpu, launch_us=0),
        network=replace(CLUSTER.network, topology="ring", link_gb_per_s=1, link_latency_us=0),
    )
    model, elements = coconet.BERTS[1], 1.2e9
    found = coconet.training_ns(machine, system, optimizer, model, 8, 8192)
    found -= coconet.computing_ns(machine, model, 8, 8192)
    phases = 4 + 1 if (system, optimizer) == ("ZeRO", "Adam") else 2  # ZeRO-2 reduces in each of four parts
    ring_ns = phases * 255 / 256 * 2 * elements
    assert found == pytest.approx(ring_ns + element_bytes * elements / 790)


def test_buckets_take_compute_units_from_the_backward_pass_until_it_is_shorter_than_they() -> None:
    model, simple_ns_per_byte = coconet.BERTS[0], 2 * 255 / 256 / 83.4
    bucket = simple_ns_per_byte * 25e6 + (8.4 + 480 * 3.4 + 30 * 9.6) * 1e3
    buckets = 2 * 336e6 / 25e6 * bucket
    for micro, batch in ((32, 8192), (1, 256)):
        computing = coconet.computing_ns(CLUSTER, model, micro, batch)
        found = coconet.training_ns(CLUSTER, "PyTorch DDP", "Adam", model, micro, batch) - computing
        exposed = bucket + max(0.4 * buckets, buckets - 2 / 3 * computing)
        assert found == pytest.approx(exposed + (6 + 12 + 34) * 336e6 / 790 + 5e3)


def test_a_pipeline_waits_for_its_slowest_node() -> None:
    model, sequences = coconet.GPT3, 8
    machine = replace(CLUSTER, gpu=replace(CLUSTER.gpu, launch_us=0))
    tokens = sequences * model.length
    size = 2 * tokens * model.width
    rest, tails = coconet._split_layer(machine, model, sequences, coconet.PIPELINE_PARALLEL)
    products = sum(1.141 * matmul_ns(machine.gpu, one) + 17.90e3 for one in tails)
    reduced = collective_ns(machine, "all-reduce", size, 16)
    reduced += 1.141 * 7 * size / 2 / 790 + 17.90e3  # one kernel of PyTorch's
    layer, kept = rest + products + 2 * reduced, rest + products + reduced
    scored = matmul_ns(machine.gpu, Matmul(tokens, 3200, model.width)) + 38 * tokens * 3200 / 790
    last = layer + 1.141 * scored + 7 * 17.90e3
    whole, sliced = (coconet.send_ns(machine, size / parts) for parts in (1, 16))
    scatter, gather = (
        coconet.in_tiles_ns(size, collective_ns(machine, kind, size, 16) + more, sliced)
        for kind, more in (("reduce-scatter", 3 * size / 16 / 790), ("all-gather", 0))
    )
    assert kept + scatter < last < layer + whole
    through = coconet.pipeline_schedules(machine, size // 2)["OL(RS+C,P2P,AG)"]

    def found(micro_batches: int) -> float:
        return coconet.pipeline_speed_up(machine, model, sequences, 1, micro_batches)

    first, overlapped = 15 * (layer + whole) + last, 15 * (kept + through) + last
    assert found(1) == pytest.approx(first / overlapped)
    slowest, slowest_overlapped = whole + max(layer + whole, last), gather + max(kept + scatter, last)
    assert found(3) == pytest.approx((first + 2 * slowest) / (overlapped + 2 * slowest_overlapped))
    assert found(10**9) == pytest.approx(slowest / slowest_overlapped)


def test_inference_gains_more_where_pointwise_kernels_move_more(monkeypatch: pytest.MonkeyPatch) -> None:
    models = (coconet.BERT, coconet.GPT2)
    gained = [coconet.tensor_parallel_speed_up(CLUSTER, model, 8) for model in models]
    unfused = replace(coconet.MODEL_PARALLEL, tail_bytes=30)
    monkeypatch.setattr(coconet, "MODEL_PARALLEL", unfused)
    more = [coconet.tensor_parallel_speed_up(CLUSTER, model, 8) for model in models]
    assert all(1 < few < many < 2 for few, many in zip(gained, more, strict=True))
