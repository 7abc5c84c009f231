"""What goes wrong on one rank alone must not leave the others waiting, and what Ctrl-C ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disco_hlo.errors import ActivationError, ProfileError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.optimize.cold_start import COMPILE_S
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin import session
from disco_hlo.plugin.measuring import candidates, traced_modules
from disco_hlo.plugin.measuring.candidates import compile_trials
from disco_hlo.plugin.measuring.known_times import STORE_NAME, KnownTimes, measured_times
from disco_hlo.plugin.measuring.traced_modules import take_timelines, traced
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.phases import capture_phase, search_phase
from disco_hlo.plugin.session import Interruption, Session, join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.profiler import trace as tracing
from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.profile import Link, OpTime, Platform
from disco_hlo.profiler.store import ProfileStore
from tests.plugin.handled import in_session
from tests.plugin.sessions import session_of
from tests.steps import models
from tests.steps.intercept import intercept

PLATFORM, LINK = Platform("some cpu", "cpu", "", "0.12", "0.12"), Link(2, 1)
CONSTANTS = DeviceConstants(launch_ns=400, memory_bandwidth=2e10, flops_per_s=1e11, noise=0.01)


def on_mlp(look: Callable[[CompileRequest, Step], Any]) -> Any:
    step, arguments = models.mlp()

    def body(request: CompileRequest) -> Any:
        module = compiles.capture(request)
        return look(request, Step(module, canonicalize(module)))

    return intercept(step, arguments, body)


def out_of_memory(*_: Any, **__: Any) -> Any:
    """As jax raises it: no error of ours."""
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")


def full(*_: Any) -> None:
    """As a store says it."""
    raise ProfileError("database or disk is full")


# --- the store of measured times, which rank 0 alone has ------------------------------------------


def test_a_damaged_row_in_the_store_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ProfileStore(tmp_path / "profile.sqlite") as store:
        store.add_ops(PLATFORM, {"dot": OpTime(100, 1, 12)})
        store._connection.execute("UPDATE op SET median_ns = -1")
        known = KnownTimes(PLATFORM, LINK, store)
        known.add_constants(CONSTANTS)
        assert known.profile("f00d").ops == {}
    assert "measured times are not kept: " in caplog.text
    assert "dot (-1, 1, 12): Expected `int` >= 0" in caplog.text


@pytest.fixture
def alone(tmp_path: Path) -> Session:
    """One rank, of no step."""
    return session_of(tmp_path)


def test_a_store_that_cannot_be_written_is_read_and_one_line_says_so(
    alone: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with measured_times(alone) as store:
        KnownTimes(PLATFORM, LINK, store).add_ops("f00d", {"dot": OpTime(100, 1, 12)}, [5000])
    monkeypatch.setattr(ProfileStore, "_probed", lambda self, mode, statement: _read_only(self, mode))
    with measured_times(alone) as store:
        known = KnownTimes(PLATFORM, LINK, store)
        known.add_constants(CONSTANTS)
        assert known.profile("f00d").ops == {"dot": OpTime(100, 1, 12)}
        assert known.profile("f00d").launch_ns == 400
    assert caplog.messages == [f"measured times are not kept: {tmp_path / STORE_NAME} cannot be written"]


@pytest.mark.parametrize("unwritable", [False, True])
def test_a_search_says_once_that_times_are_not_kept(
    unwritable: bool,
    alone: Session,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ProfileStore(tmp_path / STORE_NAME).close()
    if unwritable:
        monkeypatch.setattr(ProfileStore, "_probed", lambda self, mode, statement: _read_only(self, mode))
    monkeypatch.setattr(ProfileStore, "add_ops", full)
    for _ in ("the step", "another structure of it"):
        with measured_times(alone) as store:
            known = KnownTimes(PLATFORM, LINK, store)
            known.add_constants(CONSTANTS)
            known.add_ops("f00d", {"fused": OpTime(70, 1, 12)}, [5000])
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    why = f"{tmp_path / STORE_NAME} cannot be written" if unwritable else "database or disk is full"
    assert said == f"measured times are not kept: {why}"


def _read_only(store: ProfileStore, mode: str) -> Any:
    import sqlite3

    if mode != "ro":
        raise sqlite3.OperationalError("attempt to write a readonly database")
    return store._connected(mode)


# --- traces -----------------------------------------------------------------------------------------


class Counted:
    """Stands in for a runner; the other ranks' all-reduces wait for each of its runs."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self) -> int:
        self.runs += 1
        return 1000


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("INTERNAL: no profiler")])
def test_a_rank_without_a_trace_runs_as_often_as_the_others(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_profiler: Any, run_once: Callable[[], None], repeats: int, warmup: int) -> bytes:
        run_once()
        raise error

    monkeypatch.setattr(tracing, "collect", failing)
    runner = Counted()
    with pytest.raises(type(error), match=str(error)):
        traced(runner, 5)  # type: ignore[arg-type]
    assert runner.runs == 7


