"""Every ``disco`` command of the documentation runs, as it is written."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from disco_hlo.cli.main import COMMANDS
from tests.cli.conftest import Disco
from tests.known_times import know_all

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/report.md", "docs/quickstart.md")


def commands(page: str) -> list[str]:
    """The indented lines of a page that call disco, without their comments."""
    lines = re.findall(r"^    (disco .*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"\s+#.*", "", line) for line in lines]


def test_the_documentation_shows_every_command() -> None:
    shown = {line.split()[1] for page in PAGES for line in commands(page)}
    assert shown == set(COMMANDS)


@pytest.mark.slow
def test_every_command_of_the_documentation_runs(
    disco: Disco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).with_name("train.py"), tmp_path)
    store = tmp_path / "plans"
    know_all(store, devices=2, processes=1)
    monkeypatch.chdir(tmp_path)

    def run(line: str, expected: tuple[int, ...] = (0,)) -> str:
        """In this process: most of such a command is starting Python."""
        program, *arguments = shlex.split(line)
        assert program == "disco"
        done = disco(*arguments)
        assert done.code in expected, (line, done)
        return done.out

    written = list(dict.fromkeys(line for page in PAGES for line in commands(page)))
    first = [line for line in written if line.split()[1] in ("capture", "search")]
    for line in first:
        run(line.replace("--seconds 30", "--evaluations 50"))
    key = json.loads(run("disco inspect found --json"))["target"]["key"]
    shutil.copytree(tmp_path / "found", store / key[:16] / "cpu-cpu-x2")
    for line in written:
        if line not in first:
            # doctor may miss something on the machine that runs this, and says so by 1.
            run(line.replace("3f2a", key[:6]), (0, 1) if "doctor" in line else (0,))
    assert (tmp_path / "plan.html").stat().st_size > 50_000
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
