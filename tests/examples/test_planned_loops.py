"""A step with scanned layers computes the same whatever its loops execute: random kernels, a random order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest
from jax.sharding import Mesh

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.apply import apply
from disco_hlo.plan.read import verify
from disco_hlo.plugin.xla import compiles, executables, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.examples.test_modern_steps import TINY, initial_state
from tests.fuzz.strategies import Wanted, strategy_of
from tests.plan.executed import executed_difference

STEPS = 5
PLAN = Wanted("order", 236)
"""With this seed the kernels are random, too, in the entry and in both loops."""


def trained(one: Wanted | None) -> list[float]:
    """Losses on two devices, where entry and loops execute such a strategy; None leaves XLA's default."""
    form = llama.Form("fsdp", "scan", "dots")
    where = llama.Layout(Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "model")), form)
    state = jax.device_put(initial_state(form.layers, form.projections), llama.state_shardings(TINY, where))
    step = llama.compile_step(TINY, where)
    _, shape = llama.abstract_arguments(TINY, where)
    batches = np.random.default_rng(0).integers(0, TINY.vocabulary, (STEPS, *shape.shape))
    planned: list[str] = []

    def handler(request: CompileRequest) -> LoadedExecutable | None:
        if one is None or request.module_name != "jit_train_step":
            return None
        source = canonicalize(compiles.capture(request))
        strategy = strategy_of(source, one)
        module = apply(strategy, source)
        verify(source, module, strategy)
        planned.extend(name for name, _ in strategy.regions)
        executable = compiles.compile_module(request, module)
        assert executed_difference(module, executables.read_executable(executable)) is None
        return executable

    jaxlink.install(handler)
    try:
        losses = []
        for batch in batches:
            state, loss = step(state, jnp.asarray(batch, jnp.int32))
            losses.append(float(loss))
    finally:
        jaxlink.uninstall()
    assert planned == ([] if one is None else ["loop1", "loop2"])
    return losses


@pytest.mark.slow
def test_losses_are_the_defaults_whatever_plan_the_loops_execute() -> None:
    """The loops of sharded weights have all that others have, and gathers."""
    # A last digit of a loss: other fusions round in other places.
    np.testing.assert_allclose(trained(PLAN), trained(None), rtol=5e-7)
