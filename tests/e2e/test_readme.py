"""The README's way from a training script to knowing why the plan is faster, line by line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import HERE, QUICK_COMPILES
from tests.known_times import know_all
from tests.ports import free_port

pytestmark = pytest.mark.mpi

SCRIPT = f"""
import runpy, sys
sys.path.insert(0, {str(HERE)!r})
import faults
faults.plan_wins()
runpy.run_path({str(HERE / "train.py")!r}, run_name="__main__")
"""


def walk() -> list[str]:
    """The lines of the section on installing, without their comments."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Install")[1].split("\n## ")[0]
    return [re.sub(r"\s+#.*", "", line).strip() for line in re.findall(r"^    (.+)$", section, re.MULTILINE)]


def test_the_readmes_lines_lead_from_a_script_to_a_page_and_to_training_with_the_plan(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    know_all(tmp_path / "my plans", devices=2, processes=2)
    environment = {
        **os.environ, "DISCO_DIR": str(tmp_path / "my plans"), "JAX_PLATFORMS": "cpu", "DISCO_FINALISTS": "1",
        "DISCO_WHEN": "compile", "DISCO_PATIENCE": "20", "DISCO_BUDGET_S": "20",
        "XLA_FLAGS": QUICK_COMPILES,  # one device a process
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip

    def run(line: str) -> str:
        environment["TRAIN_PORT"] = str(free_port())
        done = subprocess.run(
            line,
            shell=True,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout + done.stderr

    install, search, report, enact = walk()
    assert install == "pip install '.[mpi]'"
    told = re.search(r"than XLA's default.*; why: (disco report .*) -o plan.html", run(search))
    assert told is not None
    # The log's own command, with the plan's folder, and the README's, with the start of a key.
    run(f"{told[1]} -o first.html")
    folder = Path(shlex.split(told[1])[2])
    run(report.replace("3f2a", folder.parent.name[:6]))
    assert (tmp_path / "plan.html").read_bytes() == (tmp_path / "first.html").read_bytes()
    assert "enacts the plan of jit_train_step" in run(enact)
