"""Which ends of a process ban a module: real processes that end in every way there is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disco_hlo.errors import PlanError
from disco_hlo.plan import files
from disco_hlo.plan.bans import Bans, Stage
from disco_hlo.plan.store import PlanStore

A, B, C = (letter * 64 for letter in "abc")

PROGRAM = """
import ctypes, faulthandler, json, os, signal, sys, threading, time, traceback
from pathlib import Path
import llvmlite.binding
from disco_hlo.plan.bans import Bans, note_hang, withdraw_marks
libc = ctypes.CDLL(None)

def kill(number):
    os.kill(os.getpid(), number)

def abort_elsewhere(name=b"grpc"):
    # A thread of machine code alone, as those of XLA are; it has the name of the thread that makes it.
    libc.prctl(15, name)
    thread = ctypes.c_uint64()
    libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
    time.sleep(60)

def ready():
    os.write(1, b"ready %d\\n" % os.getpid())
    time.sleep(60)

def trying(module="a"):
    return Bans(folder).trying(module * 64, stage, processes)

for line in sys.stdin:
    folder, stage, processes, code = json.loads(line)
    child = os.fork()
    if not child:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # ignored in the background of a shell
            signal.signal(number, signal.SIG_DFL)
        folder = Path(folder)
        try:
            if "trying(" in code:
                exec(code)
            else:
                with trying():
                    exec(code)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.write(1, b"ended %d\\n" % os.waitstatus_to_exitcode(status))
