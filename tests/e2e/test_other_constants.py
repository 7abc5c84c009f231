"""A plan that was found under other constants is applied to today's step; its saved module is never enacted."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from disco_hlo.plan.store import compared_modules
from tests.e2e.conftest import new_job
from tests.e2e.executed import assert_same_losses, difference, digest, is_ours, plan_in, slot_of
from tests.e2e.jobs import Job, Run
from tests.known_times import know_all

APPLIED = "found under other constants and applied to this step"
COMPARED = "found under other constants: it is compared with XLA's default first, once"
SCHEDULED = ("--kind", "scheduled")
CLOSE = 1e-6
"""How far losses may be apart that a plan and XLA's default come to."""


def handed_over(run: Run) -> str:
    """Digest of the module that a run gave to XLA."""
    [line] = run.lines("executes module")
    return line.rsplit(" ", 1)[1]


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Run]:
    """A search of a step whose rate of 1e-3 falls for 100 steps."""
    job = new_job(tmp_path_factory.mktemp("scheduled"))
    know_all(job.directory, devices=2, processes=1)
    found = job.train(*SCHEDULED, "--rate", "1e-3", "--length", "100", fault="plan_wins", ENABLE_SEARCH="1")
    assert is_ours(found)
    return job, found


@pytest.mark.parametrize(
    "constants", [("--rate", "1e-2", "--length", "100"), ("--rate", "1e-3", "--length", "200")]
)
def test_a_plan_serves_another_learning_rate_and_a_longer_schedule(
    constants: Sequence[str], scheduled: tuple[Job, Run]
) -> None:
    job, found = scheduled
    default = job.train(*SCHEDULED, *constants)
    assert abs(default.losses[-1] - found.losses[-1]) > 10 * CLOSE
    first, second = (
        job.train(*SCHEDULED, *constants, ENABLE_SEARCH="0", DISCO_LOG="debug") for _ in range(2)
    )
    plan, slot = plan_in(job.directory), slot_of(job.directory)
    for run in (first, second):
        assert len(run.lines(f"enacts the plan of jit_scheduled_step, {APPLIED}: ")) == 1
        assert is_ours(run)
        assert difference(run, job.directory, plan.strategy) is None
        assert handed_over(run) != plan.module_sha256
        np.testing.assert_allclose(run.losses, default.losses, rtol=CLOSE)
    assert len(first.lines(COMPARED)) == 1
    assert second.lines(COMPARED) == []
    assert handed_over(first) == handed_over(second)
    assert handed_over(first) in {
        entry.module_sha256 for entry in compared_modules((slot / "compared.json").read_bytes())
    }


def test_a_search_replaces_a_plan_that_was_found_under_other_constants(copied: Job) -> None:
    before = plan_in(copied.directory)
    found = copied.train("--rate", "0.01", fault="plan_wins", ENABLE_SEARCH="1")
    after = plan_in(copied.directory)
    assert after.target.key == before.target.key
    assert after.target.fingerprint != before.target.fingerprint
    again = copied.train("--rate", "0.01", ENABLE_SEARCH="0", DISCO_LOG="debug")
    assert again.lines(APPLIED) == again.lines(COMPARED) == []
    assert handed_over(again) == after.module_sha256
    assert is_ours(again)
    assert is_ours(found)


def test_a_plan_that_does_not_fit_other_constants_leaves_the_step_to_xla(copied: Job) -> None:
    """Nodes that do not go together, in a plan whose module need not be the one that they would make."""
    slot = slot_of(copied.directory)
    plan = json.loads((slot / "plan.json").read_text())
    plan["strategy"]["regions"][0]["groups"][0]["nodes"] = [0]
    (slot / "plan.json").write_text(json.dumps(plan))
    default = copied.train("--rate", "0.01")
    run = copied.train("--rate", "0.01", ENABLE_SEARCH="0")
    assert len(run.lines("the plan was found under other constants and does not fit this step: ")) == 1
    assert not is_ours(run)
    assert run.losses == default.losses


@pytest.mark.mpi
def test_ranks_apply_a_plan_to_other_constants_alike(shared: Job) -> None:
    default = shared.train_ranks("--rate", "0.01")
    runs = shared.train_ranks("--rate", "0.01", ENABLE_SEARCH="0")
    assert len(runs[0].lines(APPLIED)) == 1
    assert runs[1].lines(APPLIED) == []
    assert len({digest(run) for run in runs}) == 1
    for run, other in zip(runs, default, strict=True):
        assert is_ours(run)
        assert_same_losses(run, other)


def test_ranks_with_two_rates_enact_nothing(shared: Job) -> None:
    each = [{"arguments": ("--rate", rate)} for rate in ("0.01", "0.1")]
    default = shared.train_ranks(each=each)
    runs = shared.train_ranks(ENABLE_SEARCH="0", each=each)
    assert len(runs[0].lines("the ranks compile different training steps")) == 1
    for run, other in zip(runs, default, strict=True):
        assert not is_ours(run)
        assert run.losses == other.losses
