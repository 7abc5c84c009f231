"""Two processes, under MPI and without it: all of them execute the same module, whatever happens to one."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_hlo.plan import plan as plans
from disco_hlo.plan.bans import Bans
from disco_hlo.plan.files import OwnedFile
from disco_hlo.plan.read import read
from disco_hlo.plan.store import PlanSlot
from tests.as_searched import without_measurements
from tests.e2e.conftest import new_job
from tests.e2e.executed import (
    assert_defaults,
    assert_same_losses,
    difference,
    digest,
    edited,
    is_ours,
    plan_in,
    put_plan,
    slot_of,
)
from tests.e2e.jobs import LIMIT_S, Job, Run, until_it_says
from tests.known_times import know_all

pytestmark = pytest.mark.mpi


def assert_all_execute_the_plan(runs: list[Run], directory: Path, alone: list[Run]) -> None:
    plan = plan_in(directory)
    assert plan.target.process_count == len(runs) == len(alone)
    assert len(set(map(digest, runs))) == 1
    for run, default in zip(runs, alone, strict=True):
        assert difference(run, directory, plan.strategy) is None
        assert_same_losses(run, default)
    told = [line.rsplit(" ", 1)[1] for run in runs for line in run.lines(" executes module ")]
    assert told == [plan.module_sha256] * len(runs)


def assert_all_default(runs: list[Run], alone: list[Run], text: str) -> None:
    """XLA's default on every rank, with one line, from rank 0."""
    for rank, run in enumerate(runs):
        troubles = [line for line in run.log if line.startswith("disco: warning:")]
        assert [text in line for line in troubles] == [True] * (rank == 0), run.log
    assert_defaults(runs, alone)


@pytest.mark.parametrize(("switch", "lacking"), [("1", 1), ("0", 0)])
def test_a_rank_without_the_switch_is_not_waited_for(
    switch: str, lacking: int, shared: Job, alone: list[Run]
) -> None:
    """The others waited for the whole timeout, and Gloo gave its first all-reduce up meanwhile."""
    each = [{}, {}]
    each[1 - lacking] = {"ENABLE_SEARCH": switch, "DISCO_TIMEOUT_S": "300"}
    runs = shared.train_ranks(each=each)
    [line] = runs[1 - lacking].log
    assert f"all steps are left alone: of 2 ranks, rank {lacking} does not have ENABLE_SEARCH" in line
    assert runs[lacking].log == []
    assert_defaults(runs, alone)


def test_under_mpi_a_search_and_its_enactment(together: tuple[Job, list[Run]], alone: list[Run]) -> None:
    job, search = together
    assert search[0].lines("channel between 2 ranks: mpi")
    assert_all_execute_the_plan(search, job.directory, alone)
    enacted = job.train_mpi(ENABLE_SEARCH="0", DISCO_LOG="debug")
    assert_all_execute_the_plan(enacted, job.directory, alone)


