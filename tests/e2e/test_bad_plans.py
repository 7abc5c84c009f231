"""A plan that cannot be enacted: one line says why, and the training goes on with XLA's default."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.plugin.probe import exchange_opcode
from tests.e2e.conftest import new_job
from tests.e2e.executed import assert_same_losses, copies, digest, edited
from tests.e2e.jobs import Job, Run

Spoil = Callable[[Path], None]


def strategy(**fields: Any) -> Spoil:
    """Changes the plan's strategy."""
    return edited(lambda plan: plan["strategy"]["regions"][0].update(fields))


def module(change: Callable[[bytes], bytes], *, owned: bool = True) -> Spoil:
    """Changes the optimized module, by default with a digest in the plan that fits."""

    def spoil(slot: Path) -> None:
        other = change((slot / "module.hlo.pb").read_bytes())
        (slot / "module.hlo.pb").write_bytes(other)
        if owned:
            edited(lambda plan: plan.update(module_sha256=hashlib.sha256(other).hexdigest()))(slot)

    return spoil


def truncated(slot: Path) -> None:
    text = (slot / "plan.json").read_bytes()
    (slot / "plan.json").write_bytes(text[: len(text) // 2])


def in_a_cycle(slot: Path) -> None:
    """A group of the first and the last op of the step, with the whole step between them."""
    plan = json.loads((slot / "plan.json").read_text())
    nodes = sorted(node for group in plan["strategy"]["regions"][0]["groups"] for node in group["nodes"])
    rest = [node for node in nodes if node not in (nodes[0], nodes[-1])]
    groups = [{"nodes": [nodes[0], nodes[-1]]}, *({"nodes": [node]} for node in rest)]
    strategy(groups=groups, order=[])(slot)


MILLION = [{"nodes": [1]}] * 1_000_000
BAD: dict[str, tuple[Spoil, str]] = {
    "another model": (
        edited(lambda plan: plan["target"].update(key="0" * 64)),
        "another step: key 0000000000000000",
    ),
    "another number of devices": (
        edited(lambda plan: plan["target"].update(device_count=16)), "another job: devices 16, this is 2;",
    ),
    "truncated": (truncated, "expected a plan as JSON"),
    "an older version": (
        edited(lambda plan: plan.update(version=1)),
        "plan version 1; this disco-hlo reads version 2; search again",
    ),
    "a cycle": (in_a_cycle, "does not execute its plan"),
    "a million groups": (strategy(groups=MILLION), "g0 holds node 1 (parameter"),
    "another module": (module(lambda old: old[:-9] + b"\x00" * 9, owned=False), "is not the module"),
    "another program": (module(lambda old: exchange_opcode(old, "add", "subtract")), "something else"),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(searched: tuple[Job, Run], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run with each of the bad plans, one after the other in one process."""
    job, plans = new_job(tmp_path_factory.mktemp("bad")), tmp_path_factory.mktemp("bad_plans")
    copies(searched[0].directory, plans, {name: spoil for name, (spoil, _) in BAD.items()})
    return job.train_with_each(plans, ENABLE_SEARCH="0")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plan_is_one_line_and_training_goes_on(name: str, runs: dict[str, Run], default: Run) -> None:
    run, reason = runs[name], BAD[name][1]
    warnings = run.lines("disco: warning:")
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert len(warnings[0]) < 600
    assert digest(run) == digest(default)
    assert_same_losses(run, default)
