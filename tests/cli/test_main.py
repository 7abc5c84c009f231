from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.cli.main import COMMANDS, load, main
from tests.cli.conftest import Disco


def test_help_lists_every_command_with_its_summary(disco: Disco) -> None:
    outcome = disco("--help")
    assert outcome.code == 0
    for name, entry in COMMANDS.items():
        assert name in outcome.out
        assert entry.summary in outcome.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_with_an_example(disco: Disco, name: str) -> None:
    outcome = disco(name, "--help")
    assert outcome.code == 0
    assert f"Example: disco {name}" in " ".join(outcome.out.split())
    assert load(name).name == name


def test_the_help_is_wrapped_for_the_terminal_and_nowhere_else(disco: Disco) -> None:
    lines = [line.strip() for line in disco("capture", "--help").out.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("The command runs to its end"))
    assert min(map(len, lines[first : lines.index("", first) - 1])) > 50


def test_a_mistyped_command_gets_a_suggestion(refused: Callable[..., str]) -> None:
    assert "No such command 'inspct'. Did you mean 'inspect'" in refused("inspct")


def test_a_missing_argument_and_a_bad_option_are_named(refused: Callable[..., str]) -> None:
    assert "Missing option '-o' / '--output'" in refused("search", "module")
    assert "Invalid value for '--top'" in refused("inspect", "plan", "--top", "-1")


def test_a_bad_setting_is_named(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCO_PATIENCE", "many")
    assert refused("list") == "disco: DISCO_PATIENCE is 'many'; expected a whole number, 1 or more"


@pytest.mark.parametrize(
    "command",
    [
        "inspect NAME", "diff NAME --default", "report NAME --json", "simulate NAME", "search NAME -o found",
        "simulate PLAN --plan NAME", "simulate PLAN --trace NAME", "search PLAN -o NAME", "report PLAN -o NAME",
        "capture -o NAME -- true", "calibrate -o NAME -- true", "capture -o found -- NAME",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["long", "locked"])
def test_a_name_that_the_system_does_not_look_up_is_refused(
    command: str, kind: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "a" * 300
    if kind == "locked":
        name = "locked-folder/name"
        stat = os.stat

        def refuse(path: Any, **options: Any) -> os.stat_result:
            """As root, whom no folder is locked to, would not be refused."""
            if str(path).endswith(name):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return stat(path, **options)

        monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.chdir(tmp_path)
    words = [{"NAME": name, "PLAN": str(PLAN)}.get(word, word) for word in command.split()]
    assert name in refused(*words).replace(" ", "")
    assert not (tmp_path / "found").exists()


@pytest.mark.parametrize(
    "command",
    [
        "forgive NAME", "inspect NAME", "diff NAME --default", "diff PLAN NAME", "report NAME --json",
        "report PLAN -o NAME", "report PLAN --json --profile NAME", "simulate NAME", "simulate PLAN --plan NAME",
        "simulate PLAN --trace NAME", "simulate PLAN --gpus 4 --machine NAME", "search NAME -o found",
        "search PLAN -o NAME", "search PLAN --output=", "capture -o NAME -- true", "capture -o found -- NAME",
        "calibrate -o NAME -- true",
    ],
)  # fmt: skip
def test_an_empty_name_is_not_the_current_folder(
    command: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(PLAN, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(Path().iterdir())
    words = [{"NAME": "", "PLAN": str(PLAN)}.get(word, word) for word in command.split()]
    assert refused(*words).startswith("disco: an argument is empty (is a variable not set?): disco ")
    assert sorted(Path().iterdir()) == before


def test_a_training_command_may_have_an_empty_argument(disco: Disco, tmp_path: Path) -> None:
    outcome = disco("capture", "-o", tmp_path / "found", "--", "test", "-z", "")
    assert "disco: the command ended with exit code 0 and compiled no training step" in outcome.err


def test_a_failure_that_names_no_file_is_not_hidden(disco: Disco, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("disco_hlo.cli.plans.plan_directory", fail)
    with pytest.raises(OSError, match="Input/output error"):
        disco("list")


def test_the_version(disco: Disco) -> None:
    from disco_hlo import __version__

    assert disco("--version").out == f"disco-hlo {__version__}\n"


def test_help_and_list_import_nothing_heavy() -> None:
    heavy = ["google.protobuf", "jax", "jaxlib", "mpi4py", "numba", "numpy"]
    code = (
        "import sys; from disco_hlo.cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        f"sys.stderr.write(repr([name for name in {heavy} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]"


def completions(words: str) -> list[str]:
    """What the shell would offer after typing ``words``."""
    environment = {
        **os.environ, "_DISCO_COMPLETE": "complete_bash", "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }  # fmt: skip
    code = "from disco_hlo.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout.split()


def test_the_shell_completes_commands_and_options() -> None:
    assert completions("disco s") == ["simulate", "search"]
    assert "--bandwidth" in completions("disco simulate --b")


PLAN = Path(__file__).parents[1] / "data" / "demo_plan"


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Of ``disco`` in this process, with its output where it is."""
    monkeypatch.setattr(sys, "argv", ["disco", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


def test_an_output_that_cannot_hold_every_sign_is_printed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert exit_code(monkeypatch, "inspect", PLAN) == 0
    sys.stdout.flush()
    assert b"? " in written.getvalue()
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_output_on_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it fails once more
        monkeypatch.setattr(sys, "stdout", full)
        assert exit_code(monkeypatch, "inspect", PLAN) == 1
    said = "disco: the output could not be written: No space left on device\n"
    assert capsys.readouterr().err == said


def test_a_closed_stderr_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert exit_code(monkeypatch, "simulate", PLAN, "--json") == 0
    sys.stderr.close()
    assert json.loads(capsys.readouterr().out)["module"].startswith("jit_")


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "disco_hlo.cli.main", "list", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.wait(60)
    process.stderr.close()
