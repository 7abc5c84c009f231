"""Calls of candidates that hang end the job; what only takes long ends nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disco_hlo.activation.channel import LocalChannel
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.store import PlanStore
from disco_hlo.plugin import hangs
from disco_hlo.plugin.calls import hanging, watch
from disco_hlo.plugin.calls.observing import Observation
from disco_hlo.plugin.calls.watch import UnderWay
from tests.plugin.calls.hanging import PLACES, end_where_it_hangs
from tests.plugin.calls.training import compiled_again, jitted, train, trial_of
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
_QUEUED_S = 0.1


class Tried:
    """In the place of a trial, one of whose calls is under way."""

    channel = LocalChannel()
    tag = "t"
    outcome = None

    def __init__(self, name: str, call_ns: int) -> None:
        self.call_ns = call_ns
        self.marks: dict[str, Any] = {}
        self.watch: Any = SimpleNamespace(module_name="jit_step", ended=3)
        self.watch.under_way = UnderWay(self.watch, 3, name)

    def name_of(self, _: int) -> str:
        return self.watch.under_way.name  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Exception in thread disco-endless")
@pytest.mark.parametrize(
    ("name", "call_s", "hangs_s"),
    [("plan", 0.001, 0.1), ("plan", 0.05, 0.9), (DEFAULT, 0.001, None), ("plan", 0.0, None)],
    ids=["a candidate", "of a large model", "XLA's default", "beside what nobody has timed"],
)
def test_a_call_hangs_that_takes_as_long_as_many_of_the_default(
    name: str, call_s: float, hangs_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = end_where_it_hangs(monkeypatch)
    monkeypatch.setattr(hangs, "_HANGS_S", 0.1)
    monkeypatch.setattr(hangs, "_CALLS", 18)
    tried, closing = Tried(name, round(1e9 * call_s)), threading.Event()
    began = time.monotonic()
    looking = threading.Thread(target=hanging._look_after, args=(weakref.ref(tried), closing))
    looking.start()
    try:
        assert ended.wait(60 if hangs_s else 0.5) == (hangs_s is not None)
        assert time.monotonic() - began >= (hangs_s or 0.0)
    finally:
        closing.set()
        looking.join()


def test_a_program_of_the_scripts_that_is_queued_before_a_call_is_not_the_calls(
    observation: Observation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long evaluation, for instance, whose results nobody has read yet."""
    monkeypatch.setattr(watch, "backend_of", lambda _: SimpleNamespace(queues=True))
    call = jitted("queued")
    _, state = train(call, 3)
    own = trial_of(observation.trials, "jit_queued").watch
    own.drain_queue()
    own.offer("again", compiled_again(own))
    own.swap(lambda _: "again")
    done = threading.Event()
    token = SimpleNamespace(block_until_ready=lambda: done.wait(60))
    monkeypatch.setattr(watch, "run_nothing", lambda _: token)
    train(call, 1, state)
    time.sleep(_QUEUED_S)
    assert (own.under_way, own.ended) == (None, 3)
    done.set()
    observation.drain()
    assert (own.under_way, own.ended) == (None, 4)


def run_both(folder: Path, fault: str, carrier: str) -> tuple[list[int], list[str]]:
    """How the two processes of hanging_rank.py end, and what they write; one of each where ``mpiexec`` has both."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    script = (sys.executable, "-m", "tests.plugin.calls.hanging_rank")
    own = [*script, f"127.0.0.1:{free_port()}", str(folder), fault]
    commands = [["mpiexec", "-n", "2", *own]] if carrier == "MPI" else [[*own, "0"], [*own, "1"]]
    started = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        errors = [process.communicate(timeout=100)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], errors


@pytest.mark.slow
@pytest.mark.product_only  # the older jax takes no turns with a plan
@pytest.mark.parametrize(
    ("fault", "carrier"),
    [
        (PLACES[0], "key-value store"),
        (PLACES[1], "key-value store"),  # the other process is past the call by then
        pytest.param(PLACES[1], "MPI", marks=pytest.mark.mpi),
        ("sleeps", "key-value store"),
    ],
)
def test_a_plan_that_hangs_in_a_call_of_one_of_two_processes_ends_both_and_a_rank_that_sleeps_none(
    fault: str, carrier: str, tmp_path: Path
) -> None:
    codes, errors = run_both(tmp_path, fault, carrier)
    lines = [line for one in errors for line in one.splitlines() if "has not ended" in line]
    bans = [ban.reason for one in PlanStore(tmp_path).list_plans() for ban in one.bans]
    assert carrier in errors[0]
    if fault == "sleeps":
        assert (codes, lines, bans) == ([0, 0], [], []), errors
        return
    assert 0 not in codes
    [line], [ban] = lines, bans
    assert "a call of jit_tried that no fusion ran has not ended after " in line
    assert line.endswith("; the candidate is banned, and the next job goes on without it")
    assert " hung while it was run (" in ban
