"""Starting training runs for tests: one process with two devices, or two processes, with or without MPI."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.forks import Forked, Forks
from tests.ports import free_port

HERE = Path(__file__).parent
LIMIT_S = 400
FORKS = Forks()
QUICK_COMPILES = "--xla_backend_optimization_level=0"
"""For XLA_FLAGS: without LLVM's optimizations, which take a third of a compile (see tests/conftest.py)."""
_FOREIGN = (
    "DISCO_",
    "ENABLE_SEARCH",
    "JAX_",
    "XLA_FLAGS",
    "OMPI_COMM",
    "PMIX_",
    "PMI_",
    "PRTE_LAUNCHED",
    "SLURM_",
)


@dataclass(frozen=True)
class Run:
    """What one process of a training run did."""

    losses: list[float]
    modules: tuple[bytes, ...]
    """What it executed as its step: a serialized HloModuleProto for every time that JAX compiled it."""
    donated_bytes: list[int]
    """What each of them takes over from donated arguments."""
    log: list[str]
    """The lines of our plugin."""
    imported: frozenset[str]
    listening: int
    """TCP ports on which the process listened when its training was done."""

    def lines(self, text: str) -> list[str]:
        """The log's lines that hold ``text``."""
        return [line for line in self.log if text in line]


@dataclass
class Started:
    """Training runs that are under way."""

    processes: list[subprocess.Popen[str] | Forked]
    folder: Path
    ranks: int
    first: int = 0
    """Which rank the first of them is."""

    def finish(self, *, codes: Sequence[int] | None = None) -> list[Run]:
        """Wait; the runs by rank. Fails where a process hangs, or ends in another way than expected."""
        try:
            errors = [process.communicate(timeout=LIMIT_S)[1] for process in self.processes]
        finally:
            self.kill()
        found = [process.returncode for process in self.processes]
        assert found == list(codes or [0] * len(found)), "\n".join(errors)
        return [run_of(self.folder, self.first + rank) for rank in range(self.ranks)]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def run_of(folder: Path, rank: int) -> Run:
    """What a rank left of its training in ``folder``."""
    report = json.loads((folder / f"{rank}.json").read_text())
    modules = tuple(path.read_bytes() for path in sorted(folder.glob(f"{rank}-*.pb")))
    assert modules, "the step was not found among the executables"
    return Run(
        report["losses"], modules, report["donated_bytes"], report["log"], frozenset(report["imported"]),
        report["listening"],
    )  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A training run to be: what it is told by its environment and its command line."""

    directory: Path
    """``DISCO_DIR``."""
    folder: Path
    """Where the processes leave their reports."""

    def train(self, *arguments: str, fault: str = "", **environment: str) -> Run:
        """One process with two devices."""
        return self.start(*arguments, fault=fault, **environment).finish()[0]

    def train_with_each(self, plans: Path, *arguments: str, **environment: str) -> dict[str, Run]:
        """One process with two devices that trains once with each plan directory in ``plans``; runs by name."""
        folder = self._fresh_folder()
        told = [str(folder), "--each", str(plans), str(HERE / "train.py"), *arguments]
        Started([self._process(told, 2, environment)], folder, 0).finish()
        return {path.name: run_of(folder / path.name, 0) for path in plans.iterdir()}

    def start(self, *arguments: str, fault: str = "", **environment: str) -> Started:
        """As :meth:`train`, not waited for."""
        folder = self._fresh_folder()
        return Started([self._process(_told(folder, fault, arguments), 2, environment)], folder, 1)

    def train_ranks(
        self, *arguments: str, fault: str = "", each: Sequence[dict[str, Any]] = ({}, {}), **environment: str
    ) -> list[Run]:
        """Processes of one ``jax.distributed`` job, without MPI; ``each`` adds what differs between them:
        environment, ``arguments``, or a ``fault``."""
        return self.start_ranks(*arguments, fault=fault, each=each, **environment).finish()

    def start_ranks(
        self, *arguments: str, fault: str = "", each: Sequence[dict[str, Any]] = ({}, {}), **environment: str
    ) -> Started:
        """As :meth:`train_ranks`, not waited for."""
        folder = self._fresh_folder()
        port = str(free_port())
        processes = []
        for rank, own in enumerate(each):
            own = dict(own)
            own_arguments = (*arguments, *own.pop("arguments", ()))
            told = {"TRAIN_PORT": port, **environment, **own, "fault": f"{fault} {own.get('fault', '')}"}
            processes.append(self._start_rank(folder, rank, len(each), own_arguments, told))
        return Started(processes, folder, len(each))

    def start_rank(self, rank: int, size: int, *, script: str, **environment: str) -> Started:
        """One process of a ``jax.distributed`` job by itself, whose ``script`` finds its coordinator."""
        folder = self._fresh_folder()
        process = self._start_rank(folder, rank, size, (), {"fault": "", **environment}, script)
        return Started([process], folder, 1, first=rank)

    def _start_rank(
        self,
        folder: Path,
        rank: int,
        size: int,
        arguments: Sequence[str],
        told: dict[str, str],
        script: str = "train.py",
    ) -> subprocess.Popen[str] | Forked:
        own = told | {"TRAIN_RANK": str(rank), "TRAIN_SIZE": str(size)}
        return self._process(_told(folder, own.pop("fault"), arguments, script), 1, own)

    def train_mpi(self, *arguments: str, fault: str = "", ranks: int = 2, **environment: str) -> list[Run]:
        """Processes under ``mpiexec``, with one device each."""
        return self.start_mpi(*arguments, fault=fault, ranks=ranks, **environment).finish()

    def start_mpi(self, *arguments: str, fault: str = "", ranks: int = 2, **environment: str) -> Started:
        """As :meth:`train_mpi`, not waited for."""
        mpiexec = shutil.which("mpiexec")
        if mpiexec is None:
            pytest.fail("mpiexec is not on PATH; it comes with pip install 'disco-hlo[mpi]'")
        folder = self._fresh_folder()
        env = self._environment(1, environment) | {"TRAIN_PORT": str(free_port())}
        told = _told(folder, fault, arguments)
        return Started(
            [_popen([mpiexec, "--oversubscribe", "-n", str(ranks), *OBSERVE, *told], env)], folder, ranks
        )

    def _process(self, told: list[str], devices: int, own: dict[str, str]) -> subprocess.Popen[str] | Forked:
        """A run; with a Python of its own where it is told what is read as Python or JAX starts."""
        env = self._environment(devices, own)
        if "not_installed" in told or any(name.startswith(("JAX_", "LD_PRELOAD")) for name in own):
            return _popen([*OBSERVE, *told], env)
        return FORKS.start(told, env)

    def _fresh_folder(self) -> Path:
        number = sum(1 for _ in self.folder.iterdir())
        folder = self.folder / str(number)
        folder.mkdir()
        return folder

    def _environment(self, devices: int, own: dict[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        return kept | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK_COMPILES}",
            "DISCO_DIR": str(self.directory),
            "DISCO_WHEN": "compile",
            "DISCO_BUDGET_S": "60",
            "DISCO_PATIENCE": "50",
            "DISCO_FINALISTS": "1",
            "DISCO_TIMEOUT_S": "60",
            **own,
        }


OBSERVE = (sys.executable, str(HERE / "forks.py"))


def _told(folder: Path, fault: str, arguments: Sequence[str], script: str = "train.py") -> list[str]:
    """The arguments of observe.py."""
    faults = [word for name in fault.split() for word in ("--fault", name)]
    return [str(folder), *faults, str(HERE / script), *arguments]


def _popen(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def until_it_says(process: subprocess.Popen[str] | Forked, text: str) -> str:
    """Read the process's stderr until a line begins with ``text``, and return that; fails where it ends
    before."""
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith(text):
        assert line, f"the process ended without {text!r}"
    return line
