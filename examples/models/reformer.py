"""Reformer (Kitaev et al. 2020): LSH attention, queries shared with keys, reversible layers, axial positions.

Attention: queries, which are also the keys, are hashed by random rotations in `hashes` rounds, sorted by
bucket, cut into chunks, and attend to their own bucket within their chunk and the one before. The rounds are
weighted by their softmax normalisers; a pair that meets in several rounds counts in each (the paper's
correction for that is left out, and so is its chunking of the feed-forward layer, which saves memory alone).

Reversible layers: the backward pass recomputes each layer's inputs from its outputs (custom_vjp), keeping
only the buckets. Adam for the paper's Adafactor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.training import Example, Training, mean_cross_entropy, training

Params = Any


@dataclass(frozen=True)
class Config:
    """Sizes: sequences of `axes[0] * axes[1]` tokens, in chunks of `chunk`."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    axes: tuple[int, int]
    chunk: int
    hashes: int
    learning_rate: float
    batch_per_device: int
    compute_dtype: str

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self.axes[0] * self.axes[1]

    @property
    def buckets(self) -> int:
        """Hash buckets per round: on average half a chunk each."""
        return 2 * self.length // self.chunk


class LSHAttention(nn.Module):
    """Pre-norm causal LSH self-attention, [rows, length, width] -> the same."""

    config: Config

    def setup(self) -> None:
        """One projection for queries and keys, one for values, one out."""
        width, dtype = self.config.width, jnp.dtype(self.config.compute_dtype)
        self.norm = nn.LayerNorm(dtype=dtype)
        self.query_key = nn.Dense(width, use_bias=False, dtype=dtype)
        self.value = nn.Dense(width, use_bias=False, dtype=dtype)
        self.out = nn.Dense(width, use_bias=False, dtype=dtype)

    def _heads(self, x: jax.Array) -> jax.Array:
        config = self.config
        return x.reshape(*x.shape[:2], config.heads, config.width // config.heads).swapaxes(1, 2)

    def hash(self, x: jax.Array, rotations: jax.Array) -> jax.Array:
        """Bucket of every position, [rows, heads, hashes, length] int32.

        `rotations` is [head width, hashes, buckets / 2].
        """
        query = self._heads(self.query_key(self.norm(x))).astype(rotations.dtype)
        rotated = jnp.einsum("bhld,dnr->bhnlr", query, rotations)
        return jnp.argmax(jnp.concatenate([rotated, -rotated], -1), -1).astype(jnp.int32)

    def __call__(self, x: jax.Array, buckets: jax.Array) -> jax.Array:
        """Attention within the buckets that `hash` gave."""
        normal = self.norm(x)
        query, value = self._heads(self.query_key(normal)), self._heads(self.value(normal))
        mixed = attend(query, value, buckets, self.config.chunk)
        return self.out(mixed.swapaxes(1, 2).reshape(x.shape))


def attend(query: jax.Array, value: jax.Array, buckets: jax.Array, chunk: int) -> jax.Array:
    """LSH attention given the buckets: query, value [rows, heads, length, head width] -> the same.

    `buckets` is [rows, heads, hashes, length] int32.
    """
    length, head_width = query.shape[-2:]
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), buckets.shape)
    # Sort by bucket, and within a bucket by position.
    _, order = jax.lax.sort((buckets * length + position, position), num_keys=1)
    _, back = jax.lax.sort((order, position), num_keys=1)

    def chunked(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:3], length // chunk, chunk, *x.shape[4:])

    def sort_rows(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x[:, :, None], order[..., None], axis=3)

    def with_previous(x: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.roll(x, 1, axis=3), x], axis=4)

    queries = chunked(sort_rows(query))
    keys = with_previous(queries * jax.lax.rsqrt(jnp.square(queries).sum(-1, keepdims=True) + 1e-6))
    values = with_previous(chunked(sort_rows(value)))
    positions = chunked(order)
    bucket = chunked(jnp.take_along_axis(buckets, order, axis=3))
    scores = jnp.einsum("...qd,...kd->...qk", queries, keys) * head_width**-0.5
    scores = masked(
        scores.astype(jnp.float32), positions, with_previous(positions), bucket, with_previous(bucket)
    )
    normaliser = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    mixed = jnp.einsum("...qk,...kd->...qd", jnp.exp(scores - normaliser).astype(values.dtype), values)

    def unsort_rows(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x.reshape(*x.shape[:3], length, x.shape[-1]), back[..., None], axis=3)

    round_weight = jax.nn.softmax(unsort_rows(normaliser), axis=2)
    return (unsort_rows(mixed) * round_weight.astype(mixed.dtype)).sum(2)


def masked(
    scores: jax.Array, query_at: jax.Array, key_at: jax.Array, query_bucket: jax.Array, key_bucket: jax.Array
) -> jax.Array:
    """Causal, own bucket only, and itself only where there is nothing else (queries are their own keys)."""
    later_or_elsewhere = (query_at[..., :, None] < key_at[..., None, :]) | (
        query_bucket[..., :, None] != key_bucket[..., None, :]
    )
    itself = query_at[..., :, None] == key_at[..., None, :]
    return jnp.where(later_or_elsewhere, -1e9, jnp.where(itself, -1e5, scores))


