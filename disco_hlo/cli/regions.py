"""The table of a step's regions, which several subcommands print."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from disco_hlo.cli.output import add_row, table
from disco_hlo.report.printable import size_text, time_text
from disco_hlo.report.regions import RegionFacts


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
    buckets = f"{row.buckets} bucket{'s' * (row.buckets != 1)}"
    return f"{row.collectives} in {buckets}, {size_text(row.collective_bytes)}"


def regions_as_json(rows: list[RegionFacts]) -> list[dict[str, Any]]:
    """The same for machines."""
    return [{**asdict(row), "what": row.what} for row in rows]
