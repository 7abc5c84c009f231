"""A transformer's layers, tensor parallel over every device: Megatron's sharding, told to `jax.jit` alone.

    python examples/tensor_parallel.py --size full --steps 20
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 python examples/tensor_parallel.py
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 python examples/tensor_parallel.py --forward

Heads and the MLP's hidden width are split over the devices, activations are left to XLA: two all-reduces a layer
forward and two backward, each with the next layer waiting for it. Sizes: configs/parallel/tensor_parallel.toml.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import parallel
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LEARNING_RATE = 1e-3
SHARDED = {
    "query_key_value": PartitionSpec(None, None, "model", None),
    "out": PartitionSpec("model", None, None),
    "up": PartitionSpec(None, "model"),
    "down": PartitionSpec("model", None),
}
"""Axes of a layer's matrices that are split; the norms' scales are on every device."""


class Config(NamedTuple):
    """Sizes: rows of `length` activations of `width`; the MLP is four times as wide inside."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    dtype: str


def load(size: str) -> Config:
    """The configuration of that size; ValueError where it is bad."""
    return parallel.read_sizes(Config, parallel.CONFIGS / "tensor_parallel.toml", size)


def init(config: Config, key: jax.Array) -> list[dict[str, jax.Array]]:
    """Parameters of each layer, in the configuration's dtype."""
    width, heads = config.width, config.heads
    shapes = {
        "query_key_value": (width, 3, heads, width // heads),
        "out": (heads, width // heads, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        drawn = {name: jax.random.normal(keys[name], shape) * width**-0.5 for name, shape in shapes.items()}
        scales = {"attention_scale": jnp.ones(width), "mlp_scale": jnp.ones(width)}
        return jax.tree.map(lambda leaf: leaf.astype(config.dtype), drawn | scales)

    return [layer(key) for key in jax.random.split(key, config.layers)]


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32."""
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype) * scale


def attention(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Causal self-attention of [batch, length, width]."""
    query, key, value = jnp.moveaxis(jnp.einsum("bsd,dthe->btshe", x, layer["query_key_value"]), 1, 0)
    scores = jnp.einsum("bqhe,bkhe->bhqk", query, key) * query.shape[-1] ** -0.5
    allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(allowed, scores.astype(jnp.float32), -1e30)).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhe->bqhe", weights, value)
    return jnp.einsum("bqhe,hed->bqd", mixed, layer["out"])


def forward(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """All layers, pre-norm, with residuals: [batch, length, width] to the same."""
    for layer in params:
        x = x + attention(layer, normed(x, layer["attention_scale"]))
        x = x + jax.nn.gelu(normed(x, layer["mlp_scale"]) @ layer["up"]) @ layer["down"]
    return x


def train_step(
    params: list[dict[str, jax.Array]], x: jax.Array, y: jax.Array
) -> tuple[list[dict[str, jax.Array]], jax.Array]:
    """One step of plain gradient descent on the mean square error."""

    def loss_of(params: list[dict[str, jax.Array]]) -> jax.Array:
        return jnp.mean((forward(params, x).astype(jnp.float32) - y.astype(jnp.float32)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g.astype(p.dtype), params, gradients), loss


def layout(params: Any) -> tuple[Any, NamedSharding]:
    """Where each parameter lives, as a tree like `params`, and where what is on every device does."""
    mesh = Mesh(np.array(jax.devices()), ("model",))
    layers = [
        {name: NamedSharding(mesh, SHARDED.get(name, PartitionSpec())) for name in layer} for layer in params
    ]
    return layers, NamedSharding(mesh, PartitionSpec())


def compilable(config: Config, *, training: bool) -> parallel.Compilable:
    """The jitted step over every device: (params, x, y) -> (params, loss), or (params, x) -> out."""
    params = jax.eval_shape(lambda key: init(config, key), jax.random.key(0))
    shardings, everywhere = layout(params)
    rows = jax.ShapeDtypeStruct((config.batch, config.length, config.width), config.dtype)
    if not training:
        jitted = jax.jit(forward, in_shardings=(shardings, everywhere), out_shardings=everywhere)
        return parallel.Compilable(jitted, (params, rows))
    jitted = jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, everywhere, everywhere),
        out_shardings=(shardings, everywhere),
    )
    return parallel.Compilable(jitted, (params, rows, rows))


def main() -> None:
    """Train on random rows, or run the layers forward."""

    def drawn(config: Config, made: parallel.Compilable, seed: int) -> tuple[Any, tuple[jax.Array, ...]]:
        params, rows = made.arguments[:2]
        shardings, everywhere = layout(params)
        key = jax.random.key(seed, impl="rbg")
        params = jax.jit(lambda key: init(config, key), out_shardings=shardings)(key)
        random = np.random.default_rng(seed)
        # The type first: every process hands in its own copy, and jax compares them as arrays of its own types.
        x, y = (
            jax.device_put(random.normal(size=rows.shape).astype(rows.dtype), everywhere) for _ in range(2)
        )
        return params, (x, y)

    parallel.train_layers("tensor_parallel", __doc__, load, compilable, drawn)


if __name__ == "__main__":
    main()
