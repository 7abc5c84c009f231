"""Time NCCL's ring reduce-scatter over the size, one process a GPU: ``torchrun --nproc-per-node 2 <this>``.

For ``scripts/papers.py scatter`` and T3's figure 14, which validates a simulated reduce-scatter, 6 to 192 MB. By the
protocol that NCCL chooses, and by each of two alone, since each is a line of its own. Needs torch; takes half a
minute, and ends itself after a minute.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
SIZES_MB = (6, 9, 12, 18, 24, 36, 48, 72, 96, 144, 192)
PROTOCOLS = ("", "LL128", "Simple")
ROUNDS, REPEATS, MOST_S = 25, 20, 60
BUSY = 8192
"""Rows of a matmul that keeps the GPU busy while the host launches what is timed."""


def main() -> None:
    """Measure, and let rank 0 write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="docs/benchmarks/reduce_scatter_<n>x<gpu>.json where not given"
    )
    chosen = parser.parse_args()
    signal.alarm(MOST_S)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    os.environ |= {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0"}
    dist.init_process_group("gloo")
    points = {}
    for protocol in PROTOCOLS:
        os.environ.pop("NCCL_PROTO", None)
        os.environ |= {"NCCL_PROTO": protocol} if protocol else {}  # read when a group first communicates
        group = dist.new_group(backend="nccl", timeout=timedelta(seconds=MOST_S))
        points[protocol or "chosen"] = measured(group)
    if dist.get_rank() == 0:
        record = {
            "device": torch.cuda.get_device_name(),
            "devices": dist.get_world_size(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "points": points.pop("chosen"),
            "by_protocol": points,
        }
        name = f"{record['devices']}x{record['device'].split()[1].lower()}"
        out = chosen.out or ROOT / "docs" / "benchmarks" / f"reduce_scatter_{name}.json"
        out.write_text(json.dumps(record) + "\n")
        print(json.dumps(record))
    dist.destroy_process_group()


def measured(group: dist.ProcessGroup) -> dict[int, list[int]]:
    """Of one reduce-scatter in ns, by size in MB, once a round; rounds go through all sizes."""
    busy = torch.ones((BUSY, BUSY), dtype=torch.bfloat16, device="cuda")
    found: dict[int, list[int]] = {size: [] for size in SIZES_MB}
    for number in range(ROUNDS + 1):  # the first warms up
        for size in SIZES_MB:
            whole = torch.ones(size * 10**6 // 2, dtype=torch.bfloat16, device="cuda")
            part = torch.empty(whole.numel() // dist.get_world_size(), dtype=whole.dtype, device="cuda")
            dist.barrier()
            for _ in range(4):
                busy @ busy
            dist.reduce_scatter_tensor(part, whole, group=group)  # all begin together
            ns = timed(functools.partial(dist.reduce_scatter_tensor, part, whole, group=group))
            found[size] += [round(ns)] if number else []
    return found


def timed(run: Callable[[], object]) -> float:
    """Of one call of many, in ns; the GPU's own clock."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPEATS):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e6 / REPEATS


if __name__ == "__main__":
    main()
