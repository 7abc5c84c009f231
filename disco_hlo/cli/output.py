"""What the subcommands print and write."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from disco_hlo.errors import DiscoError, PlanError
from disco_hlo.plan.files import replace_files
from disco_hlo.report.printable import printable


def plan_directory() -> Path:
    """The plan store that the environment names.

    Raises:
        SettingsError: a ``DISCO_*`` variable has a value that cannot be used.
    """
    from disco_hlo.plugin.settings import Settings

    return Settings.from_environment({**os.environ, "ENABLE_SEARCH": "0"}).directory


def print_json(value: Any) -> None:
    """One JSON document on stdout; ASCII, so that no name in it can reach the terminal."""
    print(json.dumps(value, indent=1, allow_nan=False))


def say(line: str) -> None:
    """A remark for people, on stderr, where it is in no machine's way."""
    sys.stderr.write(f"disco: {printable(line, 2000)}\n")


def warn_all(lines: tuple[str, ...] | list[str]) -> None:
    """Say every line."""
    for line in lines:
        say(line)


def as_argument(path: Path | str) -> str:
    """A path whole and as a shell takes it, to be printed in a command that can be copied."""
    return printable(shlex.quote(str(path)), 4000)


def check_place(file: Path) -> None:
    """Refuse now, before the work, what could not be written after it.

    Raises:
        DiscoError: ``file`` is a folder, or what would be its folder is something else or read-only.
    """
    if file.is_dir():
        raise DiscoError(f"{file} is a folder; name a file")
    existing = next(path for path in file.absolute().parents if path.exists())
    if not existing.is_dir():
        raise DiscoError(f"{existing} is not a folder; {file} cannot be written below it")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DiscoError(f"the folder {existing} is read-only; {file} cannot be written there")


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write files into a folder, which is made if need be; each appears whole or not at all.

    Raises:
        DiscoError: that is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiscoError(f"cannot create the folder {folder}: {error.strerror or error}") from error
    for name in files:
        if (folder / name).is_dir():
            raise DiscoError(f"{folder / name} is a folder; name a file")
    try:
        replace_files(folder, files)
    except PlanError as error:
        raise DiscoError(str(error)) from error


def write_file(path: Path, data: bytes) -> None:
    """Write one file, whole or not at all.

    Raises:
        DiscoError: that is not possible.
    """
    write_files(path.parent, {path.name: data})


def table(*headings: str, right: tuple[int, ...] = ()) -> Table:
    """A plain table. The first column never wraps, nor do those in ``right``, which are right-aligned."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for number, heading in enumerate(headings):
        whole = number in right or not number
        justify: Literal["left", "right"] = "right" if number in right else "left"
        least = cell_len(heading) if whole else None
        made.add_column(heading, justify=justify, overflow="fold", no_wrap=whole, min_width=least)
    return made


def add_row(made: Table, *cells: object) -> None:
    """Add a row whose cells are shown as they are, whatever is in them."""
    texts = [Text(printable(str(cell), 400)) for cell in cells]
    for column, text in zip(made.columns, texts, strict=False):
        if column.no_wrap:  # of a number that a narrow terminal cuts, what is left is another number
            column.min_width = max(column.min_width or 0, text.cell_len)
    made.add_row(*texts)


def show(*parts: Table | str) -> None:
    """Print tables and lines on stdout."""
    console = Console(highlight=False, soft_wrap=False)
    for part in parts:
        if isinstance(part, str):
            console.print(Text(part), soft_wrap=True)
        else:
            console.print(part, crop=False)
