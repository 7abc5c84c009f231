"""Reduce-scatter + Adam + all-gather as one kernel (CoCoNet, sections 3.4 and 4): `update` with Adam's work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from disco_hlo.kernels.refusals import require
from disco_hlo.kernels.tiles import UPDATE_RANGE, UpdateTiles
from disco_hlo.kernels.update import check_update, scatter_update, update_shard

NAME = "reduce-scatter + Adam + all-gather"
RANGE = UPDATE_RANGE


@dataclasses.dataclass(frozen=True)
class Adam:
    """The numbers of Adam (Kingma and Ba) that do not change from step to step."""

    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def update(
        self,
        gradient: jax.Array,
        moments: tuple[jax.Array, jax.Array],
        corrections: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What to subtract from the parameters, and the new moments.

        `corrections` are 1 / (1 - beta1^t) and 1 / (1 - beta2^t) of step t.
        """
        mean = self.beta1 * moments[0] + (1 - self.beta1) * gradient
        square = self.beta2 * moments[1] + (1 - self.beta2) * gradient * gradient
        return self.step((mean, square), corrections), mean, square

    def step(
        self, moments: tuple[jax.Array, jax.Array], corrections: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """What to subtract from the parameters, by moments that have the gradient in them."""
        mean, square = moments
        return mean * (self.rate * corrections[0]) / (jnp.sqrt(square * corrections[1]) + self.epsilon)


def adam_update(
    gradients: jax.Array,
    parameters: jax.Array,
    moments: tuple[jax.Array, jax.Array],
    corrections: jax.Array,
    axis_name: str,
    tiles: UpdateTiles = RANGE[0],
    adam: Adam = Adam(),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum the gradients over the devices and step all parameters with Adam.

    Args:
        gradients: (n,) float32, this device's.
        parameters: (n,) float32, equal on all devices; of those, this device's shard is read.
        moments: mean and square, each (n / devices,) float32: this device's shard.
        corrections: (2,) float32: 1 / (1 - beta1^t) and 1 / (1 - beta2^t).
        axis_name: the only axis of the mesh.
        tiles: RANGE holds those worth trying.
        adam: rate, betas and epsilon, compiled in.

    Returns:
        The new parameters (n,), equal on all devices, and this device's new moments (n / devices,).

    Raises:
        KernelRefusedError: see `check_step`.
    """
    check_step(NAME, gradients, parameters, moments, corrections, axis_name, tiles)
    mean, square = moments

    def work(
        total: jax.Array, arrays: Sequence[jax.Array], factors: Sequence[jax.Array]
    ) -> tuple[jax.Array, Sequence[jax.Array]]:
        own, *tiles_of_moments = arrays
        step, *new = adam.update(total, (tiles_of_moments[0], tiles_of_moments[1]), (factors[0], factors[1]))
        return own - step, new

    new, new_mean, new_square = scatter_update(
        gradients, (parameters, mean, square), (corrections,), axis_name, work, 2, tiles
    )
    return new, new_mean, new_square


def reference(
    gradients: jax.Array,
    parameters: jax.Array,
    moments: tuple[jax.Array, jax.Array],
    corrections: jax.Array,
    axis_name: str,
    adam: Adam = Adam(),
) -> tuple[jax.Array, ...]:
    """The same by XLA's separate operations."""

    def work(total: jax.Array, own: jax.Array) -> tuple[jax.Array, ...]:
        step, mean, square = adam.update(total, moments, (corrections[0], corrections[1]))
        return own - step, mean, square

    return update_shard(gradients, parameters, axis_name, work)


def check_step(
    kernel: str,
    gradients: jax.Array,
    parameters: jax.Array,
    moments: tuple[jax.Array, jax.Array],
    corrections: jax.Array,
    axis_name: str,
    tiles: UpdateTiles,
) -> None:
    """Raise KernelRefusedError for other shapes than those of `adam_update`, and as `check_update` does."""
    named = {"gradients": gradients, "parameters": parameters, "mean": moments[0], "square": moments[1]}
    named |= {"corrections": corrections}
    devices = check_update(kernel, named, axis_name, tiles)
    shapes = [array.shape for array in named.values()]
    whole, shard = (gradients.size,), (gradients.size // devices,)
    expected = [whole, whole, shard, shard, (2,)]
    require(shapes == expected, kernel, f"needs shapes {expected}, got {shapes}")
