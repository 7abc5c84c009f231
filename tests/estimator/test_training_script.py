"""The training script as a user runs it, on a data set whose rule is known."""

from __future__ import annotations

import json
import runpy
import sys
from functools import cache
from pathlib import Path

import pytest

from disco_hlo.estimator import dataset
from disco_hlo.estimator.dataset import Dataset, TrainingData, load
from disco_hlo.estimator.network import network
from disco_hlo.estimator.weights import load_file
from tests.estimator import synthetic

if sys.version_info >= (3, 12):
    pytest.skip("DGL has no wheel past Python 3.11; the 3.11 leg runs this", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_estimator.py"
CONFIG = """
[train]
epochs = 3
batch = 32

[train.architecture]
layers = 2
heads = 2
width = 16
dense = [16, 8]

[split]
test = 40
validation = 20

[report]
fine_tune = [50]
compare.paper = { architecture = "paper", loss = "paper", epochs = 1 }
"""


@cache
def read_once(path: Path) -> TrainingData:
    """Every run reads the same data set, which takes longest where the configuration is refused."""
    with Dataset(path) as data:
        return load(data)


def run(*arguments: object) -> int:
    """Runs the script in this process, which has torch already; gives its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        patch.setattr(
            dataset, "load", lambda data, other=None: load(data, other) if other else read_once(data.path)
        )
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
    return int(ended.value.code or 0)


def files_of(folder: Path) -> tuple[object, ...]:
    return folder / "c.toml", folder / "s.sqlite", "-o", folder / "out", "--weights", folder / "w.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    synthetic.write(folder / "s.sqlite")
    (folder / "c.toml").write_text(CONFIG)
    assert run(*files_of(folder)) == 0
    return folder


def test_the_report_has_both_splits_with_baselines_and_noise_beside(folder: Path) -> None:
    report = json.loads((folder / "out" / "report.json").read_text())
    section = report["unseen_structures"]
    assert section.keys() >= {
        "network", "network_without_op_times", "analytical", "linear", "paper", "noise_floor",
    }  # fmt: skip
    assert section["network"]["samples"] == 40
    assert section["network"]["mean"] < section["analytical"]["mean"]
    assert sorted(report["leave_one_model_out"]) == ["one", "two"]
    assert report["leave_one_model_out"]["one"]["fine_tuned_50"]["samples"] == 70
    assert report["error_distribution"]["cdf"][-1] == 1.0
    assert report["inference"]["largest_difference_from_torch"] < 1e-5
    assert report["data"]["about"]["device_kind"] == "Test GPU"
    for name in ("curves.svg", "errors.svg"):
        assert (folder / "out" / name).read_text().startswith("<svg")


def test_the_weights_it_writes_are_ready_for_inference(folder: Path) -> None:
    weights = load_file(folder / "w.safetensors")
    assert weights.device_kind == "Test GPU"
    assert network(weights).message.shape[0] == 2


def test_weights_to_go_on_from_are_judged_as_they_are_and_only_the_listed_models_left_out(
    folder: Path, tmp_path: Path
) -> None:
    config = CONFIG[: CONFIG.index("[report]")] + '[start]\nepochs = 2\n[report]\nleave_one_out = ["one"]\n'
    (tmp_path / "c.toml").write_text(config)
    start = ("--start", folder / "w.safetensors")
    assert run(tmp_path / "c.toml", folder / "s.sqlite", "-o", tmp_path, *start) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    before = json.loads((folder / "out" / "report.json").read_text())["unseen_structures"]["network"]
    rows = report["unseen_structures"]
    assert rows["started_from"] == before  # of the same device
    assert rows["network"]["mean"] < rows["started_from"]["mean"]
    assert sum(row["samples"] for row in rows["network"]["by_group"].values()) == 40
    assert report["trainings"]["without_one"]["epochs"] == report["trainings"]["main"]["epochs"] == 2
    assert list(report["leave_one_model_out"]) == ["one"]
    assert {"started_from", "started_from_scaled"} <= report["leave_one_model_out"]["one"].keys()


def test_a_finished_run_is_not_trained_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "w.safetensors").read_bytes()
    assert run(*files_of(folder)) == 0
    assert "epoch" not in capsys.readouterr().out.split("unseen structures")[0]
    assert (folder / "w.safetensors").read_bytes() == before


def test_bad_input_exits_with_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.toml").write_text("[train]\nepoch = 3\n")
    for arguments, message in (
        ((tmp_path / "none.toml", folder / "s.sqlite"), "No such file"),
        ((tmp_path / "bad.toml", folder / "s.sqlite"), "epoch"),
        ((folder / "c.toml", tmp_path / "none.sqlite"), "there is no data set"),
        ((folder / "c.toml", folder / "c.toml"), "cannot be used as a data set"),
        (
            (folder / "c.toml", folder / "s.sqlite", "--start", folder / "c.toml"),
            "is no readable safetensors file",
        ),
    ):
        assert run(*arguments, "-o", tmp_path / "out") == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("[train.architecture]", "[train.architecture", "c.toml: "),
        ("test = 40", "test = 0", "split.test"),
        ("validation = 20", "validation = 0", "split.validation"),
        ("fine_tune = [50]", "fine_tune = [1]", "report.fine_tune"),
        ("fine_tune = [50]", 'leave_one_out = ["three"]', "cannot leave out three"),
        ("fine_tune = [50]", "fine_tune = [5000]", "cannot fine-tune on 5000 samples of"),
        ("compare.paper =", "compare.network =", "compare.network"),
        ("compare.paper =", "compare.'a/b' =", "compare.a/b"),
        ('"paper", loss', '"papr", loss', "architecture 'papr'"),
        ("epochs = 1 }", "epoch = 1 }", "epoch"),
    ],
)
def test_a_configuration_that_would_fail_later_is_refused_before_the_training(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, instead: str, message: str
) -> None:
    assert CONFIG.count(line) == 1
    (tmp_path / "c.toml").write_text(CONFIG.replace(line, instead))
    assert run(tmp_path / "c.toml", folder / "s.sqlite", "-o", tmp_path / "out") == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_weights_that_could_not_be_written_are_refused_before_the_training(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, tmp_path / "none" / "w.safetensors"):
        files = (folder / "c.toml", folder / "s.sqlite", "-o", tmp_path / "out", "--weights", place)
        assert run(*files) == 2
        said = capsys.readouterr()
        assert "expected a file in a folder that exists" in said.err
        assert said.out == ""
