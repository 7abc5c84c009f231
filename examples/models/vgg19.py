"""VGG19 (Simonyan and Zisserman 2015, configuration E): 16 convolutions, 3 dense layers, SGD, momentum."""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.training import Example, Training, mean_cross_entropy, training

CONVOLUTIONS = (2, 2, 4, 4, 4)


@dataclass(frozen=True)
class Config:
    """Sizes: images are `image` x `image` x 3; `channels` per block; `hidden` units per dense layer."""

    image: int
    classes: int
    channels: tuple[int, ...]
    hidden: int
    dropout: float
    learning_rate: float
    momentum: float
    weight_decay: float
    batch_per_device: int
    compute_dtype: str


class VGG19(nn.Module):
    """Images [rows, image, image, 3] -> logits [rows, classes]."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Training mode: draws dropout masks."""
        config = self.config
        dtype = jnp.dtype(config.compute_dtype)
        he = nn.initializers.he_normal()
        for channels, convolutions in zip(config.channels, CONVOLUTIONS, strict=True):
            for _ in range(convolutions):
                x = nn.relu(nn.Conv(channels, (3, 3), dtype=dtype, kernel_init=he)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(config.hidden, dtype=dtype, kernel_init=he)(x))
            x = nn.Dropout(config.dropout, deterministic=False)(x)
        # As in the paper: logits start near 0. With the default, ten times as large, training diverges.
        return nn.Dense(config.classes, dtype=dtype, kernel_init=nn.initializers.normal(0.01))(x)


def build(config: Config) -> Training:
    """The training step on random images and labels."""
    model = VGG19(config)
    shape = (config.image, config.image, 3)

    def variables(key: jax.Array) -> tuple[Any, Any]:
        return model.init({"params": key, "dropout": key}, jnp.zeros((1, *shape)))["params"], {}

    def loss_of(params: Any, model_state: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        logits = model.apply({"params": params}, batch["image"], rngs={"dropout": key})
        return mean_cross_entropy(logits, batch["label"]), model_state

    def example(rng: np.random.Generator) -> Example:
        label = rng.integers(config.classes, size=(), dtype=np.int32)
        return {"image": rng.standard_normal(shape, np.float32), "label": np.asarray(label)}

    optimizer = optax.chain(
        optax.add_decayed_weights(config.weight_decay), optax.sgd(config.learning_rate, config.momentum)
    )
    return training(variables, loss_of, optimizer, example, config.batch_per_device)
