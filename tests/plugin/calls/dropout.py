"""Dropout that compiles quickly: JAX's own generator takes XLA longer than all else in a small step."""

from __future__ import annotations

import jax
import numpy as np


def kept(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Which elements stay, four of five; another key keeps others."""
    drawn = jax.lax.iota(np.uint32, int(np.prod(shape))) * jax.random.key_data(key)[1]
    return (drawn % 5 > 0).reshape(shape)


def following(key: jax.Array) -> jax.Array:
    """The key of the next step."""
    return jax.random.wrap_key_data(jax.random.key_data(key) * np.uint32(1664525) + np.uint32(1013904223))
