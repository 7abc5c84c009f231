"""No loop of compiled code may go on for ever: each ``while`` says beside it, or right above, why it ends.

Nothing interrupts compiled code, neither a budget nor Ctrl-C. A reason is no proof, but who writes it looks for one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("search", "profiler", "estimator", "disco_hlo")
COMPILED = {"compiled", "inner"}


def loops_of_compiled_code() -> Iterator[tuple[Path, int]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and COMPILED & {
                    ast.unparse(one) for one in node.decorator_list
                }:
                    yield from ((file, one.lineno) for one in ast.walk(node) if isinstance(one, ast.While))


def reason(file: Path, line: int) -> str:
    """The comment on the line, or on those right above it."""
    lines = file.read_text(encoding="utf-8").splitlines()
    found = [lines[line - 1].partition("#")[2]]
    above = line - 2
    while lines[above].strip().startswith("#"):
        found.append(lines[above])
        above -= 1
    return " ".join(found).lower()


def test_every_loop_of_compiled_code_says_why_it_ends() -> None:
    loops = list(loops_of_compiled_code())
    assert len(loops) > 50
    silent = [f"{file.relative_to(ROOT)}:{line}" for file, line in loops if "ends" not in reason(file, line)]
    assert not silent, "\n".join(silent)
