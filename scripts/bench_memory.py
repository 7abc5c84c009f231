"""What the plugin needs of the host's memory beside the training: one script unset, searching and enacting.

    python scripts/bench_memory.py -- examples/train.py --model transformer --size tiny --steps 20
    JAX_PLATFORMS=cuda python scripts/bench_memory.py -- examples/train.py --model gpt12 --size full --steps 20

The script runs in one process, each time in a fresh interpreter. Printed are the largest resident set of any of its
processes, and the most that it and those which a search starts (seeds of large steps) had together, looked at now and
then. On CPU two devices are made where the environment does not say how many.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20
_LOOKS_EVERY_S = 0.2


def run_phase(switch: str | None, plans: Path, script: list[str]) -> tuple[int, int]:
    """Run the script in a fresh process: the largest resident set of a process, and of all together, in bytes.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "ENABLE_SEARCH"}
    environment.setdefault("JAX_NUM_CPU_DEVICES", "2")
    environment["DISCO_DIR"] = str(plans)
    if switch is not None:
        environment |= {"ENABLE_SEARCH": switch, "DISCO_WHEN": "compile"}
    command = [sys.executable, *script]
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    together = ended = 0
    while not ended:
        together = max(together, resident_bytes(process.pid))
        time.sleep(_LOOKS_EVERY_S)
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return used.ru_maxrss * 1024, together


def resident_bytes(process_id: int) -> int:
    """What a process and all that it started have resident."""
    parents, pages = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], pages[int(folder.name)] = int(fields[1]), int(fields[21])
    family = {process_id}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(pages.get(one, 0) for one in family) * resource.getpagesize()


def main() -> int:
    """Print one line for each phase; returns the exit status."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("script", nargs="+", metavar="SCRIPT", help="a training script and its arguments")
    script = parser.parse_args().script
    if not Path(script[0]).is_file():
        parser.error(f"there is no script {script[0]}")
    print("| | largest process, MiB | all together, MiB |\n| --- | ---: | ---: |")
    with tempfile.TemporaryDirectory() as plans:
        for name, switch in (("unset", None), ("searching", "1"), ("enacting", "0")):
            largest, together = run_phase(switch, Path(plans), script)
            print(f"| {name} | {largest / MIB:,.0f} | {together / MIB:,.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
