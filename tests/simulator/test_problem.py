"""Lists in compressed rows."""

from __future__ import annotations

from disco_hlo.simulator.problem import Lists


def test_lists_and_their_reverse() -> None:
    lists = Lists.of([[1, 2], [], [2]])
    assert [row.tolist() for row in lists] == [[1, 2], [], [2]]
    assert [row.tolist() for row in lists.reversed(4)] == [[], [0], [0, 2], []]
