"""Every kernel against its reference on interpreted devices, with a detector of races that must find planted ones."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import pytest

from disco_hlo.kernels.refusals import OLDEST_JAX

if jax.__version_info__ < OLDEST_JAX:
    pytest.skip(
        f"jax {jax.__version__} lacks what the kernels and their interpreter use", allow_module_level=True
    )

from disco_hlo.kernels.catalog import FUSED
from tests.kernels.cases import NORMED, RACES, case_name, tiles_for
from tests.kernels.interpreter import environment

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@cache
def rows(devices: int) -> dict[str, str]:
    """What came of every case on so many devices."""
    command = [sys.executable, "-m", "tests.kernels.cases"]
    ran = subprocess.run(
        command, env=environment(devices), cwd=ROOT, capture_output=True, text=True, timeout=550, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, str] = json.loads(ran.stdout)
    return found


CASES = [
    (devices, case_name(name, tiles))
    for devices in (2, 4)
    for name in FUSED
    for tiles in tiles_for(name, devices)
]


@pytest.mark.parametrize(("devices", "case"), CASES)
def test_a_kernel_gives_what_its_reference_gives_and_has_no_race(devices: int, case: str) -> None:
    assert rows(devices)[case] == "equal"


def test_an_update_with_a_norm_gives_what_its_recipe_says() -> None:
    assert rows(2)[NORMED] == "equal"


@pytest.mark.parametrize("case", RACES)
def test_a_race_between_devices_is_found(case: str) -> None:
    assert "RACE DETECTED" in rows(2)[case]
    assert "memory_space_id=0" in rows(2)[case], "it must be one in the GPUs' own memory"
