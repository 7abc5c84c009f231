"""What runs on made-up inputs runs alone, and on all ranks the same."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disco_hlo.activation.agree import Agreement
from disco_hlo.errors import ActivationError, UnsupportedError
from disco_hlo.plugin import refusals
from disco_hlo.plugin import step as steps
from disco_hlo.plugin.phases import capture_phase, search_phase
from disco_hlo.plugin.refusals import may_be_run, refuse_other_threads
from disco_hlo.plugin.session import Session, join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.steps import models
from tests.steps.intercept import intercept

RANKS: Any = SimpleNamespace(process_indices=(0, 1))
ALONE: Any = SimpleNamespace(process_indices=(0,))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing was compiled so far, and what is compiled here, other tests do not know of."""
    for forget in (steps._histories.clear, refusals._out_of_step.clear, refusals._threads.clear):
        forget()
    yield
    refusals._out_of_step.clear()
    refusals._threads.clear()


@pytest.fixture
def compiling_thread() -> Callable[[], None]:
    """Starts a thread that compiles for all processes and goes on; called again, it ends."""
    compiled, ended = threading.Event(), threading.Event()

    def train() -> None:
        may_be_run(RANKS)
        compiled.set()
        ended.wait(60)

    thread = threading.Thread(target=train, name="trains", daemon=True)

    def start_or_end() -> None:
        if not compiled.is_set():
            thread.start()
            assert compiled.wait(60)
        else:
            ended.set()
            thread.join()

    return start_or_end


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
    monkeypatch.setattr(refusals, "agree", lambda *_, **__: Agreement("", "rank 0: A; rank 1: B"))
    with pytest.raises(ActivationError, match="rank 0: A; rank 1: B; no other step is run on made-up inputs"):
        intercept(*models.mlp(), handled)
    steps._histories.clear()
    assert intercept(*models.mlp(), handled) is None
    assert len(joined) == 1


def test_a_step_compiled_beside_a_thread_that_may_run_another_is_not_searched_in_several_processes(
    compiling_thread: Callable[[], None],
) -> None:
    assert may_be_run(RANKS)
    refuse_other_threads(RANKS, threading.current_thread())
    compiling_thread()
    refuse_other_threads(ALONE, threading.current_thread())
    with pytest.raises(UnsupportedError, match=r"another thread \(trains\) may run another step"):
        refuse_other_threads(RANKS, threading.current_thread())
    compiling_thread()
    refuse_other_threads(RANKS, threading.current_thread())


def test_a_step_that_may_not_be_run_is_captured_without_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was run, and its all-reduces met those of the step that another thread trained."""
    monkeypatch.setattr(refusals, "agree", lambda *_, **__: Agreement("", "rank 0: A; rank 1: B"))
    monkeypatch.setattr(capture_phase, "profile_step", lambda *_, **__: pytest.fail("was run"))
    settings = Settings(search=False, directory=tmp_path / "plans")
    with caplog.at_level(logging.INFO, "disco_hlo"):
        intercept(*models.mlp(), lambda request: capture_phase.handle(request, settings, tmp_path / "step"))
    assert "captured without measured times: rank 0: A; rank 1: B" in caplog.text
    assert not (tmp_path / "step" / "profile.json").exists()
    assert (tmp_path / "step" / "default.hlo.pb.gz").exists()
