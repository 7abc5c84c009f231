"""Whatever moves are made or found, XLA computes the same numbers (real steps, CPU devices)."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.variants import normal_form, unfused
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.search import layout as at
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.run import search
from tests.machines import CPU
from tests.outputs import outputs_of
from tests.plan.test_storage_steps import assert_same_numbers, intercepted
from tests.search.cost_models import HashedCosts
from tests.search.states import Bench, undo
from tests.steps import models
from tests.steps.intercept import intercept
from tests.steps.storage_steps import FORMS


@pytest.mark.parametrize("start", ["unfused", "XLA's own"])
def test_any_moves_leave_a_module_with_the_same_numbers(start: str) -> None:
    step, arguments = models.mlp()

    def body(request: CompileRequest) -> None:
        default, captured = compiles.compile_seen(request)
        source = canonicalize(captured)
        graph = source.graph
        expected = outputs_of(Runner(request, default, seed=1))
        first = unfused(graph) if start == "unfused" else read(source)
        for seed in range(2):
            bench = Bench(graph, CPU, start=first)
            before = normal_form(graph, bench.strategy())
            assert bench.random_moves(Random(seed), 400) > 10
            strategy = normal_form(graph, bench.strategy())
            assert strategy != before
            module = apply(strategy, source)
            verify(source, module, strategy)
            found = outputs_of(Runner(request, compiles.compile_module(request, module), seed=1))
            for want, got in zip(expected, found, strict=True):
                for one, other in zip(want, got, strict=True):
                    scale = float(np.max(np.abs(one), initial=0.0)) or 1.0
                    np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-5 * scale)
            undo(bench.step, bench.state, bench.scratch, 0)
            assert bench.scratch.number[at.LOGGED] == 0
            assert normal_form(graph, bench.strategy()) == before

    intercept(step, arguments, body)


@pytest.mark.parametrize("name", FORMS)
def test_what_a_search_finds_computes_what_xla_does(name: str) -> None:
    """Costs that make no sense lead it to kernels that nobody would choose. Other forms of these steps are written and
    run by plan/test_storage_steps.py."""

    def found_in(source: CanonicalModule) -> dict[str, Strategy]:
        start, found = read(source), {}
        for seed in range(3):
            settings = SearchSettings(seed=seed, seeds=1, evaluations=300, processes=1, finalists=2)
            result = search(source.graph, HashedCosts(), CPU, start=start, settings=settings)
            found |= {
                f"search {seed}, {place}": finalist.strategy
                for place, finalist in enumerate(result.finalists)
            }
        assert found
        return found

    intercepted(FORMS[name], lambda request: assert_same_numbers(request, FORMS[name], found_in))
