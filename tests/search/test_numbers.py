"""Whatever moves are made, XLA executes the strategy and computes the same numbers (real steps, two CPU devices)."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.apply import apply
from disco_hlo.plan.baselines import unfused
from disco_hlo.plan.normal import normal_form
from disco_hlo.plan.read import read
from disco_hlo.plan.verify import verify
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.search import layout as at
from tests.machines import CPU
from tests.search.entries import undo
from tests.search.states import Bench
from tests.steps import models
from tests.steps.intercept import intercept


@pytest.mark.parametrize("start", ["unfused", "XLA's own"])
def test_any_moves_leave_a_module_with_the_same_numbers(start: str) -> None:
    step, arguments = models.mlp()

    def body(request: CompileRequest) -> None:
        source = canonicalize(compiles.capture(request))
        graph = source.graph
        expected = Runner(request, compiles.compile_module(request, None), seed=1).outputs()
        first = unfused(graph) if start == "unfused" else read(source)
        for seed in range(3):
            bench = Bench(graph, CPU, start=first)
            before = normal_form(graph, bench.strategy())
            assert bench.random_moves(Random(seed), 400) > 10
            strategy = normal_form(graph, bench.strategy())
            assert strategy != before
            module = apply(strategy, source)
            verify(source, module, strategy)
            found = Runner(request, compiles.compile_module(request, module), seed=1).outputs()
            for want, got in zip(expected, found, strict=True):
                for one, other in zip(want, got, strict=True):
                    scale = float(np.max(np.abs(one), initial=0.0)) or 1.0
                    np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-5 * scale)
            undo(bench.step, bench.state, bench.scratch, 0)
            assert bench.scratch.number[at.LOGGED] == 0
            assert normal_form(graph, bench.strategy()) == before

    intercept(step, arguments, body)
