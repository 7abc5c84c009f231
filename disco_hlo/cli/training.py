"""``disco capture`` and ``disco calibrate``: run a training command, told by its environment to capture its step.

The one saves the step and lets the command train, the other takes the profile and ends it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import typer

from disco_hlo.cli.output import (
    add_row,
    as_argument,
    check_folder,
    check_places,
    print_json,
    say,
    show,
    table,
    write_file,
)
from disco_hlo.errors import DiscoError
from disco_hlo.plan.store import PROFILE_NAME
from disco_hlo.plugin.phases.capture_record import RECORD_NAME, VARIABLE, CaptureRecord
from disco_hlo.plugin.phases.capture_record import load as load_record
from disco_hlo.printable import counted, printable, time_text
from disco_hlo.profiler.profile import Profile, load, to_json

_NO_STEP = (
    "compiled no training step: no module on several devices with an all-reduce or reduce-scatter of a computed value "
    "(DISCO_MODULE=name names one)"
)
"""What to say of a command that left no capture."""
_INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that was ended by Ctrl-C."""
_POLL_S = 0.2
_PATIENCE_S = 10.0


def capture(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The training command.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the step.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON once the command has ended.")] = False,
) -> None:
    """Run a training command unchanged and save its step: modules, measured times, and where it ran.

    The command runs to its end; once the line "captured ..." has appeared, Ctrl-C may end it. The exit
    code is the command's, or 1 where it compiled no training step.
    """
    _require(command, "disco capture -o DIR -- python train.py")
    check_folder(output, RECORD_NAME)
    before = _stamp(output)
    code = _run(_start(command, output.absolute(), quiet=as_json))
    if _stamp(output) == before:
        no_step = "had saved no step" if code == _INTERRUPTED else _NO_STEP
        say(f"the command ended with exit code {code} and {no_step}")
        raise typer.Exit(code or 1)
    record = load_record(output / RECORD_NAME)
    assert record is not None
    if as_json:
        print_json(_as_json(record, output))
    else:
        target = record.target
        show(
            f"captured {printable(target.module_name)} ({target.key[:16]}) on {target.device_count} x "
            f"{printable(target.device_kind)} in {printable(str(output))}",
            f"next: disco search {as_argument(output)} -o found",
        )
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


def _as_json(record: CaptureRecord, folder: Path) -> dict[str, object]:
    target = msgspec.to_builtins(record.target)
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    return {"folder": str(folder), "files": files, "module": target.pop("module_name"), **target}


