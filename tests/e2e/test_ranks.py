"""Two processes, under MPI and without it: all of them execute the same module, whatever happens to one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from disco_hlo.plan import plan as plans
from tests.e2e.conftest import new_job
from tests.e2e.executed import assert_same_losses, difference, digest, is_ours, plan_in, slot_of
from tests.e2e.jobs import Job, Run

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two ranks with XLA's default."""
    return new_job(tmp_path_factory.mktemp("alone")).train_ranks()


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[Run]]:
    """A search by two ranks under MPI; not to be changed."""
    job = new_job(tmp_path_factory.mktemp("together"))
    return job, job.train_mpi(fault="plan_wins", ENABLE_SEARCH="1", DISCO_LOG="debug")


@pytest.fixture
def shared(together: tuple[Job, list[Run]], tmp_path: Path) -> Job:
    return new_job(tmp_path / "shared", together[0].directory)


def assert_all_execute_the_plan(runs: list[Run], directory: Path, alone: list[Run]) -> None:
    plan = plan_in(directory)
    assert plan.target.process_count == 2
    assert len(set(map(digest, runs))) == 1
    for run, default in zip(runs, alone, strict=True):
        assert difference(run, directory, plan.strategy) is None
        assert_same_losses(run, default)
    told = [line.rsplit(" ", 1)[1] for run in runs for line in run.lines(" executes module ")]
    assert told == [plan.module_sha256] * 2


def assert_all_default(runs: list[Run], alone: list[Run], *texts: str) -> None:
    """XLA's default on every rank, with one line each."""
    for run, default, text in zip(runs, alone, texts, strict=True):
        troubles = [line for line in run.log if line.startswith("disco: warning:")]
        assert len(troubles) == 1, run.log
        assert text in troubles[0]
        assert digest(run) == digest(default)
        assert_same_losses(run, default)


def test_under_mpi_a_search_and_its_enactment(together: tuple[Job, list[Run]], alone: list[Run]) -> None:
    job, search = together
    assert search[0].lines("channel between 2 ranks: mpi")
    assert_all_execute_the_plan(search, job.directory, alone)
    enacted = job.train_mpi(ENABLE_SEARCH="0", DISCO_LOG="debug")
    assert_all_execute_the_plan(enacted, job.directory, alone)


def test_without_mpi_the_same_plan_is_found_and_enacted(
    together: tuple[Job, list[Run]], shared: Job, alone: list[Run]
) -> None:
    first = plan_in(shared.directory)
    search = shared.train_ranks(fault="plan_wins", ENABLE_SEARCH="1", DISCO_LOG="debug")
    assert search[0].lines("channel between 2 ranks: kv")
    assert_all_execute_the_plan(search, shared.directory, alone)
    second = plan_in(shared.directory)
    assert plans.encode(plans.without_measurements(first)) == plans.encode(plans.without_measurements(second))
    assert first.measured != second.measured


# From here on nothing depends on the versions of Python and JAX, and the other leg has less time.


@pytest.mark.product_only
def test_a_rank_needs_no_plan_directory(shared: Job, alone: list[Run], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    own = {"DISCO_DIR": str(tmp_path / "file" / "plans")}
    runs = shared.train_ranks(ENABLE_SEARCH="0", DISCO_LOG="debug", each=[{}, own])
    assert_all_execute_the_plan(runs, shared.directory, alone)
    assert [run.lines("without a mark") for run in runs] == [[], []]


@pytest.mark.product_only
def test_a_corrupt_plan_on_rank_0_is_the_default_on_all(shared: Job, alone: list[Run]) -> None:
    (slot_of(shared.directory) / "module.hlo.pb").write_bytes(b"")
    reason = "module.hlo.pb is not the module that plan.json was saved with"
    assert_all_default(shared.train_ranks(ENABLE_SEARCH="0"), alone, reason, reason)


@pytest.mark.product_only
def test_a_plan_for_one_process_is_not_enacted_by_two(copied: Job, alone: list[Run]) -> None:
    reason = "the plan was made for another job: processes 1, this is 2"
    runs = copied.train_ranks(ENABLE_SEARCH="0")
    assert_all_default(runs, alone, reason, reason)


@pytest.mark.product_only
@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_rank_with_another_batch_size_is_the_default_on_all(switch: str, shared: Job) -> None:
    each = [{}, {"arguments": ("--batch", "6")}]
    default = shared.train_ranks(each=each)
    assert digest(default[0]) != digest(default[1])
    reason = "the ranks compile different training steps (another batch size or version?): rank 0: "
    assert_all_default(shared.train_ranks(ENABLE_SEARCH=switch, each=each), default, reason, reason)


@pytest.mark.product_only
def test_ranks_in_different_phases_are_the_default_on_all(shared: Job, alone: list[Run]) -> None:
    reason = "the ranks differ in ENABLE_SEARCH (rank 0: 0; rank 1: 1)"
    runs = shared.train_ranks(each=[{"ENABLE_SEARCH": "0"}, {"ENABLE_SEARCH": "1"}])
    assert_all_default(runs, alone, reason, reason)


@pytest.mark.product_only
def test_a_rank_that_never_comes_costs_the_timeout(shared: Job, alone: list[Run]) -> None:
    runs = shared.train_ranks(DISCO_TIMEOUT_S="5", each=[{"ENABLE_SEARCH": "0"}, {}])
    assert_all_default(runs[:1], alone[:1], "rank 1 of 2 did not answer within 5 s")
    assert digest(runs[1]) == digest(alone[1])


@pytest.mark.product_only
def test_a_search_that_one_rank_cannot_follow_is_the_default_on_all(
    together: tuple[Job, list[Run]], fresh: Callable[..., Job], alone: list[Run]
) -> None:
    job = fresh(together[0])
    runs = job.train_ranks(ENABLE_SEARCH="1", each=[{}, {"fault": "no_memory"}])
    assert_all_default(runs, alone, "inputs of XLA default: rank 1: ", "MemoryError")
    assert not is_ours(runs[0])
