"""Same seed, same plan: what a clock decides is set apart."""

from __future__ import annotations

from disco_hlo.plan import plan as plans
from tests.as_searched import without_measurements
from tests.e2e.executed import difference, plan_in
from tests.e2e.jobs import Job, Run


def test_the_plan_as_the_search_left_it_is_legal_and_complete(searched: tuple[Job, Run], copied: Job) -> None:
    """Where the clock chose XLA's default, the search's own plan is still there to compare."""
    run = copied.train(fault="default_wins", ENABLE_SEARCH="1", DISCO_FINALISTS="2")
    own = without_measurements(plan_in(searched[0].directory))
    chosen = plan_in(copied.directory)
    assert chosen.chosen == "XLA default"
    assert chosen.searched is not None
    assert chosen.strategy != own.strategy
    assert plans.encode(without_measurements(chosen)) == plans.encode(own)
    assert len(run.lines("nothing beats XLA's default beyond noise")) == 1
    assert difference(run, copied.directory, chosen.strategy) is None
    enacted = copied.train(ENABLE_SEARCH="0")
    assert len(enacted.lines("the plan of jit_train_step is XLA's default")) == 1
    assert difference(enacted, copied.directory, chosen.strategy) is None
