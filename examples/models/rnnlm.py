"""RNNLM (Zaremba et al. 2014, the large model): two LSTM layers over time by `lax.scan`, dropout between layers.

Two departures: Adam for SGD, and the hidden state starts at zero in every batch (random text has no continuation).
"""

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
    """Sizes: `layers` LSTMs of `width` units, unrolled over `length` words of `vocabulary`."""

    layers: int
    width: int
    vocabulary: int
    length: int
    dropout: float
    init_range: float
    clip_norm: float
    learning_rate: float
    batch_per_device: int
    compute_dtype: str


class LSTM(nn.Module):
    """One layer over time, [rows, length, inputs] -> [rows, length, width]."""

    width: int
    kernel_init: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The inputs' share of the gates is one matmul for all times; the scan holds the recurrent one."""
        gates_x = nn.Dense(4 * self.width, dtype=self.dtype, kernel_init=self.kernel_init)(x)
        recurrent = self.param("recurrent", self.kernel_init, (self.width, 4 * self.width)).astype(self.dtype)

        def advance(carry: tuple[jax.Array, jax.Array], gate_x: jax.Array) -> tuple[Any, jax.Array]:
            hidden, cell = carry
            enter, forget, new, leave = jnp.split(gate_x + hidden @ recurrent, 4, axis=-1)
            cell = nn.sigmoid(forget) * cell + nn.sigmoid(enter) * jnp.tanh(new)
            hidden = nn.sigmoid(leave) * jnp.tanh(cell)
            return (hidden, cell), hidden

        zero = jnp.zeros((x.shape[0], self.width), self.dtype)
        _, hidden = jax.lax.scan(advance, (zero, zero), gates_x.swapaxes(0, 1))
        return hidden.swapaxes(0, 1)


class RNNLM(nn.Module):
    """Words [rows, length] int32 -> logits [rows, length, vocabulary]."""

    config: Config

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        """Training mode: draws dropout masks."""
        config = self.config
        dtype = jnp.dtype(config.compute_dtype)
        init = symmetric_uniform(config.init_range)
        x = nn.Embed(config.vocabulary, config.width, dtype=dtype, embedding_init=init)(words)
        for _ in range(config.layers):
            x = LSTM(config.width, init, dtype)(nn.Dropout(config.dropout, deterministic=False)(x))
        x = nn.Dropout(config.dropout, deterministic=False)(x)
        return nn.Dense(config.vocabulary, dtype=dtype, kernel_init=init)(x)


def symmetric_uniform(limit: float) -> Any:
    """Initializer: uniform between -limit and limit."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return init


def build(config: Config) -> Training:
    """The training step on random words."""
    model = RNNLM(config)

    def variables(key: jax.Array) -> tuple[Any, Any]:
        words = jnp.zeros((1, config.length), jnp.int32)
        return model.init({"params": key, "dropout": key}, words)["params"], {}

    def loss_of(params: Any, model_state: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        logits = model.apply({"params": params}, batch["words"][:, :-1], rngs={"dropout": key})
        return mean_cross_entropy(logits, batch["words"][:, 1:]), model_state

    def example(rng: np.random.Generator) -> Example:
        return {"words": rng.integers(config.vocabulary, size=config.length + 1).astype(np.int32)}

    optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optax.adam(config.learning_rate))
    return training(variables, loss_of, optimizer, example, config.batch_per_device)
