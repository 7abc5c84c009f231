"""Small training steps on two devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.plugin.calls.trial import Trial
from disco_hlo.plugin.calls.watch import Watch
from disco_hlo.plugin.xla import compiles, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from tests.plugin.calls.dropout import following, kept

Weights = dict[str, jax.Array]
MESH = Mesh(np.array(jax.devices()[:2]), ("data",))
WHOLE = NamedSharding(MESH, PartitionSpec())
SPLIT = NamedSharding(MESH, PartitionSpec("data"))


def fresh_state(width: int = 16) -> tuple[Weights, jax.Array]:
    """Weights, and a typed key for dropout, on both devices."""
    drawn = np.random.default_rng(0).normal(size=(2, width, width)).astype(np.float32) / width**0.5
    weights = {"in": drawn[0], "out": drawn[1]}
    return jax.device_put(weights, WHOLE), jax.device_put(jax.random.key(7), WHOLE)


def reworded_state(*words: None) -> tuple[Weights, jax.Array]:
    """:func:`fresh_state`, whose weights have the same sharding in other words."""
    weights, key = fresh_state()
    return jax.device_put(weights, NamedSharding(MESH, PartitionSpec(*words))), key


def batch(number: int, rows: int = 8, width: int = 16) -> jax.Array:
    """The batch of this number."""
    drawn = np.random.default_rng(number).normal(size=(rows, width))
    return jax.device_put(drawn.astype(np.float32), SPLIT)


def loss_of(weights: Weights, x: jax.Array, key: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ weights["in"]) * kept(key, x.shape)
    return jnp.mean((hidden @ weights["out"] - x) ** 2)


def step(
    weights: Weights, key: jax.Array, x: jax.Array, rate: float = 0.1
) -> tuple[Weights, jax.Array, jax.Array]:
    """One step with dropout: weights and key are handed on."""
    loss, slope = jax.value_and_grad(loss_of)(weights, x, key)
    return jax.tree.map(lambda w, g: w - rate * g, weights, slope), following(key), loss


def telling(weights: Weights, key: jax.Array, x: jax.Array) -> tuple[Weights, jax.Array, jax.Array]:
    """:func:`step` with JAX's own draws, which prints its loss, three lines from within a loop, and one behind that."""

    def look(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        total += jnp.tanh(row @ row)
        jax.debug.print("inside {}", total)
        return total, None

    now, later = jax.random.split(key)
    updated, _, loss = step(weights, now, x)
    jax.debug.print("loss {}", loss)
    total, _ = jax.lax.scan(look, loss, weights["in"][:3])
    jax.debug.print("behind {}", total)
    return updated, later, loss


def named(name: str, function: Callable[..., Any] = step) -> Callable[..., Any]:
    """A function that JAX has not seen, of this name."""

    def anew(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    anew.__name__ = anew.__qualname__ = name
    return anew


def train(call: Callable[..., Any], count: int, state: Any = None, rows: int = 8) -> tuple[list[float], Any]:
    """Losses of ``count`` steps, and the state after them. Every step is waited for, as its loss is read."""
    weights, key = fresh_state() if state is None else state
    losses = []
    for number in range(count):
        weights, key, loss = call(weights, key, batch(number, rows))
        losses.append(float(loss))
    return losses, (weights, key)


def numbers(state: Any) -> list[list[float]]:
    """Every number of a state, keys too."""
    weights, key = state
    return [np.ravel(one).tolist() for one in (*weights.values(), jax.random.key_data(key))]


def jitted(name: str, function: Callable[..., Any] = step, **options: Any) -> Any:
    """:func:`step`, or another, jitted under this name, with its state donated."""
    name_it = named(name, function)
    return jax.jit(name_it, donate_argnums=(0, 1), out_shardings=(WHOLE, WHOLE, None), **options)


_stock = functools.cache(functools.partial(jitted, "stock"))


@functools.cache
def stock(count: int, width: int = 16) -> tuple[list[float], list[list[float]]]:
    """Losses of the first ``count`` steps as JAX trains without us, and the numbers of the state after them."""
    state, losses = fresh_state(width), []
    with jaxlink.ours():
        for number in range(count):
            *state, loss = _stock()(*state, batch(number, width=width))
            losses.append(float(loss))
    return losses, numbers(state)


def compiled_again(watch: Watch) -> LoadedExecutable:
    """What ``watch`` watches, compiled once more."""
    with jaxlink.ours():
        return compiles.compile_module(watch.request, None)


def trial_of(trials: list[Trial], name: str) -> Trial:
    """The one of the module of this name."""
    [one] = [trial for trial in trials if trial.watch.module_name == name]
    return one


@contextmanager
def counted_python_calls() -> Iterator[Callable[[], int]]:
    """How many calls of jitted functions came through Python so far."""
    from jax._src import pjit

    count, original = 0, pjit._pjit_call_impl_python

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return original(*arguments, **options)

    pjit._pjit_call_impl_python = counting
    try:
        yield lambda: count
    finally:
        pjit._pjit_call_impl_python = original
