"""Runs a training script in this process, with a fault where one is asked for, and reports what happened.

    python observe.py FOLDER [--fault NAME]... train.py [its arguments]

Leaves FOLDER/<rank>.json (losses, the lines our plugin wrote, what was imported, bytes donated by the step)
and FOLDER/<rank>.pb, the module of the step that this process executed, as XLA gives it back.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any, TextIO

import faults

STEPS = ("train_step", "mapped_step", "lonely_step")


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


def executed_step() -> Any:
    """The one executable of the step that is alive in this process."""
    import jax

    alive = jax.local_devices()[0].client.live_executables()
    [step] = [one for one in alive if one.hlo_modules()[0].name.endswith(STEPS)]
    return step


def main(folder: Path, arguments: list[str]) -> None:
    heard = Overheard(sys.stderr)
    sys.stderr = heard  # type: ignore[assignment]
    report: dict[str, Any] = {"log": heard.lines}
    rank = os.environ.get("TRAIN_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    # Registered first, so run last: what others say at exit is part of the report.
    atexit.register(lambda: (folder / f"{rank}.json").write_text(json.dumps(report)))
    while arguments[0] == "--fault":
        faults.FAULTS[arguments[1]]()
        arguments = arguments[2:]
    sys.argv = arguments
    script = runpy.run_path(arguments[0], run_name="__main__")
    step = executed_step()
    (folder / f"{rank}.pb").write_bytes(step.hlo_modules()[0].as_serialized_hlo_module_proto())
    report["losses"] = script["losses"]
    report["donated_bytes"] = step.get_compiled_memory_stats().alias_size_in_bytes
    report["imported"] = sorted(sys.modules)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
