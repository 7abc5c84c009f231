"""Starting jobs of several processes for tests, under mpiexec or without, and collecting their results."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 180
_LAUNCHERS = ("OMPI_COMM", "PMIX_", "PMI_", "PRTE_LAUNCHED", "SLURM_", "JOB_", "DISCO_", "ENABLE_SEARCH")


def run_under_mpi(
    scenario: str, ranks: int, folder: Path, *options: str, **settings: object
) -> dict[int, Any]:
    """``mpiexec -n ranks``; results by MPI rank, without the ranks that left none."""
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        pytest.fail("mpiexec is not on PATH; it comes with pip install 'disco-hlo[mpi]'")
    command = [mpiexec, "--oversubscribe", *options, "-n", str(ranks), *_worker(scenario)]
    process = _start(command, _environment(folder, settings))
    _wait([process])
    return _results(folder, ranks)


def run_alone(
    scenario: str, ranks: int, folder: Path, **settings: object
) -> tuple[dict[int, Any], list[int]]:
    """The ranks as processes of nobody's; results by rank, and exit codes.

    Settings in capitals are environment variables, the others are for the scenario.
    """
    processes = [
        _start(_worker(scenario), _environment(folder, {**settings, "rank": rank, "size": ranks}))
        for rank in range(ranks)
    ]
    _wait(processes)
    return _results(folder, ranks), [process.returncode for process in processes]


def at_every_moment(tmp_path: Path, run: Callable[[Path, str], Any]) -> dict[str, Any]:
    """What ``run(folder, moment)`` returns for a rank killed before, during and after the broadcast.

    The three jobs mostly wait for timeouts, so they run at the same time.
    """
    moments = ("before", "during", "after")
    for moment in moments:
        (tmp_path / moment).mkdir()
    with ThreadPoolExecutor(len(moments)) as pool:
        return dict(
            zip(moments, pool.map(lambda moment: run(tmp_path / moment, moment), moments), strict=True)
        )


def _worker(scenario: str) -> list[str]:
    return [sys.executable, "-m", "tests.activation.worker", scenario]


def _environment(folder: Path, settings: dict[str, object]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    told = {name if name.isupper() else f"JOB_{name.upper()}": str(value) for name, value in settings.items()}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**kept, **root, **told, "JOB_FOLDER": str(folder), "JAX_PLATFORMS": "cpu"}


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment, cwd=REPOSITORY, start_new_session=True)


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """A hang is a failure, and leaves nothing behind."""
    try:
        for process in processes:
            process.wait(LIMIT_S)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _results(folder: Path, ranks: int) -> dict[int, Any]:
    files = {rank: folder / f"{rank}.json" for rank in range(ranks)}
    return {rank: json.loads(path.read_text()) for rank, path in files.items() if path.exists()}
