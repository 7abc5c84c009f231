"""Every measured figure of the README and of docs/, found again in the records beside them.

``docs/benchmarks/figures.toml`` says for each page where its figures are kept: for a piece of a sentence, or a table,
the place of each figure in a record. The same file names the figures that nobody measured (settings, bounds,
arithmetic), with the reason, and the pages that are records themselves. What is in neither list, what a record
contradicts, and an entry that fits no page any more are problems.

A place is ``FILE: key > key > ...`` in docs/benchmarks, in a JSON file or in a page's tables: the beginning of a
heading, a row's first cell (and its second, where several begin alike), a column. A key may be a pattern, or several
with ``|`` between; in a list of records it is a name. ``least of``, ``most of``, ``median of``, ``sum of``, ``count
of``, ``first of`` and ``size of`` make one number of all that fits, ``PLACE ~ word`` and ``PLACE < 1`` keep some of it,
``A ÷ B`` is a ratio, and ``... - 1`` and ``1 - ...`` are differences.
"""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

BENCHMARKS = Path("docs", "benchmarks")
_NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"
_UNIT = r"(?:ms|us|µs|ns|s|%|x|[KMG]i?B|times|candidates|calls|samples|pieces|rounds|cells|points)(?![\w-])"
_UNIT_AHEAD = rf"(?:,? (?:to|and|or|of|for|at) {_NUMBER})*\s?({_UNIT})"
_FIGURE = re.compile(rf"(?<![\w.^#/-])(?:{_NUMBER}(?={_UNIT_AHEAD})(?! x H)|-?\d[\d,]*\.\d+(?!\.?\w))")
_REDUCED: dict[str, Callable[[Sequence[Any]], float]] = {
    "least": min, "most": max, "median": statistics.median, "sum": sum, "count": len,
    "first": lambda values: values[0], "size": lambda values: abs(values[0]),
}  # fmt: skip
_SCALES = {
    "ns": {"us": 1e-3, "ms": 1e-6, "s": 1e-9}, "bytes": {"MB": 1e-6, "MiB": 2**-20, "GiB": 2**-30},
}  # fmt: skip
_FIGURES_ALONE = re.compile(
    rf"(?:[-+\d.,()\s]|\b(?:to|of|{_UNIT})|%)*\d(?:[-+\d.,()\s]|\b(?:to|of)\b|{_UNIT})*"
)
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


class PlaceError(Exception):
    """A place is not in the records."""


