"""One of two ranks fails or dies while both measure: neither waits, and rank 0 says once what happened."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.executed import assert_defaults, assert_same_losses, digest, is_ours, slot_of
from tests.e2e.jobs import LIMIT_S, Job, Run
from tests.known_times import know_all, know_device

pytestmark = pytest.mark.mpi

NO_ROOM = "RuntimeError: RESOURCE_EXHAUSTED: out of memory"


def all_but_ops(directory: Path) -> None:
    know_all(directory, devices=2, processes=2)


@pytest.mark.parametrize(
    ("known", "rank", "stage", "said"),
    [
        (all_but_ops, 1, "inputs-for-profiling", "inputs for profiling: rank 1: "),
        (all_but_ops, 0, "the-step's-profile", "the step's profile: rank 0: "),
        (know_device, 1, "all-reduce-to-time", "all-reduce to time: rank 1: "),
    ],
)
def test_a_rank_that_fails_while_the_step_is_profiled_is_the_default_on_all(
    known: Callable[[Path], None],
    rank: int,
    stage: str,
    said: str,
    fresh: Callable[..., Job],
    alone: list[Run],
) -> None:
    job = fresh()
    known(job.directory)
    each = [{}, {}]
    each[rank] = {"fault": f"fails_at:{stage}"}
    runs = job.train_ranks(ENABLE_SEARCH="1", each=each)
    [line] = runs[0].lines("disco: warning:")
    assert "jit_train_step runs as XLA compiles it: " in line
    assert NO_ROOM in line
    assert (said in line) is (rank != 0)
    assert runs[1].lines("disco: warning:") == []
    assert_defaults(runs, alone)


def test_a_rank_without_memory_for_one_of_the_modules_or_for_timelines_leaves_all_to_go_on_without(
    fresh: Callable[..., Job], alone: list[Run]
) -> None:
    """They search with the other module, and the winner stays in place."""
    job = fresh()
    all_but_ops(job.directory)
    each = [{}, {"fault": "fails_at:memory-for-the-XLA no_timeline"}]
    runs = job.train_ranks(fault="plan_wins", ENABLE_SEARCH="1", DISCO_EXPLAIN="1", each=each)
    [line] = runs[0].lines("XLA's kernels: not profiled: ")
    assert f"memory for the XLA's kernels: rank 1: {NO_ROOM}" in line
    assert len(runs[0].lines("no measured timelines: ")) == 1
    assert digest(runs[0]) == digest(runs[1])
    for run, default in zip(runs, alone, strict=True):
        assert run.lines("disco: warning:") == run.lines("loses buffer donation")
        assert is_ours(run)
        assert_same_losses(run, default)


def test_a_rank_that_dies_in_a_profiled_run_ends_the_job_and_the_other_says_so(
    fresh: Callable[..., Job],
) -> None:
    job = fresh()
    know_all(job.directory, devices=2, processes=2)
    each = [{"fault": "hurries_from:profile-unfused"}, {"fault": "dies_in_run:6"}]
    job_of_two = job.start_ranks(ENABLE_SEARCH="1", each=each)
    try:
        survivor = job_of_two.processes[0]
        _, errors = survivor.communicate(timeout=LIMIT_S)
        assert survivor.returncode == 1, errors
        assert job_of_two.processes[1].wait(LIMIT_S) == -signal.SIGKILL
    finally:
        job_of_two.kill()
    lines = [line for line in errors.splitlines() if line.startswith(("disco: warning:", "disco: error:"))]
    assert len(lines) == 1, errors
    assert "a profiled run of unfused step failed on rank 0 (" in lines[0]
    assert "rank 1 of 2 did not answer within 3 s" in lines[0]
    assert not (slot_of(job.directory) / "plan.json").exists()
