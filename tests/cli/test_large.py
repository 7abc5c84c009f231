"""Steps of many instructions, of many gradients, and of many hours are read, simulated and searched like any other."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.read import read
from disco_hlo.report import bundle
from tests.cli.conftest import Disco
from tests.cli.large_steps import large_step
from tests.report import plans
from tests.report.large import repeated_step


@pytest.mark.slow
def test_a_plan_of_18_000_instructions_is_inspected_and_reported(
    disco: Disco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Most of each command is bringing the step into its canonical form: once is enough to see that it can be done.
    monkeypatch.setattr(bundle, "canonicalize", functools.cache(canonicalize))
    data = repeated_step(3)
    source = bundle.canonicalize(data)
    assert len(source.graph) > 17_700
    folder = plans.save_plan(tmp_path / "plan", source, data, plans.early_all_reduces(source))
    outcome = disco("inspect", folder)
    assert outcome.code == 0
    assert f"{len(read(source).groups)} op groups" in outcome.out
    page = tmp_path / "plan.html"
    assert disco("report", folder, "-o", page).code == 0
    assert page.stat().st_size < 5_000_000


@pytest.mark.parametrize(
    ("layers", "sizes"), [(32, {"width": 16384, "batch": 8192}), (80, {"width": 16384, "batch": 16384})]
)
def test_a_step_of_billions_of_parameters_is_simulated(
    disco: Disco, tmp_path: Path, layers: int, sizes: dict
) -> None:
    """On a CPU 8.6 and 21 billions take hours: "Durations add up to 1.58e+12 ns, expected at most 800000000000"."""
    module = tmp_path / "step.hlo.pb"
    module.write_bytes(large_step(layers, **sizes))
    outcome = disco("simulate", module, "--json")
    assert outcome.code == 0, outcome
    default = outcome.json["default"]
    flops = (4 * layers * 2 + 2 * layers) * sizes["batch"] * sizes["width"] ** 2
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
    ("layers", "sizes"), [(800, {}), (150, {"ops": 42}), (20, {"width": 256, "constant_bytes": 100 << 20})]
)
def test_a_large_step_is_simulated_and_searched(
    disco: Disco, tmp_path: Path, layers: int, sizes: dict
) -> None:
    module = tmp_path / "step.hlo.pb"
    module.write_bytes(large_step(layers, **sizes))
    assert disco("simulate", module).code == 0
    outcome = disco("search", module, "-o", tmp_path / "found", "--seconds", "2", "--json")
    assert outcome.code == 0, outcome
    assert outcome.json["predicted"]["plan_ns"] <= outcome.json["predicted"]["default_ns"]
    assert disco("inspect", tmp_path / "found").code == 0
