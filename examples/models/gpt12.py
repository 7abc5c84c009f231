"""A GPT-like language model: pre-norm decoder, fused query-key-value, tied embedding, AdamW."""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.training import Example, Training, mean_cross_entropy, training


@dataclass(frozen=True)
class Config:
    """Sizes: sequences of `length` tokens of `vocabulary`."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    learning_rate: float
    weight_decay: float
    batch_per_device: int
    compute_dtype: str


class GPT(nn.Module):
    """Tokens [rows, length] int32 -> logits [rows, length, vocabulary]."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """No dropout."""
        config = self.config
        init = nn.initializers.normal(0.02)
        dtype = jnp.dtype(config.compute_dtype)
        embedding = nn.Embed(config.vocabulary, config.width, dtype=dtype, embedding_init=init)
        position = self.param("position", init, (config.length, config.width)).astype(dtype)
        x = embedding(tokens) + position
        for _ in range(config.layers):
            x = x + self._attention(nn.LayerNorm(dtype=dtype)(x))
            up = self._dense(4 * config.width)(nn.LayerNorm(dtype=dtype)(x))
            x = x + self._dense(config.width)(nn.gelu(up))
        return embedding.attend(nn.LayerNorm(dtype=dtype)(x))

    def _dense(self, features: int) -> nn.Dense:
        dtype = jnp.dtype(self.config.compute_dtype)
        return nn.Dense(features, dtype=dtype, kernel_init=nn.initializers.normal(0.02))

    def _attention(self, x: jax.Array) -> jax.Array:
        config = self.config
        shape = (*x.shape[:2], config.heads, config.width // config.heads)
        query, key, value = (
            part.reshape(shape) for part in jnp.split(self._dense(3 * config.width)(x), 3, -1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * shape[-1] ** -0.5
        allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(allowed, scores, jnp.finfo(scores.dtype).min))
        return self._dense(config.width)(jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape))


def build(config: Config) -> Training:
    """The training step on random tokens."""
    model = GPT(config)

    def variables(key: jax.Array) -> tuple[Any, Any]:
        return model.init(key, jnp.zeros((1, config.length), jnp.int32))["params"], {}

    def loss_of(params: Any, model_state: Any, batch: Any, _key: jax.Array) -> tuple[jax.Array, Any]:
        logits = model.apply({"params": params}, batch["tokens"][:, :-1])
        return mean_cross_entropy(logits, batch["tokens"][:, 1:]), model_state

    def example(rng: np.random.Generator) -> Example:
        return {"tokens": rng.integers(config.vocabulary, size=config.length + 1).astype(np.int32)}

    optimizer = optax.adamw(config.learning_rate, weight_decay=config.weight_decay)
    return training(variables, loss_of, optimizer, example, config.batch_per_device)
