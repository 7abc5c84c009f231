"""Steps of many instructions, of many gradients, and of many hours are read, simulated and searched like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Disco
from tests.cli.large_steps import large_step


def test_a_step_of_billions_of_parameters_is_simulated(disco: Disco, tmp_path: Path) -> None:
    """On a CPU 21 billions take hours: "Durations add up to 1.58e+12 ns, expected at most 800000000000"."""
    layers, width, batch = 80, 16384, 16384
    module = tmp_path / "step.hlo.pb"
    module.write_bytes(large_step(layers, width=width, batch=batch))
    outcome = disco("simulate", module, "--json")
    assert outcome.code == 0, outcome
    default = outcome.json["default"]
    flops = (4 * layers * 2 + 2 * layers) * batch * width**2
    assert default["compute_ns"] > flops / 4 / 5e10 * 1e9
    assert default["step_ns"] == default["compute_ns"] + default["exposed_ns"] > 10**12


def test_a_step_of_billions_of_parameters_is_searched(disco: Disco, tmp_path: Path) -> None:
    module = tmp_path / "step.hlo.pb"
    module.write_bytes(large_step(32, width=16384, batch=8192))
    outcome = disco(
        "search", module, "-o", tmp_path / "found", "--evaluations", "200", "--seeds", "1", "--json"
    )
    assert outcome.code == 0, outcome
    predicted = outcome.json["predicted"]
    assert predicted["bound_ns"] <= predicted["plan_ns"] <= predicted["default_ns"]
    assert disco("inspect", tmp_path / "found").code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "sizes"), [(400, {}), (60, {"ops": 42, "width": 256, "constant_bytes": 100 << 20})]
)
def test_a_large_step_is_simulated_searched_and_reported(
    disco: Disco, tmp_path: Path, layers: int, sizes: dict
) -> None:
    """Of 400 gradients; of 5,000 instructions and with a large constant."""
    module, found, page = tmp_path / "step.hlo.pb", tmp_path / "found", tmp_path / "plan.html"
    module.write_bytes(large_step(layers, **sizes))
    assert disco("simulate", module).code == 0
    outcome = disco("search", module, "-o", found, "--seconds", "1", "--json")
    assert outcome.code == 0, outcome
    assert outcome.json["predicted"]["plan_ns"] <= outcome.json["predicted"]["default_ns"]
    assert disco("inspect", found).code == 0
    assert disco("report", found, "-o", page).code == 0
    assert page.stat().st_size < 5_000_000
