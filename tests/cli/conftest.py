"""Calling ``disco`` in this process, as the console script does."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.cli import main
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.report import bundle
from tests.report import plans
from tests.report.conftest import cpu_plan, h200_plan, vgg19_plan

__all__ = ["cpu_plan", "h200_plan", "vgg19_plan"]


@dataclass(frozen=True)
class Outcome:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Disco = Callable[..., Outcome]
canonical = functools.lru_cache(8)(canonicalize)
"""Most of a command is bringing its step into its canonical form: for equal modules once is enough."""


@pytest.fixture
def disco(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disco:
    """``disco("list", "--json")``; the plan directory is a fresh one unless DISCO_DIR is set."""
    monkeypatch.setenv("DISCO_DIR", str(tmp_path / "plans"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(bundle, "canonicalize", canonical)

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["disco", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def refused(disco: Disco) -> Callable[..., str]:
    """Calls ``disco`` with what it cannot use: exit code 2, one message on stderr, which is returned."""

    def run(*arguments: str | Path) -> str:
        outcome = disco(*arguments)
        assert outcome.code == 2, outcome
        assert outcome.out == ""
        assert "Traceback" not in outcome.err
        message = " ".join(outcome.err.split())
        assert message.startswith(("disco: ", "Usage: "))
        return message

    return run


@pytest.fixture(scope="session")
def cpu_module_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """XLA's module of the small step, alone in a file."""
    path = tmp_path_factory.mktemp("module") / "step.hlo.pb"
    path.write_bytes(plans.cpu_module())
    return path
