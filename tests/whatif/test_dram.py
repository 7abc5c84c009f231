"""A channel of memory: hand-solved with one bank; what the paper's doubled delay costs with all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from disco_hlo.whatif import dram
from disco_hlo.whatif.dram import Access, ResultCost, access_cycles, result_cost


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


@pytest.mark.parametrize(
    ("address", "bank", "row"),
    [
        (0x1FFF, 0, 0),  # column, and the channel's five bits
        (0x2000, 1, 0),  # bank's lowest bit
        (0x1C000, 0, 0),  # three more bits of the column
        (0xE0000 | 0x2000, 15, 0),  # the bank's others
        (0x300000, 0, 3),
    ],
)
def test_an_address_has_its_bank_and_row_where_accel_sim_s_v100_has_them(
    address: int, bank: int, row: int
) -> None:
    assert dram._place(address) == (bank, row)


def test_all_units_write_the_same_rows_of_their_tiles_at_once() -> None:
    # One channel of one; two tiles of 128 x 256 along the rows of [256, 4096]: rows 0 and 64 of each, then 1 and 65.
    pieces = itertools.islice(_every_piece(256, 4096, 2), 16)
    addresses = [2 * (4096 * row + of) for row in (0, 64, 128, 192, 1, 65, 129, 193) for of in (0, 128)]
    assert list(pieces) == [dram._place(one) for one in addresses]


def _every_piece(rows: int, columns: int, units: int) -> Iterator[tuple[int, int]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dram, "CHANNELS", 1)
        yield from itertools.islice(dram._of_a_result(rows, columns, units, 0), 0, None, dram.PIECE)


def test_updates_cost_most_where_tiles_are_as_many_kilobytes_apart_as_banks_repeat_in() -> None:
    apart, together = (result_cost(2048, columns, 80, 8) for columns in (4256, 4096))
    for cost in (apart, together):
        assert 1 < cost.read < cost.update < cost.mixed
    assert together.update > 1.4 * apart.update
    assert together.times(2) == ResultCost(2 * together.update, 2 * together.mixed, together.read)
