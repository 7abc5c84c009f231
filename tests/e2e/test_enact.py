"""A search, and what XLA executes from then on: the plan, with the same numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import jax
import pytest

from disco_hlo.profiler.timeline import FILE_NAME, decode
from tests.e2e.executed import assert_same_losses, difference, is_ours, plan_in, slot_of
from tests.e2e.jobs import Job, Run

KEEPS_DONATION = jax.__version_info__ >= (0, 11)


def assert_donation(runs: list[Run], default: Run) -> None:
    """Kept; or on a jax that loses it, one line that says so."""
    kept = max(default.donated_bytes)
    assert kept > 0
    for run in runs:
        assert max(run.donated_bytes) == (kept if KEEPS_DONATION else 0)
        assert len(run.lines("loses buffer donation")) == (0 if KEEPS_DONATION else 1)


def test_the_searching_run_goes_on_with_the_plan_and_the_next_one_enacts_it(
    searched: tuple[Job, Run], enacted: Run, default: Run
) -> None:
    job, search = searched
    plan = plan_in(job.directory)
    assert plan.chosen == "plan"
    assert len(plan.strategy.groups) > 1
    assert len(plan.strategy.buckets) < 5
    for run in (search, enacted):
        assert difference(run, job.directory, plan.strategy) is None
        assert_same_losses(run, default)
    assert difference(default, job.directory, plan.strategy) is not None
    assert_donation([search, enacted], default)


def test_the_gain_is_the_same_in_the_search_and_in_the_enactment(
    searched: tuple[Job, Run], enacted: Run
) -> None:
    [found] = [line for line in searched[1].lines(" than XLA's default") if "; why: " in line]
    assert found.startswith(("disco: plan wins: ", "disco: plan is taken: "))
    gain = found.split(": ")[2].partition(" than ")[0]
    [line] = enacted.lines("enacts the plan of")
    assert line.endswith(f"{gain} when measured")


def test_a_measured_plan_is_not_compared_again(searched: tuple[Job, Run], enacted: Run) -> None:
    assert enacted.lines("compare") == []
    assert not (slot_of(searched[0].directory) / "compared.json").exists()


def test_a_search_leaves_the_steps_that_it_saw_run_beside_the_plan(searched: tuple[Job, Run]) -> None:
    slot = slot_of(searched[0].directory)
    record = decode((slot / FILE_NAME).read_bytes(), str(slot))
    assert record.module_sha256 == plan_in(searched[0].directory).module_sha256
    assert [step.name for step in record.steps] == ["XLA default", "plan"]
    for step in record.steps:
        assert set(step.lanes) == {"compute", "communication"}
    ours = [name for name, _ in record.steps[1].instructions]
    assert all(re.match(r"[gbn]\d+_|copy", name) for name in ours), ours


@pytest.mark.product_only
def test_two_steps_of_one_name_are_enacted_where_each_has_a_plan_and_left_to_xla_where_not(
    copied: Job,
) -> None:
    one = copied.train("--last-batch", "6", ENABLE_SEARCH="0")
    assert len(one.lines("is left alone unless a plan was saved for it: not larger than jit_train_step")) == 1
    copied.train("--batch", "6", fault="plan_wins", ENABLE_SEARCH="1")
    both = copied.train("--last-batch", "6", ENABLE_SEARCH="0")
    for run, plans in ((one, 1), (both, 2)):
        assert sum(is_ours(replace(run, modules=(module,))) for module in run.modules) == plans
        assert len(run.lines("enacts the plan of jit_train_step")) == plans
        assert run.lines("disco: warning:") == ([] if KEEPS_DONATION else run.lines("loses buffer donation"))
    assert_same_losses(both, one)


# In the pmap script JAX compiles the step twice: the first call takes parameters from the host, the second
# the step's own output, sharded otherwise. Both are the step, and run what was compiled once.
def test_a_step_mapped_by_hand_is_searched_once_and_enacted(
    searched: tuple[Job, Run], default: Run, fresh: Callable[..., Job]
) -> None:
    job = fresh(searched[0])
    search = job.train("--kind", "pmap", fault="plan_wins", ENABLE_SEARCH="1")
    enacted = job.train("--kind", "pmap", ENABLE_SEARCH="0")
    plan = plan_in(job.directory)
    assert len(search.lines("searched ")) == 1
    for run in (search, enacted):
        assert len(run.modules) == 1
        assert is_ours(run)
        assert difference(run, job.directory, plan.strategy) is None
        assert_same_losses(run, default)
    assert_donation([search, enacted], default)
