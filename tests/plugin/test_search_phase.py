"""What a search refuses before it has cost anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from disco_hlo.activation.agree import unframe
from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin import step as steps
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.phases import enact_phase, search_phase
from disco_hlo.plugin.phases.finding import looks
from disco_hlo.plugin.session import join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import captured
from tests.steps import models
from tests.steps.intercept import intercept


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Nothing was compiled so far."""
    steps._histories.clear()


def test_a_step_that_calls_python_is_refused_before_it_is_profiled_and_searched(tmp_path: Path) -> None:
    settings = Settings(search=True, directory=tmp_path)
    with pytest.raises(UnsupportedError, match="calls back into Python"):
        intercept(*models.printing(), lambda request: search_phase.handle(request, settings))
    assert list(tmp_path.iterdir()) == []


def test_a_step_whose_devices_decide_by_their_numbers_is_refused_before_it_is_run(tmp_path: Path) -> None:
    """On made-up inputs devices waited for each other, until XLA ended the job."""

    def local(x: Any) -> Any:
        total = jax.lax.pmean(jnp.tanh(x) @ jnp.ones((8, 8)), "data")
        first = jax.lax.axis_index("data") == 0
        return jax.lax.cond(first, lambda: total * jax.lax.pmean(x.sum(), "data"), lambda: total * 2) + x

    rows = PartitionSpec("data")
    step = jax.jit(jax.shard_map(local, mesh=models.mesh(), in_specs=rows, out_specs=rows, check_vma=False))
    settings = Settings(search=True, directory=tmp_path, module="local")
    with pytest.raises(
        UnsupportedError, match=r"a branch .* depends on the device's own number .*; decide by a value"
    ):
        intercept(step, (models.random(0, 8, 8),), lambda request: search_phase.handle(request, settings))
    assert list(tmp_path.iterdir()) == []


def test_who_enacts_a_step_that_calls_python_is_not_told_to_search_it(tmp_path: Path) -> None:
    def reason(request: object) -> str:
        session, step = join(request, Settings(search=False, directory=tmp_path)), captured(request)
        return enact_phase._propose(session, step, session.slot(step.source.graph.key)).reason

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
    ("wanted", "backend", "expected"), [(None, "gpu", 1), (None, "cpu", 0), (0, "gpu", 0), (2, "cpu", 2)]
)
def test_a_search_looks_again_on_gpu_unless_told_otherwise(
    wanted: int | None, backend: str, expected: int
) -> None:
    assert looks(Settings(search=True, directory=Path(), looks=wanted), backend) == expected
