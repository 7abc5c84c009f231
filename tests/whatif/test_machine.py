"""Machines are read and checked; times of their collectives by topology."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.errors import DiscoError
from disco_hlo.whatif.machine import (
    PHASES,
    Algorithm,
    Kind,
    collective_ns,
    fastest,
    load,
    names,
    parse,
    pieces,
    send,
    torus_sides,
)

LINES = """
title = "two devices"
[gpu]
compute_units = [10, "a paper"]
clock_ghz = [1.5, "a paper"]
flops_per_cycle = [100, "a paper"]
matmul_efficiency = [0.5, "assumed"]
memory_gb_per_s = [1000, "a paper"]
cache_mb = [1, "a paper"]
cache_gb_per_s = [2000, "a paper"]
memory_gb = [16, "a paper"]
launch_us = [0, "assumed"]
[network]
topology = ["ring", "a paper"]
devices = [2, "a paper"]
node_devices = [2, "a paper"]
link_gb_per_s = [50, "a paper"]
link_latency_us = [1, "a paper"]
"""


def test_every_machine_that_ships_states_a_source_for_every_parameter() -> None:
    assert len(names()) == 8
    for name in names():
        machine = load(name)
        assert len(machine.sources) >= 8 + 5
        assert all(len(source) > 5 for source in machine.sources.values())


def test_a_machine_says_what_it_can_do_and_what_was_assumed(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(LINES)
    machine = load(str(tmp_path / "two.toml"))
    assert machine.gpu.matmul_flops_per_ns == 750
    assert machine.sourced("assumed") == ("gpu.matmul_efficiency", "gpu.launch_us")
    assert machine.sourced("a paper")[0] == "gpu.compute_units"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('clock_ghz = [1.5, "a paper"]\n', "", "clock_ghz"),
        ("clock_ghz", "clock_mhz", "no parameter 'clock_mhz'"),
        ("[1.5,", "[-1.5,", r"`float` > 0.*clock_ghz"),
        ('"ring"', '"star"', "star"),
        ('devices = [2, "a', 'devices = [4, "a', "node_gb_per_s is 0, but 4 devices"),
        (', "a paper"', "", "machine two: "),
        ("[gpu]", "[gpu", "machine two: "),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, told: str) -> None:
    with pytest.raises(DiscoError, match=told):
        parse(LINES.replace(old, new, 1).encode(), "two")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"a = " + b"[" * 50_000, "something in it is nested too deep"),
        (b"a = " + b"9" * 5_000, "a number in it has thousands of digits"),
        (b"\xff", ""),
    ],
    ids=["deep", "long", "text"],
)
def test_a_file_that_cannot_be_read_is_refused(text: bytes, why: str) -> None:
    with pytest.raises(DiscoError, match=f"machine two: {why}"):
        parse(text, "two")


def test_a_machine_that_is_not_there_is_refused() -> None:
    with pytest.raises(DiscoError, match=r"expected a file \*.toml, or one of coconet"):
        load("laptop")
    with pytest.raises(DiscoError, match="No such file"):
        load("missing.toml")


def test_a_ring_sends_all_but_one_share_a_phase() -> None:
    # 3 messages of 25 bytes at 75 GB/s, 500 ns each; an all-reduce has two phases.
    assert collective_ns(load("t3"), "reduce-scatter", 100, 4) == pytest.approx(3 * 25 / 75 + 1500)
    assert collective_ns(load("t3"), "all-reduce", 100, 4) == pytest.approx(6 * 25 / 75 + 3000)


def test_a_mesh_sends_to_all_at_once() -> None:
    assert collective_ns(load("mi210-node"), "all-to-all", 8000) == pytest.approx(6000 / 80 + 1000 + 12_000)


def test_a_torus_is_as_square_as_it_can_be() -> None:
    assert torus_sides(128) == (8, 16)
    # Along 16 devices each sends 16 x 15 / 2 parts of 1/16, half of them each way; then the same along 8.
    expected = 10_000 * (15 + 7) / 2 / 2 / 25 + (15 + 7) * 700
    assert collective_ns(load("mi210-torus"), "all-to-all", 10_000) == pytest.approx(expected)


def test_what_is_sent_to_another_node_shares_its_ports() -> None:
    cluster = load("coconet")
    within, between = (send(cluster, between_nodes=one).ns(9600) for one in (False, True))
    assert within == pytest.approx(8400 + 3400 + 9600 / 120)
    assert between == pytest.approx(8400 + 9600 + 9600 * 16 / 83.4)
    assert send(load("mi210-torus"), between_nodes=True).ns(2500) == pytest.approx(700 + 100)


def test_nccl_takes_trees_between_nodes_for_small_sizes_and_rings_for_large_ones() -> None:
    machine = load("coconet")
    # LL: 4.4 us, twice 15 steps inside a node of 0.52 us x 1.8, and twice log2(16) of 5 us between nodes.
    assert collective_ns(machine, "all-reduce", 0) == pytest.approx(4400 + 2 * (15 * 520 * 1.8 + 4 * 5000))
    large = 1 << 40
    assert collective_ns(machine, "all-reduce", large) == pytest.approx(
        2 * 255 / 256 * large / 83.4, rel=1e-4
    )
    assert collective_ns(machine, "all-reduce", large, 16) == pytest.approx(
        2 * 15 / 16 * large / 120, rel=1e-4
    )


@given(
    st.sampled_from(names()), st.sampled_from(list(PHASES)), st.integers(2, 1 << 16), st.integers(0, 1 << 40)
)
def test_the_pieces_are_the_fastest_algorithm(name: str, kind: Kind, devices: int, size: int) -> None:
    machine = load(name)
    if machine.network.node_gb_per_s == 0 and machine.network.topology != "torus":
        devices = min(devices, machine.network.node_devices)
    expected = collective_ns(machine, kind, size, devices)
    assert float(pieces(machine, kind, devices).exact(size)) == pytest.approx(expected, rel=1e-6, abs=1)


def test_an_algorithm_that_is_never_the_fastest_has_no_piece() -> None:
    lines = [Algorithm("a", 4.0, 0.0), Algorithm("b", 3.0, 1000.0), Algorithm("c", 1.0, 300.0)]
    assert [(piece.from_bytes, piece.ns_per_byte) for piece in fastest(lines).lines] == [(0, 4.0), (100, 1.0)]


def test_devices_that_cannot_be_are_refused() -> None:
    with pytest.raises(DiscoError, match="one node of 4 devices, not 5"):
        collective_ns(load("mi210-node"), "all-reduce", 1, 5)
    with pytest.raises(DiscoError, match="expected 2 to"):
        collective_ns(load("h100"), "all-reduce", 1, 1)


def test_an_all_to_all_between_nodes_is_bound_by_their_ports() -> None:
    machine = load("h200")
    network = replace(machine.network, node_gb_per_s=10.0)
    size = 1 << 30
    # Each of 8 devices sends half of its bytes to the other node, over 10 GB/s in all.
    expected = 8 * size / 2 / 10
    assert collective_ns(replace(machine, network=network), "all-to-all", size, 16) == pytest.approx(
        expected, rel=1e-3
    )
