"""The ``disco`` command: which subcommands there are, and what becomes of errors.

A subcommand is imported when it is called, so that none of them waits for the imports of another.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import shlex
import sys
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from disco_hlo.errors import DiscoError
from disco_hlo.printable import printable


@dataclass(frozen=True, slots=True)
class Entry:
    """One subcommand."""

    module: str
    """In ``disco_hlo.cli``."""
    function: str
    summary: str
    example: str


COMMANDS = {
    "doctor": Entry("doctor", "doctor", "Check that everything the plugin needs is here.", "disco doctor"),
    "capture": Entry(
        "training", "capture", "Run a training script and save its step for offline search.",
        "disco capture -o captured -- python train.py",
    ),
    "calibrate": Entry(
        "training", "calibrate", "Measure this machine with a training script's step, and say how well.",
        "disco calibrate -o profile.json -- python train.py",
    ),
    "list": Entry("plans", "list_plans", "List the plans in the plan directory.", "disco list --json"),
    "inspect": Entry("inspect", "inspect", "Show what a plan does to a step.", "disco inspect 3f2a"),
    "forgive": Entry("plans", "forgive", "Lift the ban of a plan that crashed.", "disco forgive 3f2a"),
    "diff": Entry("diff", "diff", "Show how two plans of one step differ.", "disco diff 3f2a --default"),
    "simulate": Entry(
        "simulate", "simulate", "Predict the time of a step, with or without a plan.",
        "disco simulate captured --gpus 256 --bandwidth 12.5 --latency 10",
    ),
    "search": Entry(
        "search", "search", "Search a plan for a captured step, without a device.",
        "disco search captured --seconds 30 -o found --json",
    ),
    "report": Entry("report", "report", "Write a plan as one HTML page.", "disco report 3f2a -o plan.html"),
}  # fmt: skip


class _Commands(TyperGroup):
    """Knows names and summaries from the table; imports a subcommand only to run or complete it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands.update(
            {name: TyperCommand(name, help=entry.summary) for name, entry in COMMANDS.items()}
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if not ctx.resilient_parsing:
            _refuse_empty(args)
        return name, command if name is None else load(name), rest


def _refuse_empty(args: list[str]) -> None:
    """Refuse an empty argument: as a path it would be the current folder. A training command may have one.

    Raises:
        DiscoError: an argument or an option's value is empty.
    """
    ours = args[: args.index("--") + 2] if "--" in args else args
    if any(not one or (one.startswith("--") and one.endswith("=")) for one in ours):
        raise DiscoError(f"an argument is empty (is a variable not set?): disco {shlex.join(ours)}")


def load(name: str) -> Any:
    """The subcommand ``name``, imported."""
    entry = COMMANDS[name]
    function = getattr(importlib.import_module(f"disco_hlo.cli.{entry.module}"), entry.function)
    # Its paragraphs, each on one line, are wrapped for the reader's terminal.
    paragraphs = [" ".join(paragraph.split()) for paragraph in function.__doc__.split("\n\n")]
    app = typer.Typer(add_completion=False)
    app.command(
        name,
        help="\n\n".join(paragraphs),
        epilog=f"Example: {entry.example}",
        no_args_is_help=name not in ("doctor", "list"),
    )(function)
    return typer.main.get_command(app)


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        from disco_hlo import __version__

        print(f"disco-hlo {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: disco inspect 3f2a")
def _disco(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_version, is_eager=True
    ),
) -> None:
    """Look at plans, search them offline, and see why a training step got faster."""


def main() -> None:
    """Run ``disco``. Bad input ends it with exit code 2 and one message, Ctrl-C with 130."""
    # A graph lives until the end of a command; looking through it for garbage takes a fifth of the time.
    collecting = gc.isenabled()
    gc.disable()
    if sys.stderr is None:  # closed by the shell (2>&-): what is said there is not wanted, and no failure
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # no µ in ASCII
    try:
        app(prog_name="disco")
    except DiscoError as error:
        lines = [printable(line, 4000) for line in str(error).split("\n")]
        sys.stderr.write("disco: " + "\n".join(lines) + "\n")
        sys.exit(2)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            sys.stderr.write(f"disco: the output could not be written: {error.strerror}\n")
            sys.exit(1)
        if error.filename is None:
            raise
        # Even to ask whether a file exists fails where its name is too long, or its folder may not be entered.
        sys.stderr.write(f"disco: {printable(str(error.filename), 4000)}: {error.strerror}\n")
        sys.exit(2)
    finally:
        if collecting:
            gc.enable()


if __name__ == "__main__":
    main()
