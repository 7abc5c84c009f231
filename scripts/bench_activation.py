"""Time that joining, broadcasting and agreeing add to a job's start-up, over MPI and without it.

    make bench BENCH=activation ARGS="--ranks 2 4 --megabytes 0.4 5 50"

Starts jobs of jax.distributed on this machine and lets every rank do what the enactment phase does before it
compiles: choose a channel, receive plan and module from rank 0, agree. The module is random bytes, which zlib
cannot make smaller: the worst case. A time is that of the slowest rank; of several rounds the median.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disco_hlo.activation.agree import PlanBytes, Proposal, agree, broadcast_plan
from disco_hlo.activation.choose import open_channel
from disco_hlo.activation.decision import KeyValueStore
from disco_hlo.activation.kvstore import CoordinationStore

TIMEOUT_S = 120.0
JOB_LIMIT_S = 600.0


def timed(step: Callable[[], Any]) -> tuple[Any, float]:
    """The result of ``step`` and its milliseconds."""
    started = time.perf_counter()
    result = step()
    return result, (time.perf_counter() - started) * 1e3


def work(arguments: argparse.Namespace) -> None:
    """One rank: measure, and write what was measured to ``--worker``."""
    import jax

    from disco_hlo.plugin.xla import jaxlink

    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("BENCH_RANK", "0")))
    jax.distributed.initialize(f"127.0.0.1:{arguments.port}", arguments.ranks[0], rank)
    job = jaxlink.distributed_job()
    assert job is not None
    store = CoordinationStore(job[0])
    channel, open_ms = timed(lambda: open_channel(rank, arguments.ranks[0], job[1], store, os.environ))
    rounds = [
        {"megabytes": megabytes, **one_round(channel, int(megabytes * 1e6), number)}
        for megabytes in arguments.megabytes
        for number in range(arguments.rounds)
    ]
    result = {
        "channel": channel.description,
        "open_ms": open_ms,
        "rounds": rounds,
        "asked_per_s": asking_rate(store),
    }
    (Path(arguments.worker) / f"{rank}.json").write_text(json.dumps(result))
    channel.barrier(tag="end", timeout_s=TIMEOUT_S)
    jax.distributed.shutdown()


def one_round(channel: Any, size_bytes: int, number: int) -> dict[str, float]:
    """Milliseconds of one broadcast and one agreement."""
    plan = None
    if channel.rank == 0:
        plan = PlanBytes(b"{}", hashlib.shake_256(bytes([number])).digest(size_bytes))
    channel.barrier(tag="start", timeout_s=TIMEOUT_S)
    (plan, _), broadcast_ms = timed(lambda: broadcast_plan(channel, plan, timeout_s=TIMEOUT_S))
    proposal = Proposal("f" * 64, plan.module_sha256)
    channel.barrier(tag="received", timeout_s=TIMEOUT_S)
    agreement, agree_ms = timed(lambda: agree(channel, proposal, TIMEOUT_S))
    assert agreement.enact, agreement.reason
    return {"broadcast_ms": broadcast_ms, "agree_ms": agree_ms}


def asking_rate(store: KeyValueStore) -> float:
    """How often a second this rank, and all others at the same time, can ask the store for a key."""
    store.put("bench/key", b"x" * 200)
    asked, end = 0, time.perf_counter() + 1.0
    while time.perf_counter() < end:
        store.get("bench/key", 1.0)
        asked += 1
    return float(asked)


def measure(ranks: int, under_mpi: bool, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one job; what its ranks wrote."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        told = ["--worker", folder, "--port", str(probe.getsockname()[1]), "--rounds", str(arguments.rounds)]
        told += ["--ranks", str(ranks), "--megabytes", *map(str, arguments.megabytes)]
        probe.close()
        command = [sys.executable, __file__, *told]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        if under_mpi:
            # Test beds and containers are often root's, with fewer cores than ranks.
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            launch = ["mpiexec", "--oversubscribe", "-n", str(ranks), *command]
            processes = [subprocess.Popen(launch, env=environment)]
        else:
            places = [{"BENCH_RANK": str(rank)} for rank in range(ranks)]
            processes = [subprocess.Popen(command, env=environment | place) for place in places]
        wait(processes)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended; exits if one failed."""
    try:
        codes = [process.wait(JOB_LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise SystemExit(f"a rank failed: exit codes {codes}")


def summarize(results: list[dict[str, Any]], megabytes: list[float]) -> list[dict[str, Any]]:
    """One row per module size: medians over rounds of the slowest rank."""
    rows = []
    for size in megabytes:
        rounds = [[one for one in result["rounds"] if one["megabytes"] == size] for result in results]
        slowest = [
            {key: max(rank[number][key] for rank in rounds) for key in ("broadcast_ms", "agree_ms")}
            for number in range(len(rounds[0]))
        ]
        rows.append(
            {
                "channel": results[0]["channel"],
                "ranks": len(results),
                "megabytes": size,
                "open_ms": max(result["open_ms"] for result in results),
                "broadcast_ms": statistics.median(one["broadcast_ms"] for one in slowest),
                "agree_ms": statistics.median(one["agree_ms"] for one in slowest),
                "asked_per_s": sum(result["asked_per_s"] for result in results),
            }
        )
    return rows


def main() -> int:
    """Print the table; with ``--json`` write it as well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="job sizes (default 2 4)")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.4, 5.0, 50.0], help="module sizes")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per size (default 5)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if min(arguments.ranks) < 2 or arguments.rounds < 1 or not 0 < min(arguments.megabytes) < math.inf:
        parser.error("expected --ranks of at least 2, --rounds of at least 1 and --megabytes above 0")
    if arguments.worker:
        work(arguments)
        return 0
    ways = [True, False] if shutil.which("mpiexec") else [False]
    rows = []
    print(f"{'channel':32} ranks     MB  open ms  broadcast ms  agree ms  asked/s")
    for ranks in arguments.ranks:
        for under_mpi in ways:
            for row in summarize(measure(ranks, under_mpi, arguments), arguments.megabytes):
                rows.append(row)
                print(
                    f"{row['channel']:32} {row['ranks']:5} {row['megabytes']:6g} {row['open_ms']:8.1f} "
                    f"{row['broadcast_ms']:13.1f} {row['agree_ms']:9.1f} "
                    f"{row['asked_per_s']:8.0f}",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
