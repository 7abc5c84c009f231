"""The scripts as users start them: one process, several processes, bad arguments."""

import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import llama
import mixture_of_experts
import numpy as np
import parallel
import pytest
import self_attention
import tensor_parallel
import train

from tests.ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(command: list[str], devices: int, out: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment["JAX_COORDINATOR_PORT"] = str(free_port())
    done = subprocess.run(
        [*command, "--json", str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.listdir(out.parent) == [out.name]
    record: dict[str, Any] = json.loads(out.read_text())
    assert len(record["losses"]) == len(record["step_s"]) == record["steps"]
    assert np.isfinite(record["losses"]).all()
    return record


def by_one_and_by_two(script: list[str], folder: Path, *of_two: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a script records in one process with two devices, and in two processes with one each."""
    for name in ("one", "two"):
        (folder / name).mkdir()
    one = run(script, 2, folder / "one" / "run.json")
    under_mpi = ["mpiexec", "-n", "2", *script, *of_two, "--distributed"]
    return one, run(under_mpi, 1, folder / "two" / "run.json")


def test_no_example_imports_this_project() -> None:
    for path in EXAMPLES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("disco") for name in names), path


@pytest.mark.mpi
def test_language_model_learns_and_two_processes_do_as_one(tmp_path: Path) -> None:
    # Of one layer: most of each process compiles the layers.
    smaller = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import transformer_lm as script; "
        "script.LAYERS = 1; script.main()"
    )
    script = [sys.executable, "-c", smaller, "--steps", "12", "--batch-per-device", "2"]
    one, two = by_one_and_by_two(script, tmp_path, "--steps", "2")
    assert (one["devices"], one["processes"]) == (2, 1)
    assert (two["devices"], two["processes"]) == (2, 2)
    np.testing.assert_allclose(one["losses"][:2], two["losses"], rtol=1e-5)
    assert one["losses"][0] == pytest.approx(np.log(256), abs=0.1)
    assert one["losses"][-1] < one["losses"][0] - 1
    assert one["validation_loss"] < one["losses"][0] - 1


@pytest.mark.mpi
def test_two_processes_do_as_one(tmp_path: Path) -> None:
    # What is computed again is another test's; without, there is less to compile.
    options = ["--shard", "fsdp", "--recompute", "none", "--accumulate", "2", "--steps", "1"]
    one, two = by_one_and_by_two([sys.executable, str(EXAMPLES / "llama.py"), *options], tmp_path)
    assert (one["processes"], two["processes"]) == (1, 2)
    np.testing.assert_allclose(one["losses"], two["losses"], rtol=1e-4)


def test_train_script_records_a_tiny_run(tmp_path: Path) -> None:
    options = ["--model", "rnnlm", "--size", "tiny", "--steps", "3"]
    script = [sys.executable, str(EXAMPLES / "train.py"), *options]
    record = run(script, 2, tmp_path / "run.json")
    assert (record["model"], record["size"], record["devices"]) == ("rnnlm", "tiny", 2)
    assert record["parameters"] == 23140


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "expected an integer of at least 1, got 0"),
        (["--seed", "-1"], "expected an integer of at least 0, got -1"),
        (["--json", "/nowhere/at/all/out.json"], "/nowhere/at/all does not exist"),
        (["--port", "x"], "invalid positive_int value: 'x'"),
        (["--distributed"], "start with `mpiexec -n 2 python ...`"),
    ],
)
def test_bad_arguments_end_with_code_2_and_one_message(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["transformer_lm.py", *arguments])
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / "transformer_lm.py"), run_name="__main__")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_unknown_size_ends_with_code_2_and_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for main, file, arguments in (
        (train.main, "bert.toml", ["--model", "bert"]),
        (tensor_parallel.main, "tensor_parallel.toml", []),
        (self_attention.main, "self_attention.toml", []),
        (mixture_of_experts.main, "mixture_of_experts.toml", []),
        (llama.main, "llama.toml", []),
    ):
        monkeypatch.setattr(sys, "argv", ["somewhere/script.py", *arguments, "--size", "huge"])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        message = capsys.readouterr().err
        assert message.startswith("script.py: ")
        assert f"{file} has no table [huge]" in message


@pytest.mark.parametrize(("visible", "expected"), [(None, 3), ("", 3), ("5", 0), ("4,5,6,7", 3), ("4,5", 1)])
def test_each_process_of_a_host_takes_one_gpu(
    visible: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("jax.distributed.initialize", lambda **given: seen.update(given))
    for name, value in (("RANK", "7"), ("SIZE", "8"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(sys, "argv", ["x", "--distributed", "--port", "1234", "--host", "head"])
    parallel.initialize(parallel.parser(None).parse_args())
    assert seen == {
        "coordinator_address": "head:1234",
        "num_processes": 8,
        "process_id": 7,
        "local_device_ids": [expected],
    }
