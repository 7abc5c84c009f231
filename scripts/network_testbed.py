"""Run a two-process job over a slow network on one machine: two network namespaces joined by a rate limit.

    sudo python scripts/network_testbed.py --rate 100mbit -- \\
        python examples/transformer_lm.py --distributed --host {host} --port {port}

Each process runs in a network namespace of its own. What one sends the other passes a virtual cable whose
both ends send at ``--rate`` (a token bucket, ``tc tbf``), so gradients take the time they take on such a
network, while both processes share this machine's cores. It needs root and the programs ``ip`` and ``tc``
(Debian: iproute2). Whatever ends it, namespaces, cable and processes are gone afterwards; what a run killed
with -9 left behind, the next one removes.

In the command ``{rank}``, ``{size}``, ``{host}`` and ``{port}`` are filled in. The processes also find their
place in the variables that Open MPI's mpiexec would set, and in JAX_COORDINATOR_ADDRESS.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

RANKS = 2
HOSTS = Path("/etc/netns")
UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class TestbedError(Exception):
    """The namespaces cannot be set up; the text says why."""


class Namespace(NamedTuple):
    """One end of the cable."""

    name: str
    device: str
    address: str


def rate_bits(text: str) -> int:
    """``100mbit`` in bits per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text.lower())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"expected a rate like 100mbit or 1gbit, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def run(*command: str) -> None:
    """Run ``ip`` or ``tc``; raise TestbedError with what it says."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TestbedError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


@contextlib.contextmanager
def network(rate: int) -> Iterator[list[Namespace]]:
    """Two namespaces, named after this process, and the cable between them, for as long as the context lasts."""
    own = os.getpid()
    ends = [
        Namespace(f"disco-{own}-{rank}", f"veth{rank}", f"10.77.{own % 250 + 1}.{rank + 1}")
        for rank in range(RANKS)
    ]
    # The bucket must hold what the kernel hands over at once, and what passes in one tick of its clock.
    bucket = f"tbf rate {rate}bit burst {max(128 << 10, rate // 8 // 200)} latency 100ms".split()
    try:
        for end in ends:
            write_hosts(end, ends)
            run("ip", "netns", "add", end.name)
        first, second = ends
        cable = ["ip", "link", "add", first.device, "netns", first.name, "type", "veth"]
        run(*cable, "peer", "name", second.device, "netns", second.name)
        for end in ends:
            run("ip", "-n", end.name, "addr", "add", f"{end.address}/24", "dev", end.device)
            run("ip", "-n", end.name, "link", "set", "lo", "up")
            run("ip", "-n", end.name, "link", "set", end.device, "up")
            inside = ["ip", "netns", "exec", end.name]
            run(*inside, "tc", "qdisc", "replace", "dev", end.device, "root", *bucket)
        yield ends
    finally:
        for end in ends:
            remove(end.name)


def write_hosts(end: Namespace, ends: Sequence[Namespace]) -> None:
    """``ip netns exec`` shows this as /etc/hosts: gloo binds the address that the host's own name has."""
    lines = ["127.0.0.1 localhost", f"{end.address} {socket.gethostname()}"]
    lines += [f"{other.address} rank{rank}" for rank, other in enumerate(ends)]
    folder = HOSTS / end.name
    folder.mkdir(parents=True)
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def remove(name: str) -> None:
    """Take down one namespace and all that runs in it; no error where there is none."""
    inside = ["ip", "netns", "pids", name]
    for pid in subprocess.run(inside, capture_output=True, text=True, check=False).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    shutil.rmtree(HOSTS / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        HOSTS.rmdir()


def remove_leftovers() -> None:
    """Namespaces of runs that were killed before they could clean up."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    folders = [path.name for path in HOSTS.iterdir()] if HOSTS.is_dir() else []
    for name in {*listed.split(), *folders}:
        match = re.fullmatch(r"disco-(\d+)-[01]", name)
        if match and not Path("/proc", match[1]).exists():
            remove(name)


def start(end: Namespace, rank: int, command: Sequence[str], host: str, port: int) -> subprocess.Popen[Any]:
    """One rank of the job, on its share of the cores, with its place in the variables that programs look for."""
    place = {"{rank}": str(rank), "{size}": str(RANKS), "{host}": host, "{port}": str(port)}
    filled = [re.sub(r"\{(?:rank|size|host|port)\}", lambda name: place[name[0]], part) for part in command]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= RANKS:
        share = cores[rank * len(cores) // RANKS : (rank + 1) * len(cores) // RANKS]
        filled = ["taskset", "-c", ",".join(map(str, share)), *filled]
    environment = {
        **os.environ,
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(RANKS),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "JAX_COORDINATOR_ADDRESS": f"{host}:{port}",
        "DISCO_CHANNEL": "kv",  # there is no MPI behind these names, so nobody should look for it
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", end.name, *filled], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip


def relay(rank: int, stream: IO[str]) -> None:
    """Print what a rank prints, with its number."""
    for line in stream:
        print(f"[{rank}] {line}", end="", flush=True)


def run_job(ends: Sequence[Namespace], command: Sequence[str], port: int) -> int:
    """Both ranks to their end; where one fails the other is stopped. Returns the exit code."""
    processes = [start(end, rank, command, ends[0].address, port) for rank, end in enumerate(ends)]
    relays = [
        threading.Thread(target=relay, args=(rank, process.stdout), daemon=True)
        for rank, process in enumerate(processes)
    ]
    for thread in relays:
        thread.start()
    try:
        return wait_for_all(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for thread in relays:
            thread.join(5)


def wait_for_all(processes: Sequence[subprocess.Popen[Any]]) -> int:
    """0 when all have succeeded, else the code of the first that failed, as soon as it has."""
    waiting = list(processes)
    while waiting:
        for process in list(waiting):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.2)
                if code:
                    return code if code > 0 else 128 - code
                waiting.remove(process)
    return 0


def main() -> int:
    """Set up, run, clean up; code 2 where it cannot work here."""
    summary, details = (__doc__ or "").split("\n\n", 1)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=raw)
    rates = "e.g. 100mbit, 1gbit (default)"
    parser.add_argument("--rate", type=rate_bits, default=rate_bits("1gbit"), help=rates)
    parser.add_argument("--port", type=int, default=29765, help="the coordinator's port (default 29765)")
    parser.add_argument("command", nargs="+", help="what each of the two processes runs")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("needs root, to make network namespaces")
    for program in ("ip", "tc", "taskset"):
        if shutil.which(program) is None:
            parser.error(f"needs the program {program} (Debian: apt install iproute2 util-linux)")
    # Being told to end must end in the clean-up too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    remove_leftovers()
    try:
        with network(arguments.rate) as ends:
            return run_job(ends, arguments.command, arguments.port)
    except TestbedError as error:
        print(f"network_testbed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
