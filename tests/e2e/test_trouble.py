"""Whatever is wrong around a training run: one line says so, and it goes on, here with XLA's default."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from disco_hlo.plan.bans import Bans
from tests.e2e.executed import assert_same_losses, difference, digest, is_ours, plan_in, slot_of
from tests.e2e.jobs import LIMIT_S, Job, Run, Started, until_it_says

LONG = {"ENABLE_SEARCH": "1", "DISCO_PATIENCE": "1000000000", "DISCO_BUDGET_S": "100000"}


def assert_one_line(run: Run, default: Run, text: str) -> None:
    """Trained with XLA's default, and said why, once."""
    troubles = [line for line in run.log if line.startswith(("disco: warning:", "disco: off:"))]
    assert len(troubles) == 1, run.log
    assert text in troubles[0]
    assert digest(run) == digest(default)
    assert_same_losses(run, default)


def test_a_jax_that_lacks_what_we_need(fresh: Callable[..., Job], default: Run) -> None:
    line = "XLA did not call the HLO hook while compiling jit_train_step"
    assert_one_line(fresh().train(fault="hook_never_called", ENABLE_SEARCH="1"), default, line)


def test_no_plan_but_one_for_another_batch_size(copied: Job) -> None:
    run = copied.train("--batch", "6", ENABLE_SEARCH="0")
    [line] = run.lines("disco: warning:")
    assert "; for jit_train_step a plan lies beside (disco list), but another batch size," in line
    assert not is_ours(run)


def test_a_step_without_an_all_reduce(fresh: Callable[..., Job]) -> None:
    job = fresh()
    run = job.train("--kind", "no_all_reduce", ENABLE_SEARCH="1")
    [line] = run.lines("disco: warning:")
    assert (
        "of 1 module on several devices none has an all-reduce or reduce-scatter of a computed value" in line
    )
    assert not is_ours(run)
    assert list(job.directory.iterdir()) == []


def test_a_search_where_no_plan_could_be_saved(
    fresh: Callable[..., Job], default: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    run = fresh().train(ENABLE_SEARCH="1", DISCO_DIR=str(tmp_path / "file" / "plans"))
    assert_one_line(run, default, "cannot create the plan folder")
    # It says so before it searches, not after.
    assert run.lines("profiled") == []


def test_a_disk_that_is_full_when_the_plan_is_saved(
    searched: tuple[Job, Run], fresh: Callable[..., Job]
) -> None:
    job = fresh(searched[0])
    run = job.train(fault="disk_full plan_wins", ENABLE_SEARCH="1")
    [line] = run.lines("disco: warning: the plan cannot be saved: cannot save ")
    assert line.endswith("No space left on device")
    assert is_ours(run)
    assert_same_losses(run, searched[1])
    assert [path.name for path in slot_of(job.directory).iterdir()] == []


def test_ctrl_c_saves_the_best_plan_so_far_and_training_goes_on(
    searched: tuple[Job, Run], fresh: Callable[..., Job], default: Run
) -> None:
    job = fresh(searched[0])
    search = start_searching(job)
    # Meanwhile another search for the same step finds the place taken.
    assert_one_line(job.train(ENABLE_SEARCH="1"), default, "another search holds ")
    search.processes[0].send_signal(signal.SIGINT)
    [run] = search.finish()
    assert len(run.lines("interrupted: the best plan so far is in ")) == 1
    assert digest(run) == digest(default)
    assert_same_losses(run, default)
    plan = plan_in(job.directory)
    assert plan.chosen == "plan"
    assert plan.measured is not None
    assert all(one.samples == 0 for one in plan.measured.candidates)
    enacted = job.train(ENABLE_SEARCH="0")
    assert len(enacted.lines("the plan of jit_train_step was saved unmeasured: ")) == 1
    assert difference(enacted, job.directory, plan.strategy) is None
    assert_same_losses(enacted, default)


def test_a_search_that_is_killed_or_interrupted_leaves_a_measured_plan_alone(
    copied: Job, default: Run
) -> None:
    before = (slot_of(copied.directory) / "plan.json").read_bytes()
    start_searching(copied).kill()
    assert (slot_of(copied.directory) / "plan.json").read_bytes() == before
    # The killed one's lock is in nobody's way.
    search = start_searching(copied)
    search.processes[0].send_signal(signal.SIGINT)
    [run] = search.finish()
    assert len(run.lines("interrupted: the measured plan in ")) == 1
    assert digest(run) == digest(default)
    assert (slot_of(copied.directory) / "plan.json").read_bytes() == before


def test_a_candidate_that_crashes_xla_is_not_tried_by_the_next_search(
    searched: tuple[Job, Run], fresh: Callable[..., Job]
) -> None:
    job = fresh(searched[0])
    crash = job.start(fault="plan_crashes_xla", ENABLE_SEARCH="1").processes[0]
    crash.communicate(timeout=LIMIT_S)
    assert crash.returncode == -signal.SIGABRT
    # The fault is still there; the candidate that meets it is not tried.
    run = job.train(fault="plan_crashes_xla", ENABLE_SEARCH="1")
    [line] = run.lines("disco: plan: not measured: ")
    said = f"it is banned: process {crash.pid} on "
    assert said in line
    assert " ended by SIGABRT while it was compiled (" in line
    slot = slot_of(job.directory)
    assert f"; to try it again: disco forgive {slot}" in line
    assert_same_losses(run, searched[1])
    assert len(Bans(slot).all()) == len(list(slot.glob("died-*"))) == 1
    assert list(slot.glob("compiling-*")) == []
    plan = plan_in(job.directory)
    assert plan.chosen != "plan"
    assert any(one.name == "plan" and said in one.error for one in plan.measured.candidates)


def test_a_job_that_is_ended_while_its_plan_compiles_bans_nothing_and_a_crash_does(
    copied: Job, default: Run
) -> None:
    """Whatever ended the process, the plan was banned for good."""
    slot = slot_of(copied.directory)
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
    ended = [copied.start(fault="enacting:lasts", ENABLE_SEARCH="0") for _ in ends]
    for one, number in zip(ended, ends, strict=True):
        until_it_says(one.processes[0], "compiling")
        one.processes[0].send_signal(number)
        one.processes[0].communicate(timeout=LIMIT_S)
        assert one.processes[0].returncode != 0
    assert Bans(slot).all() == []
    # SIGKILL leaves no note: one death of three, which a success takes back.
    assert [path.name.partition("-")[0] for path in slot.glob("*-*")] == ["died"]
    enacted = copied.train(ENABLE_SEARCH="0")
    assert is_ours(enacted)
    assert list(slot.glob("*-*")) == []

    crash = copied.start(fault="enacting:crashes", ENABLE_SEARCH="0").processes[0]
    crash.communicate(timeout=LIMIT_S)
    assert crash.returncode == -signal.SIGABRT
    run = copied.train(fault="enacting:crashes", ENABLE_SEARCH="0")
    assert_one_line(run, default, f"its plan is banned: process {crash.pid} on ")
    assert Bans(slot).forgive() == 1
    assert is_ours(copied.train(ENABLE_SEARCH="0"))


def start_searching(job: Job) -> Started:
    """A search that will not end by itself, in the midst of it."""
    search = job.start(**LONG)
    # The line is said once Ctrl-C is taken care of.
    until_it_says(search.processes[0], "disco: profiled")
    return search
