"""Runs a training script in this process, with a fault where one is asked for, and reports what happened.

    python observe.py FOLDER [--fault NAME]... train.py [its arguments]
    python observe.py FOLDER --each PLANS train.py [its arguments]

The second runs the script once for every folder in PLANS, each time with a copy of that in the plan directory's
place, and reports on each in a folder of its name. Most of a short run is starting Python and JAX.

Leaves FOLDER/<rank>.json: the losses, the lines our plugin wrote, what was imported, the bytes the step takes
over from donated arguments. And FOLDER/<rank>-<number>.pb: the step's module as XLA gives it back, twice
where JAX compiled the step twice, for parameters from the host and for those the step itself returned.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

import faults

STEPS = ("train_step", "scheduled_step", "mapped_step", "lonely_step", "jit__fun")  # the last is pmap's


class Overheard:
    """A stream that also keeps our plugin's lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lines: list[str] = []

    def write(self, text: str) -> int:
        self.lines += [line for line in text.splitlines() if line.startswith("disco:")]
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def executed_steps() -> list[Any]:
    """The executables of the step that are alive in this process. Several compiled at once go by numbers."""
    import jax

    gc.collect()
    alive = jax.local_devices()[0].client.live_executables()
    return [one for one in alive if one.hlo_modules()[0].name.partition("__disco_")[0].endswith(STEPS)]


def listening_ports() -> int:
    """On how many TCP ports this process listens."""
    own = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return sum(1 for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own)


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def main(folder: Path, arguments: list[str]) -> None:
    heard = Overheard(sys.stderr)
    sys.stderr = heard  # type: ignore[assignment]
    rank = os.environ.get("TRAIN_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    plans: list[Path | None] = [None]
    if arguments[0] == "--each":
        plans = [*sorted(Path(arguments[1]).iterdir())]
        arguments = arguments[2:]
    report: dict[str, Any] = {}
    # Registered first, so run last: what others say at exit is part of the (last) report.
    atexit.register(lambda: (folder / f"{rank}.json").write_text(json.dumps(report | {"log": heard.lines})))
    while arguments[0] == "--fault":
        faults.arrange(arguments[1])
        arguments = arguments[2:]
    # One place from which the script is run, since the modules that are compared hold the call stack.
    for plan in plans:
        own = folder if plan is None else folder / plan.name
        if plan is not None:
            own.mkdir()
            shutil.rmtree(os.environ["DISCO_DIR"])
            shutil.copytree(plan, os.environ["DISCO_DIR"])
        report = observed(own, rank, arguments)
        if plan is not None:
            (own / f"{rank}.json").write_text(json.dumps(report | {"log": heard.lines}))
            heard.lines = []
            forget_compiled()


def observed(folder: Path, rank: str, arguments: list[str]) -> dict[str, Any]:
    """Run the script, keep the modules of its step, and say what else is to be reported."""
    sys.argv = arguments
    script = runpy.run_path(arguments[0], run_name="__main__")
    steps = executed_steps()
    for number, step in enumerate(steps):
        module = step.hlo_modules()[0].as_serialized_hlo_module_proto()
        (folder / f"{rank}-{number}.pb").write_bytes(module)
    return {
        "losses": script["losses"],
        "donated_bytes": [step.get_compiled_memory_stats().alias_size_in_bytes for step in steps],
        "listening": listening_ports(),
        "imported": sorted(sys.modules),
    }


def forget_compiled() -> None:
    """Let go of the step, so that the next run of the script compiles its own."""
    import jax

    jax.clear_caches()
    assert executed_steps() == []


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