# --- what jax raises --------------------------------------------------------------------------------


def test_no_memory_for_the_timelines_leaves_the_winner_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traced_modules, "Runner", out_of_memory)

    def look(request: CompileRequest, step: Step) -> Any:
        session = join(request, Settings(search=True, directory=tmp_path))
        return take_timelines(session, step, [Trial("XLA default", None, 0)])

    with caplog.at_level(logging.INFO, "disco_hlo"):
        assert on_mlp(look) == ()
    assert "no measured timelines: RuntimeError: RESOURCE_EXHAUSTED" in caplog.text


def test_no_memory_for_profiling_leaves_a_capture_without_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture_phase, "profile_step", out_of_memory)
    monkeypatch.setattr(capture_phase, "training_step", lambda request, settings: taken[0])
    taken: list[Step] = []
    folder = tmp_path / "captured"

    def look(request: CompileRequest, step: Step) -> None:
        taken.append(step)
        capture_phase.handle(request, Settings(search=False, directory=tmp_path / "plans"), folder)

    with caplog.at_level(logging.INFO, "disco_hlo"):
        on_mlp(look)
    assert "captured without measured times: RuntimeError: RESOURCE_EXHAUSTED" in caplog.text
    assert sorted(path.name for path in folder.iterdir()) == [
        "capture.json", "default.hlo.pb.gz", "unfused.hlo.pb.gz",
    ]  # fmt: skip


def test_ranks_wait_as_long_for_a_search_as_it_may_take_to_compile_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once on a machine it takes some minutes, beyond the budget; the others gave up after five."""
    waits_s: dict[str, float] = {}

    def stage(_: Session, name: str, takes_s: float = 0.0) -> contextlib.AbstractContextManager[None]:
        waits_s[name] = takes_s
        return contextlib.nullcontext()

    monkeypatch.setattr(Session, "stage", stage)
    for name in ("read", "profile_step", "Making"):
        monkeypatch.setattr(search_phase, name, lambda *_, **__: None)
    monkeypatch.setattr(search_phase, "measured_times", lambda _: contextlib.nullcontext())
    step: Any = SimpleNamespace(source=SimpleNamespace(graph=SimpleNamespace(backend="gpu")))
    monkeypatch.setattr(search_phase, "room_bytes", lambda _: None)
    asking = session_of(tmp_path, budget_s=7.0)
    search_phase._search(asking, step, None, Interruption(), lambda: None)  # type: ignore[arg-type]
    assert waits_s["search"] >= 7.0 + COMPILE_S


def test_a_candidate_that_rank_0_fails_to_write_is_left_out_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> bytes:
        raise KeyError("n7")

    monkeypatch.setattr(candidates, "apply", broken)

    def look(session: Session, source: CanonicalModule) -> list[Trial]:
        trials = [Trial("XLA default", None, 0), Trial("no fusion", unfused(source.graph), 0)]
        compile_trials(session, source, trials, tag="candidate")
        return trials

    default, plain = in_session(tmp_path, look)
    assert (default.error, plain.error) == ("", "KeyError: 'n7'")
    assert default.executable is not None
    assert plain.executable is None


class Board:
    """Notes that all ranks of this test see."""

    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone
        self.asked = 0
        self.left = threading.Event()

    def leave(self) -> None:
        if self.gone:
            raise ActivationError("rank 0's process does not answer")
        self.left.set()

    def found(self) -> bool:
        self.asked += 1
        if self.gone:
            raise ActivationError("rank 0's process does not answer")
        return self.left.is_set()


@pytest.fixture(autouse=True)
def _python_takes_ctrl_c() -> Iterator[None]:
    """A suite in the background of a shell hands its processes SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_LOOK_S", 0.0)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def told_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "disco-interrupted":
            thread.join()


