"""``disco calibrate``: measure everything the simulator computes with, on the devices of a training command."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from disco_hlo.cli import training
from disco_hlo.cli.output import add_row, check_places, print_json, say, show, table, write_file
from disco_hlo.errors import DiscoError
from disco_hlo.plan.store import PROFILE_NAME
from disco_hlo.plugin.phases.capture_record import RECORD_NAME
from disco_hlo.profiler.collectives import AllReduceFit
from disco_hlo.profiler.profile import Profile, load, to_json

_POLL_S = 0.2
_PATIENCE_S = 10.0


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
    """Measure op times, launch cost, all-reduce lines, contention and noise, and write them as a profile.

    The command is started, its step measured on its own devices while it compiles, and the command ended; it
    does not train. What was measured before, for another model too, is taken from the plan directory.
    """
    training.require(command, "disco calibrate -o profile.json -- python train.py")
    aside = check_places({"-o": output}, as_json=as_json)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="disco_calibrate_") as folder:
        profile = _measured(command, Path(folder), seconds, quiet=as_json or aside)
    write_file(output, to_json(profile).encode())
    taken_s = time.monotonic() - started
    if as_json:
        print_json({"file": str(output), "seconds": round(taken_s, 1), **_facts(profile)})
        return
    _print(profile, aside)
    say(f"measured in {taken_s:.0f} s; the profile is {'on stdout' if aside else f'in {output}'}")


def _measured(command: list[str], folder: Path, seconds: float, *, quiet: bool) -> Profile:
    """The profile that the command's own processes take, after which they are ended.

    Raises:
        DiscoError: the command ended or the time was up before there was one, or its step cannot be measured.
    """
    process = training.start(command, folder, quiet=quiet, own_group=True)
    deadline = time.monotonic() + seconds
    try:
        while not (folder / RECORD_NAME).exists() and process.poll() is None:
            if time.monotonic() > deadline:
                raise DiscoError(f"nothing was measured within {seconds:g} s; give it longer with --seconds")
            time.sleep(_POLL_S)
    finally:
        _end(process)
    if not (folder / RECORD_NAME).exists():
        raise DiscoError(f"the command ended with exit code {process.returncode} and {training.NO_STEP}")
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
    slowed = profile.contention
    return {
        "platform": str(profile.platform),
        "link": {
            "device_count": profile.link.device_count,
            "process_count": profile.link.process_count,
            "label": profile.link.label,
        },
        "ops": len(profile.ops),
        "launch_ns": profile.launch_ns,
        "memory_bandwidth": profile.memory_bandwidth,
        "flops_per_s": profile.flops_per_s,
        "noise": profile.noise,
        "contention": None if slowed is None else [slowed.compute, slowed.communication],
        "contention_by_kind": None
        if slowed is None or slowed.products is None
        else [slowed.products, slowed.others],
        "transfer_wait_ns": None if slowed is None else slowed.transfer_wait_ns,
        "holds": dict(profile.holds),
        "all_reduce": _fit_facts(profile.all_reduce),
        "in_step": None if profile.in_step is None else asdict(profile.in_step),
        "together": None if profile.together is None else asdict(profile.together),
        "collectives": {
            kind: {
                "swept": _fit_facts(known.swept),
                "in_step": None if known.in_step is None else asdict(known.in_step),
                "together": None if known.together is None else asdict(known.together),
            }
            for kind, known in profile.collectives.items()
        },
        "loops": {
            body: {
                "executions": loop.executions,
                "own_ns": loop.own_ns,
                "first_more_ns": loop.first_more_ns,
            }
            for body, loop in profile.loops.items()
        },
    }


def _fit_facts(fitted: AllReduceFit | None) -> dict[str, Any] | None:
    if fitted is None:
        return None
    return {
        "pieces": [[line.from_bytes, line.ns_per_byte, line.offset_ns] for line in fitted.line.lines],
        "median_error": fitted.median_error,
        "maximum_error": fitted.maximum_error,
    }


def _print(profile: Profile, aside: bool = False) -> None:
    rows = table("", "measured")
    add_row(rows, "device", profile.platform)
    add_row(rows, "op and kernel times", len(profile.ops))
    add_row(rows, "launch", f"{profile.launch_ns / 1e3:.2f} µs")
    add_row(rows, "memory bandwidth", f"{profile.memory_bandwidth / 1e9:.1f} GB/s")
    add_row(rows, "arithmetic", f"{profile.flops_per_s / 1e9:.0f} GFLOP/s")
    swept = {
        "all-reduce": profile.all_reduce, **{kind: one.swept for kind, one in profile.collectives.items()}
    }  # fmt: skip
    for kind, fitted in swept.items():
        for piece in fitted.line.lines if fitted else ():
            line = f"{piece.offset_ns / 1e3:.1f} µs + {piece.ns_per_byte:.4g} ns a byte"
            add_row(rows, f"{kind} from {piece.from_bytes} bytes", line)
        if fitted is None:
            continue
        residuals = f"{100 * fitted.median_error:.1f} % median, {100 * fitted.maximum_error:.1f} % largest"
        add_row(rows, "its residuals", residuals)
    if profile.transfers is not None and profile.in_step is not None:
        latency_ns = profile.transfers.lines[0].offset_ns
        add_row(rows, "latency of an all-reduce in the step", f"{latency_ns / 1e3:.1f} µs")
    for loop in profile.loops.values():
        own = f"{loop.own_ns / 1e3:.1f} µs of its own each, first turn {loop.first_more_ns / 1e3:+.1f} µs"
        add_row(rows, f"a loop of {loop.executions} turns a step", own)
    if profile.contention is not None:
        slowed = (
            f"compute {profile.contention.compute:.3f}, collectives {profile.contention.communication:.3f}"
        )
        add_row(rows, "slowed by each other", slowed)
        if profile.contention.products is not None and profile.contention.others is not None:
            products, others = profile.contention.products, profile.contention.others
            add_row(rows, "of compute by kind", f"matmuls {products:.3f}, others {others:.3f}")
        if profile.contention.transfer_wait_ns:
            wait_us = profile.contention.transfer_wait_ns / 1e3
            add_row(rows, "wait of a collective during kernels", f"{wait_us:.1f} µs")
    if profile.holds:
        held = [share for share in profile.holds.values() if share]
        share = f", {100 * median(held):.0f} % of their time" if held else ""
        add_row(
            rows, "matmuls that delay collectives", f"{len(held)} of {len(profile.holds)} kinds seen{share}"
        )
    add_row(rows, "noise of a step", f"{100 * profile.noise:.1f} %")
    show(rows, aside=aside)
