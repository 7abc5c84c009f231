"""Which made-up inputs stay positive: what each op needs, and how it is asked for through kernels, calls and loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from disco_hlo.plugin.measuring.inputs.signs import positive_parameters
from tests.plugin.handled import named_parameters
from tests.steps import models
from tests.steps.intercept import captured_step

Array = Any


def names_of(*step: Any) -> set[str]:
    """Names of the arguments that stay positive."""
    source, names = named_parameters(step)
    return {names[number] for number in positive_parameters(source)}


def positive(function: Callable[..., Any], **shapes: tuple[int, ...]) -> set[str]:
    """Names of ``function``'s arguments that stay positive."""
    arguments = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes.values()]
    return names_of(jax.jit(function, in_shardings=models.replicated()), tuple(arguments))


def a_relu_network(x: Array, w: Array, b: Array) -> Array:
    return jax.nn.relu(x @ w + b) @ w - jnp.tanh(x)


def test_masks_and_matmuls_ask_for_nothing() -> None:
    assert positive(a_relu_network, x=(4, 8), w=(8, 8), b=(8,)) == set()


@pytest.mark.parametrize(
    "function",
    [
        jnp.sqrt,
        jax.lax.rsqrt,
        jnp.log,
        jnp.log1p,
        lambda p: 1 / p,
        lambda p: jnp.power(p, 0.3),
        jnp.arcsin,
        lambda p: jnp.sqrt(2 * p.reshape(2, 4).T + 1e-8),
        lambda p: jnp.sqrt(jnp.concatenate([p[2:4], jnp.ones(3)])),
        lambda p: jnp.log(jnp.where(p > 0.5, p, p * p)),
        lambda p: jnp.sqrt(jnp.ones(8) / (1 - 0.9**p)),
        lambda p: jnp.log(1 - jnp.exp(-p[0]) * jnp.ones(8)),
    ],
    ids=[
        "sqrt", "rsqrt", "log", "log1p", "denominator", "power", "arcsin", "rearranged", "joined", "chosen",
        "bias correction", "one less an exponential",
    ],
)  # fmt: skip
def test_a_root_a_logarithm_or_a_denominator_asks_for_what_reaches_it(function: Callable[..., Any]) -> None:
    assert positive(lambda p, x: (function(p), jnp.sin(x)), p=(8,), x=(8,)) == {"p"}


@pytest.mark.parametrize(
    "function",
    [
        lambda p: jnp.sqrt(p * p + 1e-6),
        lambda p: jnp.log(jnp.exp(p).sum()),
        lambda p: jnp.sqrt(jnp.square(p - p.mean()).mean()),
        lambda p: jnp.log1p(jnp.abs(p)),
        lambda p: 1 / (1 + jnp.exp(-p)),
        lambda p: jnp.sqrt(jnp.maximum(p, 0)),
        lambda p: jnp.sqrt(jnp.clip(p, 1e-3, 2)),
        lambda p: jnp.log(jnp.max(jnp.abs(p)) + 1),
        lambda p: jnp.power(p, 3.0) + jnp.power(p, 2.0),
        jax.nn.softmax,
        jnp.cbrt,
    ],
    ids=[
        "square", "exponentials", "variance", "abs", "logistic", "relu", "clip", "largest", "whole powers", "softmax",
        "cbrt",
    ],
)  # fmt: skip
def test_what_is_never_negative_answers_for_itself(function: Callable[..., Any]) -> None:
    assert positive(function, p=(8,)) == set()


def test_a_loop_is_asked_for_what_it_carries() -> None:
    """The root is of what a turn leaves for the next, three members away from what it began with."""

    def rooted(a: Array, b: Array, c: Array, x: Array) -> Array:
        def turn(_: Any, carry: Any) -> Any:
            first, second, third, total = carry
            return second, third, first * 0.9, total + jnp.sqrt(first) * x

        return jax.lax.fori_loop(0, 5, turn, (a, b, c, jnp.zeros(8)))

    assert positive(rooted, a=(8,), b=(8,), c=(8,), x=(8,)) == {"a", "b", "c"}


def test_a_root_of_what_a_loop_computes_asks_for_what_enters_that_member() -> None:
    def rooted(a: Array, x: Array) -> Array:
        found = jax.lax.fori_loop(0, 5, lambda _, c: (c[0] * 0.9, jnp.sin(c[1] + c[0])), (a, x))
        return jnp.sqrt(found[0]), found[1]

    assert positive(rooted, a=(8,), x=(8,)) == {"a"}


def test_a_branch_is_asked_by_its_own_operand() -> None:
    def rooted(i: Array, a: Array, b: Array) -> Array:
        return jax.lax.cond(i[0] > 0, lambda a, b: jnp.sqrt(a) + b, lambda a, b: a + jnp.sin(b), a, b)

    assert positive(rooted, i=(1,), a=(8,), b=(8,)) == {"a"}


def test_of_adam_the_second_moments_stay_positive() -> None:
    """A norm for clipping and AdamW beside layers with relu: no weight, and no first moment."""

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jax.nn.relu(x @ p["w"] + p["b"]) ** 2)

    parameters = {"w": models.random(0, 16, 16), "b": models.random(1, 16)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    found = names_of(*models.trained("adam_step", loss, parameters, (models.random(2, 8, 16),), optimizer))
    assert sorted(name.split(".")[-1] for name in found) == ["nu['b']", "nu['w']"]


@pytest.mark.parametrize("name", ["resnet", "pooled", "in_place", "cached", "scanned_layers"])
def test_networks_with_relus_and_plain_descent_have_inputs_of_both_signs_only(name: str) -> None:
    """The normalizations of layers in a loop take roots of squares; the momentum is a sum."""
    assert positive_parameters(captured_step(name)) == frozenset()
