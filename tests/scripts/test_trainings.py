"""Trainings in turn: what a record says, and what is said where there is none; trainings of others, without theirs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import train_in_turn
import train_stranger
from strangers.training import Source, put_on_path

from disco_hlo.plan import plan as plans
from tests.made_plans import made_plan

PRINTS = """
import json, os, sys
which = {None: 100.0, "1": 90.0, "0": 80.0}[os.environ.get("ENABLE_SEARCH")]
print("disco: enacts the plan of jit_step" if which == 80.0 else "")
if which == 90.0:
    print("disco: the training was held for 61 s: profiling 30, search 11, other structures 8, candidates 12")
print("step     0   loss 3.5   2500.00 ms")
print(f"3 steps on 1 cpu device(s) of 1 process(es): median {which} ms, last loss 3.25")
"""


def measured() -> plans.Plan:
    candidates = (
        plans.Candidate("XLA default", 110_000_000, 100_000_000, 0, 25, ratio=1.0, ratio_noise=0.0),
        plans.Candidate("plan", 88_000_000, 90_000_000, 0, 25, ratio=0.9, ratio_noise=0.01),
        plans.Candidate("plan 2", 89_000_000, 0, 0, 0, error="no room"),
    )
    target = plans.Target("f00d", "cafe", "jit_step", "cpu", "cpu", 1, 1)
    return made_plan(
        target, plans.Strategy(()), b"", measured=plans.Measured("now", candidates, (), 5.0, 6.0, 7.0, 0.0)
    )


def run(folder: Path, *command: str) -> int:
    return train_in_turn.main(["--out", str(folder), "--", *command])


def test_a_record_says_what_was_predicted_measured_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_in_turn, "found_plan", lambda folder, log: (measured(), folder))
    monkeypatch.setenv("ENABLE_SEARCH", "1")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("DISCO_DIR", "somewhere/else")  # where no plan of these runs lies
    program = PRINTS.replace("loss 3.25", 'loss {float("nan") if which == 90.0 else 3.25}')
    assert run(tmp_path / "out", sys.executable, "-c", program) == 0
    record: dict[str, Any] = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["environment"]["NCCL_P2P_DISABLE"] == "1"
    assert "DISCO_DIR" not in record["environment"]
    assert record["taken"] == {
        "name": "plan", "predicted_ms": 88.0, "measured_ms": 90.0, "of_default": 0.9, "noise": 0.01
    }  # fmt: skip
    assert record["candidates"]["plan 2"] == {"predicted_ms": 89.0, "error": "no room"}
    assert record["held_s"] == 61
    assert record["stages_s"] == {"profile": 5.0, "search": 6.0, "measure": 7.0}
    assert record["runs"] == {
        "with the switch, the run that searched": {
            "median_ms": [90.0], "first_step_s": [2.5], "last_loss": ["nan"]
        },
        "XLA default": {"median_ms": [100.0, 100.0], "first_step_s": [2.5, 2.5], "last_loss": [3.25, 3.25]},
        "with the switch": {"median_ms": [80.0, 80.0], "first_step_s": [2.5, 2.5], "last_loss": [3.25, 3.25]},
    }  # fmt: skip
    assert record["of_default"] == [0.8, 0.8]
    assert "100.00 ms by default, 80.00 with plan (0.8, 0.8)" in capsys.readouterr().out


def test_a_run_that_does_not_enact_the_plan_is_not_counted_as_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_in_turn, "found_plan", lambda folder, log: (measured(), folder))
    assert run(tmp_path / "out", sys.executable, "-c", PRINTS.replace("enacts", "refuses")) == 1
    said = capsys.readouterr().err
    assert "with-the-switch-0: expected a line with 'disco: enacts the plan'" in said
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert record["runs"]["XLA default"]["median_ms"] == [100.0]
    assert record["runs"]["with the switch"]["median_ms"] == record["of_default"] == []


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (PRINTS, "the search saved no plan"),
        ("raise SystemExit('no such file')", "search: failed with exit status 1"),
        ("print('trained')", "expected lines like 'step 0 ... 7140.29 ms'"),
        (PRINTS.replace("{which}", "."), "expected lines like 'step 0 ... 7140.29 ms'"),
        (PRINTS.replace("{which}", "0.00"), "expected lines like 'step 0 ... 7140.29 ms'"),
        (PRINTS.replace("3.25", "3.25,"), "the search saved no plan"),
    ],
)
def test_what_cannot_be_compared_leaves_no_record(
    program: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "out", sys.executable, "-c", program) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "out" / "record.json").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--out", "a" * 300, "--", "true"], "cannot use --out"),
        (["--out", "new", "--timeout", "nan", "--", "true"], "a --timeout above 0"),
        (
            ["--out", "new", "--", "no-such-command"],
            "expected a command that can be run, got 'no-such-command'",
        ),
    ],
)
def test_bad_arguments_make_no_folder(
    argv: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        train_in_turn.main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missing_checkout_is_said_with_the_commands_that_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    assert train_stranger.main(["gemma", "--sources", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    place = tmp_path / "flax"
    assert (
        f"git clone https://github.com/google/flax {place} && git -C {place} checkout 18f8f311c275" in error
    )


def test_what_a_step_does_not_use_is_stood_in_for_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "theirs" / "inside"
    folder.mkdir(parents=True)
    (folder / "their_training.py").write_text(
        "import json\nimport not_here.deep as deep\nfrom not_here import Writer\nloader = deep.Loader\n"
        "class Own(Writer): pass\nwhole = json.dumps([1])\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("not_here", "not_here.deep", "their_training"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    put_on_path(Source("somebody/theirs", "f00d", "inside"), tmp_path, ("json", "not_here", "not_here.deep"))
    import their_training  # type: ignore[import-not-found]

    assert (their_training.whole, their_training.loader.__name__) == ("[1]", "Loader")
    for name in ("not_here", "not_here.deep", "their_training"):
        sys.modules.pop(name, None)
