"""Kernels that a search made up are measured, and the search is made again, where that is asked for."""

from __future__ import annotations

import contextlib
import gzip
import sqlite3
from collections.abc import Callable

import pytest

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.units import unit_graph
from disco_hlo.plugin.measuring.known_times import STORE_NAME
from disco_hlo.profiler.keys import kernel_keys
from tests.as_searched import without_measurements
from tests.e2e.conftest import SLOW_LAUNCH_NS
from tests.e2e.executed import difference, plan_in, slot_of
from tests.e2e.jobs import Job, Run
from tests.known_times import know_all


def unknown_kernels(job: Job, searched: Job) -> int:
    """How many kernels of ``searched``'s plan the measured times of ``job`` lack."""
    graph = canonicalize(
        gzip.decompress((slot_of(searched.directory) / "default.hlo.pb.gz").read_bytes())
    ).graph
    own = without_measurements(plan_in(searched.directory))
    with contextlib.closing(sqlite3.connect(job.directory / STORE_NAME)) as store:
        known = {key for (key,) in store.execute("SELECT DISTINCT key FROM op")}
    return sum(key not in known for key in kernel_keys(graph, unit_graph(graph, own.strategy).kernels(graph)))


def test_the_second_search_knows_the_kernels_of_the_first(searched: tuple[Job, Run], copied: Job) -> None:
    before = unknown_kernels(copied, searched[0])
    assert before > 0
    run = copied.train(ENABLE_SEARCH="1", DISCO_FINALISTS="2", DISCO_LOOKS="1")
    assert unknown_kernels(copied, searched[0]) == 0
    assert len(run.lines(f"measured {before} kernels of the plan that had never run")) == 1
    assert len(run.lines("searched ")) == 2
    plan = plan_in(copied.directory)
    assert difference(run, copied.directory, plan.strategy) is None
    searched_lines = [line.split() for line in run.lines("searched ")]
    assert plan.search.searches == tuple(int(words[2]) for words in searched_lines)
    assert plan.search.evaluations == sum(plan.search.searches)
    assert all(evaluation >= plan.search.searches[0] for evaluation, _ in plan.search.improvements)
    said_s = [float(words[5]) for words in searched_lines]
    assert list(plan.measured.searches_s) == pytest.approx(said_s, abs=0.06)


def test_ranks_look_again_together(fresh: Callable[..., Job]) -> None:
    job = fresh()
    know_all(job.directory, devices=2, processes=2, launch_ns=SLOW_LAUNCH_NS)
    first, second = job.train_ranks(ENABLE_SEARCH="1", DISCO_LOOKS="2")
    looks = len(first.lines("kernels of the plan that had never run"))
    assert looks > 0
    assert len(first.lines("searched ")) == 1 + looks
    assert second.lines("searched ") == []
    assert first.modules == second.modules


def test_a_plan_whose_kernels_cannot_be_measured_stays(searched: tuple[Job, Run], copied: Job) -> None:
    assert unknown_kernels(copied, searched[0]) > 0
    run = copied.train(fault="no_look", ENABLE_SEARCH="1", DISCO_FINALISTS="2", DISCO_LOOKS="1")
    assert len(run.lines("the plan's kernels are not measured: RuntimeError: no look")) == 1
    assert len(run.lines("searched ")) == 1
    assert difference(run, copied.directory, plan_in(copied.directory).strategy) is None