@pytest.fixture(autouse=True)
def _nothing_is_said_in_the_next_test() -> Iterator[None]:
    yield
    told_threads()


def test_rank_0_hears_of_another_ranks_ctrl_c() -> None:
    board = Board()
    first, second = Interruption(board), Interruption(board, leads=False)
    with first.watched():
        assert not first
    with second.watched():
        assert not second
        press()
        assert second
        assert board.left.wait(10)
    assert first
    assert first.wanted


def test_rank_0_leaves_no_note_of_its_own_and_asks_for_none_once_it_knows() -> None:
    board = Board()
    stop = Interruption(board)
    with stop.watched():
        press()
    assert stop
    told_threads()
    assert not board.left.is_set()
    assert board.asked == 0


def test_it_looks_for_notes_now_and_then_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_LOOK_S", 1000.0)
    board = Board()
    stop = Interruption(board)
    assert [bool(stop) for _ in range(5)] == [False] * 5
    assert board.asked == 1


def test_a_second_ctrl_c_ends_the_program() -> None:
    with Interruption(Board(), leads=False).watched():
        press()
        with pytest.raises(KeyboardInterrupt):
            press()


def test_a_handler_that_is_not_pythons_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a program in another language, with a handler of its own, embeds Python."""
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    with Interruption().watched() as stop, pytest.raises(KeyboardInterrupt):
        press()
    assert not stop


def test_where_nobody_takes_the_note_one_line_says_so_and_nothing_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop = Interruption(Board(gone=True), leads=False)
    with caplog.at_level(logging.INFO, "disco_hlo"):
        with stop.watched():
            press()
        told_threads()
    assert caplog.messages == [
        "interrupted: the search is ended; another Ctrl-C ends the program",
        "rank 0 cannot be told of the interruption: rank 0's process does not answer",
    ]
    assert not Interruption(Board(gone=True))


def test_in_one_process_there_is_nobody_to_tell() -> None:
    stop = Interruption()
    with stop.watched():
        assert not stop
        press()
        assert stop


def test_what_fails_because_a_training_ends_is_no_line_for_the_user(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "disco_hlo")
    ends = [False]
    session = replace(session_of(tmp_path), over=lambda: ends[0])
    session.say_failed("%s: not profiled", "before")
    ends[0] = True
    session.say_failed("%s: not profiled", "after")
    assert [(one.levelno, one.getMessage()) for one in caplog.records] == [
        (logging.INFO, "before: not profiled"),
        (logging.DEBUG, "after: not profiled"),
    ]


def test_a_rank_that_waits_for_one_without_the_switch_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It waited in silence for ten minutes, for the channel."""
    told = threading.Event()
    monkeypatch.setattr(session, "_TOLD_AFTER_S", 0.01)
    monkeypatch.setattr(session.LOGGER, "warning", lambda *_: told.set())
    monkeypatch.setattr(session, "device_facts", lambda _: SimpleNamespace(process_index=0))
    channel = SimpleNamespace(all_gather=lambda payload, **_: [payload] * 2)
    monkeypatch.setattr(session, "_channel", lambda *_: told.wait(20) and channel)
    request: Any = SimpleNamespace(module_name="jit_step", process_indices=(0, 1))
    join(request, Settings(search=True, directory=tmp_path))
    assert told.is_set()
