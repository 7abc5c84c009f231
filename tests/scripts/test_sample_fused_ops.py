"""The sampling script as a user runs it: measures, goes on where it stopped, and says what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import draw_fused_ops
import pytest
import sample_fused_ops

from disco_hlo.estimator.dataset import Dataset
from disco_hlo.estimator.samples import is_plain

ROOT = Path(__file__).parents[2]
CONFIG = """
seed = 0
samples_per_model = 12
most_members = 8
sample_bytes = 1_000_000
longest_ms = 5.0
bandwidth = 1e10
flops = 1e11
scalar_flops = 2e9

[measure]
pack_samples = 90
pack_bytes = 100_000_000
held_bytes = 20_000
processes = 2
by_model = true
reuse_after_bytes = 1_000_000
input_bytes = 10_000_000
compile_threads = 1
sessions = 2
repeats = 3
pack_seconds = 5.0
rounds = 1.1

[[steps]]
model = "rnnlm"
size = "tiny"
change = { width = 16, length = 4 }
"""


def run(config: Path, out: Path, *more: str) -> tuple[int, str]:
    """The script in this process, its children in theirs: how it ended, and what it said."""
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(StringIO()) as said:
        patched.setattr(sys, "argv", ["sample_fused_ops.py", str(config), "-o", str(out), *more])
        return sample_fused_ops.main(), said.getvalue()


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the script: exit code 2, and what is on stderr."""

    def call(config: Path, out: Path, *more: str) -> str:
        assert run(config, out, *more)[0] == 2
        message = capfd.readouterr().err
        assert "Traceback" not in message
        return message

    return call


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The configuration and the file, after a run that had no time and one that had enough."""
    folder = tmp_path_factory.mktemp("samples")
    (folder / "c.toml").write_text(CONFIG)
    code, said = run(folder / "c.toml", folder / "s.sqlite", "--seconds", "0")
    assert code == 3
    assert "out of time: run again to go on" in said
    assert run(folder / "c.toml", folder / "s.sqlite")[0] == 0
    return folder / "c.toml", folder / "s.sqlite"


def test_every_sample_is_measured_with_its_provenance(measured: tuple[Path, Path]) -> None:
    with Dataset(measured[1]) as data:
        samples, times, about = data.samples(), data.measurements(), data.about()
        sources = data.sources()
        graphs = {source.id: data.computation(source).graph for source in sources}
        assert data.failures() == {}
    name = "rnnlm tiny length=4 width=16"
    assert [source.name for source in sources] == [name, f"{name}, loop1", f"{name}, loop2"]
    assert {sample.source for sample in samples} == graphs.keys()
    assert set(times) == {sample.id for sample in samples}
    assert len({sample.key for sample in samples}) == len(samples) > 50
    assert all(is_plain(graphs[one.source], one.op.members, one.op.results) for one in samples)
    assert all(m.low_ns > 0 and m.repeats == 6 for taken in times.values() for m in taken)
    assert 0 < sum(len(taken) > 1 for taken in times.values()) < len(samples)
    assert about["backend"] == "cpu"
    assert about["config"]["seed"] == 0


def test_a_second_run_has_nothing_left_to_do(
    measured: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = measured[1].read_bytes()
    monkeypatch.setattr(sys, "argv", ["sample_fused_ops.py", str(measured[0]), "-o", str(measured[1])])
    assert sample_fused_ops.main() == 0
    said = capfd.readouterr().out
    assert "0 failed" in said
    assert "captured" not in said
    assert "measured 0." not in said
    assert measured[1].read_bytes() == before


def test_kernels_that_searches_choose_are_drawn_without_a_device(tmp_path: Path) -> None:
    steps = CONFIG.index("[[steps]]")
    file = "tests/data/h200_models/rnnlm.hlo.pb.gz"
    step = f'[[steps]]\nmodel = "rnnlm"\nfile = "{file}"\nsearches = 2\ncandidates = 2000\n'
    step += '[[steps]]\nmodel = "vgg19"\nsize = "tiny"\n'  # which is captured where it is measured
    (tmp_path / "c.toml").write_text(CONFIG[:steps].replace("1_000_000", "1_000_000_000") + step)
    assert run(tmp_path / "c.toml", tmp_path / "s.sqlite", "--until-drawn")[0] == 0
    with Dataset(tmp_path / "s.sqlite") as data:
        parts = {source.id: data.computation(source) for source in data.sources()}
        names = [source.name.removeprefix("rnnlm rnnlm.hlo.pb.gz") for source in data.sources()]
        samples, about = {sample.key: sample for sample in data.samples()}, data.about()
        assert data.measurements() == {}
    assert names == ["", ", loop1", ", loop2"]
    own = {
        draw_fused_ops.key_of(part, op) for part in parts.values() for op in draw_fused_ops.xla_kernels(part)
    }
    chosen = samples.keys() & set(about[draw_fused_ops.mark("chosen", "rnnlm rnnlm.hlo.pb.gz", 1)])
    assert len(chosen - own) > 5
    assert {samples[key].source for key in chosen} == parts.keys()
    for sample in map(samples.__getitem__, chosen):
        assert is_plain(parts[sample.source].graph, sample.op.members, sample.op.results)
    assert "device_kind" not in about


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("seed = ", "sample_fused_ops.py: "),
        (CONFIG.replace("rounds = 1.1", "round = 1.1"), "round"),
        (CONFIG.replace('"rnnlm"', '"nonesuch"'), "step 'nonesuch tiny"),
        (CONFIG.replace('"tiny"', '"huge"'), "has no table [huge]"),
        (CONFIG.replace("width", "girth"), "girth"),
    ],
)
def test_bad_configuration_exits_with_one_line(
    tmp_path: Path, config: str, message: str, refused: Callable[..., str]
) -> None:
    (tmp_path / "c.toml").write_text(config)
    assert message in refused(tmp_path / "c.toml", tmp_path / "s.sqlite")


def test_a_missing_folder_a_foreign_file_and_a_time_that_is_none_are_named(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    config, out = tmp_path / "c.toml", tmp_path / "s.sqlite"
    config.write_text(CONFIG)
    assert "does not exist" in refused(config, tmp_path / "no" / "s.sqlite")
    assert "--seconds nan: expected a number from 0 on" in refused(config, out, "--seconds", "nan")
    assert not out.exists()
    out.write_bytes(b"something else" * 99)
    assert "cannot be used as a data set" in refused(config, out)


def test_the_configurations_that_ship_are_read() -> None:
    for device, models in (("cpu", 7), ("h200", 7), ("h200_chosen", 7), ("h100", 9)):
        config = draw_fused_ops.read_config(ROOT / "configs" / "estimator" / f"samples_{device}.toml")
        assert len({step.model for step in config.steps}) == models
        assert len({step.name for step in config.steps}) == len(config.steps)
