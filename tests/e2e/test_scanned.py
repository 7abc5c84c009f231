"""Two processes whose layers are a loop: the plan of its body is enacted on both, with buckets in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import UNSET

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.variants import one_bucket
from tests.e2e.conftest import new_job
from tests.e2e.executed import assert_same_losses, difference, digest, plan_in, put_plan, slot_of
from tests.e2e.jobs import Job, Run
from tests.known_times import know_all

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

SCANNED = ("--kind", "scanned")


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two ranks with XLA's default."""
    return new_job(tmp_path_factory.mktemp("default")).train_ranks(*SCANNED)


def assert_all_execute(runs: list[Run], directory: Path, default: list[Run]) -> Strategy:
    strategy = plan_in(directory).strategy
    assert len(set(map(digest, runs))) == 1
    for run, other in zip(runs, default, strict=True):
        assert difference(run, directory, strategy) is None
        assert_same_losses(run, other)
    return strategy


def bucketed(source: CanonicalModule) -> Strategy:
    """In all regions XLA's kernels, and as few collectives as can be."""
    strategy = one_bucket(source.graph, read(source).groups)
    regions = [
        (region.name, one_bucket(region.source.graph, read(region.source).groups))
        for region in source.regions
    ]
    return replace(strategy, regions=tuple(regions))


def test_a_scanned_step_is_searched_and_enacted_and_so_is_a_plan_with_buckets_in_the_loop(
    default: list[Run], fresh: Callable[..., Job]
) -> None:
    job = fresh()
    know_all(job.directory, devices=2, processes=2, kinds=(ALL_REDUCE, CollectiveKind("all-gather")))
    search = job.train_ranks(*SCANNED, fault="plan_wins", ENABLE_SEARCH="1", DISCO_BUDGET_S="5")
    assert assert_all_execute(search, job.directory, default).regions

    put_plan(slot_of(job.directory), bucketed)
    strategy = assert_all_execute(job.train_ranks(*SCANNED, ENABLE_SEARCH="0"), job.directory, default)
    (gathers,) = dict(strategy.regions)["loop1"].buckets
    assert (len(gathers.collectives), gathers.form) == (2, "variadic")


@pytest.mark.product_only
def test_ranks_of_mpiexec_write_the_loops_out_each_by_itself(
    default: list[Run], fresh: Callable[..., Job]
) -> None:
    job = fresh()
    know_all(job.directory, devices=2, processes=2, kinds=(ALL_REDUCE, CollectiveKind("all-gather")))
    wanted = {"DISCO_STRUCTURE": "unroll", "DISCO_FINALISTS": "1", "DISCO_BUDGET_S": "5"}
    search = job.train_ranks(*SCANNED, fault="unroll_wins", ENABLE_SEARCH="1", **wanted)
    plan = plan_in(job.directory)
    assert plan.structure is not UNSET
    assert {move["move"] for move in plan.structure.moves} == {"unroll"}
    # The ranks agree while XLA waits in another thread, which MPI does not know.
    enacted = job.train_mpi(*SCANNED, ENABLE_SEARCH="0")
    assert [len(run.lines("enacts the plan of jit_train_step: unroll, ")) for run in enacted] == [1, 0]
    assert len({canonicalize(run.modules[0]).graph.key for run in (*search, *enacted)}) == 1
    for run, other in zip((*search, *enacted), (*default, *default), strict=True):
        assert "while" not in {node.opcode for node in canonicalize(run.modules[0]).graph.nodes}
        assert_same_losses(run, other)
