"""A plan that never ran on these devices is compared with XLA's default before the training runs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from disco_hlo.plan.store import compared_modules
from tests.e2e.executed import assert_same_losses, difference, digest, edited, plan_in, slot_of
from tests.e2e.jobs import Job, Run

COMPARED = "it is compared with XLA's default first, once"
offline = edited(lambda plan: plan.update(measured=None))
older = edited(lambda plan: plan["versions"].update(jax="0.0.1"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (offline, "the plan of jit_train_step was found offline: "),
        (older, "the plan of jit_train_step was measured under jax 0.0.1: "),
    ],
    ids=["offline", "older"],
)
def test_a_plan_that_never_ran_here_is_compared_once(
    change: Callable[[Path], object], why: str, copied: Job, default: Run
) -> None:
    change(slot_of(copied.directory))
    runs = [copied.train(ENABLE_SEARCH="0")]
    assert len(runs[0].lines(why + COMPARED)) == 1
    assert len(runs[0].lines("the plan computes what XLA's default computes")) == 1
    if change is offline:
        runs.append(copied.train(ENABLE_SEARCH="0"))
        assert runs[1].lines("compare") == runs[1].lines("computes what") == []
    plan = plan_in(copied.directory)
    for run in runs:
        [line] = run.lines("enacts the plan of jit_train_step")
        if change is older:
            assert line.endswith("at first it takes turns with XLA's default, and goes on if it pays")
            assert len(run.modules) == 2
        else:
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
