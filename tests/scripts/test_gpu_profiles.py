"""The profiles that ship with the package: made from what was measured, and the simulator right with them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from disco_hlo.profiler.profile import Profile, load

ROOT = Path(__file__).parents[2]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_profiles", ROOT / "scripts" / "gpu_profiles.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SCRIPT = script()


@pytest.fixture(scope="module")
def probe() -> Any:
    return SCRIPT.Probe(ROOT / "tests" / "data" / "h200_probe")


@pytest.fixture(scope="module")
def made(probe: Any) -> dict[str, Profile]:
    profiles: dict[str, Profile] = SCRIPT.make(probe)
    return profiles


def test_the_shipped_profiles_are_those_the_measurements_give(made: dict[str, Profile]) -> None:
    """Where this fails because cost keys changed, run scripts/gpu_profiles.py again."""
    for link in ("nvlink", "staged", "sockets"):
        shipped = load(ROOT / "disco_hlo" / "data" / "profiles" / f"nvidia-h200-{link}.json")
        assert shipped == made[link]


def test_the_simulator_predicts_the_measured_steps(probe: Any, made: dict[str, Profile]) -> None:
    rows = SCRIPT.comparison(probe, made, ("default", "list", "separate", "ten", "all"))
    assert len(rows) == 15
    assert {(row.link, row.variant): row.error for row in rows if abs(row.error) > 0.045} == {}
    for link, gain in (("staged", 0.87), ("sockets", 0.80)):
        times = {row.variant: row for row in rows if row.link == link}
        assert times["list"].measured_ms < gain * times["default"].measured_ms
        assert times["list"].predicted_ms < gain * times["default"].predicted_ms


def test_an_unfused_step_is_predicted_by_the_estimate(probe: Any, made: dict[str, Profile]) -> None:
    (row,) = SCRIPT.comparison(probe, {"nvlink": made["nvlink"]}, ("unfused",))
    assert abs(row.error) < 0.06