@pytest.fixture(scope="module")
def without_mpi(
    together: tuple[Job, list[Run]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Job, list[Run]]:
    """The same search without MPI."""
    job = new_job(tmp_path_factory.mktemp("without_mpi") / "job", together[0].directory)
    return job, job.train_ranks(fault="plan_wins", ENABLE_SEARCH="1", DISCO_LOG="debug")


def test_without_mpi_the_same_plan_is_found_and_enacted(
    together: tuple[Job, list[Run]], without_mpi: tuple[Job, list[Run]], alone: list[Run]
) -> None:
    job, search = without_mpi
    assert search[0].lines("channel between 2 ranks: kv")
    assert_all_execute_the_plan(search, job.directory, alone)
    first, second = plan_in(together[0].directory), plan_in(job.directory)
    assert plans.encode(without_measurements(first)) == plans.encode(without_measurements(second))
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
def test_what_another_rank_has_in_its_own_directory_does_not_matter(
    together: tuple[Job, list[Run]], alone: list[Run], tmp_path: Path
) -> None:
    own = new_job(tmp_path / "own", together[0].directory)
    # The plan of an earlier search: XLA's own kernels and buckets.
    put_plan(slot_of(own.directory), read)
    each = [{}, {"DISCO_DIR": str(own.directory)}]
    runs = together[0].train_ranks(ENABLE_SEARCH="0", DISCO_LOG="debug", each=each)
    assert_all_execute_the_plan(runs, together[0].directory, alone)


@pytest.mark.product_only
def test_a_corrupt_plan_on_rank_0_is_the_default_on_all(shared: Job, alone: list[Run]) -> None:
    (slot_of(shared.directory) / "module.hlo.pb").write_bytes(b"")
    reason = "module.hlo.pb is not the module that plan.json was saved with"
    assert_all_default(shared.train_ranks(ENABLE_SEARCH="0"), alone, reason)


@pytest.mark.product_only
def test_a_plan_that_is_wrong_on_one_rank_is_enacted_by_none(shared: Job, alone: list[Run]) -> None:
    edited(lambda plan: plan.update(measured=None))(slot_of(shared.directory))
    runs = shared.train_ranks(ENABLE_SEARCH="0", each=[{}, {"fault": "one_element_off"}])
    reason = "output 0 differs from XLA's default at [0"
    assert_all_default(runs, alone, reason)


@pytest.mark.product_only
def test_a_plan_for_one_process_is_not_enacted_by_two(copied: Job, alone: list[Run]) -> None:
    reason = "there is no plan for it in"
    runs = copied.train_ranks(ENABLE_SEARCH="0")
    assert_all_default(runs, alone, reason)


@pytest.mark.product_only
def test_a_rank_with_another_batch_size_is_the_default_on_all(shared: Job) -> None:
    each = [{}, {"arguments": ("--batch", "6")}]
    default = shared.train_ranks(each=each)
    assert digest(default[0]) != digest(default[1])
    reason = "the ranks compile different training steps (another batch size or version?): rank 0: "
    # Where a plan is enacted, test_ranks_with_two_rates_enact_nothing shows the same.
    assert_all_default(shared.train_ranks(ENABLE_SEARCH="1", each=each), default, reason)


@pytest.mark.product_only
def test_ranks_in_different_phases_are_the_default_on_all(shared: Job, alone: list[Run]) -> None:
    reason = "the ranks differ in ENABLE_SEARCH (rank 0: 0; rank 1: 1)"
    runs = shared.train_ranks(each=[{"ENABLE_SEARCH": "0"}, {"ENABLE_SEARCH": "1"}])
    assert_all_default(runs, alone, reason)


@pytest.mark.product_only
def test_a_search_that_one_rank_cannot_follow_is_the_default_on_all(
    together: tuple[Job, list[Run]], fresh: Callable[..., Job], alone: list[Run]
) -> None:
    job = fresh(together[0])
    runs = job.train_ranks(ENABLE_SEARCH="1", each=[{}, {"fault": "no_memory"}])
    assert_all_default(runs, alone, "inputs of XLA default: rank 1: MemoryError")
    assert not is_ours(runs[0])


@pytest.mark.product_only
def test_a_fastest_candidate_that_is_wrong_on_one_rank_is_taken_by_none(
    together: tuple[Job, list[Run]], fresh: Callable[..., Job], alone: list[Run]
) -> None:
    job = fresh(together[0])
    runs = job.train_ranks(
        fault="plan_wins", ENABLE_SEARCH="1", each=[{}, {"fault": "one_element_off"}], DISCO_LOG="debug"
    )
    why = "compared: rank 1: output 0 differs from XLA's default at [0"
    assert len(runs[0].lines(f"plan: timed, and then left out: {why}")) == 1
    assert len(runs[0].lines("nothing beats XLA's default beyond noise")) == 1
    for run, default in zip(runs, alone, strict=True):
        assert not is_ours(run)
        assert_same_losses(run, default)
    candidates = json.loads((slot_of(job.directory) / "plan.json").read_text())["measured"]["candidates"]
    wrong = [one for one in candidates if one["error"]]
    assert [(one["name"], one["samples"]) for one in wrong] == [("plan", 0)]
    timed = [one["name"] for one in candidates if one.get("only_timed")]
    assert timed == [one["name"] for one in candidates if one["name"] not in ("XLA default", "plan")]


@pytest.mark.product_only
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_rank_0_searches_keeps_nobody_waiting(
    victim: int, together: tuple[Job, list[Run]], fresh: Callable[..., Job]
) -> None:
    job = fresh(together[0])
    each = [{"fault": "hurries_from:search"}, {"fault": "hurries_from:search"}]
    each[victim] = {"fault": "dies_at:search"}
    search = job.start_ranks(ENABLE_SEARCH="1", each=each)
    try:
        if victim == 0:
            # The store dies with rank 0, and jax ends the others.
            assert search.processes[1].wait(LIMIT_S) not in (0, -signal.SIGKILL)
        else:
            line = until_it_says(
                search.processes[0], "disco: warning: jit_train_step runs as XLA compiles it"
            )
            assert "search: rank 1 of 2 did not answer within 3 s" in line
    finally:
        search.kill()
    slot = slot_of(job.directory)
    assert not (slot / "plan.json").exists()
    with PlanSlot(job.directory, slot).search_lock().held():
        assert list(slot.glob("compiling-*")) == []


@pytest.mark.product_only
def test_ctrl_c_at_mpiexec_while_the_plan_compiles_bans_nothing(shared: Job) -> None:
    job = shared.start_mpi(fault="enacting:lasts", ENABLE_SEARCH="0")
    try:
        for _ in range(2):
            until_it_says(job.processes[0], "compiling")
        [mark] = slot_of(shared.directory).glob("compiling-*")
        job.processes[0].send_signal(signal.SIGINT)
        job.processes[0].communicate(timeout=LIMIT_S)
        # It ends before its ranks do: jax takes SIGTERM for a warning, and SIGKILL follows.
        until = time.monotonic() + LIMIT_S
        while OwnedFile(mark).is_alive() and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        job.kill()
    assert Bans(slot_of(shared.directory)).all() == []
    assert list(slot_of(shared.directory).glob("*-*")) == []


@pytest.mark.product_only
def test_a_rank_that_jax_ends_since_another_died_bans_nothing(shared: Job) -> None:
    each = [{"fault": "enacting:lasts"}, {"fault": "dies_at:enact"}]
    job = shared.start_ranks(ENABLE_SEARCH="0", TRAIN_HEARTBEAT_S="3", each=each)
    try:
        assert job.processes[0].wait(LIMIT_S) == -signal.SIGABRT
    finally:
        job.kill()
    [mark] = slot_of(shared.directory).glob("compiling-*")
    assert json.loads(mark.read_text())["fatal"] == "06"
    assert Bans(slot_of(shared.directory)).all() == []
    assert list(slot_of(shared.directory).glob("*-*")) == []


@pytest.mark.product_only
def test_ctrl_c_on_another_rank_ends_the_search_on_all_and_training_goes_on(
    fresh: Callable[..., Job], alone: list[Run]
) -> None:
    """Only rank 0's did: of a signal that reached another rank nobody heard, and the search went on to its end."""
    job = fresh()
    know_all(job.directory, devices=2, processes=2)
    endless = {"ENABLE_SEARCH": "1", "DISCO_PATIENCE": "1000000000", "DISCO_BUDGET_S": "100000"}
    search = job.start_ranks(each=[{}, {"DISCO_LOG": "debug"}], **endless)
    # It waits for rank 0's search from here on.
    until_it_says(search.processes[1], "disco: debug: search: ")
    search.processes[1].send_signal(signal.SIGINT)
    runs = search.finish()
    # Whether it has found something by then is chance: it is ended within a candidate.
    assert len(runs[0].lines("interrupted")) == 1
    assert len(runs[1].lines("interrupted: the search is ended")) == 1
    assert_defaults(runs, alone)


@pytest.mark.product_only
def test_ctrl_c_on_another_rank_while_the_step_is_profiled_leaves_nobody_in_an_all_reduce(
    fresh: Callable[..., Job], alone: list[Run]
) -> None:
    """That rank left, and the other waited in the profiled step until jax gave the job up after five minutes."""
    job = fresh()
    know_all(job.directory, devices=2, processes=2)
    search = job.start_ranks(each=[{}, {"DISCO_LOG": "debug"}], ENABLE_SEARCH="1")
    until_it_says(search.processes[1], "disco: debug: known times: ")
    search.processes[1].send_signal(signal.SIGINT)
    runs = search.finish()
    assert len(runs[0].lines("interrupted before the search; this run goes on with XLA's default")) == 1
    assert_defaults(runs, alone)


@pytest.mark.product_only
def test_ranks_that_agree_without_mpi_listen_on_no_more_ports(
    without_mpi: tuple[Job, list[Run]], alone: list[Run]
) -> None:
    assert [run.listening for run in without_mpi[1]] == [run.listening for run in alone]
    # The count sees what there is: rank 0 is jax.distributed's coordinator.
    assert alone[0].listening >= 1
