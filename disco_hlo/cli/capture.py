"""``disco capture``: run a training command, and save its step on the way."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from disco_hlo.cli import training
from disco_hlo.cli.output import as_argument, check_folder, print_json, say, show
from disco_hlo.plugin.phases.capture_record import RECORD_NAME, CaptureRecord, load
from disco_hlo.report.printable import printable

_INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that was ended by Ctrl-C."""


def capture(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The training command.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the step.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON once the command has ended.")] = False,
) -> None:
    """Run a training command unchanged and save its step: modules, measured times, and where it ran.

    The command runs to its end; once the line "captured ..." has appeared, Ctrl-C may end it. The exit
    code is the command's, or 1 where it compiled no training step.
    """
    training.require(command, "disco capture -o DIR -- python train.py")
    check_folder(output, RECORD_NAME)
    before = _stamp(output)
    code = _run(training.start(command, output.absolute(), quiet=as_json))
    if _stamp(output) == before:
        no_step = "had saved no step" if code == _INTERRUPTED else training.NO_STEP
        say(f"the command ended with exit code {code} and {no_step}")
        raise typer.Exit(code or 1)
    record = load(output / RECORD_NAME)
    assert record is not None
    if as_json:
        print_json(_as_json(record, output))
    else:
        _print(record, output)
    if code:
        raise typer.Exit(code)


def _run(process: subprocess.Popen[bytes]) -> int:
    """Exit code of the command; as shells say it, 128 + n where signal n ended it."""
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            # The command got the same Ctrl-C and decides; a second one does not make us leave it alone.
            continue
    return 128 - code if code < 0 else code


def _stamp(folder: Path) -> int | None:
    try:
        return (folder / RECORD_NAME).stat().st_mtime_ns
    except OSError:
        return None


def _print(record: CaptureRecord, folder: Path) -> None:
    target = record.target
    show(
        f"captured {printable(target.module_name)} ({target.key[:16]}) on {target.device_count} x "
        f"{printable(target.device_kind)} in {printable(str(folder))}",
        f"next: disco search {as_argument(folder)} -o found",
    )


def _as_json(record: CaptureRecord, folder: Path) -> dict[str, object]:
    target = record.target
    return {
        "folder": str(folder),
        "files": sorted(path.name for path in folder.iterdir() if path.is_file()),
        "key": target.key,
        "fingerprint": target.fingerprint,
        "module": target.module_name,
        "backend": target.backend,
        "device_kind": target.device_kind,
        "device_count": target.device_count,
        "process_count": target.process_count,
    }
