"""Two real processes that measure together: neither may wait for ever where the other fails."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from disco_hlo.activation.channel import LocalChannel
from disco_hlo.errors import ActivationError, GoneError, is_shared
from disco_hlo.plugin.measuring import lockstep
from disco_hlo.plugin.measuring.inputs.made_up import synthetic_values
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla.executables import Parameter
from tests.plugin.test_hangs import NO_MEMORY, request_of
from tests.plugin.two_ranks import run_two

KEEPS_DONATION = jax.__version_info__ >= (0, 11)


@pytest.mark.parametrize("fault", [pytest.param("inputs", marks=pytest.mark.product_only), "run on all"])
def test_a_candidate_that_fails_in_a_round_is_out_on_all_and_the_training_goes_on(
    fault: str, tmp_path: Path
) -> None:
    codes, errors, _ = run_two("measuring_rank", tmp_path, fault, devices=1)
    assert codes == [0, 0], errors
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for report in reports:
        (default_error, default_rounds), (plain_error, plain_rounds) = report["trials"]
        assert default_error == ""
        assert default_rounds >= 1
        assert NO_MEMORY in plain_error
        assert plain_rounds == 0
        # Of the script's own step, whose all-reduces met those of the same step.
        assert report["updated"] == [7.0] * 5
    if fault == "inputs":
        assert "rank 1: RuntimeError" in reports[0]["trials"][1][0]


@pytest.mark.product_only  # how jax ends a job is its own; that nobody goes on is shown once
def test_a_rank_whose_run_fails_alone_ends_the_job_and_says_why(tmp_path: Path) -> None:
    codes, errors, _ = run_two("measuring_rank", tmp_path, "run", devices=1)
    assert 0 not in codes, errors
    [line] = [one for one in errors[1].splitlines() if one.startswith("disco: ")]
    assert f"a run of no fusion failed on rank 1 (RuntimeError: {NO_MEMORY}), but not on all ranks (" in line
    assert "the job ends" in line
    assert list(tmp_path.glob("*.json")) == []


def test_a_run_that_fails_since_another_rank_is_dead_does_not_end_the_job() -> None:
    """Nobody waits in its all-reduce: that failed because nobody is there."""

    def all_gather(*_: Any, **__: Any) -> list[bytes]:
        raise GoneError("ran: rank 1 of 2 did not answer: a rank is dead or stood still")

    session: Any = SimpleNamespace(
        channel=SimpleNamespace(all_gather=all_gather),
        timeout_s=1.0,
        alone=lambda _: nullcontext(),
        request=request_of(0),
    )

    def run() -> None:
        raise RuntimeError("connection closed by peer")

    with pytest.raises(
        GoneError, match="rank 1 of 2 did not answer: a rank is dead or stood still"
    ) as raised:
        lockstep.run_on_all(session, "a run", run)
    assert is_shared(raised.value)


class Array:
    """What can be referenced weakly."""


def test_what_failed_keeps_no_arrays_on_the_devices_once_it_was_handled() -> None:
    """A training needs their memory again, and nobody knows when garbage is collected."""
    settings: Any = SimpleNamespace(timeout_s=1.0)
    session = Session(request_of(0), settings, None, LocalChannel())  # type: ignore[arg-type]
    made: list[weakref.ref[Any]] = []

    def run() -> None:
        array = Array()
        made.append(weakref.ref(array))
        raise RuntimeError(NO_MEMORY)

    def in_a_stage() -> None:
        with session.stage("inputs"):
            run()

    collects = gc.isenabled()
    gc.disable()
    try:
        for failing in (lambda: lockstep.run_on_all(session, "a run", run), in_a_stage):
            with suppress(RuntimeError):
                failing()
            assert made.pop()() is None
    finally:
        if collects:
            gc.enable()


def test_between_the_steps_of_a_training_runs_are_made_as_many_at_once_as_a_slice_has_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[list[int]] = []
    clock_ns = itertools.count(0, 20_000_000)
    monkeypatch.setattr(lockstep.time, "perf_counter_ns", lambda: next(clock_ns))

    @contextmanager
    def between_steps(_: str) -> Iterator[None]:
        held.append([])
        yield

    def run() -> int:
        held[-1].append(sum(map(len, held)))
        return held[-1][-1]

    settings: Any = SimpleNamespace(timeout_s=1.0)
    session = Session(request_of(0), settings, None, LocalChannel(), between_steps)  # type: ignore[arg-type]
    assert lockstep.repeated(session, "a run", run, 6) == list(range(6))
    assert held == [[0], [1, 2], [3, 4], [5]]
    session = replace(session, between_steps=None)
    held.append([])
    assert lockstep.repeated(session, "a run", run, 3) == [6, 7, 8]
    assert held[-1] == [6, 7, 8]


def test_the_job_ends_where_nobody_takes_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "stdout", None)
    session: Any = SimpleNamespace(channel=SimpleNamespace(rank=1))
    with pytest.raises(SystemExit):
        lockstep._end_job(session, "a run", "RuntimeError: broken", ActivationError("rank 0 is silent"))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks of one job say of it."""
    folder = tmp_path_factory.mktemp("ranks")
    codes, errors, address = run_two("rank", folder, devices=2)
    assert codes == [0, 0], errors
    return [{**json.loads((folder / f"{rank}.json").read_text()), "address": address} for rank in (0, 1)]


def test_a_rank_that_comes_late_takes_no_time_of_the_step(reports: list[dict[str, Any]]) -> None:
    """The earlier one's first all-reduce waited for it, and that counted."""
    assert [report["waits"] for report in reports] == [True, True]


def test_what_decides_about_a_collective_is_equal_in_two_processes(reports: list[dict[str, Any]]) -> None:
    """One process took the branch, the other did not, and both hung."""
    assert [report["guarded"] for report in reports] == [[0], [0]]


def test_two_processes_capture_enact_and_run_in_lockstep(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        assert report["ran"] is True
        assert report["same_module"] is True
        assert report["job"] == report["address"]
        assert report["places"] == [rank, 2, 4]
        assert report["local"] == 2
        # The step of the script itself: -2 + (2 * 3 * 1 + 2 * 3 * 2), and |-2| in the place of -(-2).
        assert report["updated"] == [16.0] * 5
        assert report["flipped"] == [2.0] * 5

    weight = synthetic_values(Parameter((5,), np.dtype(np.float32), sharded=False), 1, 0, 0)
    split = Parameter((1, 3), np.dtype(np.float32), sharded=True)
    total = sum(synthetic_values(split, 1, 1, place).sum() for place in range(4))
    elements = Parameter((256,), np.dtype(np.float32), sharded=True)
    summed = 4 * sum(synthetic_values(elements, 1, 0, place) for place in range(4))
    for report in reports:
        for part in report["outputs"][0]:
            np.testing.assert_allclose(part, weight + total, rtol=1e-6)
        for part in report["outputs"][1]:
            np.testing.assert_array_equal(part, weight.tolist())
        # What takes no storage of its arguments over hands nothing on.
        steps = [weight + number * total * KEEPS_DONATION for number in range(4)]
        np.testing.assert_allclose(report["in a row"], steps, rtol=1e-6)
        assert len(report["sums"]) == 2
        for part in report["sums"]:
            assert part == pytest.approx(summed.tolist(), rel=1e-6)
