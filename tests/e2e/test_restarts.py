"""Processes that are in one job after the other: what belongs to a job ends with it."""

from __future__ import annotations

import pytest

from tests.e2e.executed import assert_same_losses, digest, plan_in
from tests.e2e.jobs import LIMIT_S, Job, Run, Started, until_it_says
from tests.ports import free_port

pytestmark = pytest.mark.mpi


def test_ranks_that_join_one_job_after_the_other_have_their_plan_in_each(
    shared: Job, alone: list[Run]
) -> None:
    """Both initialize again, at another address; then rank 1 is killed, started again, and rank 0 initializes again
    at the same address. The second job went without a plan, the third waited ten minutes on the old coordinator."""
    first, second = str(free_port()), str(free_port())

    def start(rank: int, *ports: str, **own: str) -> Started:
        told = {"fault": "", "ENABLE_SEARCH": "0", "DISCO_LOG": "debug", "DISCO_TIMEOUT_S": "600"}
        return shared.start_rank(rank, 2, script="train_again.py", TRAIN_PORTS=",".join(ports), **told | own)

    started = [
        start(0, first, second, second, TRAIN_LOSES="2"),
        start(1, first, second, TRAIN_LOSES="2", TRAIN_DIES="1"),
    ]
    try:
        # Before that the old coordinator has the address, and would take it.
        until_it_says(started[0].processes[0], "left 2")
        _, errors = started[1].processes[0].communicate(timeout=LIMIT_S)
        started.append(start(1, second))
        runs = [*started[0].finish(), *started[2].finish()]
    finally:
        for one in started:
            one.kill()
    executed = plan_in(shared.directory).module_sha256
    assert errors.count(" executes module ") == errors.count(f" executes module {executed}") == 2
    for run, default, jobs in zip(runs, alone, (3, 1), strict=True):
        told = [line.rsplit(" ", 1)[1] for line in run.lines(" executes module ")]
        assert told == [executed] * jobs
        assert run.lines("disco: warning:") == run.lines("loses buffer donation")
        assert_same_losses(run, default)
    assert digest(runs[0]) == digest(runs[1])
