"""The two-namespace test bed: a rate that holds, names that resolve, nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "network_testbed.py"

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None,
    reason="only root makes network namespaces, with ip and tc",
)

SEND_A_MEGABYTE = """
import os, socket, subprocess, sys, time
rank, host, length = int(sys.argv[1]), sys.argv[2], 1_000_000
print("name", socket.gethostbyname(socket.gethostname()) == socket.gethostbyname(f"rank{rank}"))
print("place", os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"])
if rank == 0:
    with socket.create_server((host, 5001)) as server:
        connection, _ = server.accept()
        connection.recv(1)
        received = 1
        while received < length:
            received += len(connection.recv(1 << 20))
    # Each end keeps what it sends to this rate.
    print("slow", "rate 16Mbit" in subprocess.run(["tc", "qdisc"], capture_output=True, text=True).stdout)
else:
    connection = None
    while connection is None:
        try:
            connection = socket.create_connection((host, 5001))
        except OSError:
            time.sleep(0.02)
    connection.sendall(bytes(length))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def left_behind(pid: int) -> list[str]:
    """What a run of the test bed as process ``pid`` has left."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    named = [line for line in listed.splitlines() if line.startswith(f"disco-{pid}-")]
    return named + [str(path) for path in Path("/etc/netns").glob(f"disco-{pid}-*")]


@needs_root
def test_two_ranks_meet_over_a_slow_cable() -> None:
    command = command_line(
        "--rate", "16mbit", "--", sys.executable, "-c", SEND_A_MEGABYTE, "{rank}", "{host}"
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=200)
    lines = sorted(output.splitlines())
    assert lines == ["[0] name True", "[0] place 0 2", "[0] slow True", "[1] name True", "[1] place 1 2"]
    assert process.returncode == 0
    assert left_behind(process.pid) == []


@needs_root
def test_where_one_rank_fails_the_other_is_stopped_and_the_code_is_passed_on() -> None:
    command = command_line("--", "sh", "-c", "test {rank} = 0 && exec sleep 60; exit 7")
    process = subprocess.Popen(command)
    assert process.wait(timeout=200) == 7
    assert left_behind(process.pid) == []


@needs_root
def test_a_terminated_run_cleans_up_and_a_killed_one_is_cleaned_up_by_the_next() -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        process = subprocess.Popen(
            command_line("--", "sh", "-c", "echo up; exec sleep 60"), stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(timeout=200) == code
        process.stdout.close()
    assert len(left_behind(process.pid)) == 4
    assert subprocess.run(command_line("--", "true"), timeout=200, check=False).returncode == 0
    end = time.monotonic() + 60
    while left_behind(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert left_behind(process.pid) == []