"""
"""Forks a process for each line: what they need is imported once."""
FORKING: list[subprocess.Popen[str]] = []


@pytest.fixture(scope="module", autouse=True)
def _forking() -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    ) as process:  # fmt: skip
        FORKING[:] = [process]
        yield
        assert process.stdin is not None
        process.stdin.close()


def end(folder: Path, code: str, *sent: signal.Signals, stage: str = "compile", processes: int = 1) -> int:
    """Let a process end while it tries module A; how it ended.

    Args:
        sent: what it is sent once it says that it is ready, one after the other.
    """
    (process,) = FORKING
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([str(folder), stage, processes, code]) + "\n")
    process.stdin.flush()
    word, number = process.stdout.readline().split()
    if sent:
        assert word == "ready"
        for one in sent:
            os.kill(int(number), one)
            time.sleep(0.1 if len(sent) > 1 else 0.0)  # the first is heard before the second is sent
        word, number = process.stdout.readline().split()
    assert word == "ended"
    return int(number)


def names(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in folder.iterdir())


IGNORES = "signal.signal(signal.SIGTERM, lambda *_: None)\n"
"""As jax does in a job of several processes: its preemption service has SIGTERM."""


@pytest.mark.parametrize(
    ("code", "sent"),
    [
        *(("ready()", (number,)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)),
        *(("ready()", (number,)) for number in (signal.SIGUSR1, signal.SIGXCPU)),
        ("trying_on = trying()\n" + IGNORES + "with trying_on: ready()\n", (signal.SIGTERM, signal.SIGKILL)),
        # What follows the first word: an abort in the course of an orderly end, a crash in a destructor.
        ("trying_on = trying()\n" + IGNORES + "with trying_on: ready()\n", (signal.SIGTERM, signal.SIGABRT)),
        (IGNORES + "with trying('b'): kill(15)\nwith trying(): kill(9)", ()),
        # A watchdog's: nobody but another process sent it.
        ("ready()", (signal.SIGABRT,)),
        ("ready()", (signal.SIGSEGV,)),
        ("withdraw_marks(); os._exit(1)", ()),
    ],
)  # fmt: skip
def test_a_process_that_was_told_to_end_says_nothing_of_a_module(
    code: str, sent: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    """A job that was ended while its step compiled banned the plan for good."""
    assert end(tmp_path, code, *sent) != 0
    assert Bans(tmp_path).all() == []
    assert names(tmp_path) == []


CRASHES = {
    "SIGSEGV": "faulthandler._sigsegv()",
    "SIGABRT": "os.abort()",
    "SIGBUS": "kill(signal.SIGBUS)",
    "SIGFPE": "faulthandler._sigfpe()",
    "SIGILL": "signal.raise_signal(signal.SIGILL)",
}


@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_bans_until_it_is_forgiven(name: str, tmp_path: Path) -> None:
    assert end(tmp_path, CRASHES[name]) == -signal.Signals[name]
    for _ in range(2):
        [ban] = Bans(tmp_path).all()
        assert ban.module == A
        assert ban.reason.startswith("process ")
        assert f" ended by {name} while it was compiled (" in ban.reason
        assert "; to try it again: disco forgive " in ban.reason
        assert str(tmp_path) in ban.reason
    assert Bans(tmp_path).reason(B) == ""
    assert names(tmp_path) == ["died"]
    assert Bans(tmp_path).forgive() == 1
    assert Bans(tmp_path).reason(A) == ""
    assert names(tmp_path) == []


@pytest.mark.parametrize("user", ["before", "meanwhile", "before, and no more", "a handler"])
def test_a_crash_is_noted_beside_the_users_own_faulthandler(user: str, tmp_path: Path) -> None:
    folder, dump = tmp_path / "plans", tmp_path / "dump"
    folder.mkdir()
    enable = f"faulthandler.enable(open({str(dump)!r}, 'w'))\n"
    code = {
        "before": enable + "with trying(): faulthandler._sigsegv()",
        "meanwhile": "with trying():\n  " + enable + "  faulthandler._sigsegv()",
        "before, and no more": enable + "with trying():\n  faulthandler.disable(); faulthandler._sigsegv()",
        # A second stretch, where ours is in the midst of the user's chain.
        "a handler": "with trying('b'):\n  " + enable + "with trying():\n  faulthandler._sigsegv()",
    }[user]
    assert end(folder, code) == -signal.SIGSEGV
    banned = Bans(folder).reason(A) != ""
    assert banned is (user != "before, and no more")  # that gives the default action back: one death
    assert Bans(folder).reason(B) == ""
    dumped = dump.read_text()
    assert dumped.count("Fatal Python error: Segmentation fault") == (user != "before, and no more")


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        # The user's own handlers are still theirs, during and after.
        (
            "signal.signal(signal.SIGTERM, lambda *_: heard.append(1))\n"
            "with trying(): kill(15); time.sleep(0.01)\n"
            "kill(15); time.sleep(0.01); os._exit(10 + len(heard))",
            12,
        ),
        ("with trying(): pass\nkill(15); time.sleep(60)", -signal.SIGTERM),
        ("with trying(): pass\nos.abort()", -signal.SIGABRT),
        # Python's Ctrl-C.
        (
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "try:\n  with trying(): kill(2); time.sleep(60)\n"
            "except KeyboardInterrupt: os._exit(11)",
            11,
        ),
        # nohup
        ("signal.signal(1, signal.SIG_IGN)\nwith trying(): kill(1)\nos._exit(11)", 11),
        # A handler set meanwhile stays.
        (
            "with trying(): signal.signal(signal.SIGTERM, lambda *_: heard.append(1))\n"
            "kill(15); time.sleep(0.01); os._exit(10 + len(heard))",
            11,
        ),
        # A system call that Ctrl-C interrupts is still interrupted.
        (
            "signal.signal(signal.SIGALRM, lambda *_: kill(15))\n"
            "class Heard(Exception): pass\n"
            "def hear(*_): raise Heard\n"
            "signal.signal(signal.SIGTERM, hear)\n"
            "try:\n  with trying(): signal.setitimer(signal.ITIMER_REAL, 0.05); os.read(os.pipe()[0], 1)\n"
            "except Heard: os._exit(11)",
            11,
        ),
    ],
)  # fmt: skip
def test_signals_do_what_they_would_do_without_us(code: str, returncode: int, tmp_path: Path) -> None:
    assert end(tmp_path, "heard = []\n" + code) == returncode
    assert names(tmp_path) == []


FORKED = "child = os.fork()\nif not child: {}\nos.waitpid(child, 0)\n"


def test_what_becomes_of_a_forked_child_is_not_noted(tmp_path: Path) -> None:
    """A data loader's workers are ended by SIGTERM, and crash by SIGBUS where shared memory is full."""
    end(tmp_path, FORKED.format("kill(signal.SIGTERM); time.sleep(60)") + "os.abort()")
    assert "SIGABRT" in Bans(tmp_path).reason(A)
    Bans(tmp_path).forgive()
    end(tmp_path, FORKED.format("os.abort()") + "kill(9)")
    assert Bans(tmp_path).reason(A) == ""
    assert names(tmp_path) == ["died"]


