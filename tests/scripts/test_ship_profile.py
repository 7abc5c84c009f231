"""What is asked of a profile before it ships."""

from __future__ import annotations

import gzip
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import ship_profile

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from disco_hlo.profiler.collectives import fit, point_of
from disco_hlo.profiler.keys import kernel_keys
from disco_hlo.profiler.profile import Contention, Link, OpTime, Platform, Profile, load, save

MODULE = Path(__file__).parents[1] / "data" / "demo_plan" / "default.hlo.pb.gz"


canonical = cache(canonicalize)
"""The demo's step is the module of every cell here."""


@pytest.fixture(autouse=True)
def step_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ship_profile, "canonicalize", canonical)


@pytest.fixture(scope="module")
def profile() -> Profile:
    """A profile that knows every op and kernel of the demo's step."""
    source = canonical(gzip.decompress(MODULE.read_bytes()))
    keys = {node.key for node in source.graph.nodes}
    keys |= {*kernel_keys(source.graph, unit_graph(source.graph, read(source)).kernels(source.graph))}
    line = fit([point_of(size, [1000 + size]) for size in (1 << 10, 1 << 14, 1 << 18)])
    platform = Platform("NVIDIA H200", "gpu", "cuda 13000", "0.11.2", "0.11.2")
    ops = {key: OpTime(1000, 1, 5) for key in keys}
    return Profile(platform, ops, 900, 4e12, 4e14, line, Link(2, 1), Contention(1.25, 1.5))


def cell(folder: Path, profile: Profile) -> Path:
    folder.mkdir()
    (folder / "module.hlo.pb.gz").write_bytes(MODULE.read_bytes())
    save(profile, folder / "profile.json")
    return folder / "profile.json"


def run(*arguments: str | Path) -> int:
    return ship_profile.main([*map(str, arguments), "--name", "nvidia-h200-nvlink"])


def test_a_profile_that_knows_its_models_is_written(tmp_path: Path, profile: Profile) -> None:
    keys = sorted(profile.ops)
    half = {key: profile.ops[key] for key in keys[::2]}
    rest = {key: profile.ops[key] for key in keys[1::2]}
    parts = [cell(tmp_path / str(i), replace(profile, ops=ops)) for i, ops in enumerate((half, rest))]
    assert run(*parts, "--write", tmp_path / "out") == 0
    assert load(tmp_path / "out" / "nvidia-h200-nvlink.json") == profile


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ops": {}}, "0 % known, expected 80"),
        ({"contention": None}, "how compute and transfers slow each other"),
        ({"contention": Contention(1.0, 1.0)}, "how compute and transfers slow each other"),
        ({"all_reduce": None}, "no all-reduce sweep"),
    ],
)
def test_what_is_missing_is_said_and_nothing_written(
    tmp_path: Path,
    profile: Profile,
    change: dict[str, object],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = cell(tmp_path / "cell", replace(profile, **change))
    assert run(path, "--write", tmp_path / "out") == 1
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_files_that_are_no_profiles_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile.json").write_text("{")
    assert run(tmp_path / "profile.json") == 2
    assert "expected a profile as JSON" in capsys.readouterr().err
