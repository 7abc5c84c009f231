"""What a step's roundings amount to, by its module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from disco_hlo.backends import BACKENDS
from disco_hlo.hlo.proto import parse
from disco_hlo.plugin.measuring.tolerances import longest_sum, rounding_of
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.steps import models
from tests.steps.intercept import intercept


def of_step(step: models.Step) -> tuple[list[float], float]:
    """The rounding on CPU and GPU, and the longest sum."""

    def body(request: CompileRequest) -> tuple[list[float], float]:
        module = compiles.capture(request)
        return [rounding_of(module, BACKENDS[name]) for name in ("cpu", "gpu")], longest_sum(parse(module))

    found: tuple[list[float], float] = intercept(*step, body)
    return found


def test_a_step_rounds_in_its_coarsest_type_on_gpu_at_least_as_tensor_cores_do() -> None:
    assert of_step(models.mlp(jnp.bfloat16))[0] == [2.0**-8, 2.0**-8]
    assert of_step(models.mlp(np.float16))[0] == [2.0**-10, 2.0**-10]
    (cpu, gpu), _ = of_step(models.mlp())
    assert 2.0**-23 <= cpu < 2.0**-20
    assert gpu == 2.0**-11


@pytest.mark.parametrize(
    ("function", "terms"),
    [
        (lambda x: x @ x.T, 1024),
        (lambda x: jnp.einsum("ij,kj->ik", x[:64], x), 1024),
        (lambda x: jnp.tanh(x).sum(0), 256),
        (jnp.tanh, 1),
    ],
    ids=["matmul", "fewer rows", "sum", "none"],
)
def test_the_longest_sum_counts(function: Any, terms: int) -> None:
    def step(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(function(x), models.replicated())

    (cpu, _), longest = of_step(
        (jax.jit(step), (jax.device_put(np.ones((256, 1024), np.float32), models.replicated()),))
    )
    assert longest == pytest.approx(terms, rel=0.5)
    assert cpu == max(2.0**-23, 2.0**-23 * 0.5 * longest**0.5)
