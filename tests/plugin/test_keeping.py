"""Structures within the memory that devices have: what has no room gives way to what needs less."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from disco_hlo.activation.kvstore import KvChannel
from disco_hlo.elsewhere import here
from disco_hlo.errors import XlaRefusalError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.pipeline import Case
from disco_hlo.plan.read import read
from disco_hlo.plan.store import PlanStore
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.measuring import room
from disco_hlo.plugin.measuring.room import limited_bytes
from disco_hlo.plugin.phases import keeping, structure_search
from disco_hlo.plugin.phases.keeping import (
    Ranked,
    in_part,
    is_near,
    most_bytes,
    most_drafted_bytes,
    needed_bytes,
    prices_of,
    with_room,
)
from disco_hlo.plugin.phases.making_structures import Making
from disco_hlo.plugin.phases.structure_search import StructureSearch
from disco_hlo.plugin.session import join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.structure import early_module, enacted
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.executables import memory
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.search.schedule import Scheduled
from disco_hlo.simulator.build import resident_bytes
from disco_hlo.structure.choose import Chosen
from disco_hlo.structure.moves import Double, to_json
from disco_hlo.structure.propose_loops import KEPT_IN_PART, KEPT_IN_PART_NAMES, InPart, kept_in_part
from tests.activation.stores import on_ranks
from tests.plugin.sessions import fake_session, session_of
from tests.plugin.test_structure import SCANNED, found, parsed, profile
from tests.steps.intercept import intercept
from tests.structure.test_keep import step

MIB = 1 << 20
MOVES = (Double((0,)),)


def ranked(**peaks_mib: int) -> list[Ranked]:
    return [Ranked(1, name.replace("_", "-"), False, mib * MIB) for name, mib in peaks_mib.items()]


def test_what_is_predicted_to_have_no_room_is_one_line() -> None:
    session = fake_session()
    every = ranked(keep=120, gather_once_rotate=101, keep_kernels=100, rotate=130)
    assert [one.name for one in with_room(session, every, 100 * MIB)] == ["keep-kernels", "rotate"]
    assert session.said == [
        "not tried, as each device has room for 100 MiB: keep (120 MiB), gather-once-rotate (101 MiB)"
    ]
    assert with_room(session, every, None) == every
    asked = fake_session(settings=Settings(search=True, directory=Path(), structure="keep"))
    assert with_room(asked, every, 100 * MIB) == every
    assert asked.said == []


def test_what_keeps_more_is_compiled_to_see_its_memory_where_that_is_near() -> None:
    near = [one.name for one in ranked(keep=91, keep_kernels=90, rotate=95) if is_near(one, 100 * MIB)]
    assert near == ["keep"]


def test_what_lacks_one_byte_is_not_said_to_fit() -> None:
    assert room.over_limit(100 * MIB, 100 * MIB) == ""
    assert room.over_limit(100 * MIB + 1, 100 * MIB).startswith("it needs 101 MiB a device, 100 MiB are")
    session = fake_session()
    assert not with_room(session, [Ranked(1, "keep", False, 100 * MIB + 1)], 100 * MIB)
    assert session.said == ["not tried, as each device has room for 100 MiB: keep (101 MiB)"]


NAMES = KEPT_IN_PART_NAMES[:2]
"""Of those that a step has."""


def part_of(room_bytes: int) -> InPart:
    """Keeps as much as there is room for."""
    held_bytes = max(0, room_bytes)
    chosen = Chosen(frozenset({("body", "dot.1")}), held_bytes, 1.0) if held_bytes else Chosen()
    return InPart(dict.fromkeys(NAMES, MOVES) if held_bytes else {}, chosen)


EARLY: Any = SimpleNamespace(module=b"", copies=True, in_float32=True, run=here)


def needing(peak_mib: int) -> Any:
    """A step that needs so much."""
    return SimpleNamespace(default=SimpleNamespace(peak_bytes=peak_mib * MIB), costs=None)


def done(early: bytes) -> Future[Any]:
    """A structure that was made."""
    future: Future[Any] = Future()
    future.set_result(SimpleNamespace(early=early))
    return future


def rooms_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rooms in MiB for which values to keep are chosen from now on; an executable is the bytes that it needs."""
    rooms: list[int] = []

    def chosen(_module: bytes, _prices: object, room_bytes: int, **allowed: bool) -> InPart:
        rooms.append(room_bytes // MIB)
        return part_of(room_bytes)

    monkeypatch.setattr(keeping, "kept_in_part", chosen)
    monkeypatch.setattr(keeping, "_DRAFTED_WITHIN", 0.0)
    monkeypatch.setattr(room, "memory", lambda executable: SimpleNamespace(total_bytes=executable))
    return rooms


def kept_by(
    monkeypatch: pytest.MonkeyPatch, needed_mib: list[int], most_mib: int, peak_mib: int = 60
) -> tuple[list[str], list[int], list[str]]:
    """Names of what is kept in part, the rooms asked for in MiB, and what is said, of a step that needs ``peak_mib``,
    where XLA needs so much for each structure that is compiled."""
    needed = iter(needed_mib)

    def made(schedules: Any) -> dict[str, Future[Any]]:
        assert all(moves == to_json(MOVES) for moves in schedules.values())
        return {name: done(b"") for name in schedules}

    monkeypatch.setattr(compiles, "compile_module", lambda *_: next(needed) * MIB)
    rooms = rooms_asked_for(monkeypatch)
    session = fake_session()
    return list(in_part(session, EARLY, needing(peak_mib), most_mib * MIB, made)), rooms, session.said


def test_no_call_is_held_for_the_memory_of_a_structure_that_is_not_made() -> None:
    session = fake_session(compiles_between_steps=True, compiling=lambda _: pytest.fail("a call was held"))
    unmade: Future[Any] = Future()
    unmade.set_exception(XlaRefusalError("XLA refused the restructured step"))
    assert needed_bytes(session, "keep", unmade, 100) == (0, "")


def test_as_much_is_kept_as_the_step_leaves_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    names, rooms, said = kept_by(monkeypatch, [100, 100], 100)
    assert (names, rooms) == (list(NAMES), [40])
    assert said == ["keep-some keeps 1 value computed twice, in up to 40 of the 40 MiB left on each device"]


def test_a_little_of_the_limit_is_left_to_picks_of_the_autotuner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of a training on 2 H200 were held for structures whose drafts had room, by 26 and 35 of 15,176 MiB, and
    which themselves had none."""
    rooms = rooms_asked_for(monkeypatch)
    monkeypatch.setattr(keeping, "_DRAFTED_WITHIN", 0.015)
    session = fake_session()
    assert in_part(session, EARLY, needing(60), 100 * MIB, lambda _: {}) == {}
    assert rooms == [38]
    assert (most_drafted_bytes(100 * MIB), most_drafted_bytes(None)) == (int(98.5 * MIB), None)


def test_what_is_kept_may_be_worth_it_only_in_a_rotated_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = rooms_asked_for(monkeypatch)
    monkeypatch.setattr(compiles, "compile_module", lambda *_: (110 if len(rooms) == 1 else 100) * MIB)
    rotated, session = NAMES[1], fake_session()
    kept = in_part(session, EARLY, needing(60), 100 * MIB, lambda _: {rotated: done(b"")})
    assert (list(kept), rooms) == ([rotated], [40, 30])


def test_where_xla_needs_more_than_predicted_one_line_says_so_and_less_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """10 MiB more, then 5 and 2 for the rotated one."""
    names, rooms, said = kept_by(monkeypatch, [110, 111, 100, 102], 100)
    assert (names, rooms) == ([KEPT_IN_PART], [40, 30])
    refused = [line for line in said if "is not tried" in line]
    assert refused[0] == (
        "keep-some is not tried: it needs 110 MiB a device, 100 MiB are the most that it may need"
    )
    assert [line.split(":")[0] for line in refused[1:]] == ["keep-some-rotate is not tried"] * 2


def test_half_is_still_kept_where_xla_needs_more_than_all_that_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, rooms, _ = kept_by(monkeypatch, [150, 150, 100, 100], 100)
    assert (names, rooms) == (list(NAMES), [40, 20])


def test_what_never_fits_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    names, rooms, _ = kept_by(monkeypatch, [110, 110, 101, 101, 104, 104], 100)
    assert (names, rooms) == ([], [40, 30, 29])


def test_ranks_keep_what_rank_0_chooses_and_what_fits_on_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """XLA needs 4 MiB too much on rank 1, and less once 4 MiB less are kept."""
    rooms = rooms_asked_for(monkeypatch)
    monkeypatch.setattr(
        compiles, "compile_module", lambda _request, _module, _options, early: int(early) * MIB
    )

    def kept(channel: KvChannel) -> tuple[list[str], list[Any]]:
        session = session_of(tmp_path, channel, timeout_s=20.0)
        needed = iter([99, 99, 95, 95] if channel.rank == 0 else [104, 104, 100, 100])
        told: list[Any] = []

        def made(schedules: Any) -> dict[str, Future[Any]]:
            told.append(schedules)
            return {name: done(b"%d" % next(needed)) for name in schedules}

        case = needing(60) if channel.rank == 0 else None
        return list(in_part(session, EARLY, case, 100 * MIB, made)), told

    first, second = on_ranks(2, kept)
    assert first == second
    assert first[0] == list(NAMES)
    assert rooms == [40, 36]


def test_without_room_nothing_is_kept_and_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_by(monkeypatch, [], 50) == (
        [],
        [-10],
        [
            "nothing that is computed twice is kept: none of it is predicted to save time in the 0 MiB left on "
            "each device"
        ],
    )


def test_a_structure_may_need_what_a_plan_may_and_before_a_training_what_is_free() -> None:
    source = parsed(SCANNED.replace("OP", "negate(x)"))
    case = Case(source, unfused(source.graph), costs_of(profile("gpu", 1.0), source), 10 * MIB)
    limit = resident_bytes(source.graph) + 10 * MIB
    assert most_bytes(SimpleNamespace(on_calls=None), case, 8 * MIB) == 8 * MIB
    assert most_bytes(SimpleNamespace(on_calls=None), case, 80 * MIB) == limit
    assert most_bytes(SimpleNamespace(on_calls=object()), case, 8 * MIB) == limit


def test_the_users_limit_counts_what_the_step_has() -> None:
    graph = parsed(SCANNED.replace("OP", "negate(x)")).graph
    resident = resident_bytes(graph)
    settings = Settings(search=True, directory=Path(), memory_mib=4)
    assert (
        limited_bytes(settings, 100 * MIB, graph)
        == limited_bytes(settings, None, graph)
        == 4 * MIB - resident
    )
    assert limited_bytes(settings, 5, graph) == 5
    assert limited_bytes(Settings(search=True, directory=Path()), None, graph) is None


@pytest.mark.product_only  # compiles the engine
def test_a_step_without_room_for_all_keeps_some_which_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked for by name, in half of the memory that all would take. XLA:CPU needs more for the step than was predicted,
    since it fuses less after a move."""
    monkeypatch.setattr(structure_search, "profile_structures", lambda *_: {})
    monkeypatch.setattr(structure_search, "room_bytes", lambda _: 1 << 40)

    def look(request: CompileRequest) -> None:
        source, early = canonicalize(compiles.capture(request)), early_module(request)
        session = join(
            request, Settings(search=True, directory=tmp_path, structure=KEPT_IN_PART, budget_s=1.0)
        )
        slot = PlanStore(tmp_path).slot(source.graph.key, "cpu", "cpu", 2)
        costs = found(source).case.costs
        prices = functools.partial(prices_of, costs)
        everything = kept_in_part(early.module, prices, 1 << 40, copies=early.copies).chosen
        plain = memory(compiles.compile_module(request, None, None, early.module)).total_bytes
        most = plain + everything.held_bytes // 2
        case = Case(source, read(source), costs, most - resident_bytes(source.graph))
        known = replace(found(source), case=case)

        def search(_module: bytes, case: Case, _seconds: float) -> Scheduled:
            return case.unfused

        (trial,) = StructureSearch(session, slot, None, known, Making(session, source), search).trials()
        made = trial.restructured
        assert made is not None
        assert trial.name == made.record.name == KEPT_IN_PART
        kept = sum(len(move.get("pairs", ())) for move in made.record.moves)
        assert 0 < kept < len(everything.values)
        assert memory(compiles.compile_module(request, None, None, made.early)).total_bytes <= most
        with compiles.halted(request, early=True) as waiting:
            again = enacted(request, made.record, waiting)
        assert again.early == made.early
        assert again.source.graph.key == made.source.graph.key

    mapped, arguments = step("scan")
    caplog.set_level("INFO", "disco_hlo")
    intercept(jax.jit(mapped), arguments, look)
    assert any(line.startswith("keep-some keeps ") for line in caplog.messages)


def test_nothing_is_kept_in_part_where_that_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = SimpleNamespace(schedules={KEPT_IN_PART: ()})
    monkeypatch.setattr(keeping, "_chosen", lambda *_: chosen)
    asked: list[Any] = []
    assert in_part(fake_session(), EARLY, needing(1), 2, lambda one: asked.append(one) or {}) == {}
    assert asked == [{KEPT_IN_PART: []}]
