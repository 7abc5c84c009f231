"""Two processes change over at the same call, by MPI and by the key-value store."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from disco_hlo.plan.plan import DEFAULT
from tests.plugin.two_ranks import run_by, run_two


@pytest.mark.slow
@pytest.mark.parametrize(
    "carrier",
    # By MPI nothing goes through JAX. On the product's leg test_searched_trainings.py has trainings without MPI.
    [
        pytest.param("MPI", marks=[pytest.mark.mpi, pytest.mark.product_only]),
        pytest.param(
            "key-value store", marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="as above")
        ),
    ],
)
def test_two_processes_change_over_at_the_same_calls(carrier: str, tmp_path: Path) -> None:
    codes, errors = run_by(carrier, "tests.plugin.calls.rank", tmp_path, longest_s=300)
    assert not any(codes), errors
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]

    for report in reports:
        assert carrier in report["channel"]
        assert report["ran"] == reports[0]["ran"]
        assert report["settled"] in (DEFAULT, "again")
        # The training is that of stock, step by step, whoever ran the steps.
        assert report["losses"] == [True, 120]
        # Where rank 0 alone would have changed over, it met nobody and went on with XLA's default.
        assert report["alone"] is True
        assert report["still watched"] == []
    ran = reports[0]["ran"]
    first = ran.index("again")
    assert first >= 20  # when rank 1 had it, too
    assert ran[first - 1 : first + 9] == [DEFAULT, "again"] * 5
    assert set(ran) == {DEFAULT, "again"}
    assert reports[0]["rounds"] >= 5

    # A plan of another jax: both ranks found out at the same call that it does not pay, and rank 0 knew it later.
    for rank, report in enumerate(reports):
        if "again" in report:
            assert report["again"]["outcomes"] == [DEFAULT]
            assert max(report["again"]["apart"]) < 1e-5
            assert report["again"]["lost"] is (rank == 0)


def test_what_each_process_makes_for_itself_is_copied_as_other_arguments(tmp_path: Path) -> None:
    """A key or a rate lies on the process's own device, and JAX brings it to all: of such an array JAX itself names no
    shards where a process has one device, and each search ended there."""
    codes, errors, _ = run_two("calls.own_arguments", tmp_path, devices=1)
    assert codes == [0, 0], errors
    for rank in "01":
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report["seen"] == report["given"]