@pytest.mark.parametrize(
    ("code", "stage", "processes", "left"),
    [
        # Ended by the coordination service, since a peer is gone.
        ("abort_elsewhere()", "compile", 2, []),
        ("abort_elsewhere()", "run", 2, []),
        # By itself: in a compile for certain, in a run that a dead peer may disturb perhaps.
        ("os.abort()", "compile", 2, ["banned"]),
        ("abort_elsewhere(b'tf_XLACompile')", "compile", 2, ["banned"]),
        ("os.abort()", "run", 2, ["died"]),
        # There are no peers.
        ("abort_elsewhere()", "compile", 1, ["banned"]),
        ("os.abort()", "run", 1, ["banned"]),
        ("os._exit(1)", "compile", 2, ["died"]),
    ],
)
def test_the_death_of_a_peer_bans_nothing(
    code: str, stage: str, processes: int, left: list[str], tmp_path: Path
) -> None:
    assert end(tmp_path, code, stage=stage, processes=processes) != 0
    banned = Bans(tmp_path).reason(A)
    assert ["banned" if banned else name for name in names(tmp_path)] == left


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_hangs_bans_its_module_at_once_and_none_that_is_compiled_meanwhile(
    processes: int, tmp_path: Path
) -> None:
    """It was one death of three, so that two more jobs waited for it."""
    code = "with Bans(folder).trying('b' * 64, 'compile', processes), trying(): note_hang(); os._exit(1)"
    assert end(tmp_path, code, stage="run", processes=processes) == 1
    [ban] = Bans(tmp_path).all()
    assert ban.module == A
    assert " hung while it was run (" in ban.reason
    assert names(tmp_path) == ["died"]


def succeed(folder: Path, stage: Stage) -> None:
    with Bans(folder).trying(A, stage, 1):
        pass


def test_three_ends_without_a_word_ban_and_a_success_between_takes_them_back(tmp_path: Path) -> None:
    def killed(stage: str) -> None:
        assert end(tmp_path, "kill(9)", stage=stage) == -signal.SIGKILL

    killed("compile")
    killed("run")
    succeed(tmp_path, "compile")  # which says nothing of runs
    killed("run")
    assert Bans(tmp_path).reason(A) == ""
    succeed(tmp_path, "run")
    assert names(tmp_path) == []
    for count in range(3):
        assert Bans(tmp_path).reason(A) == "", count
        killed("compile")
    reason = Bans(tmp_path).reason(A)
    assert reason.startswith("3 processes ended, the last: process ")
    assert Bans(tmp_path).reason(B) == ""
    succeed(tmp_path, "compile")
    assert Bans(tmp_path).reason(A) == ""


def test_a_compile_that_is_interrupted_or_refused_is_neither_a_death_nor_a_success(tmp_path: Path) -> None:
    end(tmp_path, "kill(9)")
    assert Bans(tmp_path).all() == []

    def fail(error: type[BaseException]) -> None:
        with Bans(tmp_path).trying(A, "compile", 1):
            assert names(tmp_path) == ["compiling", "died"]
            assert Bans(tmp_path).reason(A) == "", "it is still being compiled"
            raise error

    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error):
            fail(error)
        assert names(tmp_path) == ["died"]


def test_of_modules_tried_at_once_the_one_that_crashes_again_alone_is_banned(tmp_path: Path) -> None:
    end(tmp_path, "with trying('a'), trying('b'), trying('c'): os.abort()")
    # Nobody knows which it was: none is banned, and they are to be tried one at a time.
    assert [Bans(tmp_path).suspects(one) for one in (A, B, C, "d" * 64)] == [True, True, True, False]
    assert Bans(tmp_path).all() == []
    succeed(tmp_path, "compile")
    end(tmp_path, "with trying('b'): os.abort()")
    assert [ban.module for ban in Bans(tmp_path).all()] == [B]


def spoiled(path: Path, **changes: object) -> Path:
    """The death beside it, spoiled."""
    [died] = path.parent.glob("died-*")
    path.write_text(json.dumps(json.loads(died.read_text()) | changes))
    return path


