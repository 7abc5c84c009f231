"""Two processes of one ``jax.distributed`` job, each running a script of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.jobs import FORKS, QUICK_COMPILES
from tests.ports import free_port

ROOT = Path(__file__).parents[2]


def run_two(script: str, folder: Path, *arguments: str, devices: int) -> tuple[list[int], list[str], str]:
    """Run ``SCRIPT ADDRESS RANK FOLDER ARGUMENTS`` as both ranks, with so many devices each.

    Returns:
        Exit codes and what was written to stderr, by rank, and the address.
    """
    flags = f"--xla_force_host_platform_device_count={devices} {QUICK_COMPILES}"
    environment = {**os.environ, "XLA_FLAGS": flags}
    address = f"127.0.0.1:{free_port()}"
    started = ["--module", f"tests.plugin.{script}", address]
    ranks = [FORKS.start([*started, str(rank), str(folder), *arguments], environment) for rank in (0, 1)]
    return *_ends(ranks, 300), address


def run_by(
    carrier: str, module: str, folder: Path, *arguments: str, longest_s: float
) -> tuple[list[int], list[str]]:
    """How two processes that run a module, with one device each, end, and what they write; one of each where
    ``mpiexec`` has both."""
    flags = f"--xla_force_host_platform_device_count=1 {QUICK_COMPILES}"
    environment = {**os.environ, "XLA_FLAGS": flags}
    own = [module, f"127.0.0.1:{free_port()}", str(folder), *arguments]
    if carrier != "MPI":
        return _ends([FORKS.start(["--module", *own, rank], environment) for rank in "01"], longest_s)
    command = ["mpiexec", "-n", "2", sys.executable, "-m", *own]
    started = [subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)]
    return _ends(started, longest_s)


def _ends(started: Sequence[Any], longest_s: float) -> tuple[list[int], list[str]]:
    try:
        errors = [process.communicate(timeout=longest_s)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.wait() for process in started], errors
