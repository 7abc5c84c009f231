"""A plan that never ran on these devices is compared with XLA's default before the training runs it."""

from __future__ import annotations

import os

import jax
import pytest

from disco_hlo.plan.store import compared_modules
from tests.e2e.executed import assert_same_losses, difference, digest, edited, plan_in, slot_of
from tests.e2e.jobs import Job, Run

COMPARED = "it is compared with XLA's default first, once"
offline = edited(lambda plan: plan.update(measured=None))


def test_a_plan_that_never_ran_here_is_compared_once(copied: Job, default: Run) -> None:
    """Of one that ran under other versions tests/plugin/test_second_trial.py shows the same."""
    offline(slot_of(copied.directory))
    runs = [copied.train(ENABLE_SEARCH="0") for _ in range(2)]
    assert len(runs[0].lines(f"the plan of jit_train_step was found offline: {COMPARED}")) == 1
    assert len(runs[0].lines("the plan computes what XLA's default computes")) == 1
    assert runs[1].lines("compare") == runs[1].lines("computes what") == []
    plan = plan_in(copied.directory)
    for run in runs:
        assert len(run.lines("enacts the plan of jit_train_step")) == 1
        assert difference(run, copied.directory, plan.strategy) is None
        assert_same_losses(run, default)
    [entry] = compared_modules((slot_of(copied.directory) / "compared.json").read_bytes())
    assert entry.module_sha256 == plan.module_sha256
    assert entry.versions["jax"] == jax.__version__


def test_a_read_only_directory_and_a_damaged_record_cost_a_comparison_each_time(
    copied: Job, default: Run
) -> None:
    slot = slot_of(copied.directory)
    offline(slot)
    (slot / "compared.json").write_text('{"format": "disco-hlo compared", "version": 1, "entries": [7]}')
    before = sorted(copied.directory.rglob("*"))
    run = copied.train(fault="read_only", ENABLE_SEARCH="0")
    assert len(run.lines(COMPARED)) == 1
    assert len(run.lines("every run will compare the plan again: cannot save")) == 1
    assert len(run.lines("disco: warning: plans are compiled without marks")) == 1
    assert difference(run, copied.directory, plan_in(copied.directory).strategy) is None
    assert_same_losses(run, default)
    assert sorted(copied.directory.rglob("*")) == before


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("one_element_off", "output 0 differs from XLA's default at [0"),
        ("no_memory", "compile the step once before they are made (jit(step).lower(shapes).compile())"),
    ],
)
def test_a_plan_that_is_wrong_or_cannot_be_compared_is_not_enacted(
    fault: str, line: str, copied: Job, default: Run
) -> None:
    offline(slot_of(copied.directory))
    run = copied.train(fault=fault, ENABLE_SEARCH="0")
    [trouble] = [one for one in run.log if one.startswith("disco: warning:")]
    assert "jit_train_step runs as XLA compiles it: its plan was found offline" in trouble
    assert line in trouble
    assert digest(run) == digest(default)
    assert_same_losses(run, default)
    assert not os.path.exists(slot_of(copied.directory) / "compared.json")