def named(letter: str, kind: str = "died") -> str:
    return f"{kind}-{letter * 64}.1-{letter * 12}"


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a copy for another module": lambda folder: spoiled(folder / named("b")),
    "another version": lambda folder: spoiled(folder / named("b"), module=B, version=2),
    "an unknown field": lambda folder: spoiled(folder / named("b"), module=B, run="rm"),
    "a terminal's escapes": lambda folder: spoiled(folder / named("b"), module=B, host="\x1b[2J"),
    "a signal of three digits": lambda folder: spoiled(folder / named("b"), module=B, fatal="111"),
    "no JSON": lambda folder: (folder / named("b")).write_bytes(b"\xff{"),
    "nested": lambda folder: (folder / named("b")).write_text("[" * 4096),
    "empty": lambda folder: (folder / named("b")).write_bytes(b""),
    "too long": lambda folder: (folder / named("b")).write_bytes(b" " * 5000),
    "a link": lambda folder: (folder / named("b")).symlink_to(folder / named("x")),
    "a pipe": lambda folder: os.mkfifo(folder / named("b")),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_record_is_one_line_and_bans_nothing_else(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    end(tmp_path, "os.abort()")
    assert [ban.module for ban in Bans(tmp_path).all()] == [A]
    HOSTILE[what](tmp_path)
    for _ in range(2):
        assert [ban.module for ban in Bans(tmp_path).all()] == [A]
    [line] = caplog.messages
    assert "it bans nothing" in line
    assert len(names(tmp_path)) == 1


def test_a_mark_that_its_owner_takes_back_meanwhile_is_nothing_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks of a host have one plan directory: what one had just compiled the other called no readable record."""
    gone = tmp_path / named("a", "compiling")
    monkeypatch.setattr(Bans, "_named", lambda *_: [gone])
    assert Bans(tmp_path).all() == []
    assert caplog.records == []


def test_files_of_others_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("died-young.txt", "compiling-linux.md", "banned-words", f"died-{B}", f"banned-{B}.txt"):
        (tmp_path / name).write_text("mine")
    assert Bans(tmp_path).all() == []
    assert Bans(tmp_path).forgive() == 0
    assert len(names(tmp_path)) == 5
    assert caplog.messages == []


def test_a_folder_in_the_place_of_a_record_stays_and_bans_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / named("b")).mkdir()
    for _ in range(2):
        assert Bans(tmp_path).all() == []
    assert len(caplog.messages) == 1
    with pytest.raises(PlanError, match="cannot remove "):
        Bans(tmp_path).forgive()


def test_a_mark_of_a_former_version_bans_nothing_and_goes_when_it_is_old(tmp_path: Path) -> None:
    mark = tmp_path / f"compiling-{A}.1-abc"
    mark.write_text(json.dumps({"host": "elsewhere", "machine": "elsewhere", "pid": 1, "started": "1"}))
    assert Bans(tmp_path).all() == []
    assert mark.exists()
    os.utime(mark, (0, 0))
    assert Bans(tmp_path).all() == []
    assert names(tmp_path) == []


def test_a_mark_of_another_machine_is_judged_when_nobody_has_renewed_it(tmp_path: Path) -> None:
    end(tmp_path, "os.abort()")
    mark = tmp_path / named("b", "compiling")
    [died] = (path for path in [*tmp_path.iterdir()] if path.name.startswith("compiling-"))
    mark.write_text(json.dumps(json.loads(died.read_text()) | {"machine": "elsewhere", "module": B}))
    assert [ban.module for ban in Bans(tmp_path).all()] == [A]
    os.utime(mark, ns=(0, time.time_ns() - 130 * 10**9))
    assert [ban.module for ban in Bans(tmp_path).all()] == [A, B]


def test_where_nothing_can_be_written_living_marks_of_another_machine_count_as_living(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(tmp_path, "kill(9)")
    [mark] = tmp_path.iterdir()
    content = json.loads(mark.read_text()) | {"machine": "elsewhere"}
    mark.unlink()
    for letter in "bcd":
        (tmp_path / f"compiling-{A}.1-{letter * 12}").write_text(json.dumps(content))

    def refuse(_: Path) -> int:
        raise OSError

    monkeypatch.setattr(files, "server_now_ns", refuse)
    assert Bans(tmp_path).reason(A) == ""


def test_a_death_that_bans_nothing_is_forgotten_in_time(tmp_path: Path) -> None:
    end(tmp_path, "kill(9)")
    assert Bans(tmp_path).all() == []
    [died] = tmp_path.iterdir()
    os.utime(died, (0, 0))
    assert Bans(tmp_path).all() == []
    assert names(tmp_path) == []


def test_a_rank_without_the_plan_directory_compiles_without_making_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slot = PlanStore(tmp_path / "plans").slot("0" * 64, "cpu", "cpu", 2)
    with slot.bans.trying(A, "compile", 1):
        assert not slot.root.exists()
    assert caplog.text == ""


def test_many_marks_at_once_are_all_taken_back(tmp_path: Path) -> None:
    code = (
        "import contextlib\nwith contextlib.ExitStack() as many:\n"
        "  for i in range(80): many.enter_context(Bans(folder).trying(f'{i:064x}', stage, 1))\n"
        "  assert len(list(folder.iterdir())) == 80\nassert not list(folder.iterdir())  # trying()"
    )
    assert end(tmp_path, code) == 0
