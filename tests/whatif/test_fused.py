"""Paper 004's operators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disco_hlo.whatif.fused import (
    Dlrm,
    Embedding,
    dlrm,
    embedding_all_to_all,
    fused_ends_ns,
    gemv_all_reduce,
    matmul_all_to_all,
    pooling_ns,
    skew,
)
from disco_hlo.whatif.machine import Matmul, load, matmul_ns

PAIR = load("mi210-pair")
QUICK = replace(PAIR, network=replace(PAIR.network, link_latency_us=0))
TABLES = Embedding(2048, 256)


def test_slices_for_others_go_out_while_the_rest_is_computed() -> None:
    # Pooling takes E; half of the slices are sent in X < E, so all have arrived when the rest is computed.
    whole = TABLES.ns(QUICK)
    assert fused_ends_ns(QUICK, TABLES, [True, True]).tolist() == pytest.approx([whole, whole])
    assert skew(QUICK, TABLES, aware=True) == pytest.approx(0)


def test_in_the_batch_s_order_the_second_device_waits_for_the_first() -> None:
    # Device 0 computes what device 1 needs in the second half of E; sending it takes X > E/2.
    whole, sent = TABLES.ns(QUICK), TABLES.output_bytes / 2 / 20
    assert sent > whole / 2
    expected = [whole, whole / 2 + sent]
    assert fused_ends_ns(QUICK, TABLES, [False, False]).tolist() == pytest.approx(expected, rel=1e-4)
    assert skew(QUICK, TABLES, aware=False) == pytest.approx(0.5 + sent / whole - 1, rel=1e-3)


def test_a_slow_link_is_what_a_fused_kernel_waits_for() -> None:
    slow = replace(QUICK, network=replace(QUICK.network, link_gb_per_s=2))
    sent = TABLES.output_bytes / 2 / 2
    found = embedding_all_to_all(slow, TABLES)
    assert found.fused_ns == pytest.approx(sent + 5000, rel=1e-3)
    assert found.separate_ns == pytest.approx(sent + TABLES.ns(slow) + 10_000, rel=1e-3)


def test_occupancy_helps_until_what_is_in_flight_covers_the_latency() -> None:
    # 104 x 32 waves x 256 bytes are 852 kB: of these 1165 GB/s x 436 ns are 508 kB, or 60 %.
    busy, quarter = TABLES.ns(PAIR) * 1638 / 1165, 0.25 * 104 * 32 * 256
    assert pooling_ns(PAIR, TABLES, 0.25) == pytest.approx(busy * 1165 * 436 / quarter)
    assert pooling_ns(PAIR, TABLES, 0.59) > busy * 1.001
    assert pooling_ns(PAIR, TABLES, 0.60) == pooling_ns(PAIR, TABLES, 0.875) == pytest.approx(busy)


def test_operators_in_a_node() -> None:
    node = load("mi210-node")
    gemv = gemv_all_reduce(node, 8192, 8192)
    compute_ns = 2 * 8192 * 8192 / 1638
    assert gemv.fused_ns == pytest.approx(5000 + compute_ns + 1000 + 0.75 * 2 * 8192 / 80)
    matmul = Matmul(4096, 2048, 8192)
    found = matmul_all_to_all(node, matmul)
    assert found.fused_ns == pytest.approx(5000 + matmul_ns(node.gpu, matmul))
    assert found.saved == pytest.approx(1 - found.fused_ns / found.separate_ns)


def test_dlrm_hides_the_embedding_behind_the_exchange() -> None:
    torus = load("mi210-torus")
    model = Dlrm(layers=1, layer_width=1)
    found = dlrm(torus, model)
    pooled = Embedding(model.batch, model.tables, 92, 70)
    exchange = pooled.output_bytes * 22 / 4 / 25 + 22 * 700
    forward = pooled.ns(torus)
    tiny = found.separate_ns - (3 * forward + 2 * exchange)
    assert 0 < tiny < 1e5
    assert found.fused_ns == pytest.approx(max(forward, exchange) + max(2 * forward, exchange) + tiny)
