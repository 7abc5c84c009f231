"""google-research/vision_transformer: the step of ``vit_jax/train.py`` for ``b16,cifar10``, on made images.

Weights are those that their ``init_model`` draws, where theirs come from a file.
"""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from strangers.training import Source, Training

SOURCE = Source("google-research/vision_transformer", "c6de1e5378c9", ".")
CLASSES = 10
"""Of cifar10."""
_DISTINCT = 4
"""Batches, taken in turn."""


def training(size: str) -> Training:
    """Ours: 64 images for each device, as on their eight, and what ``tiny`` makes small."""
    pipeline, models, train, utils = (
        import_module(f"vit_jax.{name}") for name in ("input_pipeline", "models", "train", "utils")
    )
    devices = jax.local_device_count()
    config = import_module("vit_jax.configs.vit").get_config("b16,cifar10")
    config.batch = 64 * devices
    if size == "tiny":
        config.batch, config.pp.crop = 16 * devices, 32
        config.model = import_module("vit_jax.configs.models").get_testing_config()
        config.model.hidden_size = 64
        config.model.transformer.mlp_dim, config.model.transformer.num_layers = 128, 2
    config.base_lr *= config.batch / 512  # as their README asks
    data = _batches((devices, config.batch // devices, config.pp.crop, config.pp.crop, 3))

    # As their train_and_evaluate, without checkpoints, logs and evaluation.
    model = models.VisionTransformer(num_classes=CLASSES, **config.model)

    def init_model() -> Any:
        images = data[0]["image"]
        return model.init(jax.random.PRNGKey(0), jnp.ones(images.shape[1:], images.dtype.name), train=False)

    params = flax.core.freeze(jax.jit(init_model, backend="cpu")()["params"])
    lr_fn = utils.create_learning_rate_schedule(
        config.total_steps, config.base_lr, config.decay_type, config.warmup_steps
    )
    tx = optax.chain(
        optax.clip_by_global_norm(config.grad_norm_clip),
        optax.sgd(learning_rate=lr_fn, momentum=0.9, accumulator_dtype="bfloat16"),
    )
    update = train.make_update_fn(apply_fn=model.apply, accum_steps=config.accum_steps, tx=tx)
    state = flax.jax_utils.replicate((params, tx.init(params)))
    del params
    random = flax.jax_utils.replicate(jax.random.PRNGKey(0))
    batches = pipeline.prefetch(itertools.cycle(data), config.prefetch)

    def step(batch: Any) -> Any:
        nonlocal state, random
        weights, moments, loss, random = update(*state, batch, random)
        state = (weights, moments)
        return loss

    def read(loss: Any) -> float:
        return float(flax.jax_utils.unreplicate(loss))

    return Training(lambda _: next(batches), step, read, lambda: flax.jax_utils.unreplicate(state[0]))


def _batches(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Uniform pixels, as theirs are scaled to [-1, 1]."""
    random = np.random.default_rng(0)
    return [
        {
            "image": random.uniform(-1, 1, shape).astype(np.float32),
            "label": np.eye(CLASSES, dtype=np.float32)[random.integers(0, CLASSES, shape[:2])],
        }
        for _ in range(_DISTINCT)
    ]
