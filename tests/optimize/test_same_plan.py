"""The plugin and ``disco search`` find one plan for one step, by one profile and one seed."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from disco_hlo.cli import main
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.plan import SEARCHED, decode
from disco_hlo.plan.read import read
from disco_hlo.plugin.phases import finding
from disco_hlo.plugin.phases.finding import search_settings
from disco_hlo.plugin.session import Interruption
from disco_hlo.plugin.settings import Settings
from disco_hlo.profiler.profile import Profile, to_json
from disco_hlo.search import joint
from disco_hlo.search.api import SearchSettings
from tests.captured import stored
from tests.report import plans

CANDIDATES = 200


def profile(backend: str) -> Profile:
    measured = plans.sockets_profile()
    return replace(measured, platform=replace(measured.platform, backend=backend))


@pytest.mark.parametrize(
    ("backend", "module"), [("cpu", plans.cpu_module), ("gpu", lambda: stored("h200_models/rnnlm"))]
)
def test_the_plugin_and_the_command_find_one_plan(
    backend: str, module: Callable[[], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin's search looked buckets up one by one, the command's computed them, and each ranked in its own way."""
    data = module()
    (tmp_path / "step.hlo.pb.gz").write_bytes(gzip.compress(data))
    (tmp_path / "profile.json").write_text(to_json(profile(backend)))
    command = ["disco", "search", tmp_path / "step.hlo.pb.gz", "--profile", tmp_path / "profile.json"]
    command += ["-o", tmp_path / "found", "--seed", "3", "--evaluations", CANDIDATES]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    # The plan does not depend on the processes, each of which loads the search's code.
    monkeypatch.setattr(joint, "WORTH_A_PROCESS", 1 << 20)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code in (0, None)
    offline = decode((tmp_path / "found" / "plan.json").read_bytes(), "plan.json")

    def few(settings: Settings) -> SearchSettings:
        """A training says how long to search, not how many candidates."""
        return replace(search_settings(settings), evaluations=CANDIDATES)

    monkeypatch.setattr(finding, "search_settings", few)
    settings = Settings(True, tmp_path, budget_s=1e6, seed=3)
    source = canonicalize(data)
    found = finding.find(settings, lambda *_: None, source, read(source), profile(backend), Interruption())
    assert offline.chosen == SEARCHED
    assert offline.strategy == found.search.best.strategy
    assert offline.prediction == found.search.case.prediction(found.search.best)
    assert offline.search.evaluations == found.search.evaluations
    assert offline.search.improvements == tuple(
        (one.evaluation, one.cost_ns) for one in found.search.result.trace
    )
