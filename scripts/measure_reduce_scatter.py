"""Time NCCL's reduce-scatter over the size, one process a GPU: ``torchrun --nproc-per-node 2 <this> --out FILE``.

For ``scripts/papers.py`` and T3's figure 14, which validates a simulated reduce-scatter from 6 to 192 MB. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

SIZES_MB = (6, 12, 24, 48, 96, 192)
ROUNDS, REPEATS = 11, 20


def main() -> None:
    """Measure, and let rank 0 write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    devices = dist.get_world_size()
    of = {
        megabytes: torch.ones(megabytes * 10**6 // 2, dtype=torch.bfloat16, device=device)
        for megabytes in SIZES_MB
    }
    found: dict[int, list[float]] = {megabytes: [] for megabytes in SIZES_MB}
    for round_number in range(ROUNDS + 1):  # the first warms up
        for megabytes, whole in of.items():
            part = torch.empty(whole.numel() // devices, dtype=whole.dtype, device=device)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            dist.barrier()
            begin.record()
            for _ in range(REPEATS):
                dist.reduce_scatter_tensor(part, whole)
            end.record()
            end.synchronize()
            if round_number:
                found[megabytes].append(begin.elapsed_time(end) * 1e6 / REPEATS)
    if dist.get_rank() == 0:
        points = {
            megabytes: {"median_ns": median(times), "least_ns": min(times), "most_ns": max(times)}
            for megabytes, times in found.items()
        }
        name, version = torch.cuda.get_device_name(), ".".join(map(str, torch.cuda.nccl.version()))
        record = {"device": name, "devices": devices, "nccl": version, "points": points}
        out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
