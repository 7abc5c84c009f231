"""google-deepmind/nanodo: the step of ``nanodo/train.py`` with ``configs/default.py``, on made tokens."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from strangers.training import Source, Training

SOURCE = Source("google-deepmind/nanodo", "10aefdeed40a", ".")
VOCABULARY = 32_100
_DISTINCT = 8
"""Batches, taken in turn."""


def training(size: str) -> Training:
    """Ours: half of their batch, as two devices have no room for all of it, and what ``tiny`` makes small."""
    factory, train = import_module("nanodo.model_factory"), import_module("nanodo.train")
    c, vocabulary = import_module("nanodo.configs.default").get_config(), VOCABULARY
    c.batch_size = 128
    if size == "tiny":
        c.batch_size, vocabulary = 8, 256
        c.model.D, c.model.H, c.model.L, c.model.N, c.model.F = 64, 2, 32, 1, 128

    # As their train_and_evaluate, without checkpoints, logs and evaluation.
    mesh = Mesh(mesh_utils.create_device_mesh((jax.device_count(),)), ("data",))
    model, get_loss_fn = factory.get_model_and_loss(c, vocabulary)
    shardings, state = train._init_train_state(c, model, rng=jax.random.PRNGKey(c.seed), mesh=mesh)
    trainer = train.Trainer(c=c, state=state, mesh=mesh, shardings=shardings, get_loss_fn=get_loss_fn)

    numbers = np.random.default_rng(0)
    shape = (c.batch_size, c.model.L)
    made = [numbers.integers(1, vocabulary, shape, dtype=np.int32) for _ in range(_DISTINCT)]

    def step(numbered: Any) -> Any:
        return trainer.do_step(*numbered)["train_loss"]

    return Training(
        lambda number: (number, made[number % _DISTINCT]), step, float, lambda: trainer.state.params
    )
