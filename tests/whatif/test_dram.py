"""A channel of memory: hand-solved with one bank; what the paper's doubled delay costs with all."""

from __future__ import annotations

import pytest

from disco_hlo.whatif import dram
from disco_hlo.whatif.dram import Access, access_cycles, update_cost


@pytest.mark.parametrize(
    ("access", "piece_cycles"),
    [
        (
            Access.READ,
            47,
        ),  # 14 from the row to its first column, 7 x 2 to the last, 4 to close, 14 to open: RC is more
        (Access.WRITE, 11 + 7 * 2 + 15 + 14),
        (Access.UPDATE, 11 + 7 * 4 + 15 + 14),
    ],
)
def test_one_bank_takes_a_row_s_cycle_for_each_piece(
    access: Access, piece_cycles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dram, "BANKS", 1)
    monkeypatch.setattr(dram, "GROUPS", 1)
    assert 8 * access_cycles.__wrapped__((access,)) == pytest.approx(piece_cycles, rel=2e-3)


def test_all_banks_nearly_reach_the_bus_and_a_mix_stands_still_between() -> None:
    read, write = (access_cycles((one,)) for one in (Access.READ, Access.WRITE))
    assert 1 <= min(read, write) <= max(read, write) < 1.2
    assert access_cycles((Access.READ, Access.READ)) == pytest.approx(2 * read, rel=0.02)
    assert access_cycles((Access.READ, Access.WRITE)) > 1.2 * (read + write)


def test_an_update_costs_less_than_twice_a_write_alone_and_more_among_reads() -> None:
    cost = update_cost()
    assert 1 < cost.alone < 2 < cost.mixed
    assert cost.times(2).mixed == 2 * cost.mixed
