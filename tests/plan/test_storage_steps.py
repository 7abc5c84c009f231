"""Steps whose values share memory compute the same numbers under every strategy that the rules accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Kind
from disco_hlo.plan.apply import apply, attested_groups
from disco_hlo.plan.legal import check_strategy
from disco_hlo.plan.plan import Group, Strategy
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.steps import storage_steps
from tests.steps.intercept import intercept
from tests.steps.storage_steps import Form, variants
from tests.steps.strategies import random_strategy

FORMS = dict(variants())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in storage_steps.FORMS else pytest.mark.product_only)
        for name in FORMS
    ],
)
def test_every_legal_strategy_computes_what_xla_does(name: str) -> None:
    """XLA's own plan, the unfused step, one kernel where it is legal, and random strategies: six of each step as it is,
    two of each in another form."""

    def body(request: CompileRequest) -> None:
        random = 6 if name in storage_steps.FORMS else 2
        assert_same_numbers(request, FORMS[name], lambda source: strategies(source, random))

    intercepted(FORMS[name], body)


def intercepted(form: Form, body: Callable[[CompileRequest], Any]) -> Any:
    """Call ``body`` with the compile of a form's step."""
    step = jax.jit(form.function, donate_argnums=form.donated)
    return intercept(step, form.arguments, body, devices=1)


def strategies(source: CanonicalModule, random: int) -> dict[str, Strategy]:
    """What a step is executed as."""
    found = {"XLA's own": read(source), "unfused": unfused(source.graph)}
    whole = _one_kernel(source)
    if whole is not None:
        found["one kernel"] = whole
    return found | {f"random {seed}": random_strategy(source, seed) for seed in range(random)}


def _one_kernel(source: CanonicalModule) -> Strategy | None:
    graph = source.graph
    group = Group(tuple(node.id for node in graph.nodes if node.kind is Kind.FUSIBLE))
    try:
        strategy = Strategy((group,), unfused(graph).buckets)
        check_strategy(graph, strategy, unit_graph(graph, strategy), attested_groups(source))
    except IllegalStrategyError:
        return None
    return strategy


def assert_same_numbers(
    request: CompileRequest, form: Form, wanted: Callable[[CanonicalModule], dict[str, Strategy]]
) -> None:
    """Each strategy that is ``wanted`` for XLA's module gives the numbers of XLA's default; modules that are equal run
    once."""
    default, captured = compiles.compile_seen(request)
    source, expected = canonicalize(captured), _run(request, default, form)
    seen: set[bytes] = set()
    for title, strategy in wanted(source).items():
        module = apply(strategy, source)
        verify(source, module, strategy)
        if module in seen:
            continue
        seen.add(module)
        executable = compiles.compile_module(request, module)
        for want, got in zip(expected, _run(request, executable, form), strict=True):
            assert want.dtype == got.dtype
            _assert_close(want, got, title)


def _assert_close(want: np.ndarray[Any, Any], got: np.ndarray[Any, Any], title: str) -> None:
    if want.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want, err_msg=title)
        return
    a, b = np.asarray(want, np.float64), np.asarray(got, np.float64)
    tolerance = 2e-2 if want.dtype.itemsize == 2 else 2e-5
    scale = float(np.max(np.abs(a), initial=0.0)) or 1.0
    np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance * scale, err_msg=title)


def _run(request: CompileRequest, executable: LoadedExecutable, form: Form) -> list[np.ndarray[Any, Any]]:
    device = request.devices[0]
    buffers = [jax.device_put(np.array(x), device) for x in form.arguments]
    results = executable.execute_sharded(buffers).disassemble_into_single_device_arrays()
    return [np.asarray(result[0]) for result in results]
