"""How many compiles at once: ranks of one host share its cores, and all come to the same number."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disco_hlo.activation.local import LocalChannel
from disco_hlo.cores import own_cores
from disco_hlo.plugin.measuring import room
from disco_hlo.plugin.measuring.room import compiles_at_once, fewest_cores
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings


def host(*numbers: int) -> list[int]:
    return list(range(*numbers))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([("a", host(16))], 16),
        ([("a", host(16)), ("a", host(16))], 8),
        ([("a", host(16)), ("b", host(16))], 16),
        ([("a", host(8)), ("a", host(8, 16))], 8),  # bound to halves
        ([("a", [0]), ("a", [1])], 1),  # Open MPI binds each of two ranks to a core
        ([("a", host(2)), ("a", host(2)), ("a", host(2))], 1),  # fewer cores than ranks
        ([("a", host(16)), ("b", host(6)), ("b", host(6))], 3),  # the scarcest host
        ([("a", host(2)), ("a", host(16))], 2),
    ],
)
def test_cores_to_oneself(ranks: list[tuple[str, list[int]]], expected: int) -> None:
    assert fewest_cores(ranks) == expected


class TwoHosts(LocalChannel):
    """A channel on which another rank, of another host, answers as well."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = other

    def all_gather(self, item: bytes, *, tag: str, timeout_s: float) -> list[bytes]:
        return [item, json.dumps(self.other).encode()]


def at_once(channel: LocalChannel, tmp_path: Any) -> int:
    return compiles_at_once(Session(None, Settings(search=True, directory=tmp_path), None, channel))  # type: ignore[arg-type]


def test_a_large_host_compiles_eight_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(room, "own_cores", lambda: host(96))
    assert at_once(LocalChannel(), tmp_path) == 8


def test_a_rank_with_many_cores_goes_at_the_pace_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(room, "own_cores", lambda: host(96))
    assert at_once(TwoHosts(["elsewhere", [4, 5]]), tmp_path) == 2


def test_a_process_has_a_core() -> None:
    assert len(own_cores()) >= 1