class FeedForward(nn.Module):
    """Pre-norm feed-forward, [rows, length, width] -> the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """No dropout."""
        dtype = jnp.dtype(self.config.compute_dtype)
        up = nn.gelu(nn.Dense(self.config.hidden, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x)))
        return nn.Dense(self.config.width, dtype=dtype)(up)


def reversible_stack(attention: LSHAttention, feed_forward: FeedForward) -> Any:
    """`stack(layers, rotations, left, right) -> (left, right)`, differentiable without stored activations.

    Every layer adds attention of the right half to the left one, then feed-forward of the left half to the
    right one. Gradients do not flow into `rotations` [layers, head width, hashes, buckets / 2]; `layers` is a
    list of {"attention", "feed_forward"} parameters.
    """

    def mix(params: Params, x: jax.Array, buckets: jax.Array) -> jax.Array:
        return attention.apply({"params": params}, x, buckets)

    def feed(params: Params, x: jax.Array) -> jax.Array:
        return feed_forward.apply({"params": params}, x)

    def forward(layers: Sequence[Params], rotations: jax.Array, left: jax.Array, right: jax.Array) -> Any:
        kept = []
        for params, rotation in zip(layers, rotations, strict=True):
            variables = {"params": params["attention"]}
            kept.append(attention.apply(variables, right, rotation, method=LSHAttention.hash))
            left = left + mix(params["attention"], right, kept[-1])
            right = right + feed(params["feed_forward"], left)
        return (left, right), (layers, kept, left, right)

    def backward(residuals: Any, cotangents: Any) -> Any:
        layers, kept, left, right = residuals
        left_bar, right_bar = cotangents
        gradients = []
        for params, buckets in zip(reversed(layers), reversed(kept), strict=True):
            change, pull = jax.vjp(feed, params["feed_forward"], left)
            right = right - change
            feed_gradient, left_more = pull(right_bar)
            left_bar = left_bar + left_more
            change, pull = jax.vjp(lambda p, x, at=buckets: mix(p, x, at), params["attention"], right)
            left = left - change
            mix_gradient, right_more = pull(left_bar)
            right_bar = right_bar + right_more
            gradients.append({"attention": mix_gradient, "feed_forward": feed_gradient})
        return gradients[::-1], None, left_bar, right_bar

    @jax.custom_vjp
    def stack(layers: Sequence[Params], rotations: jax.Array, left: jax.Array, right: jax.Array) -> Any:
        return forward(layers, rotations, left, right)[0]

    stack.defvjp(forward, backward)
    return stack


def add_positions(x: jax.Array, row_table: jax.Array, column_table: jax.Array) -> jax.Array:
    """Axial positions: x [rows, n * m, width] plus vectors from tables [n, width / 2] and [m, width / 2]."""
    grid = x.reshape(x.shape[0], row_table.shape[0], column_table.shape[0], x.shape[-1])
    first, second = jnp.split(grid, 2, axis=-1)
    return jnp.concatenate([first + row_table[:, None], second + column_table], -1).reshape(x.shape)


def make_variables(config: Config, key: jax.Array) -> Params:
    """Parameters: embedding, axial positions, layers, and the head over both halves."""
    attention, feed_forward = LSHAttention(config), FeedForward(config)
    keys = iter(jax.random.split(key, 2 * config.layers + 4))
    normal = nn.initializers.normal(0.02)
    x = jnp.zeros((1, config.length, config.width))
    buckets = jnp.zeros((1, config.heads, config.hashes, config.length), jnp.int32)
    return {
        "embedding": normal(next(keys), (config.vocabulary, config.width)),
        "rows": normal(next(keys), (config.axes[0], config.width // 2)),
        "columns": normal(next(keys), (config.axes[1], config.width // 2)),
        "layers": [
            {
                "attention": attention.init(next(keys), x, buckets)["params"],
                "feed_forward": feed_forward.init(next(keys), x)["params"],
            }
            for _ in range(config.layers)
        ],
        "head": head(config).init(next(keys), jnp.concatenate([x, x], -1))["params"],
    }


def head(config: Config) -> nn.Sequential:
    """Both halves, normalised -> logits."""
    dtype = jnp.dtype(config.compute_dtype)
    return nn.Sequential([nn.LayerNorm(dtype=dtype), nn.Dense(config.vocabulary, dtype=dtype)])


def build(config: Config) -> Training:
    """The training step on random tokens; the rotations are drawn anew in every step."""
    stack = reversible_stack(LSHAttention(config), FeedForward(config))
    rotations_shape = (config.layers, config.width // config.heads, config.hashes, config.buckets // 2)

    def loss_of(params: Any, model_state: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        dtype = jnp.dtype(config.compute_dtype)
        x = params["embedding"][batch["tokens"][:, :-1]]
        x = add_positions(x, params["rows"], params["columns"]).astype(dtype)
        left, right = stack(params["layers"], jax.random.normal(key, rotations_shape), x, x)
        logits = head(config).apply({"params": params["head"]}, jnp.concatenate([left, right], -1))
        return mean_cross_entropy(logits, batch["tokens"][:, 1:]), model_state

    def example(rng: np.random.Generator) -> Example:
        return {"tokens": rng.integers(config.vocabulary, size=config.length + 1).astype(np.int32)}

    return training(
        lambda key: (make_variables(config, key), {}),
        loss_of,
        optax.adam(config.learning_rate),
        example,
        config.batch_per_device,
    )
