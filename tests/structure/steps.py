"""Sharded steps as users write them: plain functions, jitted with shardings of their arguments alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
WIDTH, HEADS, WORDS, SEQUENCE, BATCH = 16, 4, 24, 4, 8


def mesh(devices: int, axis: str = "model") -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), (axis,))


def place(on: Mesh, values: Any, specs: Any) -> Any:
    shardings = jax.tree.map(lambda s: NamedSharding(on, s), specs, is_leaf=lambda s: isinstance(s, P))
    return jax.device_put(values, shardings)


def normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, shape), dtype)


# --- a Megatron-style transformer ------------------------------------------------------------------

LAYER_SPECS = {
    "gain": P(), "qkv": P(None, None, "model", None), "out": P("model", None, None), "gain2": P(),
    "up": P(None, "model"), "bias": P("model"), "down": P("model", None), "bias2": P(),
}  # fmt: skip


def transformer(devices: int, layers: int, dtype: Any) -> tuple[Any, jax.Array, jax.Array]:
    """Parameters, tokens and labels on a mesh with axis ``model``."""
    depth = WIDTH // HEADS
    shapes = {
        "gain": (WIDTH,), "qkv": (WIDTH, 3, HEADS, depth), "out": (HEADS, depth, WIDTH), "gain2": (WIDTH,),
        "up": (WIDTH, 4 * WIDTH), "bias": (4 * WIDTH,), "down": (4 * WIDTH, WIDTH), "bias2": (WIDTH,),
    }  # fmt: skip
    stack = [
        {name: normal(10 * n + i, shape, dtype, 0.3) for i, (name, shape) in enumerate(shapes.items())}
        for n in range(layers)
    ]
    parameters = {
        "words": normal(1, (WORDS, WIDTH), dtype),
        "places": normal(2, (SEQUENCE, WIDTH), dtype),
        "layers": stack,
    }
    specs = {"words": P(), "places": P(), "layers": [LAYER_SPECS] * layers}
    rng = np.random.default_rng(3)
    tokens, labels = (rng.integers(0, WORDS, (BATCH, SEQUENCE)).astype(np.int32) for _ in range(2))
    on = mesh(devices)
    return place(on, parameters, specs), place(on, tokens, P()), place(on, labels, P())


def _norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain


def _attention(x: jax.Array, layer: Any) -> jax.Array:
    qkv = jnp.einsum("bsd,dthk->tbshk", x, layer["qkv"])
    scores = jnp.einsum("bqhk,bshk->bhqs", qkv[0], qkv[1]) / np.sqrt(WIDTH // HEADS).astype(x.dtype)
    causal = jnp.tril(jnp.ones((SEQUENCE, SEQUENCE), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, jnp.asarray(-1e9, x.dtype)), axis=-1)
    return jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", weights, qkv[2]), layer["out"])


def forward(parameters: Any, tokens: jax.Array) -> jax.Array:
    """Logits of every position."""
    x = parameters["words"][tokens] + parameters["places"]
    for layer in parameters["layers"]:
        x = x + _attention(_norm(x, layer["gain"]), layer)
        hidden = jax.nn.gelu(_norm(x, layer["gain2"]) @ layer["up"] + layer["bias"])
        x = x + hidden @ layer["down"] + layer["bias2"]
    return x @ parameters["words"].T


def train(parameters: Any, tokens: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
    """One step of SGD on the cross-entropy."""

    def loss(parameters: Any) -> jax.Array:
        chances = jax.nn.log_softmax(forward(parameters, tokens).astype(jnp.float32))
        return -jnp.take_along_axis(chances, labels[..., None], -1).mean()

    value, gradient = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), parameters, gradient), value


# --- CoCoNet's running example (figure 3) -------------------------------------------------------------


def example(x: jax.Array, w: jax.Array, b: jax.Array, r: jax.Array, key: jax.Array) -> jax.Array:
    """Matmul over the sharded dimension, all-reduce, bias, dropout, residual."""
    layer = x @ w + b
    kept = jax.random.bernoulli(key, 0.9, layer.shape)
    return jnp.where(kept, layer / 0.9, 0).astype(x.dtype) + r


def example_arguments(devices: int, dtype: Any) -> tuple[Any, ...]:
    on = mesh(devices)
    values = (
        normal(1, (BATCH, SEQUENCE, 4 * WIDTH), dtype),
        normal(2, (4 * WIDTH, WIDTH), dtype),
        normal(3, (WIDTH,), dtype),
        normal(4, (BATCH, SEQUENCE, WIDTH), dtype),
        jax.random.key(5),
    )
    return tuple(place(on, values, (P(None, None, "model"), P("model", None), P(), P(), P())))


# --- data-parallel Adam (section 4) ------------------------------------------------------------------


def adam(p: jax.Array, m: jax.Array, v: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """One step of Adam on a linear regression."""
    g = jax.grad(lambda p: ((x @ p - y) ** 2).mean())(p)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 0.1 * m / (jnp.sqrt(v) + 1e-8), m, v


def adam_arguments(devices: int) -> tuple[tuple[Any, ...], tuple[NamedSharding, ...]]:
    """Arguments with the state sharded over ``data``, and the shardings of the results."""
    on = mesh(devices, "data")
    values = (
        normal(1, (16,), jnp.float32),
        normal(2, (16,), jnp.float32, 0.1),
        normal(3, (16,), jnp.float32, 0.1) ** 2,
        normal(4, (32, 16), jnp.float32),
        normal(5, (32,), jnp.float32),
    )
    specs = (P(), P("data"), P("data"), P("data"), P("data"))
    shardings = tuple(NamedSharding(on, s) for s in specs[:3])
    return tuple(place(on, values, specs)), shardings
