"""The Transformer (Vaswani et al. 2017): encoder and decoder, post-norm, one tied embedding, Adam."""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.training import Example, Training, training


@dataclass(frozen=True)
class Config:
    """Sizes: `layers` in each of encoder and decoder; `length` tokens a sentence, `vocabulary` shared."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    length: int
    dropout: float
    label_smoothing: float
    warmup_steps: int
    batch_per_device: int
    compute_dtype: str


class Attention(nn.Module):
    """Multi-head attention of `x` [rows, length, width] over `memory` [rows, length, width]."""

    config: Config
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array) -> jax.Array:
        """[rows, length, width]."""
        config = self.config
        dtype = jnp.dtype(config.compute_dtype)
        head_width = config.width // config.heads

        def heads(source: jax.Array, name: str) -> jax.Array:
            flat = nn.Dense(config.width, use_bias=False, dtype=dtype, name=name)(source)
            return flat.reshape(*source.shape[:2], config.heads, head_width)

        scores = jnp.einsum("bqhd,bkhd->bhqk", heads(x, "query"), heads(memory, "key")) * head_width**-0.5
        if self.causal:
            allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            scores = jnp.where(allowed, scores, jnp.finfo(scores.dtype).min)
        weights = nn.Dropout(config.dropout, deterministic=False)(jax.nn.softmax(scores))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, heads(memory, "value"))
        return nn.Dense(config.width, use_bias=False, dtype=dtype, name="out")(mixed.reshape(x.shape))


class Transformer(nn.Module):
    """Source and target tokens, both [rows, length] int32 -> logits [rows, length, vocabulary]."""

    config: Config

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        """Training mode: teacher forcing, draws dropout masks."""
        config = self.config
        dtype = jnp.dtype(config.compute_dtype)
        init = nn.initializers.normal(config.width**-0.5)
        embedding = nn.Embed(config.vocabulary, config.width, dtype=dtype, embedding_init=init)
        memory = self._embedded(embedding, source)
        for _ in range(config.layers):
            memory = self._residual(memory, Attention(config)(memory, memory))
            memory = self._residual(memory, self._feed_forward(memory))
        x = self._embedded(embedding, target)
        for _ in range(config.layers):
            x = self._residual(x, Attention(config, causal=True)(x, x))
            x = self._residual(x, Attention(config)(x, memory))
            x = self._residual(x, self._feed_forward(x))
        return embedding.attend(x)

    def _embedded(self, embedding: nn.Embed, tokens: jax.Array) -> jax.Array:
        x = embedding(tokens) * self.config.width**0.5
        x = x + sinusoids(self.config.length, self.config.width).astype(x.dtype)
        return nn.Dropout(self.config.dropout, deterministic=False)(x)

    def _feed_forward(self, x: jax.Array) -> jax.Array:
        dtype = jnp.dtype(self.config.compute_dtype)
        return nn.Dense(self.config.width, dtype=dtype)(nn.relu(nn.Dense(self.config.hidden, dtype=dtype)(x)))

    def _residual(self, x: jax.Array, change: jax.Array) -> jax.Array:
        change = nn.Dropout(self.config.dropout, deterministic=False)(change)
        return nn.LayerNorm(dtype=jnp.dtype(self.config.compute_dtype))(x + change)


def sinusoids(length: int, width: int) -> np.ndarray:
    """Position signal, [length, width] float32 (section 3.5 of the paper)."""
    angle = np.arange(length)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angle), np.cos(angle)], -1).reshape(length, width).astype(np.float32)


def build(config: Config) -> Training:
    """The training step on random sentence pairs of equal length (no padding)."""
    model = Transformer(config)

    def variables(key: jax.Array) -> tuple[Any, Any]:
        tokens = jnp.zeros((1, config.length), jnp.int32)
        return model.init({"params": key, "dropout": key}, tokens, tokens)["params"], {}

    def loss_of(params: Any, model_state: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        inputs, labels = batch["target"][:, :-1], batch["target"][:, 1:]
        logits = model.apply({"params": params}, batch["source"], inputs, rngs={"dropout": key})
        smooth = optax.smooth_labels(jax.nn.one_hot(labels, config.vocabulary), config.label_smoothing)
        return optax.softmax_cross_entropy(logits.astype(jnp.float32), smooth).mean(), model_state

    def example(rng: np.random.Generator) -> Example:
        source, target = (rng.integers(config.vocabulary, size=config.length + extra) for extra in (0, 1))
        return {"source": source.astype(np.int32), "target": target.astype(np.int32)}

    def learning_rate(step: jax.Array) -> jax.Array:
        count = jnp.asarray(step, jnp.float32) + 1
        return config.width**-0.5 * jnp.minimum(count**-0.5, count * config.warmup_steps**-1.5)

    optimizer = optax.adam(learning_rate, b2=0.98, eps=1e-9)
    return training(variables, loss_of, optimizer, example, config.batch_per_device)
