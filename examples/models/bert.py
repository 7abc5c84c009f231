"""BERT (Devlin et al. 2019): masked words and next sentence, post-norm encoder, AdamW, clipped gradients."""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.training import Example, Training, matrices_only, mean_cross_entropy, training

MASK_TOKEN = 1


@dataclass(frozen=True)
class Config:
    """Sizes: two segments in `length` tokens, `masked` of which are to be predicted."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    length: int
    masked: int
    dropout: float
    learning_rate: float
    weight_decay: float
    clip_norm: float
    batch_per_device: int
    compute_dtype: str


class Layer(nn.Module):
    """Self-attention and feed-forward, [rows, length, width] -> the same."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Training mode: draws dropout masks."""
        config = self.config
        dtype = jnp.dtype(config.compute_dtype)
        x = self._residual(x, self._attention(x))
        up = nn.gelu(dense(config.hidden, dtype)(x), approximate=False)
        return self._residual(x, dense(config.width, dtype)(up))

    def _attention(self, x: jax.Array) -> jax.Array:
        config = self.config
        dtype = jnp.dtype(config.compute_dtype)
        shape = (*x.shape[:2], config.heads, config.width // config.heads)
        query, key, value = (dense(config.width, dtype)(x).reshape(shape) for _ in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * shape[-1] ** -0.5
        weights = nn.Dropout(config.dropout, deterministic=False)(jax.nn.softmax(scores))
        return dense(config.width, dtype)(jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape))

    def _residual(self, x: jax.Array, change: jax.Array) -> jax.Array:
        change = nn.Dropout(self.config.dropout, deterministic=False)(change)
        return nn.LayerNorm(1e-12, dtype=jnp.dtype(self.config.compute_dtype))(x + change)


class Bert(nn.Module):
    """Word logits [rows, masked, vocabulary] and next-sentence logits [rows, 2].

    From tokens and segments [rows, length] and the masked positions [rows, masked], all int32.
    """

    config: Config

    @nn.compact
    def __call__(
        self, tokens: jax.Array, segments: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Training mode: draws dropout masks."""
        config = self.config
        dtype = jnp.dtype(config.compute_dtype)
        words = embed(config.vocabulary, config.width, dtype)
        x = words(tokens) + embed(2, config.width, dtype)(segments)
        x = x + embed(config.length, config.width, dtype)(jnp.arange(config.length))
        x = nn.LayerNorm(1e-12, dtype=dtype)(x)
        x = nn.Dropout(config.dropout, deterministic=False)(x)
        for _ in range(config.layers):
            x = Layer(config)(x)
        next_logits = dense(2, dtype)(jnp.tanh(dense(config.width, dtype)(x[:, 0])))
        x = jnp.take_along_axis(x, positions[:, :, None], axis=1)
        x = nn.gelu(dense(config.width, dtype)(x), approximate=False)
        x = nn.LayerNorm(1e-12, dtype=dtype)(x)
        bias = self.param("word_bias", nn.initializers.zeros, (config.vocabulary,))
        return words.attend(x) + bias.astype(dtype), next_logits


def dense(features: int, dtype: Any) -> nn.Dense:
    """A dense layer, weights N(0, 0.02)."""
    return nn.Dense(features, dtype=dtype, kernel_init=nn.initializers.truncated_normal(0.02))


def embed(rows: int, width: int, dtype: Any) -> nn.Embed:
    """An embedding table, N(0, 0.02)."""
    return nn.Embed(rows, width, dtype=dtype, embedding_init=nn.initializers.truncated_normal(0.02))


def build(config: Config) -> Training:
    """The training step on random tokens: mean loss of the masked words plus that of the next sentence."""
    model = Bert(config)

    def variables(key: jax.Array) -> tuple[Any, Any]:
        tokens = jnp.zeros((1, config.length), jnp.int32)
        made = model.init({"params": key, "dropout": key}, tokens, tokens, tokens[:, : config.masked])
        return made["params"], {}

    def loss_of(params: Any, model_state: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        word_logits, next_logits = model.apply(
            {"params": params}, batch["tokens"], batch["segments"], batch["positions"], rngs={"dropout": key}
        )
        loss = mean_cross_entropy(word_logits, batch["words"]) + mean_cross_entropy(
            next_logits, batch["is_next"]
        )
        return loss, model_state

    def example(rng: np.random.Generator) -> Example:
        tokens = rng.integers(config.vocabulary, size=config.length).astype(np.int32)
        positions = np.sort(rng.choice(config.length, config.masked, replace=False)).astype(np.int32)
        words = tokens[positions]
        tokens[positions] = MASK_TOKEN
        segments = (np.arange(config.length) >= config.length // 2).astype(np.int32)
        is_next = np.asarray(rng.integers(2, dtype=np.int32))
        return {
            "tokens": tokens,
            "segments": segments,
            "positions": positions,
            "words": words,
            "is_next": is_next,
        }

    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(config.learning_rate, weight_decay=config.weight_decay, mask=matrices_only),
    )
    return training(variables, loss_of, optimizer, example, config.batch_per_device)
