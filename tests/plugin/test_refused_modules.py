"""What the last check refuses: one candidate less, or XLA's default and one line; never an error for the user."""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from disco_hlo.errors import PlanError
from disco_hlo.hlo import proto
from disco_hlo.plan import plan as plans
from disco_hlo.plan.apply import apply
from disco_hlo.plan.check_module import faults
from disco_hlo.plan.read import verify
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin import step as steps
from disco_hlo.plugin.measuring import candidates
from disco_hlo.plugin.measuring.candidates import Trial, compile_trials
from disco_hlo.plugin.phases import enact_phase
from disco_hlo.plugin.session import join, target
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import captured
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.made_plans import made_plan
from tests.modules import run_before
from tests.steps import models
from tests.steps.intercept import intercept

SENTENCE = (
    r"the module would compute wrong numbers: |the optimized module does not execute its plan: in loop1, its order "
    "runs something before what it must wait for"
)
"""By the last check, or where the loop is a region, as XLA:CPU of jax 0.10.2 leaves it, by its graph."""


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Nothing was compiled so far."""
    steps._histories.clear()


def looping() -> models.Step:
    """A loop whose carried values take each other's place, so that the order inside it matters."""

    def looping_step(x: Any) -> Any:
        turn = lambda _, held: (jnp.sin(held[1]), held[1] * 0.5, held[2] + held[0])  # noqa: E731
        return sum(jax.lax.fori_loop(0, 5, turn, (x, jnp.tanh(x), x * 2))).sum()

    return jax.jit(looping_step), (jax.device_put(models.random(1, 16, 8), models.split()),)


def spoiled(module: bytes) -> bytes:
    """A module in which a loop's body overwrites a value that it was given before it has read that."""
    message = proto.parse(module)
    inner = [one for one in message.computations if one.id in set(message.schedule.sequences)]
    tried = (
        run_before(module, body.name, late.name, early.name)
        for body in inner
        for early, late in itertools.permutations(body.instructions, 2)
        if body.id != message.entry_computation_id
    )
    return next(one for one in tried if faults(one, "cpu"))


def test_a_candidate_that_reads_what_was_overwritten_is_one_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "apply", lambda *given: spoiled(apply(*given)))

    def compiled(request: CompileRequest) -> list[Trial]:
        session = join(request, Settings(search=True, directory=tmp_path))
        source = captured(request).source
        trials = [Trial("XLA default", None, 0), Trial("no fusion", unfused(source.graph), 0)]
        compile_trials(session, source, trials, tag="candidate")
        return trials

    default, refused = intercept(*looping(), compiled)
    assert default.executable is not None
    assert default.error == ""
    assert refused.executable is None
    assert re.match(SENTENCE, refused.error)


def test_a_plan_that_reads_what_was_overwritten_is_not_enacted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def enacted(request: CompileRequest) -> object:
        settings = Settings(search=False, directory=tmp_path)
        session, step = join(request, settings), captured(request)
        strategy = unfused(step.source.graph)
        module = spoiled(apply(strategy, step.source))
        with pytest.raises(PlanError, match=SENTENCE):
            verify(step.source, module, strategy)
        plan = made_plan(target(step.source.graph, session.facts), strategy, module, chosen="no fusion")
        session.slot(step.source.graph.key).save(plans.encode(plan), module, "", step.module)
        with caplog.at_level(logging.INFO, "disco_hlo"):
            return enact_phase.enact(request, settings, step)

    assert intercept(*looping(), enacted) is None
    [line] = [record.getMessage() for record in caplog.records]
    assert re.match(f"jit_looping_step runs as XLA compiles it: (?:{SENTENCE})", line)


def test_a_step_that_xla_computes_wrongly_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """XLA:CPU updates a row in place by what it cuts out across both: it reads what it has just written."""

    def cutting_step(x: Any, row: Any) -> Any:
        x = jnp.tanh(x)
        return jax.lax.dynamic_update_slice(x.reshape(2, 8), x[1:9].reshape(1, 8) * 2, (row, 0))

    arguments = jnp.arange(16.0) / 8, 0
    settings = Settings(search=True, directory=tmp_path, module="jit_cutting_step")
    with caplog.at_level(logging.WARNING, "disco_hlo"):
        assert (
            intercept(jax.jit(cutting_step), arguments, lambda r: steps.training_step(r, settings), 1) is None
        )
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("jit_cutting_step runs as XLA compiles it, whose numbers may be wrong: ")
