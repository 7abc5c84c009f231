"""Two processes of one ``jax.distributed`` job, each running a script of this folder."""

from __future__ import annotations

import os
from pathlib import Path

from tests.e2e.jobs import FORKS, QUICK_COMPILES
from tests.ports import free_port


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
    try:
        errors = [process.communicate(timeout=300)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [process.wait() for process in ranks], errors, address
