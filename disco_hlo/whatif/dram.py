"""A channel of HBM2, for T3: how much longer the memory takes for an update than for a write (sections 4.3 and 5.1.1).

T3 changes Accel-Sim's memory in one place: the next column command of a bank group waits twice as long after an update
(table 1: CCDWL = 4). What that costs depends on what else the channel does, so the channel is simulated by the rules
of Accel-Sim (GPGPU-Sim's ``dram.cc``): a queue of 64 accesses of 32 bytes, from which one a cycle goes to a free bank,
to its open row first, else the oldest; a column and a row command a cycle. Between reads and writes the bus stands
still.

Timings are table 1's, and for the rest those of Accel-Sim's V100 at 1 GHz (``SM7_QV100/gpgpusim.config``; Chatterjee et
al., HPCA 2017). Streams go in pieces of 256 bytes, 128 columns of a tile. A matmul's result, and what communication
reads and updates of it, lies where that file's ``-gpgpu_mem_addr_mapping`` puts it (:func:`_of_a_result`): all units
write their tiles at once, and where columns are a multiple of many KB apart they meet in few banks. Which channel a
piece is in is a hash there and drawn here; a kernel's own streams have a drawn bank and row for each piece.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import cycle, product
from math import ceil

from disco_hlo.whatif.machine import HALF, TILE_COLUMNS, TILE_ROWS

BANKS, GROUPS, QUEUE, PIECE, PIECE_COLUMNS = 16, 4, 64, 8, 128
RRD, RCD, RAS, RP, RC, CL, WL, WR, WTR, RTP = 4, 14, 33, 14, 47, 14, 2, 12, 3, 4
BURST = 1
"""Cycles of the data of an access: 32 bytes over 16 at a double rate."""
TO_READ, TO_WRITE = WL + BURST + WTR, CL + BURST + 2 - WL
"""From a write's command to a read's, and back."""
CYCLES = 40_000
"""With 100,000 no figure of T3's changes by 0.3 points, with 20,000 one by 0.3."""
CHANNELS, CHANNELS_FROM = 32, 13
"""Above the 5 bits of the channel (``dramid@8``) begin the bits of the bank and the row."""
WARP = 64
"""Rows and columns of what a warp writes of a tile, a row at a time: CUTLASS has 64 x 64 on V100
(``default_gemm_configuration.h``)."""


class Access(Enum):
    """What a stream does."""

    READ = "read"
    WRITE = "write"
    UPDATE = "update"


GROUP_CYCLES = {Access.READ: 2, Access.WRITE: 2, Access.UPDATE: 4}
"""From a column command to the next of its bank group (CCDL, and table 1's CCDWL)."""


@dataclass(slots=True)
class _Bank:
    waiting: deque[tuple[int, Access]] = field(default_factory=deque)
    """The row of each access."""
    now: tuple[int, Access] | None = None
    row: int = -1
    column_from: int = 0
    close_from: int = 0
    open_from: int = 0

    def take(self) -> bool:
        """The next access: the first to the open row, else the first."""
        if self.now is not None or not self.waiting:
            return False
        at = next((at for at, (row, _) in enumerate(self.waiting) if row == self.row), 0)
        self.now = self.waiting[at]
        del self.waiting[at]
        return True


