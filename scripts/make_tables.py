"""Tables of the evaluation (DisCo, section 6) from what scripts/benchmark.py measured.

    python scripts/make_tables.py DIR                    DIR/tables.md
    python scripts/make_tables.py DIR --out OTHER        OTHER/tables.md
    python scripts/make_tables.py --figures              figures of README and docs/ that are in no record

Reads every record in DIR. Exit status 1: there are such figures; 2: no record, or one that cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evaluation import commands, fidelity, figures, tables
from evaluation.record import RecordError, read, write_atomically

Section = tuple[str, Callable[[tables.Cells], tables.Table]]
"""Title, and what makes the table."""
WHAT_THEY_SAY = 'docs/benchmarks/evaluation.md, section "The tables", says what is in each.'
SECTIONS: tuple[Section, ...] = (
    ("Step time by scheme (figure 6)", tables.step_times),
    ("Speed-up over the best baseline (table 1)", tables.speed_ups),
    ("Compute, communication, overlap (figure 7)", tables.overlaps),
    ("What contributes what", tables.parts),
    ("By simpler means", tables.simple_ways),
    ("By other searches", tables.searches),
    ("Looking again", tables.looks),
    ("Predicted against measured", fidelity.fidelity),
    ("By day", fidelity.days),
    ("Every plan on CPU", fidelity.cpu_plans),
    ("What the evaluation took", tables.costs),
    ("Numbers", tables.numbers),
    ("Rows without a time", tables.missing),
)
OF_FORMS: tuple[Section, ...] = (
    ("Predicted against measured", fidelity.form_fidelity),
    ("Every plan", fidelity.every_plan),
    ("Peak memory", fidelity.memory),
    ("What the evaluation took", tables.costs),
    ("Numbers", tables.numbers),
    ("Rows without a time", tables.missing),
)
"""Where all records are of forms of the Llama step."""


def records_in(folder: Path) -> list[dict[str, Any]]:
    """The records in a folder, by link, devices and model.

    Raises:
        RecordError: there is none, or one of them cannot be read.
    """
    found = [read(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise RecordError(
            f"{folder} holds no record (*.json); scripts/benchmark.py --out {folder} makes them"
        )
    return sorted(found, key=_place)


def _place(record: Mapping[str, Any]) -> tuple[int, int, str, str]:
    cell, links = record["cell"], list(commands.LINKS)
    link = links.index(cell["link"]) if cell["link"] in links else len(links)
    return link, cell["devices"], cell["size"], cell["model"]


def document(records: tables.Cells) -> str:
    """All tables in markdown."""
    made_with = sorted({_made_with(one) for one in records})
    lines = ["# Evaluation", "", *(f"- {line}" for line in made_with), "", WHAT_THEY_SAY]
    sections = OF_FORMS if all(commands.is_form(one["cell"]["model"]) for one in records) else SECTIONS
    for title, make in sections:
        table = make(records)
        if table[1]:
            lines += ["", f"## {title}", "", tables.markdown(table).rstrip()]
    return "\n".join(lines) + "\n"


def _made_with(record: Mapping[str, Any]) -> str:
    facts, versions = record["facts"], record["facts"].get("versions", {})
    what = ", ".join(f"{name} {versions[name]}" for name in ("jax", "jaxlib") if name in versions)
    return f"{facts.get('device', 'unknown device')}, {what}, {facts.get('date', 'no date')}"


def write(folder: Path, out: Path) -> None:
    """Write ``out``/tables.md from the records in ``folder``.

    Raises:
        RecordError: as :func:`records_in`.
        OSError: it cannot be written.
    """
    records = records_in(folder)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "tables.md", document(records).encode())


def main() -> int:
    """Write the tables."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path, metavar="DIR", nargs="?")
    parser.add_argument("--out", type=Path, help="folder to write to (default DIR)")
    parser.add_argument("--figures", action="store_true", help="look for the figures of README and docs/")
    args = parser.parse_args()
    if args.figures:
        found = figures.problems(Path(__file__).resolve().parents[1])
        print("\n".join(found) or "every figure is in a record or has a reason")
        return int(bool(found))
    if args.folder is None:
        parser.error("name a folder of records")
    out = args.out or args.folder
    try:
        write(args.folder, out)
    except (RecordError, OSError) as error:
        print(f"make_tables.py: {error}", file=sys.stderr)
        return 2
    print(out / "tables.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
