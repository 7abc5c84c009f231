"""Runs that do not come back: which end the job, what they say, and which of them are banned."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disco_hlo.activation.kvstore import HANGS
from disco_hlo.plan.store import PlanStore
from disco_hlo.plugin import hangs
from tests.plugin.two_ranks import run_two

NO_MEMORY = "RESOURCE_EXHAUSTED: out of memory"


def request_of(call_ns: int, ranks: int = 1, wait: Any = None) -> Any:
    return SimpleNamespace(
        module_name="jit_step",
        call_ns=call_ns,
        process_indices=range(ranks),
        wait=None if wait is None else lambda _: wait,
    )


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Whether the process would have ended itself; what it logs is caught."""
    event = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda _code: event.set())
    monkeypatch.setattr(logging.getLogger("disco_hlo"), "propagate", True)
    return event


def test_a_step_that_does_not_come_back_ends_the_job_and_says_why(
    ended: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hangs, "_ENDLESS_S", 0.01)
    with hangs.coming_back(request_of(0)):
        assert ended.wait(60)
    assert "a run of jit_step has not ended after 0.01 s" in caplog.text


@pytest.mark.parametrize(("call_s", "ranks", "longest_s"), [(0.001, 1, 0.1), (0.01, 1, 0.18), (0.01, 2, 0.4)])
def test_a_run_beside_a_training_hangs_where_many_calls_would_have_ended(
    call_s: float,
    ranks: int,
    longest_s: float,
    ended: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It held the training for ten minutes. Of several ranks that tell each other nothing, one may stand still."""
    monkeypatch.setattr(hangs, "_ENDLESS_S", 0.4)
    monkeypatch.setattr(hangs, "_HANGS_S", 0.1)
    with hangs.coming_back(request_of(int(1e9 * call_s), ranks)):
        assert ended.wait(60)
    assert f"has not ended after {longest_s:g} s" in caplog.text
    assert ("it hangs" in caplog.text) == (ranks == 1)


class Wait:
    """Of a rank that asks for the verdict again and again, and hears the last one for ever."""

    def __init__(self, rank: int, *verdicts: str) -> None:
        self.rank = rank
        self._verdicts = list(verdicts)
        self.asked = 0
        self.ended = threading.Event()

    def verdict(self, longest_s: float) -> str:
        time.sleep(longest_s)
        self.asked += 1
        return self._verdicts.pop(0) if self._verdicts[1:] else self._verdicts[0]

    def end(self) -> None:
        self.ended.set()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("verdicts", "why"),
    [
        (("", "", HANGS), "it hangs"),
        (("", "rank 1: no memory"), "rank 1: no memory"),
        (("",), "another rank stands still"),
    ],
)
def test_a_run_on_several_ranks_ends_the_job_where_all_of_them_wait_in_it(
    verdicts: tuple[str, ...],
    why: str,
    rank: int,
    ended: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It took ten minutes, as one of them might have stood still. Where one does, it still takes that long."""
    monkeypatch.setattr(hangs, "_ENDLESS_S", 1.0)
    monkeypatch.setattr(hangs, "_HANGS_S", 0.1)
    monkeypatch.setattr(hangs, "_LAST_S", 0.0)
    caplog.set_level(logging.DEBUG, "disco_hlo")
    wait = Wait(rank, *verdicts)
    with hangs.coming_back(request_of(1, 2, wait)):
        assert ended.wait(60)
    [record] = caplog.records
    assert record.levelname == ("DEBUG" if rank and wait._verdicts[0] else "ERROR")
    assert "a run of jit_step has not ended after " in record.message
    assert f" s: {why}; it cannot be interrupted" in record.message
    assert wait.asked >= len(verdicts)


def test_a_rank_that_waits_to_hear_of_a_run_ends_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it waits is its channel's to say."""
    monkeypatch.setattr(os, "_exit", lambda _code: pytest.fail("the job was ended"))
    monkeypatch.setattr(hangs, "_ENDLESS_S", 0.02)
    monkeypatch.setattr(hangs, "_HANGS_S", 0.01)
    wait = Wait(1, "")
    with hangs.coming_back(request_of(1, 2, wait), ""):
        while wait.asked < 600:  # ten times as long as a run may last
            time.sleep(0.001)
    assert wait.ended.wait(60)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("hangs", "it hangs"),
        pytest.param("hangs at first", "it hangs", marks=pytest.mark.product_only),
        pytest.param("hangs late", "it hangs", marks=pytest.mark.product_only),
        pytest.param("fails", f"rank 1: RuntimeError: {NO_MEMORY}", marks=pytest.mark.product_only),
    ],
)
def test_a_candidate_that_hangs_on_one_of_two_ranks_ends_the_job_and_only_that_bans_it(
    fault: str, why: str, tmp_path: Path
) -> None:
    """Once both have waited for too long in it, or for each other's word on it; after ten minutes otherwise."""
    codes, errors, _ = run_two("hanging_rank", tmp_path, fault, devices=1)
    assert 0 not in codes, errors
    told = [line for one in errors for line in one.splitlines() if line.startswith("disco: ")]
    assert [line.partition(" s: ")[2].partition(";")[0] for line in told] == [why], errors
    assert told[0].startswith("disco: error: a run of jit_step has not ended after ")
    bans = [ban.reason for one in PlanStore(tmp_path).list_plans() for ban in one.bans]
    assert ["hung while it was run" in reason for reason in bans] == [True] * (why == "it hangs")


def test_a_rank_that_stands_still_for_longer_than_a_run_may_hang_ends_nothing(tmp_path: Path) -> None:
    codes, errors, _ = run_two("hanging_rank", tmp_path, "stands still", devices=1)
    assert codes == [0, 0], errors
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {"updated": [7.0] * 5}


def test_a_step_that_comes_back_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda _code: pytest.fail("the job was ended"))
    monkeypatch.setattr(hangs, "_ENDLESS_S", 0.05)
    before = set(threading.enumerate())
    with hangs.coming_back(request_of(0)):
        [watch] = set(threading.enumerate()) - before
    watch.join(60)
    assert not watch.is_alive()
