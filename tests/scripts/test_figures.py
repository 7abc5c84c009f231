"""Figures of the README and of docs/ are those of the records beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from evaluation import figures
from make_tables import document, records_in

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "benchmarks"
STAGED_BEYOND = {
    ("llama-fsdp-scan, staged, 2", "plan"): -3.8,
    ("llama-fsdp-scan-x8, staged, 2", "XLA's double-buffered loop"): 4.5,
}


def test_every_figure_is_in_a_record_or_has_a_reason() -> None:
    assert figures.problems(ROOT) == []


@pytest.mark.parametrize(
    "folder",
    [
        "cpu",
        "h100",
        "h100/llama",
        "h100/llama_nvlink",
        "h200",
        "h200/llama",
        "h200/one_gpu",
        "h200/llama_sockets",
        "h200/llama_sockets_held",
    ],
)
def test_the_tables_are_what_the_records_make(folder: str) -> None:
    assert (RECORDS / folder / "tables.md").read_text() == document(records_in(RECORDS / folder))


@pytest.mark.parametrize(
    ("link", "plans", "within", "beyond"),
    [
        ("", 33, 1.9, STAGED_BEYOND),
        ("_nvlink", 33, 2.5, {}),
    ],
)
def test_plans_take_the_memory_that_was_predicted_as_the_page_says(
    link: str, plans: int, within: float, beyond: dict[tuple[str, str], float]
) -> None:
    [(_, rows)] = [
        table
        for table in figures.tables_in((RECORDS / f"h100/llama{link}/tables.md").read_text())
        if "XLA" in table[0]
    ]
    errors = {row[:2]: round(100 * (int(row[2]) / int(row[3]) - 1), 1) for row in rows}
    assert len(errors) == plans
    assert {plan: error for plan, error in errors.items() if abs(error) > within} == beyond


@pytest.fixture
def page(tmp_path: Path) -> Callable[[str, str], list[str]]:
    """Problems of a README, by the entries of its figures, beside two records."""
    records = tmp_path / figures.BENCHMARKS
    records.mkdir(parents=True)
    runs = [{"name": "plan", "ms": [1.26, 3], "end_ns": 2500000}]
    (records / "run.json").write_text(json.dumps({"runs": runs, "share": 0.5}))
    rows = "| model | row | ms |\n| --- | --- | --- |\n| a | plan | 7.26 % |\n| a | other | - |\n"
    (records / "page.md").write_text(f"\n## Steps (figure 6)\n\n{rows}")
    (tmp_path / "CONTRIBUTING.md").write_text("")

    def problems(text: str, entry: str) -> list[str]:
        (tmp_path / "README.md").write_text(text)
        (records / "figures.toml").write_text(
            f'["docs/benchmarks/page.md"]\nkept = "here"\n["README.md"]\n{entry}'
        )
        return figures.problems(tmp_path)

    return problems


MS = "run.json: runs > plan > ms > *"
PROSE = 'prose."takes {} of {} ms" = ["run.json: runs > plan > ms > 0", "run.json: runs > plan > ms > 1"]'
TABLE = """[["README.md".tables]]
header = "run | end, ms | share"
cells = ["run.json: runs > {1} > end_ns", "run.json: share"]
"""
HEAD = "| run | end, ms | share |\n| --- | --- | --- |\n"


@pytest.mark.parametrize(
    ("text", "entry", "problem"),
    [
        ("It takes 1.3 of\n3 ms.", PROSE, ""),
        ("It takes 1.2 of 3 ms.", PROSE, "1.2 ms, and the record 1.26"),
        ("It takes 1.3 of 3 ms, or 4 ms.", PROSE, "4 has neither record nor reason"),
        ("It takes 1.3 of 3 ms, or 4 ms.", f'{PROSE}\nothers."or 4 ms" = "bound"', ""),
        ("Nothing.", PROSE, "is said to have 'takes {} of {} ms'"),
        ("It takes 2.5 ms.", 'prose."{} ms" = ["run.json: runs > plan > end_ns"]', ""),
        ("It takes 50 %.", 'prose."{} %" = ["run.json: share"]', ""),
        ("It takes 7.3 %.", 'prose."{} %" = ["page.md: Steps > a > plan > ms"]', ""),
        ("It takes 2.4x.", f'prose."{{}}x" = ["most of {MS} ÷ least of {MS}"]', ""),
        ("It takes 58 %.", f'prose."{{}} %" = ["1 - least of {MS} ÷ most of {MS}"]', ""),
        ("It takes 2 rounds.", f'prose."{{}} rounds" = ["count of {MS}"]', ""),
        ("It takes 1 rounds.", f'prose."{{}} rounds" = ["count of {MS} < 3"]', ""),
        ("It takes 1 rounds.", 'prose."{} rounds" = ["count of run.json: runs > missing"]', "no record has"),
        ("`2 ms`, [a](b-2.5.md) in section 4.3, 2026-11-20, jax 0.10.2, 2 x H100\n\n    3 ms\n", "", ""),
        (f"{HEAD}| Plan | **2.5** | 50 % |\n", TABLE, ""),
        (f"{HEAD}| Plan | 2.5 | 51 % |\n", TABLE, "51 %, and the record 0.5"),
        (f"{HEAD}| Plan | 2.5, 2.5 | |\n", TABLE, "figures: 2, and 1 in the records"),
        (f"{HEAD}| Plan | 2.5 to 3 | |\n", "", "ms | share' has neither record nor reason"),
        ("", TABLE, "is said to have the table"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_figure_is_held_against_the_record(
    text: str, entry: str, problem: str, page: Callable[[str, str], list[str]]
) -> None:
    found = page(text, entry)
    assert len(found) == bool(problem), found
    assert not problem or problem in found[0]


def test_a_figure_of_the_readme_that_is_changed_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "CONTRIBUTING.md", tmp_path)
    readme = (ROOT / "README.md").read_text()
    for old, new in (("146.59", "146.49"), ("0.74 (0.92)", "0.73 (0.92)"), ("149.2 ms", "139.2 ms")):
        assert readme.count(old) == 1
        (tmp_path / "README.md").write_text(readme.replace(old, new))
        [problem] = figures.problems(tmp_path)
        assert new.split()[0] in problem
