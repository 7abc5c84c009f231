"""``docs/benchmarks/search.json``: a section for every kind of run, a line for every result."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from searching.steps import ROOT

RESULTS = ROOT / "docs" / "benchmarks" / "search.json"


def is_done(arguments: argparse.Namespace, section: str, key: str) -> bool:
    """Whether a result is there and need not be found again."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return not arguments.again and key in found.get(section, {})


def record(section: str, key: str, value: object) -> None:
    """Put one result into the file, at once."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found.setdefault(section, {})[key] = value
    temporary = RESULTS.with_suffix(".new")
    temporary.write_text(_a_result_a_line(found))
    os.replace(temporary, RESULTS)
    print(section, key, json.dumps(value)[:300], flush=True)


def _a_result_a_line(found: dict[str, dict[str, Any]]) -> str:
    """JSON in which a changed result changes one line."""
    sections = []
    for section, results in sorted(found.items()):
        lines = [
            f"  {json.dumps(key)}: {json.dumps(value, sort_keys=True)}"
            for key, value in sorted(results.items())
        ]
        sections.append(f" {json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(sections) + "\n}\n"
