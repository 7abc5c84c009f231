"""What a search refuses before it has cost anything."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disco_hlo.activation.agree import Agreement, unframe
from disco_hlo.errors import ActivationError, UnsupportedError
from disco_hlo.plugin import step as steps
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.phases import enact_phase, search_phase
from disco_hlo.plugin.session import Session, join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import captured
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.steps import models
from tests.steps.intercept import intercept


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Nothing was compiled so far."""
    steps._histories.clear()
    search_phase._out_of_step.clear()
    search_phase._threads.clear()


def test_a_step_that_calls_python_is_refused_before_it_is_profiled_and_searched(tmp_path: Path) -> None:
    settings = Settings(search=True, directory=tmp_path)
    with pytest.raises(UnsupportedError, match="calls back into Python"):
        intercept(*models.printing(), lambda request: search_phase.handle(request, settings))
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_were_about_to_search_different_steps_wait_for_each_other_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(search=True, directory=tmp_path)
    joined: list[str] = []

    def counted(request: CompileRequest, settings: Settings) -> Session:
        joined.append(request.module_name)
        return join(request, settings)

    def handled(request: CompileRequest) -> object:
        return search_phase.handle(request, settings)

    monkeypatch.setattr(search_phase, "join", counted)
    monkeypatch.setattr(search_phase, "agree", lambda *_, **__: Agreement("", "rank 0: A; rank 1: B"))
    with pytest.raises(ActivationError, match="rank 0: A; rank 1: B; no other step is searched"):
        intercept(*models.mlp(), handled)
    steps._histories.clear()
    assert intercept(*models.mlp(), handled) is None
    assert len(joined) == 1


def test_a_step_compiled_beside_a_thread_that_may_run_another_is_not_searched_in_several_processes() -> None:
    """Whatever a thread compiles it notes before anything else, here that its ranks are out of step."""
    ranks: Any = SimpleNamespace(process_indices=(0, 1), module_name="jit_step")
    alone: Any = SimpleNamespace(process_indices=(0,), module_name="jit_step")
    settings = Settings(search=True, directory=Path())
    search_phase._out_of_step.add((0, 1))
    search_phase.handle(ranks, settings)
    search_phase._refuse_other_threads(ranks)
    compiled, ended = threading.Event(), threading.Event()

    def train() -> None:
        search_phase.handle(ranks, settings)
        compiled.set()
        ended.wait()

    thread = threading.Thread(target=train, name="trains", daemon=True)
    thread.start()
    assert compiled.wait(60)
    search_phase._refuse_other_threads(alone)
    with pytest.raises(UnsupportedError, match="trains, a thread beside this one, may run another step"):
        search_phase._refuse_other_threads(ranks)
    ended.set()
    thread.join()
    search_phase._refuse_other_threads(ranks)


def test_who_enacts_a_step_that_calls_python_is_not_told_to_search_it(tmp_path: Path) -> None:
    def reason(request: object) -> str:
        session, step = join(request, Settings(search=False, directory=tmp_path)), captured(request)
        return enact_phase._propose(session, step, session.slot(step.source.graph.fingerprint)).reason

    assert intercept(*models.printing(), reason).endswith("; a step that calls Python is not searched")
    assert intercept(*models.mlp(), reason).endswith("; search first (ENABLE_SEARCH=1)")


@pytest.mark.parametrize("error", [OSError("Stale file handle"), RecursionError("nested too deeply")])
def test_whatever_keeps_rank_0_from_its_plan_the_others_are_told(error: Exception, tmp_path: Path) -> None:
    sent: list[bytes | None] = []

    def broadcast(payload: bytes | None, **_: object) -> bytes:
        sent.append(payload)
        return payload or b""

    class Unreadable:
        path = tmp_path

        def load(self) -> None:
            raise error

    def received(request: object) -> object:
        session, step = join(request, Settings(search=False, directory=tmp_path)), captured(request)
        channel = SimpleNamespace(rank=0, size=2, broadcast=broadcast)
        return enact_phase._receive(replace(session, channel=channel), step, Unreadable())

    plan, reason = intercept(*models.mlp(), received)
    assert (plan, reason) == (None, one_line(error))
    assert [unframe(payload or b"") for payload in sent] == [(None, reason)]


@pytest.mark.parametrize(
    ("wanted", "backend", "looks"), [(None, "gpu", 1), (None, "cpu", 0), (0, "gpu", 0), (2, "cpu", 2)]
)
def test_a_search_looks_again_on_gpu_unless_told_otherwise(
    wanted: int | None, backend: str, looks: int
) -> None:
    facts = SimpleNamespace(backend=backend)
    settings = Settings(search=True, directory=Path(), looks=wanted)
    assert search_phase._looks(SimpleNamespace(settings=settings, facts=facts)) == looks
