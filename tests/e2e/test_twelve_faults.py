"""Twelve faults in a job of two processes: nobody waits long, no training is ended by us, and nothing is banned.

docs/cluster.md has the longest wait. Most need real time: a minute of standing still, jax's own 100 s until it misses a
process. Those run where TWELVE_FAULTS is set, with their times printed (``TWELVE_FAULTS=1 pytest -s``); the others are
tests as any.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.plan.bans import Bans
from tests.e2e.conftest import new_job
from tests.e2e.executed import assert_same_losses
from tests.e2e.faults import MEASURED_RUN
from tests.e2e.jobs import LIMIT_S, Job, Run, Started, run_of
from tests.known_times import know_all

pytestmark = pytest.mark.mpi

STAGES = {"profile": "profile-unfused", "search": "search", "measure": MEASURED_RUN, "enact": "enact"}
LONG = bool(os.environ.get("TWELVE_FAULTS"))
MOST_S = 60.0
STOPPED_S = 58.0
"""After 60 s without an answer gRPC, and jax with it, may give the coordinator up (docs/cluster.md)."""
DAY = 86400
ELASTIC = {"JAX_ENABLE_RECOVERABILITY": "1"}
JAX_ENDS = "the JAX distributed service detected fatal errors"
GLOO_ENDS = "Gloo all-reduce failed"
MPI_ENDS = "mpiexec"
AGAIN = "again"


@dataclass(frozen=True)
class Row:
    """One fault, where it happens, and what may become of the training."""

    fault: str
    rank: int
    phase: str
    how: str
    """Of ``faults.py``, its stage left open."""
    mpi: bool = False
    ended_by: tuple[str, ...] = ()
    """Who may end it, by their words; empty: it goes on to its end on both ranks."""
    restarted: bool = False
    own: dict[str, str] = field(default_factory=dict)
    quick: bool = False
    """Whether it takes seconds, so that it is a test as any."""

    @property
    def name(self) -> str:
        return f"{self.fault}-rank-{self.rank}-{self.phase}".replace(" ", "-")


DIES, STOPS = "dies_at:{}", "stops_at:{}"
TWELVE = (
    Row("killed", 1, "profile", DIES, ended_by=(JAX_ENDS, GLOO_ENDS)),
    Row("killed", 0, "enact", DIES, ended_by=(JAX_ENDS,)),
    Row("killed", 1, "measure", DIES, mpi=True, ended_by=(MPI_ENDS,)),
    Row("stopped", 0, "profile", STOPS),
    Row("stopped", 1, "measure", STOPS),
    Row("stopped", 0, "enact", STOPS, mpi=True),
    Row("restarted", 1, "search", DIES, restarted=True, own=ELASTIC, ended_by=(JAX_ENDS, GLOO_ENDS)),
    Row("restarted", 0, "measure", DIES, restarted=True, ended_by=(JAX_ENDS,)),
    Row("disk full", 0, "search", "disk_fills_at:{}", mpi=True),
    Row("plan directory gone", 0, "enact", "directory_gone_at:{}"),
    Row("plan directory gone", 0, "search", "directory_gone_at:{}", quick=True),
    Row("clock moved", 1, "profile", f"clock_moves_at:{{}}:{-DAY}", quick=True),
    Row("coordinator gone", 0, "search", "coordinator_gone_at:{}", ended_by=(JAX_ENDS,), quick=True),
)


class Watched:
    """The lines of a job's processes, with when they came."""

    def __init__(self, row: Row, started: Started) -> None:
        self.fault_s = self.over_s = 0.0
        self.lines: list[tuple[float, str]] = []
        self.codes: dict[str, int] = {}
        self.ended_s: dict[str, float] = {}
        self._row = row
        self.folder = started.folder
        self._readers: list[threading.Thread] = []
        self._count = len(started.processes)
        for number, process in enumerate(started.processes):
            self.read(str(number), process)

    def read(self, name: str, process: subprocess.Popen[str]) -> None:
        reader = threading.Thread(target=self._read, args=(name, process), daemon=True)
        self._readers.append(reader)
        reader.start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as stream:
            for line in stream:
                self.lines.append((time.monotonic(), f"{name} {line.rstrip()}"))
                if found := re.match(r"fault at ([0-9.]+) in process (\d+)", line):
                    self._happened(float(found[1]), int(found[2]))
        self.codes[name] = process.wait()
        self.ended_s[name] = time.monotonic()

    def _happened(self, at_s: float, pid: int) -> None:
        self.fault_s = self.over_s = at_s
        if self._row.how is STOPS:
            self.over_s += STOPPED_S
            threading.Timer(STOPPED_S, os.kill, (pid, signal.SIGCONT)).start()

    def wait(self) -> None:
        """Until all have ended; one that was started again, and finds nobody, waits for five minutes of jax's own."""
        end = time.monotonic() + LIMIT_S
        for reader in self._readers[: self._count]:
            reader.join(max(0.0, end - time.monotonic()))
            assert not reader.is_alive(), self.text()

    def read_to_the_end(self) -> None:
        for reader in self._readers:
            reader.join(LIMIT_S)

    def text(self) -> str:
        return "\n".join(
            f"{at - self.fault_s:+8.1f} {line}" for at, line in self.lines if "    @ " not in line
        )

    def longest_wait_s(self) -> float:
        """The longest stretch after the fault in which no process said anything of ours, until all was over for us:
        we gave up, took a plan, or were ended."""
        given_up = ("runs as XLA compiles it", "executes module")
        ours = [at for at, line in self.lines if "disco: " in line]
        last = [at for at, line in self.lines if any(words in line for words in given_up)]
        end = last[-1] if last else max(at for name, at in self.ended_s.items() if name != AGAIN)
        moments = [self.over_s, *(at for at in ours if self.over_s < at < end), max(end, self.over_s)]
        return max(after - before for before, after in itertools.pairwise(moments))


