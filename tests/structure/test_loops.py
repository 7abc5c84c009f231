"""Moves of loops: random scanned layers with sharded weights under every schedule, the same numbers bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from disco_hlo.structure.propose_loops import loop_schedules
from tests.structure import steps
from tests.structure.enact import Run, run

P = steps.P
WIDTH = 8
EVERY = {"prefetch", "double", "prefetch-double", "gather-once", "gather-once-prefetch"}


def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array], form: random.Random) -> jax.Array:
    """A layer that gathers its weights, before or after it converts them, and perhaps uses one of them twice."""
    up, down = weights
    if form.random() < 0.5:
        up = lax.all_gather(up.astype(jnp.bfloat16), "model", tiled=True).astype(jnp.float32)
    else:
        up = lax.all_gather(up, "model", tiled=True)
    down = lax.all_gather(down, "model", tiled=True)
    hidden = jnp.tanh(x @ up)
    if form.random() < 0.5:
        hidden = hidden * up[0]
    return x + hidden @ down


def program(seed: int, devices: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Scanned layers, forward and backward, and arguments: layers counted up or down, recomputed or not, perhaps in
    a loop over microbatches."""
    rng = random.Random(seed)
    layers, backward, reverse = rng.choice((2, 4, 5, 7)), rng.random() < 0.7, rng.random() < 0.5
    recompute, microbatches = rng.random() < 0.7, rng.choice((1, 1, 2))

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, one: Any) -> tuple[jax.Array, jax.Array]:
            x = layer(x, one, random.Random(seed))
            return x, x.sum()

        scanned = jax.checkpoint(body) if recompute else body
        x, sums = lax.scan(scanned, x, weights, reverse=reverse)
        return (x * x).sum() + sums.sum()

    def local(up: jax.Array, down: jax.Array, x: jax.Array) -> Any:
        def step(total: Any, part: jax.Array) -> tuple[Any, jax.Array]:
            if not backward:
                return total, loss((up, down), part)
            value, gradient = jax.value_and_grad(loss)((up, down), part)
            return jax.tree.map(jnp.add, total, gradient), value

        total, values = lax.scan(step, (up * 0, down * 0), x) if microbatches > 1 else step((up, down), x[0])
        return total, lax.psum(values, "model")

    on = steps.mesh(devices)
    specs = (P(None, "model"), P(None, "model"), P(None, "model"))
    out = ((P(None, "model"), P(None, "model")), P())
    mapped = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=out, check_vma=False)
    values = (
        steps.normal(seed, (layers, WIDTH, WIDTH), jnp.float32, 0.3),
        steps.normal(seed + 1, (layers, WIDTH, WIDTH), jnp.float32, 0.3),
        steps.normal(seed + 2, (microbatches, 2 * devices, WIDTH), jnp.float32),
    )
    return mapped, tuple(steps.place(on, values, specs))


@cache
def unmoved(seed: int, devices: int) -> tuple[Callable[..., Any], tuple[Any, ...], Run]:
    function, arguments = program(seed, devices)
    return function, arguments, run(function, arguments)


def assert_equal(found: Run, expected: Run) -> None:
    for new, old in zip(found.outputs, expected.outputs, strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.product_only  # minutes of compiling
@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_every_schedule_of_random_loops_gives_the_same_numbers(seed: int, devices: int) -> None:
    function, arguments, expected = unmoved(seed, devices)
    found = loop_schedules(expected.module)
    assert "prefetch" in found
    for moves in found.values():
        assert_equal(run(function, arguments, moves), expected)
