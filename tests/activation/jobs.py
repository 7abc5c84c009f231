"""Starting jobs of several processes for tests, under mpiexec or without, and collecting their results."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.forks import Forked
from tests.e2e.jobs import FORKS

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 180
WORKER = "tests.activation.worker"
_LAUNCHERS = ("OMPI_COMM", "PMIX_", "PMI_", "PRTE_LAUNCHED", "SLURM_", "JOB_", "DISCO_", "ENABLE_SEARCH")


def run_under_mpi(
    scenario: str, ranks: int, folder: Path, *options: str, **settings: object
) -> dict[int, Any]:
    """``mpiexec -n ranks``; results by MPI rank, without the ranks that left none."""
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        pytest.fail("mpiexec is not on PATH; it comes with pip install 'disco-hlo[mpi]'")
    command = [mpiexec, "--oversubscribe", *options, "-n", str(ranks), sys.executable, "-m", WORKER, scenario]
    environment = _environment(folder, settings)
    _wait([subprocess.Popen(command, env=environment, cwd=REPOSITORY, start_new_session=True)])
    return _results(folder, ranks)


def run_alone(
    scenario: str, ranks: int, folder: Path, **settings: object
) -> tuple[dict[int, Any], list[int]]:
    """The ranks as processes of nobody's; results by rank, and exit codes.

    Settings in capitals are environment variables, the others are for the scenario.
    """
    told = ["--module", WORKER, scenario]
    processes = [
        FORKS.start(told, _environment(folder, {**settings, "rank": rank, "size": ranks}))
        for rank in range(ranks)
    ]
    _wait(processes)
    return _results(folder, ranks), [process.wait() for process in processes]


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


def _environment(folder: Path, settings: dict[str, object]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    told = {name if name.isupper() else f"JOB_{name.upper()}": str(value) for name, value in settings.items()}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**kept, **root, **told, "JOB_FOLDER": str(folder), "JAX_PLATFORMS": "cpu"}


def _wait(processes: Sequence[subprocess.Popen[bytes] | Forked]) -> None:
    """A hang is a failure, and leaves nothing behind."""
    try:
        for process in processes:
            print(process.communicate(timeout=LIMIT_S)[1] or "", end="", file=sys.stderr)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _results(folder: Path, ranks: int) -> dict[int, Any]:
    files = {rank: folder / f"{rank}.json" for rank in range(ranks)}
    return {rank: json.loads(path.read_text()) for rank, path in files.items() if path.exists()}
