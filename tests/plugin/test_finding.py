"""What is said before a search: which share can change, what can be gained, how long it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from disco_hlo.plugin.phases import finding
from disco_hlo.plugin.settings import Settings
from tests.plan.small_graphs import graph

STEP = graph("param\nwhile 0\nexp 1\nall-reduce 2\ntuple 3")


class Costs:
    def op_ns(self, step: Any) -> Any:
        return np.array([{"while": 6_000_000}.get(node.opcode, 1_000_000) for node in step.nodes])


def said(
    monkeypatch: pytest.MonkeyPatch, *, default_ns: int, bound_ns: int, backend: str, cached: bool
) -> str:
    monkeypatch.setattr(finding, "is_cached", lambda _: cached)
    monkeypatch.setattr(finding, "lower_bound", lambda *_: SimpleNamespace(makespan_ns=bound_ns))
    settings = Settings(search=True, directory=Path(), budget_s=90)
    case = SimpleNamespace(
        source=SimpleNamespace(graph=replace(STEP, backend=backend), regions=()),
        xla=None,
        costs=Costs(),
        default=SimpleNamespace(makespan_ns=default_ns),
    )
    return finding.outlook(settings, case)  # type: ignore[arg-type]


def test_a_step_in_a_loop_is_told_how_little_can_change(monkeypatch: pytest.MonkeyPatch) -> None:
    line = said(monkeypatch, default_ns=8_000_000, bound_ns=6_400_000, backend="cpu", cached=True)
    assert line == (
        "a step is predicted to take 8.00 ms; a plan can change 25% of it, the rest lies in loops and branches that "
        "stay as XLA compiled them; another order and other buckets can make it 1.25x faster at best, other kernels "
        "perhaps more; next: search for up to 90 s (DISCO_BUDGET_S), then compile and measure the best plans "
        "for up to 130 s"
    )


def test_a_first_search_on_a_gpu_is_made_twice_and_compiles_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    line = said(monkeypatch, default_ns=8_000_000, bound_ns=7_990_000, backend="gpu", cached=False)
    assert "can make it no faster, other kernels" in line
    assert "next: compile the search's code (some minutes, once on this machine), " in line
    assert "search for up to 2 times 90 s" in line


@pytest.mark.parametrize(
    ("cached", "said"),
    [
        (set(), True),
        ({"disco_hlo.simulator.timeline"}, True),
        ({"disco_hlo.simulator.timeline", "disco_hlo.estimator.analytic"}, False),
    ],
)
def test_nobody_waits_without_a_word_for_the_code_that_predicts(
    monkeypatch: pytest.MonkeyPatch, cached: set[str], said: bool
) -> None:
    """On a machine's first search 50 s went by between the profiling and the next line."""
    monkeypatch.setattr(finding, "is_cached", lambda module: module in cached)
    lines: list[str] = []
    session = SimpleNamespace(say=lines.append)
    assert finding.say_what_predicting_takes(session) is said  # type: ignore[arg-type]
    assert [line.split(",")[0] for line in lines] == ["compiling the code that predicts step times"] * said
