"""google/flax, ``examples/gemma``: the step of its ``train.py``, on sentences that are made and packed.

Its metric adds up all steps, so the loss is the mean of all so far, as its own loop logs it.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding

from strangers.training import Source, Training

SOURCE = Source("google/flax", "18f8f311c275", "examples/gemma")
_PAD, _EOS, _BOS = 0, 1, 2
"""As in the comments of their input pipeline."""
_DISTINCT = 8
"""Batches, taken in turn."""


def training(size: str) -> Training:
    """Ours: what ``tiny`` makes small."""
    train, models, pipeline = map(import_module, ("train", "transformer", "input_pipeline_grain"))
    config = import_module("configs.gemma3_270m").get_config()
    if size == "tiny":
        config = import_module("configs.tiny").get_config()
        config.vocab_size, config.per_device_batch_size, config.max_target_length = 512, 4, 64
        config.transformer_params |= {
            "num_layers": 2, "embed_dim": 64, "hidden_dim": 128, "head_dim": 32, "attention_types": (1, 1)
        }  # fmt: skip

    # As their train_and_evaluate, without checkpoints, logs, evaluation and text generation.
    mesh = jax.make_mesh(config.get_mesh_shape(len(jax.devices())), config.mesh_axes)
    data_sharding = NamedSharding(mesh, jax.P(config.data_sharding))
    same: dict[str, Any] = {
        "num_embed": config.vocab_size,
        "dtype": jnp.bfloat16 if config.use_bfloat16 else jnp.float32,
        "shd_config": import_module("transformer_cfg").ShardingConfig.fsdp_tp_sharding(
            fsdp_axis_name="fsdp", tensor_parallel_axis_name="tensor"
        ),
    }
    kind = models.TransformerConfig
    if config.transformer_name is not None:
        model_config = kind.from_version_name(config.transformer_name, **same)
    else:
        model_config = kind.from_dict(**config.transformer_params, **same)
    learning_rate = train.create_learning_rate_schedule(
        learning_rate=config.learning_rate, warmup_steps=config.warmup_steps
    )
    rngs = nnx.Rngs(params=config.seed, dropout=config.seed)
    with jax.set_mesh(mesh):
        sow_config = import_module("sow_lib").SowConfig(**config.sow_config)
        model = models.Transformer(model_config, rngs=rngs, sow_config=sow_config)
        tx = optax.adamw(learning_rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)
        optimizer = nnx.Optimizer(model, tx=tx, wrt=nnx.Param)
    metrics: Any = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    captures = {"with_capture": config.sow_config is not None}
    jit = nnx.jit if config.use_nnx_transforms in ("all", "jit-only") else jax.jit
    in_nnx = config.use_nnx_transforms in ("all", "grad-only")
    jitted: Any = jit(
        partial(train.nnx_train_step if in_nnx else train.jax_train_step, **captures),
        static_argnames=("label_smoothing", "pad_id"),
        donate_argnames=("model", "optimizer"),
    )

    random = np.random.default_rng(0)
    rows = config.per_device_batch_size * len(jax.devices())
    made = [
        pipeline.shift_target_left(
            _packed(random, rows, config.max_target_length, config.vocab_size), pad_id=_PAD
        )
        for _ in range(_DISTINCT)
    ]
    batches = [pipeline.move_to_devices(one, data_sharding) for one in made]

    def step(batch: Any) -> Any:
        with jax.set_mesh(mesh):
            output = jitted(model, optimizer, rngs, batch, metrics, 0.0, _PAD)
            if isinstance(output, tuple):
                nnx.update((model, optimizer, rngs, metrics), output[0])
        return metrics.loss.total[...]

    return Training(
        lambda number: batches[number % _DISTINCT],
        step,
        lambda _: float(metrics.compute()["loss"]),
        lambda: nnx.state(model, nnx.Param),
    )


def _packed(random: np.random.Generator, rows: int, length: int, vocabulary: int) -> dict[str, Any]:
    """A batch as their pipeline packs it: sentences of 10 to 60 tokens, numbered from 1, positions from 0, pads."""
    inputs, segments, positions = (np.zeros((rows, length), np.int32) for _ in range(3))
    for row in range(rows):
        at, segment = 0, 1
        while at + (size := int(random.integers(10, 61))) <= length:
            words = random.integers(3, vocabulary, size - 2)
            inputs[row, at : at + size] = np.concatenate([[_BOS], words, [_EOS]])
            segments[row, at : at + size] = segment
            positions[row, at : at + size] = np.arange(size)
            at, segment = at + size, segment + 1
    return {
        f"{name}{what}": one.copy()
        for what, one in (("", inputs), ("_segmentation", segments), ("_position", positions))
        for name in ("inputs", "targets")
    }
