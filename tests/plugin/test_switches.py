"""What a script has switched on in JAX: one line before the work starts, with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from disco_hlo.errors import UnsupportedError, is_shared
from disco_hlo.plugin import install
from disco_hlo.plugin import step as steps
from disco_hlo.plugin.install import compiles_no_step
from disco_hlo.plugin.phases import enact_phase, search_phase
from disco_hlo.plugin.refusals import refuse_switched_on
from disco_hlo.plugin.session import join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import captured
from tests.steps import models
from tests.steps.intercept import intercept


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Nothing was compiled or said so far."""
    steps._histories.clear()
    install._told.clear()


@pytest.fixture
def debugging() -> Iterator[None]:
    jax.config.update("jax_debug_nans", True)
    yield
    jax.config.update("jax_debug_nans", False)


def test_a_profiler_under_way_is_noticed_before_anything_is_measured(tmp_path: Path) -> None:
    """Two modules were compiled and run before it was seen, and three lines said so."""
    settings = Settings(search=True, directory=tmp_path / "plans")
    jax.profiler.start_trace(str(tmp_path))
    try:
        with pytest.raises(
            UnsupportedError, match=r"jax.profiler.* under way.* start the trace after"
        ) as refused:
            intercept(*models.mlp(), lambda request: search_phase.handle(request, settings))
    finally:
        jax.profiler.stop_trace()
    assert is_shared(refused.value)
    assert not (tmp_path / "plans").exists()
    refuse_switched_on()


@pytest.mark.usefixtures("debugging")
def test_debug_nans_makes_another_step_and_is_named(tmp_path: Path) -> None:
    settings = Settings(search=True, directory=tmp_path)
    with pytest.raises(UnsupportedError, match=r"jax_debug_nans is on, .* another step, .*JAX_DEBUG_NANS=0"):
        intercept(*models.mlp(), lambda request: search_phase.handle(request, settings))
    assert list(tmp_path.iterdir()) == []

    def reason(request: object) -> str:
        session, step = join(request, Settings(search=False, directory=tmp_path)), captured(request)
        return enact_phase._propose(session, step, session.slot(step.source.graph.key)).reason

    assert "there is no plan for it in" in (said := intercept(*models.mlp(), reason))
    assert "; jax_debug_nans is on, " in said


def test_a_script_without_jit_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """What JAX compiles then are single ops, and the way out was not named."""
    caplog.set_level("WARNING", "disco_hlo")
    assert compiles_no_step(leads=True) is False
    jax.config.update("jax_disable_jit", True)
    try:
        assert [compiles_no_step(leads) for leads in (False, True, True)] == [True] * 3
    finally:
        jax.config.update("jax_disable_jit", False)
    [line] = caplog.messages
    assert line.startswith("jax_disable_jit is on: ")
    assert line.endswith("switch it off (JAX_DISABLE_JIT=0)")
