"""What the subcommands print and write: JSON, remarks, files, and tables, that of a step's regions among them."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from disco_hlo.errors import DiscoError, PlanError
from disco_hlo.plan.files import replace_files
from disco_hlo.printable import counted, printable, size_text, time_text

if TYPE_CHECKING:  # the doctor is asked where an import fails
    from disco_hlo.report.regions import RegionFacts


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


STDOUT = Path("-")
"""What a file's name says where its content is to go to stdout."""


def is_stdout(file: Path | None) -> bool:
    """Whether a file is stdout by any name: ``-``, ``/dev/stdout``, or what the shell redirects it to."""
    if file is None or file == STDOUT:
        return file is not None
    if sys.stdout is None:
        return False
    try:
        return os.path.samestat(file.stat(), os.fstat(1))
    except OSError:
        return False


def check_places(files: Mapping[str, Path | None], *, as_json: bool) -> bool:
    """Refuse now, before the work, what could not be written after it.

    Args:
        files: what is to be written, by option; None where the option is not given.
        as_json: whether stdout is to have our JSON document.

    Returns:
        Whether one of the files is stdout, which then has nothing else.

    Raises:
        DiscoError: two would be written to one place, or one of them cannot be written.
    """
    places = {option: file for option, file in files.items() if file is not None}
    places = {option: STDOUT if is_stdout(file) else file for option, file in places.items()}
    places |= {"--json": STDOUT} if as_json else {}
    if sys.stdout is None and STDOUT in places.values():
        raise DiscoError("stdout is closed; name a file")
    for file in places.values():
        same = [option for option, place in places.items() if place == file]
        if len(same) > 1:
            where = "stdout" if file == STDOUT else str(file)
            raise DiscoError(f"{' and '.join(same)} would both go to {where}; name a file for one of them")
        if file != STDOUT:
            check_place(file)
    return any(map(is_stdout, files.values()))


def check_place(file: Path) -> None:
    """Refuse now, before the work, a file that could not be written after it.

    Raises:
        DiscoError: ``file`` is a folder, or what would be its folder is something else, removed or read-only.
    """
    if file.is_dir():
        raise DiscoError(f"{file} is a folder; name a file")
    if _is_written_through(file):
        return
    try:
        whole = file.absolute()
    except FileNotFoundError:
        raise DiscoError(f"{file} cannot be written: the current folder was removed") from None
    existing = next(path for path in whole.parents if path.exists())
    if not existing.is_dir():
        raise DiscoError(f"{existing} is not a folder; {file} cannot be written below it")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DiscoError(f"the folder {existing} is read-only; {file} cannot be written there")


def check_folder(folder: Path, name: str) -> None:
    """Refuse now, before the work, a folder that the file ``name`` could not be written into after it.

    Raises:
        DiscoError: ``folder`` is stdout, a file, below one, or read-only.
    """
    if folder == STDOUT:
        raise DiscoError("- is stdout, and what is written are several files; name a folder")
    if folder.exists() and not folder.is_dir():
        raise DiscoError(f"{folder} is a file; name a folder")
    check_place(folder / name)


def _is_written_through(file: Path) -> bool:
    """A device or a pipe (``/dev/null``, ``>(gzip)``): a file in its place would be no such thing any more."""
    return file.exists() and not file.is_file() and not file.is_dir()


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
    """Write one file, whole or not at all; or stdout, a device or a pipe, which take it as it comes. A link stays one.

    Raises:
        DiscoError: that is not possible.
    """
    if is_stdout(path):
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    if not _is_written_through(path):
        path = path.resolve()
        write_files(path.parent, {path.name: data})
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        raise DiscoError(f"cannot write {path}: {error.strerror or error}") from error


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


_UNFOLDED = 1000
"""Columns of what no terminal shows: wide enough for any row, and nothing is filled up to it."""


def console(*, aside: bool = False) -> Console:
    """What prints tables: folded to the terminal, or to ``COLUMNS``; in a pipe or a file a row is one line."""
    made = Console(highlight=False, soft_wrap=False, stderr=aside)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _UNFOLDED
    return made


def show(*parts: Table | str, aside: bool = False) -> None:
    """Print tables and lines on stdout; ``aside``, where a file goes there, on stderr."""
    printer = console(aside=aside)
    for part in parts:
        if isinstance(part, str):
            printer.print(Text(part), soft_wrap=True)
        else:
            printer.print(part, crop=False)


def region_table(rows: list[RegionFacts]) -> list[Table | str]:
    """The regions with a line on what the columns mean; nothing where the entry is all there is."""
    if all(row.name == rows[0].name for row in rows):
        return []
    made = table(
        "region", "by", "a step", "one takes", "share", "kernels", "exposed", "peak memory", "collectives", "what",
        right=(2, 3, 4, 5, 6, 7),
    )  # fmt: skip
    before = ""
    for row in rows:
        is_first = row.name != before
        before = row.name
        add_row(
            made, row.name if is_first else "", row.strategy, f"{row.executions:g}" if is_first else "",
            time_text(row.execution_ns), f"{row.share:.1%}", row.kernels, time_text(row.exposed_ns),
            size_text(row.peak_bytes), _collectives(row), row.what if is_first else "",
        )  # fmt: skip
    return [
        "regions, predicted; kernels, collectives and exposed communication without those of regions inside:",
        made,
        "",
    ]


def _collectives(row: RegionFacts) -> str:
    if not row.collectives:
        return "none"
    return f"{row.collectives} in {counted(row.buckets, 'bucket')}, {size_text(row.collective_bytes)}"


def regions_as_json(rows: list[RegionFacts]) -> list[dict[str, Any]]:
    """The same for machines."""
    return [{**asdict(row), "what": row.what} for row in rows]
