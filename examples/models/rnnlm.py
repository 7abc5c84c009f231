"""RNNLM (Zaremba et al. 2014, the large model): two LSTM layers over time by `lax.scan`, dropout between.

Two departures: Adam for SGD, and the hidden state starts at zero in every batch: random text has no sequel.
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


def advance(cell: jax.Array, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One time step after its matmuls: cell [rows, width], gates [rows, 4 * width] -> (hidden, cell)."""
    enter, forget, new, leave = jnp.split(gates, 4, axis=-1)
    cell = nn.sigmoid(forget) * cell + nn.sigmoid(enter) * jnp.tanh(new)
    return nn.sigmoid(leave) * jnp.tanh(cell), cell


@jax.custom_vjp
def lstm(recurrent: jax.Array, gates_x: jax.Array) -> jax.Array:
    """The recurrence from zero: recurrent [width, 4 * width], gates_x [length, rows, 4 * width], which is the
    inputs' share of the gates -> hidden [length, rows, width].

    The gradient of `recurrent` is one matmul after the backward loop. Left to autodiff it is a matmul, and
    in data parallelism an all-reduce, in every time step.
    """
    return _lstm_forward(recurrent, gates_x)[0]


def _lstm_forward(recurrent: jax.Array, gates_x: jax.Array) -> tuple[jax.Array, Any]:
    def body(carry: tuple[jax.Array, jax.Array], gate_x: jax.Array) -> tuple[Any, Any]:
        hidden, cell = carry
        gates = gate_x + hidden @ recurrent
        after = advance(cell, gates)
        return after, (after[0], (hidden, cell, gates))

    zero = jnp.zeros((gates_x.shape[1], recurrent.shape[0]), gates_x.dtype)
    _, (outputs, before) = jax.lax.scan(body, (zero, zero), gates_x)
    return outputs, (recurrent, before)


def _lstm_backward(residuals: Any, outputs_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    recurrent, (hidden, cell, gates) = residuals

    def body(carry: tuple[jax.Array, jax.Array], at: Any) -> tuple[Any, jax.Array]:
        hidden_bar, cell_bar = carry
        cell_before, gates_now, output_bar = at
        _, pull = jax.vjp(advance, cell_before, gates_now)
        cell_bar, gates_bar = pull((hidden_bar + output_bar, cell_bar))
        return (gates_bar @ recurrent.T, cell_bar), gates_bar

    zero = jnp.zeros_like(hidden[0])
    _, gates_bar = jax.lax.scan(body, (zero, zero), (cell, gates, outputs_bar), reverse=True)
    return jnp.einsum("tbi,tbj->ij", hidden, gates_bar), gates_bar


lstm.defvjp(_lstm_forward, _lstm_backward)


class LSTM(nn.Module):
    """One layer over time, [rows, length, inputs] -> [rows, length, width]."""

    width: int
    kernel_init: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The inputs' share of the gates is one matmul for all times."""
        gates_x = nn.Dense(4 * self.width, dtype=self.dtype, kernel_init=self.kernel_init)(x)
        recurrent = self.param("recurrent", self.kernel_init, (self.width, 4 * self.width)).astype(self.dtype)
        return lstm(recurrent, gates_x.swapaxes(0, 1)).swapaxes(0, 1)


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