def moved_clock(folder: Path) -> dict[str, str]:
    """What moves the wall clock of one process, its C++ included; empty where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None or sysconfig.get_platform().startswith("macosx"):
        return {}
    library, offset = folder / "moved_clock.so", folder / "offset"
    source = Path(__file__).with_name("moved_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    offset.write_text("0\n")
    return {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset)}


def started_again(watched: Watched, job: Started, row: Row) -> None:
    """Start the killed process once more, as its launcher would."""
    victim, other = job.processes[row.rank], job.processes[1 - row.rank]
    told = dict(
        line.split("=", 1) for line in Path(f"/proc/{other.pid}/environ").read_text().split("\0") if line
    )
    command = Path(f"/proc/{other.pid}/cmdline").read_text().split("\0")[:-1]
    victim.wait(LIMIT_S)
    again = subprocess.Popen(
        command, env=told | {"TRAIN_RANK": str(row.rank)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    job.processes.append(again)
    watched.read(AGAIN, again)


def run(row: Row, job: Job, folder: Path) -> Watched:
    fault = f"plan_wins {row.rank}/{row.how.format(STAGES[row.phase])}"
    told: dict[str, Any] = {
        "ENABLE_SEARCH": "0" if row.phase == "enact" else "1", "DISCO_LOG": "debug", "DISCO_TIMEOUT_S": "600",
        "DISCO_PATIENCE": "1", "DISCO_BUDGET_S": "20", **row.own,
    }  # fmt: skip
    if row.restarted:
        told["JAX_PLATFORMS"] = "cpu"  # with a Python of its own it can be started again by its command line
    if row.mpi:
        started = job.start_mpi(fault=fault, **told)
    else:
        each: list[dict[str, Any]] = [{}, {}]
        each[row.rank] = moved_clock(folder) if "clock" in row.fault else {}
        started = job.start_ranks(fault=fault, each=each, **told)
    watched = Watched(row, started)
    try:
        if row.restarted:
            started_again(watched, started, row)
        watched.wait()
    finally:
        for process in started.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        watched.read_to_the_end()
    return watched


def check(row: Row, watched: Watched, job: Job, alone: list[Run]) -> None:
    said = watched.text()
    assert watched.fault_s, said
    # The two lines of ours that end a job.
    assert "so the job ends" not in said, said
    assert not LONG or watched.longest_wait_s() <= MOST_S, said
    if row.ended_by:
        assert any(words in said for words in row.ended_by) or row.ended_by == (MPI_ENDS,), said
    else:
        assert set(watched.codes.values()) == {0}, said
        for rank, default in enumerate(alone):
            assert_same_losses(run_of(watched.folder, rank), default)
    for slot in job.directory.glob("*/*"):
        assert Bans(slot).all() == []
        assert len(list(slot.glob("died-*"))) <= 1


def report(row: Row, watched: Watched) -> None:
    ends = {
        name: (code, round(watched.ended_s[name] - watched.fault_s, 1))
        for name, code in watched.codes.items()
    }
    warnings = [line for _, line in watched.lines if re.search("disco: (warning|error):", line)]
    print(
        f"\n## {row.name}{' (mpiexec)' if row.mpi else ''}: wait {watched.longest_wait_s():.1f} s; ends {ends}"
    )
    for line in warnings:
        print("   ", line[:300])
    if os.environ.get("TWELVE_FAULTS") == "all":
        print(watched.text())


@pytest.fixture
def job(row: Row, request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    """One that has what its phase begins with."""
    if row.phase == "enact":
        return new_job(tmp_path / "planned", request.getfixturevalue("together")[0].directory)
    made = new_job(tmp_path / "fresh")
    know_all(made.directory, devices=2, processes=2)
    return made


LASTS = (
    pytest.mark.slow,
    pytest.mark.skipif(
        not LONG, reason="takes minutes of waiting: TWELVE_FAULTS=1 pytest -s tests/e2e/test_twelve_faults.py"
    ),
)


@pytest.mark.parametrize(
    "row", [pytest.param(one, id=one.name, marks=() if one.quick else LASTS) for one in TWELVE]
)
def test_a_fault_in_one_of_two_processes_costs_no_training_no_wait_and_no_ban(
    row: Row, job: Job, tmp_path: Path, alone: list[Run]
) -> None:
    watched = run(row, job, tmp_path)
    report(row, watched)
    check(row, watched, job, alone)
