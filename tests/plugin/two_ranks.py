"""Two processes of one ``jax.distributed`` job, each running a script of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port


def run_two(script: str, folder: Path, *arguments: str, devices: int) -> tuple[list[int], list[str], str]:
    """Run ``SCRIPT ADDRESS RANK FOLDER ARGUMENTS`` as both ranks, with so many devices each.

    Returns:
        Exit codes and what was written to stderr, by rank, and the address.
    """
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    address = f"127.0.0.1:{free_port()}"
    path = Path(__file__).with_name(script)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path), address, str(rank), str(folder), *arguments],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=300)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [process.returncode for process in ranks], errors, address
