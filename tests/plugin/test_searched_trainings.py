"""The search while a step trains, in processes of their own: two that train together, and one that ends early."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.plan.plan import SEARCHED
from disco_hlo.plan.store import PlanStore
from disco_hlo.plugin.measuring.known_times import STORE_NAME
from disco_hlo.profiler.store import ProfileStore
from tests.known_times import PLATFORM, know_all
from tests.plugin.searched_training import CALL, CANDIDATE, OWN_CODE, PLACES, environment_of, with_fault

pytestmark = [pytest.mark.product_only, pytest.mark.slow, pytest.mark.usefixtures("compiled_search")]
_ROOT = Path(__file__).parents[2]


def end(directory: Path, how: str, **environment: Any) -> subprocess.CompletedProcess[str]:
    """A training that ends early, in a process of its own."""
    return subprocess.run(
        (sys.executable, "-m", "tests.plugin.searched_training", "end", how), cwd=_ROOT, check=False,
        env=environment_of(directory, devices=2, **environment), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("kill", -9)])
def test_a_training_that_ends_early_keeps_what_is_known_and_leaves_no_search(
    how: str, code: int, tmp_path: Path
) -> None:
    know_all(tmp_path, devices=2, processes=1)
    done = end(tmp_path, how, patience=1_000_000)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("Traceback") == (how == "raise"), done.stderr
    while Path(f"/proc/{int(done.stdout)}").exists():  # the test's own limit ends it
        time.sleep(0.1)
    with ProfileStore(tmp_path / STORE_NAME) as store:
        assert store.ops(PLATFORM)


def test_a_training_that_ends_while_a_worker_waits_to_hold_a_call_ends_with_one_line(tmp_path: Path) -> None:
    """Python waits for workers of executors before it says that the process ends."""
    done = end(tmp_path, "held")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "disco: jit_ending_step is the training step by its calls; it goes on while a plan is searched",
        "disco: the training ended before the search for jit_ending_step did: no plan is saved, what was measured is "
        f"kept in {tmp_path}; the next job goes on from there, or DISCO_WHEN=compile searches before the first step",
    ]


def test_a_training_that_ends_as_a_search_begins_waits_until_that_can_end(tmp_path: Path) -> None:
    """On 2 x H200 one of three short jobs ended by SIGABRT, on both ranks: a dying interpreter had a thread in it."""
    done = end(tmp_path, "begun")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "disco: the training ended before the search for jit_ending_step did: no plan is saved, what was measured is "
        f"kept in {tmp_path}; the next job goes on from there, or DISCO_WHEN=compile searches before the first step",
    ]


@pytest.mark.parametrize(
    ("victim", "places", "how"),
    [
        (1, ("slice",), "kill"),
        (1, ("one compile",), "kill"),
        (0, PLACES, "stop"),
        (1, (OWN_CODE,), "sleep"),  # for longer than a run takes that hangs
    ],
)
def test_a_rank_that_dies_or_stands_still_hangs_nobody(
    victim: int, places: tuple[str, ...], how: str, tmp_path: Path
) -> None:
    """One that comes late goes on with the other, to the same plan at the same call; without a rank that died the
    other's training cannot go on, and ends by itself."""
    plans = tmp_path / "plans"
    know_all(plans, devices=2, processes=2)
    ends = with_fault(tmp_path, environment_of(plans, 1), victim, places, how)
    assert all(s < 60 for _, s in ends)
    if how == "kill":
        assert ends[victim][0] == -signal.SIGKILL
        assert ends[1 - victim][0] is not None
        return
    assert [code for code, _ in ends] == [0, 0]
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["outcome"] for one in reports] == [SEARCHED] * 2
    assert reports[0]["settled"] == reports[1]["settled"]
    for report in reports:
        assert report["losses"] == pytest.approx(report["stock"], rel=1e-4)
    [listed] = PlanStore(plans).list_plans()
    assert listed.problem == ""
    said = (tmp_path / "0.txt").read_text()
    assert "disco: the training was held for" in said
    told = [float(line.split()[1]) for line in said.splitlines() if line.startswith("loss ")]
    assert told == pytest.approx(reports[0]["losses"], rel=1e-4)
    assert f"jit_searched: {SEARCHED} from call" in said


@pytest.mark.parametrize("place", [CANDIDATE, CALL])
def test_a_candidate_that_hangs_ends_the_training_of_two_processes_and_is_banned(
    place: str, tmp_path: Path
) -> None:
    """One of them might stand still, so that it took ten minutes; in a call of the training for ever."""
    plans = tmp_path / "plans"
    know_all(plans, devices=2, processes=2)
    ends = with_fault(tmp_path, environment_of(plans, 1), 1, (place,), "hang")
    assert all(code not in (None, 0) for code, _ in ends), ends
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)]
    assert [one.count("has not ended after") for one in said] == [1, 0], said
    assert " s: it hangs; it cannot be interrupted, so the job ends" in said[0]
    [ban] = [ban for one in PlanStore(plans).list_plans() for ban in one.bans]
    assert " hung while it was run (" in ban.reason