def tables_in(text: str) -> list[Table]:
    """Header and rows of every table."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", re.sub(r"\*\*|`", "", text), re.MULTILINE):
        rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()]
        found.append((rows[0], rows[2:]))
    return found


def prose_of(text: str) -> str:
    """A page in one line, without tables, headings, code, link targets, and numbers of sections and Pythons."""
    text = re.sub(r"^(?:\||#| {4}).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"`[^`]*`|\*\*", "", text)
    text = " ".join(text.split())
    return re.sub(r"\b(sections?|Python) \d\.\d+(?: and \d\.\d)?", r"\1", text)


@cache
def _read(file: Path) -> Any:
    """A JSON file, or the tables of a page by heading, row and column."""
    text = file.read_text()
    if file.suffix == ".json":
        return json.loads(text)
    sections: dict[str, Any] = {}
    for section in text.split("\n## ")[1:]:
        rows: dict[str, Any] = {}
        for header, cells in tables_in(section):
            twice = len({row[0] for row in cells}) < len(cells)
            for row in cells:
                named = dict(reversed(list(zip(header, row, strict=True))))
                if twice:
                    rows.setdefault(row[0], {})[row[1]] = named
                else:
                    rows[row[0]] = named
        sections[section.partition("\n")[0]] = rows
    return sections


def _fit(node: Any, key: str, heading: bool) -> Iterator[tuple[str, Any]]:
    """What a key names in a part of a record, with its name."""
    if isinstance(node, list):
        names = ("name", "for", "devices")
        given = [[one[n] for n in names if isinstance(one, dict) and n in one] for one in node]
        items = [
            (str(name[0] if name else at), one)
            for at, (name, one) in enumerate(zip(given, node, strict=True))
        ]
    else:
        items = list(node.items()) if isinstance(node, dict) else []
    for pattern in key.split("|"):
        yield from (item for item in items if fnmatchcase(item[0], pattern + "*" * heading))


def _all_at(root: Path, place: str) -> list[tuple[str, Any]]:
    """All values at a place, each with the last key."""
    file, _, path = place.partition(": ")
    found = [("", _read(path)) for path in sorted((root / BENCHMARKS).glob(file))]
    for depth, key in enumerate(path.split(" > ")):
        found = [item for _, node in found for item in _fit(node, key, file.endswith(".md") and not depth)]
    if not found:
        raise PlaceError(f"no record has {place}")
    return found


def values_at(root: Path, place: str) -> list[tuple[str, Any]]:
    """What an entry names: values, each with the key under which the record has it.

    Raises:
        PlaceError: the records have no such place.
    """
    if place.startswith("1 - "):
        return [(key, 1 - _number(value)) for key, value in values_at(root, place.removeprefix("1 - "))]
    if place.endswith(" - 1"):
        return [(key, _number(value) - 1) for key, value in values_at(root, place.removesuffix(" - 1"))]
    if " ÷ " in place:
        (_, above), (_, below) = (one for part in place.split(" ÷ ") for one in values_at(root, part))
        return [("", _number(above) / _number(below))]
    if reduced := re.fullmatch(rf"({'|'.join(_REDUCED)}) of (.*)", place):
        found = [(key, value) for key, value in values_at(root, reduced[2]) if value != "-"]
        numbers = [value if reduced[1] == "count" else _number(value) for _, value in found]
        return [("" if reduced[1] == "count" else found[0][0], _REDUCED[reduced[1]](numbers))]
    if kept := re.fullmatch(r"(.*) ([~<]) (.*)", place):
        found = _all_at(root, kept[1])
        if kept[2] == "~":
            return [item for item in found if kept[3] in str(item[1])]
        return [item for item in found if item[1] != "-" and _number(item[1]) < float(kept[3])]
    return _all_at(root, place)


def _number(value: Any) -> float:
    if isinstance(value, str) and (said := re.search(_NUMBER, value)):
        return float(said[0].replace(",", "")) / (100 if "%" in value else 1)
    if isinstance(value, int | float):
        return value
    raise PlaceError(f"{value!r} is no number")


def agrees(said: str, unit: str, key: str, value: Any) -> bool:
    """Whether a figure of a page is a record's value, rounded to the digits that the page has."""
    number, digits = float(said.replace(",", "")), len(said.partition(".")[2])
    scale = 1.0
    for name, units in _SCALES.items():
        if re.search(rf"_{name}(_|$)", key):
            scale = units.get(unit, units["ms" if name == "ns" else "MB"])
    if unit == "%":
        scale = 100.0
    return abs(_number(value) * scale - number) <= 0.5000001 * 10.0**-digits


