"""A training script for tests: train.py [ADDRESS]; with an address it is one of two ranks under mpiexec."""

from __future__ import annotations

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def main() -> None:
    if len(sys.argv) > 1:
        jax.distributed.initialize(sys.argv[1], 2, int(os.environ["OMPI_COMM_WORLD_RANK"]))
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    rows = np.ones((8 // jax.process_count(), 16), np.float32)
    batch = jax.make_array_from_process_local_data(split, rows)
    weights = jax.device_put(np.full((16, 16), 0.1, np.float32), whole)

    def train_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(weights)
        return weights - 0.1 * gradient, loss

    step = jax.jit(train_step, out_shardings=(whole, whole))
    for _ in range(3):
        weights, loss = step(weights, batch)
    print(f"loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