def calibrate(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The training command.")],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FILE", help="Where the profile goes; - is stdout."),
    ],
    seconds: Annotated[
        float, typer.Option("--seconds", min=1.0, help="Longest that it may take before it is given up.")
    ] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure op times, launch cost, lines of collectives, contention and noise, and write them as a profile.

    The command is started, its step measured on its own devices while it compiles, and the command ended; it
    does not train. What was measured before, for another model too, is taken from the plan directory.
    """
    _require(command, "disco calibrate -o profile.json -- python train.py")
    aside = check_places({"-o": output}, as_json=as_json)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="disco_calibrate_") as folder:
        profile = _measured(command, Path(folder), seconds, quiet=as_json or aside)
    write_file(output, to_json(profile).encode())
    taken_s = time.monotonic() - started
    if as_json:
        print_json({"file": str(output), "seconds": round(taken_s, 1), **_facts(profile)})
        return
    _print_profile(profile, aside=aside)
    say(f"measured in {taken_s:.0f} s; the profile is {'on stdout' if aside else f'in {output}'}")


def _measured(command: list[str], folder: Path, seconds: float, *, quiet: bool) -> Profile:
    """The profile that the command's own processes take, after which they are ended.

    Raises:
        DiscoError: the command ended or the time was up before there was one, or its step cannot be measured.
    """
    process = _start(command, folder, quiet=quiet, own_group=True)
    deadline = time.monotonic() + seconds
    try:
        while not (folder / RECORD_NAME).exists() and process.poll() is None:
            if time.monotonic() > deadline:
                raise DiscoError(f"nothing was measured within {seconds:g} s; give it longer with --seconds")
            time.sleep(_POLL_S)
    finally:
        _end(process)
    if not (folder / RECORD_NAME).exists():
        raise DiscoError(f"the command ended with exit code {process.returncode} and {_NO_STEP}")
    if not (folder / PROFILE_NAME).exists():
        raise DiscoError("the step cannot be measured on made-up inputs; the lines above say why")
    return load(folder / PROFILE_NAME)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        try:
            os.killpg(process.pid, number)
            process.wait(_PATIENCE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _facts(profile: Profile) -> dict[str, Any]:
    """The profile as its file has it, but for the times of single ops, of which it has thousands."""
    return {**msgspec.to_builtins(profile), "ops": len(profile.ops)}


def _print_profile(profile: Profile, *, aside: bool) -> None:
    rows = table("", "measured")
    add_row(rows, "device", profile.platform)
    add_row(rows, "op and kernel times", len(profile.ops))
    add_row(rows, "launch", time_text(profile.launch_ns))
    add_row(rows, "memory bandwidth", f"{profile.memory_bandwidth / 1e9:.1f} GB/s")
    add_row(rows, "arithmetic", f"{profile.flops_per_s / 1e9:.0f} GFLOP/s")
    swept = {
        "all-reduce": profile.all_reduce, **{kind: one.swept for kind, one in profile.collectives.items()}
    }  # fmt: skip
    for kind, fitted in swept.items():
        for piece in fitted.line.lines if fitted else ():
            line = f"{time_text(piece.offset_ns)} + {piece.ns_per_byte:.4g} ns a byte"
            add_row(rows, f"{kind} from {piece.from_bytes} bytes", line)
        if fitted is None:
            continue
        residuals = f"{100 * fitted.median_error:.1f} % median, {100 * fitted.maximum_error:.1f} % largest"
        add_row(rows, "its residuals", residuals)
    if profile.transfers is not None and profile.in_step is not None:
        latency_ns = profile.transfers.lines[0].offset_ns
        add_row(rows, "latency of an all-reduce in the step", time_text(latency_ns))
    for loop in profile.loops.values():
        own = f"{time_text(loop.own_ns)} of its own each, the first {time_text(loop.first_more_ns)} more"
        add_row(rows, f"a loop of {counted(loop.executions, 'turn')} a step", own)
    if (slowed := profile.contention) is not None:
        both = f"compute {slowed.compute:.3f}, collectives {slowed.communication:.3f}"
        add_row(rows, "slowed by each other", both)
        if slowed.products is not None and slowed.others is not None:
            by_kind = f"matmuls {slowed.products:.3f}, others {slowed.others:.3f}"
            add_row(rows, "of compute by kind", by_kind)
        if slowed.transfer_wait_ns:
            add_row(rows, "wait of a collective during kernels", time_text(slowed.transfer_wait_ns))
    if profile.holds:
        held = [share for share in profile.holds.values() if share]
        share = f", {100 * median(held):.0f} % of their time" if held else ""
        seen = f"{len(held)} of {counted(len(profile.holds), 'kind')} seen{share}"
        add_row(rows, "matmuls that delay collectives", seen)
    add_row(rows, "noise of a step", f"{100 * profile.noise:.1f} %")
    show(rows, aside=aside)


def _require(command: list[str], example: str) -> None:
    """Refuse a command that does not exist.

    Raises:
        DiscoError: it is not on the path, or may not be executed.
    """
    if shutil.which(command[0]) is None:
        what = "not an executable program" if Path(command[0]).exists() else "no such command"
        raise DiscoError(f"{command[0]}: {what}; expected: {example}")


def _start(
    command: list[str], folder: Path, *, quiet: bool, own_group: bool = False
) -> subprocess.Popen[bytes]:
    """Start ``command``, which captures its step in ``folder``.

    Args:
        quiet: stdout is for something of ours; what the command prints goes to stderr.
        own_group: a process group of its own, which a signal reaches as a whole.

    Raises:
        DiscoError: the system cannot execute it.
    """
    environment = {**os.environ, VARIABLE: str(folder)}
    environment.pop("ENABLE_SEARCH", None)
    if sys.stdout is not None:  # closed by the shell (>&-)
        sys.stdout.flush()
    try:
        return subprocess.Popen(
            command, env=environment, stdout=2 if quiet else None, start_new_session=own_group
        )
    except OSError as error:
        raise DiscoError(f"{command[0]} cannot be started: {error.strerror or error}") from error
