"""How much memory and how many cores are left on a host, shared by devices, processes and control groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.activation.channel import LocalChannel
from disco_hlo.cores import own_cores
from disco_hlo.errors import UnsupportedError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.read import read
from disco_hlo.plugin.measuring import room
from disco_hlo.plugin.measuring.candidates import Trial, compile_trials, measure
from disco_hlo.plugin.measuring.room import (
    RankMemory,
    compiles_at_once,
    fewest_cores,
    least_bytes,
    room_bytes,
)
from disco_hlo.plugin.session import Session, join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.executables import Memory
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.steps import models
from tests.steps.intercept import intercept

GIB = 1 << 30


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([RankMemory("a", 2, None, 8 * GIB)], 4 * GIB),
        ([RankMemory("a", 1, None, 8 * GIB), RankMemory("a", 3, None, 6 * GIB)], 6 * GIB // 4),
        ([RankMemory("a", 1, None, 8 * GIB), RankMemory("b", 1, None, 3 * GIB)], 3 * GIB),
        ([RankMemory("a", 8, 2 * GIB, None), RankMemory("a", 8, GIB, None)], GIB),
        ([RankMemory("a", 1, None, None)], None),
    ],
)
def test_devices_and_processes_of_a_host_share_its_memory(
    ranks: list[RankMemory], expected: int | None
) -> None:
    assert least_bytes(ranks) == expected


def test_a_candidate_without_room_is_not_run_and_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was run, whatever it needed: on CPU the process is killed then. And a step for whose made-up inputs there is
    no room is refused."""

    def body(request: CompileRequest) -> list[Trial]:
        source = canonicalize(compiles.capture(request))
        session = join(request, Settings(search=True, directory=tmp_path))
        assert (room_bytes(session) or 0) > 1 << 20
        trials = [Trial(DEFAULT, None, 1), Trial("plan", read(source), 1), Trial("large", read(source), 1)]
        compile_trials(session, source, trials, tag="test")
        really = room.memory
        large = trials[2].executable

        def memory(executable: Any) -> Memory:
            return Memory(0, 0, 1 << 50, 0) if executable is large else really(executable)

        monkeypatch.setattr(room, "memory", memory)
        assert measure(session, trials, budget_s=0.01)
        monkeypatch.setattr(room, "room_bytes", lambda _session: 0)
        with pytest.raises(
            UnsupportedError, match=r"^XLA default has no room on made-up inputs: rank 0: it needs "
        ):
            measure(session, trials[:1], budget_s=0.01)
        return trials

    default, plan, large = intercept(*models.mlp(), body)
    assert default.times_ns
    assert plan.times_ns
    assert large.times_ns == []
    assert large.error.startswith("rank 0: it needs 1073741824 MiB a device, ")


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
