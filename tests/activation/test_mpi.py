"""The MPI channel under a real mpiexec: the ways jobs and MPI worlds relate, and dead ranks."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disco_hlo.activation import mpi
from disco_hlo.activation.channel import Deadline
from tests.activation.jobs import at_every_moment, run_alone, run_under_mpi
from tests.activation.test_processes import KV, assert_default_after, assert_exchange
from tests.ports import free_port

pytestmark = pytest.mark.mpi

KEEP_SURVIVORS = ("--runtime-options", "CONTINUOUS")
"""Open MPI's launcher then leaves the other ranks alone when one dies, so that it is not what ends them."""


def test_two_ranks_of_jax_distributed_agree_over_mpi_on_a_module_of_50_mb(tmp_path: Path) -> None:
    results = run_under_mpi("exchange", 2, tmp_path, port=free_port(), module_bytes=50_000_000)
    assert_exchange(results, 2, "MPI (Open MPI")


def test_four_ranks_agree_over_mpi_where_rank_0_is_the_last_of_mpi(tmp_path: Path) -> None:
    results = run_under_mpi("exchange", 4, tmp_path, backwards=1)
    assert_exchange(results, 4, "MPI (Open MPI")


def test_a_second_job_of_the_same_processes_has_communicators_of_its_own(tmp_path: Path) -> None:
    results = run_under_mpi("again", 3, tmp_path)
    heard = [[f"{job} {rank}" for rank in range(3)] for job in range(2)]
    assert results == {rank: {"heard": heard, "ends": 1} for rank in range(3)}


def test_four_independent_jobs_under_one_mpiexec_neither_wait_for_each_other_nor_touch_mpi(
    tmp_path: Path,
) -> None:
    results = run_under_mpi("independent", 4, tmp_path, size=1)
    expected = {"channel": "a single process", "enacts its own": True, "mpi touched": False}
    assert results == dict.fromkeys(range(4), expected)


def test_two_jobs_beside_the_users_own_mpi_keep_their_plans_and_messages_apart(tmp_path: Path) -> None:
    results = run_under_mpi("beside_users_mpi", 4, tmp_path, size=2)
    assert sorted(results) == [0, 1, 2, 3]
    for result in results.values():
        assert result.pop("channel").startswith("MPI (Open MPI")
        assert result == {"module": "own", "enact": True, "user's message": True, "sum": 4}


def test_a_script_that_initializes_mpi_itself_still_can(tmp_path: Path) -> None:
    results = run_under_mpi("uninitialized", 2, tmp_path)
    assert results == {rank: {"channel": KV, "sum": 2} for rank in range(2)}


def test_a_launcher_of_another_mpi_leaves_the_job_to_the_key_value_store_unless_mpi_is_insisted_on(
    tmp_path: Path,
) -> None:
    # Its variables name a world of two, but each process finds itself alone in one of its own.
    (tmp_path / "auto").mkdir()
    (tmp_path / "mpi").mkdir()
    results, _ = run_alone("exchange", 2, tmp_path / "auto", PMI_SIZE=2)
    assert_exchange(results, 2, KV)
    results, _ = run_alone("exchange", 2, tmp_path / "mpi", PMI_SIZE=2, channel="mpi")
    assert results[0] == results[1]
    assert results[0]["error"].startswith("DISCO_CHANNEL=mpi, but ")


def test_a_fork_of_a_rank_does_not_meet_the_others_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    mpi._finalize(os.getpid() + 1)
    with pytest.raises(ImportError):
        mpi._finalize(os.getpid())


def test_waiting_for_a_rank_leaves_the_cores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks the process sleeps, longer and longer."""
    slept: list[float] = []
    monkeypatch.setattr(mpi.time, "sleep", slept.append)
    request: Any = SimpleNamespace(Test=lambda: len(slept) == 30)
    assert mpi._complete(request, Deadline(60.0), 0.01)
    assert slept == sorted(slept)
    assert (min(slept), max(slept)) == (20e-6, 0.01)


def test_three_ranks_one_killed_the_others_come_to_one_outcome(tmp_path: Path) -> None:
    def run(folder: Path, moment: str) -> dict[int, Any]:
        told = {"victim": 0, "moment": moment, "timeout_s": 2, "channel": "mpi"}
        return run_under_mpi("killed", 3, folder, *KEEP_SURVIVORS, **told)

    for results in at_every_moment(tmp_path, run).values():
        assert_default_after(results, 3, victim=0)
