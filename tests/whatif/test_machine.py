"""Machines are read and checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from disco_hlo.errors import DiscoError
from disco_hlo.whatif.machine import load, names, parse

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
    assert machine.gpu.peak_flops_per_ns == 1500
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


def test_a_machine_that_is_not_there_is_refused() -> None:
    with pytest.raises(DiscoError, match=r"expected a file \*.toml, or one of coconet"):
        load("laptop")
    with pytest.raises(DiscoError, match="No such file"):
        load("missing.toml")
