"""How much memory and how many cores are left on a host, shared by devices, processes and control groups."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from disco_hlo.activation.channel import LocalChannel
from disco_hlo.activation.kvstore import KvChannel
from disco_hlo.cores import own_cores
from disco_hlo.errors import UnsupportedError, XlaRefusalError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.plan.plan import DEFAULT, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plugin.measuring import candidates, room
from disco_hlo.plugin.measuring.candidates import compile_trials, measure
from disco_hlo.plugin.measuring.room import (
    RankMemory,
    compiles_at_once,
    fewest_cores,
    in_passes,
    in_turn,
    least_bytes,
    needed_on_host_bytes,
    passes_on_host,
    room_bytes,
    with_room_to_compile,
)
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla.executables import Memory, tuning_bytes
from tests.activation.stores import on_ranks
from tests.modules import module_of
from tests.plugin.handled import in_session
from tests.plugin.sessions import session_of

GIB = 1 << 30
GPU: Any = SimpleNamespace(backend="gpu")


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

    def look(session: Session, source: CanonicalModule) -> list[Trial]:
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
            UnsupportedError, match=r"^XLA default has no room on made-up inputs: rank 0: it n"
        ):
            measure(session, trials[:1], budget_s=0.01)
        return trials

    default, plan, large = in_session(tmp_path, look)
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
    return compiles_at_once(session_of(tmp_path, channel))


def test_a_large_host_compiles_sixteen_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A step has 16 structures, of which each takes 20 s: by eight at once one waited for the other half."""
    monkeypatch.setattr(room, "own_cores", lambda: host(96))
    assert at_once(LocalChannel(), tmp_path) == 16


def test_a_rank_with_many_cores_goes_at_the_pace_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(room, "own_cores", lambda: host(96))
    assert at_once(TwoHosts(["elsewhere", [4, 5]]), tmp_path) == 2


@pytest.mark.parametrize(
    ("rise", "more", "other", "at_once", "held"),
    [
        (400, 0, (700, 0, 80), 3, False),  # 90 % of what is free, for 100 bytes each
        (400, 300, (100, 500, 100), 5, True),  # the least of all ranks
        (5000, 0, (None, 0, 0), 16, False),
        (0, 50, (0, 50, 100), 1, True),  # JAX's own compile had no more
    ],
)
def test_modules_are_compiled_between_steps_where_memory_is_short_on_some_rank(
    rise: int, more: int, other: Any, at_once: int, held: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(room, "may_rise_at_peak_bytes", lambda *_: rise)
    monkeypatch.setattr(room, "memory", lambda _: SimpleNamespace(temporaries_bytes=more))
    monkeypatch.setattr(room, "read_executable", lambda _: b"")
    monkeypatch.setattr(room, "tuning_bytes", lambda _: 100)
    request: Any = SimpleNamespace(call_default=object)
    session = session_of(tmp_path, TwoHosts(other))
    session = replace(session, request=request, facts=GPU, between_steps=contextlib.nullcontext)
    monkeypatch.setattr(Session, "stage", lambda *_: contextlib.nullcontext())
    found = with_room_to_compile(session)
    assert (found.compiles_at_once, found.compiles_between_steps) == (at_once, held)
    # So many are compiled in one piece; beside the steps all, some at a time.
    modules = list(range(20))
    assert [len(one) for one in in_turn(found, modules, 6)] == ([6, 6, 6, 2] if held else [20])


def test_ranks_hold_as_many_calls_where_one_alone_tries_candidates_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Marks lie in rank 0's plan directory. The others went on while it waited for them to hold a call once more."""
    monkeypatch.setattr(candidates, "_hand_out", lambda *_, **__: None)

    def compile_one(*arguments: Any) -> None:
        if arguments[-1]:
            raise XlaRefusalError("a kernel is new")

    monkeypatch.setattr(candidates, "_compile", compile_one)
    monkeypatch.setattr(candidates, "compiles_at_once", lambda _: 8)

    def holds(channel: KvChannel) -> tuple[int, list[str]]:
        marks: Any = SimpleNamespace(bans=SimpleNamespace(suspects=lambda _: channel.rank == 0))
        other: Any = SimpleNamespace(early=b"")
        trials = [Trial(name, Strategy(), 0, marks=marks, restructured=other) for name in "abc"]
        trials.insert(1, Trial("of the step itself", Strategy(), 0, marks=marks))
        held: list[str] = []

        def hold(what: str) -> contextlib.AbstractContextManager[None]:
            held.append(what)
            return contextlib.nullcontext()

        session = session_of(tmp_path, channel, timeout_s=2.0)
        between = replace(session, facts=GPU, between_steps=hold, compiles_between_steps=True)
        compile_trials(between, None, trials, tag="test")  # type: ignore[arg-type]
        return len(held), [one.error for one in trials]

    assert on_ranks(2, holds) == [(3, [""] * 4)] * 2


def test_a_kernel_is_tried_on_its_operands_and_two_of_its_results() -> None:
    text = """
        fused { p = f32[1000] parameter(0)
                q = f32[] parameter(1)
                f = f32[1000000] broadcast(q), dimensions={}
                s = f32[1000] slice(f), slice={[0:1000]}
                ROOT a = f32[1000] add(p, s) }
        body { v = (f32[1000], f32[]) parameter(0)
               x = f32[1000] get-tuple-element(v), index=0
               y = f32[] get-tuple-element(v), index=1
               k = f32[1000] fusion(x, y), kind=kLoop, calls=fused
               ROOT t = (f32[1000], f32[]) tuple(k, y) }
        forever { v = (f32[1000], f32[]) parameter(0)
                  ROOT c = pred[] constant(true) }
        ENTRY e { x = f32[1000] parameter(0)
                  y = f32[] parameter(1)
                  v = (f32[1000], f32[]) tuple(x, y)
                  ROOT w = (f32[1000], f32[]) while(v), condition=forever, body=body }"""
    assert tuning_bytes(module_of(text)) == 4 * (1000 + 1) + 2 * 4 * 1000


def test_a_backend_that_tries_nothing_on_its_devices_compiles_beside_the_steps(tmp_path: Any) -> None:
    facts: Any = SimpleNamespace(backend="cpu")
    session = replace(session_of(tmp_path), facts=facts)
    assert with_room_to_compile(session) is session


def test_a_process_has_a_core() -> None:
    assert len(own_cores()) >= 1


def test_what_lies_on_the_host_to_compare_is_a_copy_of_the_arguments_and_a_third_of_the_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was 3.5 times the state of f32, and a GPU's training stood 20 s until there was so much of it."""
    mib = 1 << 20
    assert in_passes([80 * mib, 160 * mib], 3) == [{0, 1}]
    kept = [one * mib for one in (100, 400, 300, 200, 200)]
    assert in_passes(kept, 3) == [{1}, {0, 2}, {3, 4}]
    assert in_passes(kept, 1) == [{0, 1, 2, 3, 4}]
    state = [((100 * mib,), np.dtype(np.float32))] * 3
    monkeypatch.setattr(room, "results", lambda _: [*state, ((), np.dtype(np.int32))])
    monkeypatch.setattr(room, "memory", lambda _: Memory(1200 * mib, 1200 * mib, 700 * mib, 1200 * mib))
    at_once = (1200 + 3 * 500) * mib + 4
    assert needed_on_host_bytes(None, 1) == at_once
    assert needed_on_host_bytes(None, 3) == (1200 + 500) * mib + 4
    assert (passes_on_host(None, 2 * at_once), passes_on_host(None, 2 * at_once - 1)) == (1, 3)
