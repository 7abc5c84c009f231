"""A plan that may not pay any more takes turns with XLA's default, and is run only where it still does."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import msgspec
import pytest
from msgspec import UNSET, UnsetType

from disco_hlo.plan import plan as plans
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.store import PlanSlot, note_compared
from disco_hlo.plugin import step as steps
from disco_hlo.plugin.calls import loading, schedule
from disco_hlo.plugin.calls.schedule import FEWEST_ROUNDS, Verdict
from disco_hlo.plugin.phases import enact_phase, second_trial
from disco_hlo.plugin.session import join, versions
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.plugin.calls.hanging import PLACES, end_where_it_hangs, hanging_after
from tests.plugin.calls.training import counted_python_calls, fresh_state, jitted, reworded_state, train
from tests.plugin.calls.verdicts import once_it_ran_often
from tests.plugin.handled import save_plan

pytestmark = pytest.mark.product_only
PLAN = "no fusion"
OLD = {"jax": "0.0.1"}
CALLS = 40


class Job:
    """Trainings of one step that enact what lies in a plan directory."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(search=False, directory=folder)
        self.slot: PlanSlot
        self.digest = ""
        self.versions: dict[str, str] = {}
        self.first_state = fresh_state

    def train(self, **saved: Any) -> list[float]:
        """Losses of a training that JAX compiles anew; before that a plan is saved where there is something to say."""
        steps._histories.clear()

        def handle(request: CompileRequest) -> object:
            if request.module_name != "jit_tried_step":
                return None
            self.versions = versions(join(request, self.settings).facts)
            if saved:
                self.slot, self.digest = save_plan(request, self.settings, **saved)
                note_compared(self.slot, self.digest, self.versions)
            return enact_phase.handle(request, self.settings)

        jaxlink.install(handle)
        jax.clear_caches()
        return train(jitted("tried_step"), CALLS, self.first_state())[0]

    def pays(self, created: str = "now") -> bool | None:
        """What the plan directory says of the plan that was measured then."""
        stored = self.slot.load()
        assert stored is not None
        plan = plans.decode(stored.plan_json, "")
        assert plan.measured is not None
        then = msgspec.structs.replace(plan.measured, created=created)
        plan = msgspec.structs.replace(plan, measured=then)
        return second_trial.known_outcome(self.slot, plan, self.digest, self.versions)


@pytest.fixture
def job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Job]:
    caplog.set_level(logging.INFO, "disco_hlo")
    loading.watch()
    try:
        yield Job(tmp_path)
    finally:
        jaxlink.unwatch_calls()
        jaxlink.uninstall()
        loading._watching.clear()
        second_trial._outcomes.clear()


@pytest.fixture
def let_win(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Takes the clock out: the one of this name wins."""
    return lambda name: monkeypatch.setattr(schedule, "verdict", once_it_ran_often(PLAN, name))


def test_a_plan_of_another_jax_that_does_not_pay_is_not_run_and_the_next_job_does_not_try(
    job: Job, let_win: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    let_win(DEFAULT)
    losses = job.train(**OLD)
    _, begins, ends = caplog.messages
    assert begins == (
        "enacts the plan of jit_tried_step: 0 op groups, 3 buckets, 1.11x faster when measured; it was "
        "measured under jax 0.0.1: at first it takes turns with XLA's default, and goes on if it pays"
    )
    assert re.fullmatch(
        r"the plan of jit_tried_step is not run: it was measured under jax 0\.0\.1, and in \d+ rounds of this training "
        r"it was [\w.]+ (faster|slower) than XLA's default(, which may be noise)?; ENABLE_SEARCH=1 searches another",
        ends,
    ), ends
    assert job.pays() is False
    assert job.pays(created="later, by another search") is None

    second_trial._outcomes.clear()  # as in another process
    caplog.clear()
    with counted_python_calls() as count:
        assert job.train() == pytest.approx(losses, rel=1e-5)
    assert count() < CALLS, "calls were watched"
    _, line = caplog.records
    assert "is not run: under these versions it was not faster" in line.getMessage()
    assert line.levelno == logging.INFO


@pytest.mark.parametrize(
    ("noise", "why"),
    [(0.06, "measured 10.0% faster, where 6.0% is noise"), (UNSET, "saved without the noise of its gain")],
    ids=["within twice its noise", "of unknown noise"],
)
def test_a_plan_whose_gain_is_in_doubt_goes_on_where_it_pays(
    noise: float | UnsetType,
    why: str,
    job: Job,
    let_win: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    let_win(PLAN)
    job.train(noise=noise)
    assert f"it was {why}: at first it takes turns" in caplog.text
    assert f"jit_tried_step: {PLAN} from call " in caplog.text
    assert job.pays() is True
    caplog.clear()
    job.train()
    _, line = caplog.messages
    assert line.startswith("enacts the plan of jit_tried_step: ")
    assert "turns" not in line


def test_a_plan_takes_turns_where_jax_loads_the_step_again_without_a_compile(
    job: Job, let_win: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    let_win(PLAN)
    job.first_state = lambda: reworded_state(None, None)
    job.train(**OLD)
    assert f"jit_tried_step: {PLAN} from call " in caplog.text
    assert job.pays() is True


def test_a_training_that_ends_before_the_order_is_clear_leaves_no_outcome(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "verdict", lambda *_: Verdict((PLAN,), None, FEWEST_ROUNDS))
    job.train(**OLD)
    assert job.pays() is None


@pytest.mark.filterwarnings(
    "ignore:Exception in thread disco-endless"
)  # which ends in the place of the process
@pytest.mark.parametrize("place", PLACES)
def test_a_plan_that_hangs_in_a_call_ends_the_job_and_the_next_one_runs_without(
    place: str, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind it: the call has returned, and the script goes on while the devices never end."""
    ended = end_where_it_hangs(monkeypatch)
    monkeypatch.setattr(schedule, "verdict", lambda *_: Verdict((PLAN,), None, FEWEST_ROUNDS))
    with hanging_after(3, place, ended):
        job.train(**OLD)
    [line] = [one for one in caplog.messages if "has not ended" in one]
    assert re.fullmatch(
        r"a call of jit_tried_step that no fusion ran has not ended after 0\.\d+ s: it hangs; it cannot be interrupted"
        r", so the job ends; the candidate is banned, and the next job goes on without it",
        line,
    ), line
    second_trial._outcomes.clear()  # as in another process
    caplog.clear()
    job.train()
    assert "jit_tried_step runs as XLA compiles it: its plan is banned: process " in caplog.text
    assert " hung while it was run (" in caplog.text


@pytest.mark.parametrize("watched", [False, True])
def test_what_cannot_or_need_not_be_tried_is_enacted_as_ever(
    watched: bool, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not watched:
        loading._watching.clear()
    monkeypatch.setattr(second_trial.Trial, "__init__", lambda *_: pytest.fail("was tried"))
    job.train(**({"disco_hlo": "0.0.1"} if watched else OLD))
    assert "enacts the plan of jit_tried_step: " in caplog.text
    assert "turns" not in caplog.text
    assert job.pays() is None
