"""Where subcommands write: files, stdout for ``-``, devices and pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_hlo.cli import training
from tests.cli.conftest import Disco
from tests.report import plans


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, in which a file called "-" would be seen."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_page_for_minus_is_stdout_alone(disco: Disco, cpu_plan: Path, elsewhere: Path) -> None:
    outcome = disco("report", cpu_plan, "-o", "-", "--trace", "steps.json")
    assert outcome.out.startswith("<!doctype html>")
    assert outcome.out.rstrip().endswith("</html>")
    assert "steps.json: open it in ui.perfetto.dev" in outcome.err
    assert [path.name for path in elsewhere.iterdir()] == ["steps.json"]


def test_a_current_folder_that_was_removed_is_named(
    refused: Callable[..., str], cpu_plan: Path, elsewhere: Path
) -> None:
    elsewhere.rmdir()
    for command in ("report", "search"):
        assert "the current folder was removed" in refused(command, cpu_plan, "-o", "found")


@pytest.mark.parametrize("command", ["report", "simulate"])
def test_a_trace_for_minus_is_stdout_alone(
    command: str, disco: Disco, cpu_plan: Path, elsewhere: Path
) -> None:
    outcome = disco(command, cpu_plan, "--trace", "-")
    assert json.loads(outcome.out)["traceEvents"]
    assert ("no order and no buckets can beat" in outcome.err) == (command == "simulate")
    assert list(elsewhere.iterdir()) == []


def test_a_profile_for_minus_is_stdout_alone(
    disco: Disco, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = []

    def measured(*_: object, **how: bool) -> object:
        quiet.append(how["quiet"])
        return plans.sockets_profile()

    monkeypatch.setattr(training, "_measured", measured)
    outcome = disco("calibrate", "-o", "-", "--", sys.executable)
    assert json.loads(outcome.out)["format"] == "disco-hlo profile"
    assert "noise of a step" in outcome.err
    assert quiet == [True]
    assert list(elsewhere.iterdir()) == []


def test_two_things_for_one_place_are_refused(
    refused: Callable[..., str], cpu_plan: Path, elsewhere: Path
) -> None:
    def both(*arguments: str | Path) -> str:
        return refused(*arguments).removeprefix("disco: ").split(";")[0]

    assert both("report", cpu_plan, "-o", "-", "--trace", "-") == "-o and --trace would both go to stdout"
    assert both("report", cpu_plan, "-o", "-", "--json") == "-o and --json would both go to stdout"
    assert both("report", cpu_plan, "-o", "a", "--trace", "a") == "-o and --trace would both go to a"
    clash = "and --json would both go to stdout"
    assert both("simulate", cpu_plan, "--trace", "-", "--json") == f"--trace {clash}"
    assert both("calibrate", "-o", "-", "--json", "--", sys.executable) == f"-o {clash}"
    assert list(elsewhere.iterdir()) == []


def test_a_folder_cannot_be_stdout(refused: Callable[..., str], cpu_plan: Path, elsewhere: Path) -> None:
    message = "disco: - is stdout, and what is written are several files; name a folder"
    assert refused("search", cpu_plan, "-o", "-") == message
    assert refused("capture", "-o", "-", "--", sys.executable) == message
    assert list(elsewhere.iterdir()) == []


def test_a_pipe_is_written_through_and_stays_a_pipe(disco: Disco, cpu_plan: Path, elsewhere: Path) -> None:
    pipe = elsewhere / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert disco("report", cpu_plan, "-o", pipe).code == 0
    reader.join(60)
    assert received[0].startswith(b"<!doctype html>")
    assert pipe.is_fifo()


def test_stdout_by_another_name_is_stdout_too(cpu_plan: Path, elsewhere: Path) -> None:
    page = elsewhere / "page.html"
    before = os.lstat("/dev/stdout")
    with page.open("wb") as file:
        command = [sys.executable, "-m", "disco_hlo.cli.main", "report", str(cpu_plan), "-o", "/dev/stdout"]
        subprocess.run(command, stdout=file, stderr=subprocess.DEVNULL, check=True)
    assert page.read_text().startswith("<!doctype html>")
    assert page.read_text().rstrip().endswith("</html>")
    assert os.path.samestat(os.lstat("/dev/stdout"), before)


def test_a_link_stays_a_link(disco: Disco, cpu_plan: Path, elsewhere: Path) -> None:
    (elsewhere / "latest.html").symlink_to("page.html")
    assert disco("report", cpu_plan, "-o", "latest.html").code == 0
    assert (elsewhere / "latest.html").is_symlink()
    assert (elsewhere / "page.html").read_text().startswith("<!doctype html>")


def test_a_closed_stdout_is_refused(cpu_plan: Path, elsewhere: Path) -> None:
    command = f"exec {sys.executable} -m disco_hlo.cli.main report {cpu_plan} -o - >&-"
    ended = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, "disco: stdout is closed; name a file\n")
