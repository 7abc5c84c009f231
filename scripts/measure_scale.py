"""How long ``disco simulate --machine`` takes for a large step over the number of devices: ``measure_scale.py``.

Each row is a process of its own, ``ROUNDS`` times; processor time, since wall-clock time is the load of this machine as
well. Writes ``docs/benchmarks/simulate_scale.json`` and prints its table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEP = ROOT / "tests" / "data" / "h100_llama" / "fsdp_unroll.hlo.pb.gz"
DEVICES = (2, 8, 64, 512, 1024, 8192, 65536)
ROUNDS = 3


def main() -> None:
    """Measure, write, print."""
    simulated(DEVICES[0])  # compiled code is cached
    rows = []
    for devices in DEVICES:
        found = [simulated(devices) for _ in range(ROUNDS)]
        rows.append({"devices": devices, "cpu_s": [one[0] for one in found], **found[0][1]})
        print(f"| {devices:,} | {median(rows[-1]['cpu_s']):.1f} s | {rows[-1]['step_ns'] / 1e6:,.0f} ms |")
    record = {"module": STEP.name, "machine": "h200", "rows": rows}
    (ROOT / "docs" / "benchmarks" / "simulate_scale.json").write_text(json.dumps(record) + "\n")


def simulated(devices: int) -> tuple[float, dict[str, Any]]:
    """Processor time of a process in s, and what it found."""
    disco, options = Path(sys.executable).with_name("disco"), ["--machine", "h200", "--gpus", str(devices)]
    before = os.times()
    command = [str(disco), "simulate", str(STEP), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    after = os.times()
    found = json.loads(done.stdout)
    spent_s = after.children_user + after.children_system - before.children_user - before.children_system
    return round(spent_s, 2), {"step_ns": found["default"]["step_ns"], "gains_ns": found["gains"]}


if __name__ == "__main__":
    main()
