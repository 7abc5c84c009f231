"""Where kernels are long, the host launches each by itself: searched so, saved so, enacted so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from disco_hlo.backends import BACKENDS
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.regions import Region
from disco_hlo.optimize import regions
from disco_hlo.optimize.regions import launched_singly, launching_ns
from disco_hlo.plan import plan as plans
from disco_hlo.plan.read import read
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.measuring.candidates import compile_trials
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.phases import enact_phase, finalists
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.captured import captured
from tests.plugin.handled import in_session, save_plan
from tests.steps import models
from tests.steps.intercept import intercept

SINGLY = BACKENDS["gpu"].singly_options


@pytest.fixture
def compiled_with(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, object]]:
    """The options of each compile of ours that goes to its end, on a CPU that would record launches."""
    found: list[Mapping[str, object]] = []
    compile_past_cache = compiles.compile_past_cache

    def noting(request: CompileRequest, module: object, options: Mapping[str, str]) -> LoadedExecutable:
        executable = compile_past_cache(request, module, options)
        found.append(options)
        return executable

    monkeypatch.setattr(compiles, "compile_past_cache", noting)
    monkeypatch.setitem(BACKENDS, "cpu", replace(BACKENDS["cpu"], singly_options=SINGLY))
    return found


def test_only_long_kernels_are_launched_by_themselves() -> None:
    source = captured("h100_llama/fsdp_unroll")  # 1,230 kernels, none in a loop
    own = read(source)
    assert [launched_singly(source, own, round(ms * 1e6)) for ms in (115, 5, 0)] == [True, False, False]


def test_launching_singly_takes_its_time_for_each_kernel_of_a_step() -> None:
    unrolled, scanned = captured("h100_llama/fsdp_unroll"), captured("h100_llama/dp_scan")
    kernels = [launching_ns(one, read(one)) / regions._LAUNCHING_NS for one in (unrolled, scanned)]
    assert kernels == [1230, 1778]  # in every turn of a loop


def test_kernels_in_loops_stay_recorded() -> None:
    """What the host takes to rewrite 82 kernels is less than 1,778 take longer without a recording."""
    source = captured("h100_llama/dp_scan")
    assert not launched_singly(source, read(source), 115_000_000)


def test_where_a_loop_may_run_thousands_of_short_kernels_all_stay_recorded() -> None:
    source = captured("h100_llama/dp_scan")

    def unknown(region: Region) -> Region:
        return replace(region, calls=tuple(replace(call, trips=None) for call in region.calls))

    endless = replace(source, regions=tuple(unknown(region) for region in source.regions))
    assert not launched_singly(endless, read(source), 1 << 50)


def test_a_backend_that_records_nothing_has_no_such_plans() -> None:
    source = captured("demo_plan/default")
    assert not launched_singly(source, read(source), 1 << 50)


def test_candidates_of_long_kernels_are_compiled_and_saved_so(
    compiled_with: list[Mapping[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finalists, "save_profile", lambda *_: None)

    def look(session: Session, source: CanonicalModule) -> list[tuple[bool, bool | UnsetType]]:
        plan = unfused(source.graph)
        trials = [Trial("long", plan, 10**12), Trial("short", plan, 1), Trial("by itself", plan, 0)]
        compile_trials(session, source, trials, tag="candidate")
        assert not any(trial.error for trial in trials)
        compile_trials(session, source, trials[:1], tag="again")
        own = 10**12 + launching_ns(source, plan)
        assert [trial.predicted_ns for trial in trials] == [own, 1, 0]
        return [(trial.launched_singly, saved(session, source, trials, trial)) for trial in trials]

    assert in_session(tmp_path, look) == [(True, True), (False, UNSET), (False, UNSET)]
    assert sorted(map(dict, compiled_with), key=len) == [{}, {}, dict(SINGLY), dict(SINGLY)]


def saved(session: Session, source: CanonicalModule, trials: list[Trial], winner: Trial) -> bool | UnsetType:
    """What the plan says of launches that is saved where ``winner`` has won."""
    slot, step = session.slot(source.graph.key), SimpleNamespace(source=source, module=b"")
    prediction, record = plans.Prediction(80, 100, 120, 60, 70), plans.SearchRecord("joint", {}, 1, ())
    found = SimpleNamespace(prediction=prediction, record=record, search_s=1.0)
    every: Any = [Trial(plans.DEFAULT, None, 1), replace(winner, name=plans.SEARCHED), *trials]
    profile: Any = SimpleNamespace(transfers=None)
    outcome = finalists.Outcome(session, step, slot, found, profile, every, 1.0, 1.0)  # type: ignore[arg-type]
    assert finalists.save(outcome, winner)
    stored = slot.load()
    assert stored is not None
    return plans.decode(stored.plan_json, "the plan").launched_singly


@pytest.mark.parametrize("singly", [True, False, UNSET])
def test_a_plan_is_enacted_as_it_was_measured(
    singly: bool | UnsetType, compiled_with: list[Mapping[str, object]], tmp_path: Path
) -> None:
    settings = Settings(search=False, directory=tmp_path)

    def enact(request: CompileRequest) -> LoadedExecutable | None:
        slot, _ = save_plan(request, settings)
        stored = slot.load()
        assert stored is not None
        plan = plans.decode(stored.plan_json, "the plan")
        assert plan.launched_singly is UNSET
        told = msgspec.structs.replace(plan, launched_singly=singly)
        assert plans.decode(plans.encode(told), "it") == told
        slot.save(plans.encode(told), stored.module, "", b"")
        return enact_phase.handle(request, settings)

    assert intercept(*models.mlp(), enact) is not None
    assert compiled_with[-1] == (SINGLY if singly is True else {})
