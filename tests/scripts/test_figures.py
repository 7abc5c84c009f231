"""Figures of the README and of docs/benchmarks.md are those of the records beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from evaluation import tables
from make_tables import document, records_in

ROOT = Path(__file__).parents[2]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
RECORDS = ROOT / "docs" / "benchmarks"
OFFERED = ("XLA default", "no all-reduce combining", "best threshold", "PGLE", "O1")
MODELS = {
    "12-layer transformer": "gpt12", "gpt12, a 12-layer transformer": "gpt12", "LSTM": "rnnlm",
    "rnnlm, an LSTM": "rnnlm",
}  # fmt: skip
H200, H100 = ("h200", "nvlink", 2), ("h100", "nvlink", 2)
COLUMNS: dict[tuple[str, ...], tuple[tuple[str, str, int], ...]] = {
    ("one GPU", "NVLink", "host-staged", "sockets"): (
        ("h200", "nvlink", 1), H200, ("h200", "staged", 2), ("h200", "sockets", 2),
    ),
    ("NVLink", "host-staged", "sockets"): (H100, ("h100", "staged", 2), ("h100", "sockets", 2)),
    ("one H200", "2 x H200, NVLink", "staged", "sockets", "2 x H100, NVLink", "staged", "sockets"): (
        ("h200", "nvlink", 1), H200, ("h200", "staged", 2), ("h200", "sockets", 2),
        H100, ("h100", "staged", 2), ("h100", "sockets", 2),
    ),
}  # fmt: skip
STRUCTURES = {
    "tensor-parallel transformer, forward": "tp-forward",
    "tensor-parallel transformer, training": "tp-train",
}


def tables_in(page: Path) -> Iterator[tuple[tuple[str, ...], list[list[str]]]]:
    """Header, without its first cell, and rows of every table."""
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        yield tuple(rows[0][1:]), rows[2:]


def of_default(record: Mapping[str, Any], bracket: bool) -> str:
    """The tool's choice over XLA's default, and the best baseline in brackets."""
    found = tables.schemes(record)
    best = min(found[name] for name in OFFERED if name in found)
    default = found["XLA default"]
    return f"{found['plan'] / default:.2f}" + (f" ({best / default:.2f})" if bracket else "")


def expected(folder: str, link: str, devices: int, row: str, cell: str) -> str:
    if row in STRUCTURES:
        (record,) = [
            one for one in records_in(RECORDS / "structure")
            if (one["cell"]["model"], one["cell"]["link"]) == (STRUCTURES[row], link)
        ]  # fmt: skip
        return f"{min(one['of_default'] for one in record['rows'].values() if one['status'] == 'ok'):.2f}"
    (record,) = [
        one for one in records_in(RECORDS / folder)
        if (one["cell"]["model"], one["cell"]["link"], one["cell"]["devices"])
        == (MODELS.get(row, row.lower()), link, devices)
    ]  # fmt: skip
    return of_default(record, "(" in cell)


@pytest.mark.parametrize(("page", "count"), [(README, 2), (PAGE, 1)], ids=["README", "benchmarks"])
def test_step_times_of_default_are_those_of_the_records(page: Path, count: int) -> None:
    found = [(COLUMNS[header], rows) for header, rows in tables_in(page) if header in COLUMNS]
    assert len(found) == count
    checked = 0
    for columns, rows in found:
        for name, *cells in rows:
            for place, cell in zip(columns, cells, strict=True):
                if cell:
                    assert cell == expected(*place, name, cell), (name, place)
                    checked += 1
    assert checked > 30


def test_the_readmes_first_table_is_of_the_record_of_the_demos_step() -> None:
    header, rows = next(tables_in(README))
    assert header == ("measured", "noise", "predicted", "error")
    kept = (RECORDS / "cpu" / "tables.md").read_text()
    for row in rows:
        assert f"| transformer_lm (tiny), gloo, 2 | {' | '.join(row)} |" in kept


@pytest.mark.parametrize("folder", ["cpu", "h100", "h100/llama", "h200"])
def test_the_tables_are_what_the_records_make(folder: str) -> None:
    assert (RECORDS / folder / "tables.md").read_text() == document(records_in(RECORDS / folder))


def test_errors_and_orders_on_the_page_are_those_of_the_tables() -> None:
    wanted = {"h200": "2026-11-25, 2", "h100": "2026-11-25, 2", "cpu": "2026-11-22, 2"}
    (rows,) = [rows for header, rows in tables_in(PAGE) if header[-1].startswith("Kendall's tau, by model")]
    for (_, plans, mean, largest, taus), (folder, day) in zip(rows, wanted.items(), strict=True):
        line = next(line for line in (RECORDS / folder / "tables.md").read_text().splitlines() if day in line)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert [plans, mean, largest, taus] == [cells[2], cells[3], cells[4], cells[6]]


FORMS = {
    "DP, layers in a loop": "dp-scan",
    "FSDP, layers in a loop": "fsdp-scan",
    "FSDP, unrolled": "fsdp-unroll",
}


def test_the_forms_on_the_llama_page_are_those_of_the_records() -> None:
    folder = RECORDS / "h100" / "llama"
    (_, errors), (_, plans), *_ = tables_in(folder / "tables.md")
    (_, forms), *_ = tables_in(RECORDS / "llama.md")
    for form, default_ms, order, plan, random, mean, largest, tau in forms:
        place = f"llama-{FORMS[form]}, staged, 2"
        of_form = {row[1]: row for row in plans if row[0] == place}
        (error,) = [row for row in errors if row[0] == place]
        assert [default_ms, order, plan] == [
            of_form["XLA default"][2], of_form["plan's order only"][6], of_form["plan"][6]
        ]  # fmt: skip
        drawn = sorted(row[6] for name, row in of_form.items() if name.startswith("random"))
        assert random == f"{drawn[0]} to {drawn[-1]}"
        assert [mean, largest, tau] == [error[2], error[3], error[5]]


@pytest.mark.parametrize(
    ("table", "name"), [(1, "llama-full-fsdp-scan-staged-2"), (2, "llama-full-fsdp-scan-staged-2-p2")]
)
def test_the_training_runs_on_the_llama_page_are_those_of_the_records(table: int, name: str) -> None:
    record = json.loads((RECORDS / "h100" / "training" / f"{name}.json").read_text())
    _, rows = [*tables_in(RECORDS / "llama.md")][table]
    for row, run in zip(rows, record["runs"], strict=False):
        found = (run[what] for what in ("median_ms", "last_loss", "first_step_s"))
        assert row == [run["name"], *(", ".join(map(str, one)) for one in found)]
    default, plan = (run["median_ms"] for run in record["runs"][:2])
    ratios = [round(a / b, 3) for a, b in zip(plan, default, strict=True)]
    assert ratios == record["of_default"]
    if len(ratios) > 1:
        assert rows[-1] == ["ratio", ", ".join(f"{one:.3f}" for one in ratios), "", ""]


def test_what_the_llama_page_says_of_memory_is_in_the_tables() -> None:
    """Of all plans but one XLA allocates what was predicted, within 0.8 %."""
    (memory,) = [rows for header, rows in tables_in(RECORDS / "h100/llama/tables.md") if "XLA" in header]
    errors = {
        (form, plan): round(100 * (int(predicted) / int(allocated) - 1), 1)
        for form, plan, predicted, allocated, *_ in memory
    }
    assert errors.pop(("llama-fsdp-scan, staged, 2", "plan")) == -3.8
    assert len(errors) == 19
    assert all(abs(error) <= 0.8 for error in errors.values())


def test_what_the_llama_page_says_of_structure_and_of_a_search_while_it_trains_is_recorded() -> None:
    page = " ".join((RECORDS / "llama.md").read_text().split())
    records = RECORDS / "h100" / "training"
    once = json.loads((records / "gather-once-full-fsdp-scan-staged-2.json").read_text())["candidates"]
    ms = {one["name"]: one["measured_ms"] for one in once}
    default, structure = ms.pop("XLA default"), ms.pop("gather-once")
    told = f"took {structure:.2f} ms, the best plan without it {min(ms.values()):.2f}, XLA's default {default:.2f}"
    assert f"{told} ({structure / default:.3f})" in page
    trained = json.loads((records / "while-training-tiny-fsdp-scan-staged-2.json").read_text())
    training, alone = trained["training"], trained["training against the first default"]
    pieces = sum(one["pieces"] for one in training["held"])
    for said in (
        f"after {training['first_step_s']:.1f} s ({trained['default']['first_step_s']:.1f} without the switch)",
        f"after {training['settled_after_s']:.0f} s and {training['settled_at_call']:,} calls",
        f"for {training['held_s']:.1f} s in {pieces} pieces",
        f"{alone['share_of_throughput']:.2f} of the throughput of the default run before it",
        f"{training['share_of_throughput']:.2f} of the mean of both",
        f"held it for {trained['compile']['first_step_s']:.0f} s",
    ):
        assert said in page
