"""What the plugin needs of memory beside the training: one script unset, searching and enacting.

    python scripts/bench_memory.py -- examples/train.py --model transformer --size tiny --steps 20
    JAX_PLATFORMS=cuda python scripts/bench_memory.py -- examples/train.py --model gpt12 --size full --steps 20

The script runs in one process, each time in a fresh interpreter. Printed are the process's largest resident set, the
most that it and the processes which a search starts (seeds of large steps, the rehearsal on GPU) had together, looked
at now and then, and of devices with memory of their own the most that was in use on any of them. On CPU two devices are
made where the environment does not say how many.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20
PHASES = (("unset", None), ("searching", "1"), ("enacting", "0"))
_CHILD = "--in-this-process"
_LOOKS_EVERY_S = 0.2


def peaks() -> dict[str, int]:
    """Largest memory so far, in bytes: this process's, one device's (0: it has none of its own)."""
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return {
        "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device": max(int(one.get("peak_bytes_in_use", 0)) for one in stats),
    }


def run_here(report: Path, script: list[str]) -> None:
    """Run the script in this process, and leave what it needed in ``report``."""
    sys.argv = script
    sys.path.insert(0, str(Path(script[0]).resolve().parent))
    runpy.run_path(script[0], run_name="__main__")
    report.write_text(json.dumps(peaks()))


def run_phase(switch: str | None, plans: Path, script: list[str]) -> dict[str, int]:
    """Run the script in a fresh process.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "ENABLE_SEARCH"}
    environment.setdefault("JAX_NUM_CPU_DEVICES", "2")
    environment["DISCO_DIR"] = str(plans)
    if switch is not None:
        environment["ENABLE_SEARCH"] = switch
    report = plans / "memory.json"
    command = [sys.executable, __file__, _CHILD, str(report), *script]
    together = 0
    with subprocess.Popen(command, env=environment, stdout=sys.stderr) as process:
        while process.poll() is None:
            together = max(together, resident_bytes(process.pid))
            time.sleep(_LOOKS_EVERY_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    found: dict[str, int] = json.loads(report.read_text())
    return {**found, "together": together}


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
    if sys.argv[1:2] == [_CHILD]:
        run_here(Path(sys.argv[2]), sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", nargs="+", metavar="SCRIPT", help="a training script and its arguments")
    script = parser.parse_args().script
    if not Path(script[0]).is_file():
        parser.error(f"there is no script {script[0]}")
    print("| | process, MiB | with those it started, MiB | device, MiB |\n| --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as plans:
        for name, switch in PHASES:
            found = run_phase(switch, Path(plans), script)
            cells = [f"{found[what] / MIB:,.0f}" for what in ("process", "together", "device")]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
