from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest

from disco_hlo.plugin.measuring.inputs.made_up import synthetic_values
from disco_hlo.plugin.xla.executables import Parameter
from tests.plugin.two_ranks import run_two

KEEPS_DONATION = jax.__version_info__ >= (0, 11)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks of one job say of it."""
    folder = tmp_path_factory.mktemp("ranks")
    codes, errors, address = run_two("rank.py", folder, devices=2)
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
        assert report["local"] == [2, 2]
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