class Page:
    """What is wrong with a page's figures."""

    def __init__(self, root: Path, name: str, entry: Mapping[str, Any]) -> None:
        self.root, self.name, self.entry = root, name, entry
        text = (root / name).read_text()
        self.prose, self.tables = prose_of(text), tables_in(text)

    def problems(self) -> Iterator[str]:
        """In its sentences, then in its tables."""
        prose = [] if "kept" in self.entry else self._in_prose()
        for problem in [*prose, *self._in_tables()]:
            yield f"{self.name}: {problem}"

    def _in_prose(self) -> Iterator[str]:
        covered: list[tuple[int, int]] = []
        for fragment in self.entry.get("others", {}):
            places = [one.span() for one in re.finditer(re.escape(fragment), self.prose)]
            covered += places
            if not places and not any(fragment in header for header, _ in self.tables):
                yield f"is said to have {fragment!r}"
        for template, places in self.entry.get("prose", {}).items():
            pattern = re.escape(template).replace(r"\{\}", f"({_NUMBER})")
            found = re.search(pattern, self.prose)
            if found is None:
                yield f"is said to have {template!r}"
                continue
            covered.append(found.span())
            units = [
                ahead[1] if (ahead := re.compile(_UNIT_AHEAD).match(self.prose, found.end(group))) else ""
                for group in range(1, len(found.groups()) + 1)
            ]
            yield from self._compared(found[0], found.groups(), units, places)
        for figure in _FIGURE.finditer(self.prose):
            if not any(start <= figure.start() and figure.end() <= end for start, end in covered):
                around = self.prose[max(0, figure.start() - 40) : figure.end() + 20]
                yield f"{figure[0]} has neither record nor reason: ...{around}..."

    def _in_tables(self) -> Iterator[str]:
        entries = {entry["header"]: entry for entry in self.entry.get("tables", [])}
        missing = set(entries)
        for header, rows in self.tables:
            entry = entries.get(" | ".join(header))
            missing.discard(" | ".join(header))
            if entry is not None and "cells" in entry:
                for row in rows:
                    yield from self._in_row(header, row, entry)
            elif (
                entry is None
                and "kept" not in self.entry
                and any(_FIGURES_ALONE.fullmatch(cell) for row in rows for cell in row[1:])
            ):
                yield f"the table {' | '.join(header)!r} has neither record nor reason"
        for header in missing:
            yield f"is said to have the table {header!r}"

    def _in_row(self, header: Sequence[str], row: Sequence[str], entry: Mapping[str, Any]) -> Iterator[str]:
        label = entry.get("rows", {}).get(row[0], row[0])
        columns = label if isinstance(label, list) else entry["cells"]
        small = str(label).lower()
        for column, cell, places in zip(header[1:], row[1:], columns, strict=True):
            if not cell or not places:
                continue
            for mark, name in (("{0}", str(label)), ("{1}", small), ("{2}", small.replace(", ", "-full-"))):
                places = places.replace(mark, name)
            wanted = places.split(" ; ")
            numbers = re.findall(_NUMBER, re.sub(r"\d{4}-\d\d-\d\d", "", cell))
            unit = next(iter(re.findall(rf"(?<![\w']){_UNIT}", f"{cell} {column}")), "")
            if places.startswith("="):
                values = [str(value) for _, value in values_at(self.root, places[1:])]
                if values != [cell]:
                    yield f"{row[0]}, {column}: {cell}, and the record {', '.join(values)}"
            else:
                yield from self._compared(f"{row[0]}, {column}", numbers, [unit] * len(numbers), wanted)

    def _compared(
        self, where: str, said: Sequence[str], units: Sequence[str], places: Sequence[str]
    ) -> Iterator[str]:
        try:
            values = [item for place in places for item in values_at(self.root, place)]
        except PlaceError as error:
            yield f"{where}: {error}"
            return
        if len(values) != len(said):
            yield f"{where}: figures: {len(said)}, and {len(values)} in the records"
            return
        for figure, unit, (key, value) in zip(said, units, values, strict=True):
            if not agrees(figure, unit, key, value):
                yield f"{where}: {figure} {unit}, and the record {value}"


def problems(root: Path, mapping: Mapping[str, Any] | None = None) -> list[str]:
    """What is wrong with the figures of the pages under ``root``, by ``mapping`` or figures.toml."""
    if mapping is None:
        mapping = tomllib.loads((root / BENCHMARKS / "figures.toml").read_text())
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("**/*.md"))]
    names = [str(page.relative_to(root)) for page in pages if page.name != "tables.md"]
    found = [f"{name} is no page" for name in mapping if name not in names]
    for name in names:
        entry = mapping.get(name, {})
        found += Page(root, name, entry).problems()
    return found
