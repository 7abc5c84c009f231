"""What each start of a job sees of its training step, and after how long: is it the module that has a plan?

    make bench BENCH=starts ARGS="vgg19 --size full"
    python scripts/bench_starts.py vgg19 --size full --launch "mpiexec -n 2 --bind-to none" --json OUT

Every start is a process of its own (a job of several with --launch): it sees XLA's module and goes on with it, as an
enactment does, first with nothing kept, then with what XLA:GPU's autotuner picks kept in a fresh folder. In the last
start the module is captured and then compiled anew, which takes XLA's passes twice.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmark import MODELS
from checkout import find_package
from evaluation.record import write_atomically

WORKER_LIMIT_S = 600.0
MARK = "start: "


def worker(model: str, size: str, folder: str, twice: bool) -> dict[str, Any]:
    """One start, in this process; times in seconds."""
    from evaluation import step

    sys.path.insert(0, str(step.EXAMPLES))
    import parallel

    if "OMPI_COMM_WORLD_RANK" in os.environ:
        parallel.initialize(parallel.parser(None).parse_args(["--distributed"]))
    from disco_hlo.hlo.canonical import canonicalize
    from disco_hlo.plugin.xla import compiles

    request = step.request_of(model, size)
    request.tuner_results = Path(folder) if folder else None
    started = time.monotonic()
    with compiles.halted(request) as waiting:  # begins no compile before it is asked
        module = compiles.capture(request) if twice else waiting.module()
        seen = time.monotonic()
        graph = canonicalize(module).graph
        read = time.monotonic()
        if twice:
            compiles.compile_module(request, module)
        else:
            waiting.finish(module)
    compiled = time.monotonic()
    return {
        "fingerprint": graph.fingerprint[:16],
        "ops": len(graph),
        "seen_s": round(seen - started, 1),
        "read_s": round(read - seen, 1),
        "compiled_s": round(compiled - read, 1),
    }


def start(args: argparse.Namespace, folder: str, twice: bool) -> dict[str, Any]:
    """One start; what its first rank found.

    Raises:
        SystemExit: it failed; its last lines are printed.
    """
    worker = [sys.executable, __file__, args.model, "--size", args.size, "--worker", f"--folder={folder}"]
    command = [*shlex.split(args.launch), *worker, *(["--twice"] if twice else [])]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=WORKER_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"bench_starts.py: a start failed: {error}") from None
    found = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not found:
        print("\n".join((done.stdout + done.stderr).splitlines()[-15:]), file=sys.stderr)
        raise SystemExit(f"bench_starts.py: a start ended with {done.returncode}")
    how = {"kept": bool(folder), "compiles": 2 if twice else 1}
    return {**how, **json.loads(found[0])}


def main() -> int:
    """Start after start, a line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--size", default="tiny", choices=("full", "tiny"))
    parser.add_argument("--starts", type=int, default=3, help="of each kind (default 3)")
    parser.add_argument("--launch", default="", metavar="COMMAND", help='such as "mpiexec -n 2"')
    parser.add_argument("--json", type=Path, metavar="OUT", help="write what was found here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--twice", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.starts < 1:
        parser.error("expected --starts of at least 1")
    find_package()
    if args.worker:
        found = worker(args.model, args.size, args.folder, args.twice)
        if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
            print(MARK + json.dumps(found), flush=True)
        return 0
    starts = []
    print("kept  compiles  fingerprint        ops  seen, s  read, s  compiled, s")
    with tempfile.TemporaryDirectory() as folder:
        for kept, twice in [("", False)] * args.starts + [(folder, False)] * args.starts + [(folder, True)]:
            one = start(args, kept, twice)
            starts.append(one)
            print(
                f"{'yes' if one['kept'] else 'no':4}  {one['compiles']:8}  {one['fingerprint']} {one['ops']:6}"
                f"  {one['seen_s']:7} {one['read_s']:8} {one['compiled_s']:12}",
                flush=True,
            )
    if args.json is not None:
        body = {"model": args.model, "size": args.size, "starts": starts}
        write_atomically(args.json, json.dumps(body, indent=1).encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
