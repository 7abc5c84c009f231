"""Searches that several tests look at, each made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.jobs import FORKS, Job, Run
from tests.known_times import know_all, know_device

SLOW_LAUNCH_NS = 20_000


@pytest.fixture(scope="session", autouse=True)
def _compiled_search() -> None:
    """The jobs' searches have less time than compiling takes."""
    FORKS.prepare()


def new_job(base: Path, start_from: Path | None = None) -> Job:
    """A job with a plan directory of its own, empty or a copy."""
    plans, runs = base / "plans", base / "runs"
    runs.mkdir(parents=True)
    if start_from is None:
        plans.mkdir()
    else:
        shutil.copytree(start_from, plans)
    return Job(plans, runs)


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Run]:
    """A search of the jitted step in one process; not to be changed. Its plan has kernels that XLA's has not."""
    job = new_job(tmp_path_factory.mktemp("searched"))
    know_all(job.directory, devices=2, processes=1, launch_ns=SLOW_LAUNCH_NS)
    return job, job.train(fault="plan_wins", ENABLE_SEARCH="1", DISCO_FINALISTS="2", DISCO_EXPLAIN="1")


@pytest.fixture(scope="session")
def enacted(searched: tuple[Job, Run]) -> Run:
    """The training after the search, with its plan."""
    return searched[0].train(ENABLE_SEARCH="0")


@pytest.fixture(scope="session")
def default(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same training with XLA's default."""
    return new_job(tmp_path_factory.mktemp("default")).train()


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two ranks with XLA's default."""
    return new_job(tmp_path_factory.mktemp("alone")).train_ranks()


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[Run]]:
    """A search by two ranks under MPI; not to be changed."""
    job = new_job(tmp_path_factory.mktemp("together"))
    know_device(job.directory)
    return job, job.train_mpi(fault="plan_wins", ENABLE_SEARCH="1", DISCO_LOG="debug")


@pytest.fixture
def shared(together: tuple[Job, list[Run]], tmp_path: Path) -> Job:
    """A plan directory of this test's own, with the plan of two ranks in it."""
    return new_job(tmp_path / "shared", together[0].directory)


@pytest.fixture
def copied(searched: tuple[Job, Run], tmp_path: Path) -> Job:
    """A plan directory of this test's own, with the searched plan in it."""
    return new_job(tmp_path / "copied", searched[0].directory)


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[..., Job]:
    """Makes plan directories: ``fresh()`` is an empty one, ``fresh(job)`` knows what ``job`` measured."""
    made = []

    def make(like: Job | None = None) -> Job:
        job = new_job(tmp_path / f"fresh{len(made)}")
        made.append(job)
        if like is not None:
            shutil.copy(like.directory / "profile.sqlite", job.directory)
        return job

    return make
