"""ResNet50 (He et al. 2016; stride on the 3x3 convolution, zero-initialised last scale, as is usual since).

Batch normalisation is over each device's own rows, as in the usual data-parallel training: the batch is
seen as groups of `batch_per_device` rows. Running statistics are model state: averaged over the groups,
replaced each step.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.training import Example, Training, mean_cross_entropy, training


@dataclass(frozen=True)
class Config:
    """Sizes: images are `image` x `image` x 3; stage i has `blocks[i]` blocks of `width * 2**i` channels."""

    image: int
    classes: int
    width: int
    blocks: tuple[int, ...]
    statistics_decay: float
    learning_rate: float
    momentum: float
    weight_decay: float
    batch_per_device: int
    compute_dtype: str


class GroupBatchNorm(nn.Module):
    """Batch normalisation of [rows, height, width, channels] over groups of `group_rows` rows."""

    group_rows: int
    decay: float
    dtype: Any
    scale_init: Any = nn.initializers.ones

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Training mode: normalises by the batch and updates the running statistics."""
        channels = x.shape[-1]
        scale = self.param("scale", self.scale_init, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, (channels,))
        running_variance = self.variable("batch_stats", "variance", jnp.ones, (channels,))
        groups = x.reshape(-1, self.group_rows, *x.shape[1:]).astype(jnp.float32)
        mean = groups.mean((1, 2, 3), keepdims=True)
        variance = jnp.square(groups - mean).mean((1, 2, 3), keepdims=True)
        if not self.is_initializing():
            running_mean.value = self._decayed(running_mean.value, mean)
            running_variance.value = self._decayed(running_variance.value, variance)
        normal = (groups - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias
        return normal.reshape(x.shape).astype(self.dtype)

    def _decayed(self, running: jax.Array, new: jax.Array) -> jax.Array:
        return self.decay * running + (1 - self.decay) * jax.lax.stop_gradient(new).mean((0, 1, 2, 3))


class ResNet(nn.Module):
    """Images [rows, image, image, 3] -> logits [rows, classes]."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Training mode; with `mutable=["batch_stats"]`."""
        config = self.config
        dtype = jnp.dtype(config.compute_dtype)
        conv = partial(nn.Conv, use_bias=False, dtype=dtype, kernel_init=nn.initializers.he_normal())
        norm = partial(GroupBatchNorm, config.batch_per_device, config.statistics_decay, dtype)
        x = nn.relu(norm()(conv(config.width, (7, 7), strides=(2, 2))(x)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(config.blocks):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = self._bottleneck(conv, norm, x, config.width * 2**stage, stride)
        return nn.Dense(config.classes, dtype=dtype)(x.mean((1, 2)))

    def _bottleneck(self, conv: Any, norm: Any, x: jax.Array, width: int, stride: int) -> jax.Array:
        y = nn.relu(norm()(conv(width, (1, 1))(x)))
        y = nn.relu(norm()(conv(width, (3, 3), strides=(stride, stride))(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * width, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * width, (1, 1), strides=(stride, stride))(x))
        return nn.relu(x + y)


def build(config: Config) -> Training:
    """The training step on random images and labels."""
    model = ResNet(config)
    shape = (config.image, config.image, 3)

    def variables(key: jax.Array) -> tuple[Any, Any]:
        made = model.init(key, jnp.zeros((config.batch_per_device, *shape)))
        return made["params"], made["batch_stats"]

    def loss_of(params: Any, model_state: Any, batch: Any, _key: jax.Array) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": model_state}
        logits, updated = model.apply(variables, batch["image"], mutable=["batch_stats"])
        return mean_cross_entropy(logits, batch["label"]), updated["batch_stats"]

    def example(rng: np.random.Generator) -> Example:
        label = rng.integers(config.classes, size=(), dtype=np.int32)
        return {"image": rng.standard_normal(shape, np.float32), "label": np.asarray(label)}

    optimizer = optax.chain(
        optax.add_decayed_weights(config.weight_decay), optax.sgd(config.learning_rate, config.momentum)
    )
    return training(variables, loss_of, optimizer, example, config.batch_per_device)