class _Channel:
    """Cycle by cycle; what may not begin yet has the cycle from which it may."""

    def __init__(self, streams: Sequence[tuple[Access, Iterator[tuple[int, int]]]]) -> None:
        self.banks = [_Bank() for _ in range(BANKS)]
        self.column_from, self.close_from = [0] * GROUPS, [0] * GROUPS
        self.read_from, self.write_from, self.open_from = 0, 0, 0
        self.turns = cycle(streams)
        self.queued, self.served, self.first = 0, 0, 0

    def step(self, now: int) -> None:
        """One cycle."""
        while self.queued < QUEUE:
            access, pieces = next(self.turns)
            number, row = next(pieces)
            self.banks[number].waiting.append((row, access))
            self.queued += 1
        numbers = [(self.first + x) % BANKS for x in range(BANKS)]
        self.queued -= any(self.banks[number].take() for number in numbers)
        any(self._column(now, number) for number in numbers)
        any(self._row(now, number) for number in numbers)

    def _column(self, now: int, number: int) -> bool:
        bank, group = self.banks[number], number % GROUPS
        if bank.now is None or bank.now[0] != bank.row:
            return False
        access = bank.now[1]
        bus_from = self.read_from if access is Access.READ else self.write_from
        if now < max(bank.column_from, self.column_from[group], bus_from):
            return False
        self.column_from[group] = now + GROUP_CYCLES[access]
        if access is Access.READ:
            self.write_from, self.close_from[group] = now + TO_WRITE, now + RTP
        else:
            self.read_from = now + TO_READ
            bank.close_from = max(bank.close_from, now + WL + BURST + WR)
        bank.now = None
        self.served, self.first = self.served + 1, number + 1
        return True

    def _row(self, now: int, number: int) -> bool:
        bank = self.banks[number]
        if bank.now is None or bank.now[0] == bank.row:
            return False
        if bank.row >= 0 and now >= max(bank.close_from, self.close_from[number % GROUPS]):
            bank.row, bank.open_from = -1, max(bank.open_from, now + RP)
            return True
        if bank.row >= 0 or now < max(self.open_from, bank.open_from):
            return False
        bank.row = bank.now[0]
        bank.column_from = now + RCD - (0 if bank.now[1] is Access.READ else WL + 1)
        bank.open_from, bank.close_from, self.open_from = now + RC, now + RAS, now + RRD
        return True


@cache
def access_cycles(streams: tuple[Access, ...]) -> float:
    """Cycles for one access of each of a kernel's streams, which all want as much as they get, one after the other."""
    return _cycles([(access, _drawn(seed)) for seed, access in enumerate(streams)])


def _cycles(streams: Sequence[tuple[Access, Iterator[tuple[int, int]]]]) -> float:
    channel = _Channel(streams)
    for now in range(CYCLES):
        channel.step(now)
    return CYCLES * len(streams) / channel.served


def _drawn(seed: int) -> Iterator[tuple[int, int]]:
    drawn = random.Random(seed)
    while True:
        yield from [(drawn.randrange(BANKS), drawn.randrange(1 << 14))] * PIECE


def _of_a_result(
    rows: int, columns: int, units: int, seed: int, begun: float = 0.0
) -> Iterator[tuple[int, int]]:
    """Accesses to a result ``[rows, columns]`` as it is written: bank and row of each that one channel gets.

    A row of it lies in one piece, as BLAS's columns do of the transpose that it computes. A stage is ``units`` tiles
    along ``rows``; all write the same rows of theirs at once.

    Args:
        begun: share of the tiles after which the stream begins.
    """
    drawn, along = random.Random(seed), ceil(rows / TILE_ROWS)
    count = along * ceil(columns / TILE_COLUMNS)
    first = int(begun * count)
    while True:
        stage = [divmod(tile % count, along) for tile in range(first, first + units)]
        for row in range(WARP):
            for across, at in stage:
                for own, piece in product(range(row, TILE_ROWS, WARP), range(0, TILE_COLUMNS, PIECE_COLUMNS)):
                    address = ((at * TILE_ROWS + own) * columns + across * TILE_COLUMNS + piece) * HALF
                    if not drawn.randrange(CHANNELS):
                        yield from [_place(address)] * PIECE
        first = (first + units) % count


def _place(address: int) -> tuple[int, int]:
    """Bank and row, by ``RBBBCCCB.CCCSSSSS`` without the channel's bits."""
    above = address >> CHANNELS_FROM
    return (above >> 4 & 7) << 1 | above & 1, above >> 7


@dataclass(frozen=True, slots=True)
class ResultCost:
    """Cycles that the memory takes for an access to a matmul's result, where 1 is its bandwidth."""

    update: float
    """Where it does nothing else."""
    mixed: float
    """Of an update that takes turns with reads; what these lose is counted here as well."""
    read: float = 1.0

    def times(self, factor: float) -> ResultCost:
        """With updates that cost so many times as much."""
        return ResultCost(factor * self.update, factor * self.mixed, self.read)


@cache
def result_cost(rows: int, columns: int, units: int, devices: int) -> ResultCost:
    """As the channel has it: one chunk of the result is read while the next is updated."""
    read = _cycles([(Access.READ, _of_a_result(rows, columns, units, 0))])
    update = _cycles([(Access.UPDATE, _of_a_result(rows, columns, units, 0))])
    next_chunk = (Access.UPDATE, _of_a_result(rows, columns, units, 1, 1 / devices))
    both = _cycles([(Access.READ, _of_a_result(rows, columns, units, 0)), next_chunk])
    return ResultCost(update, both - read, read)
