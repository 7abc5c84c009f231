"""Reduce-scatter + LAMB + all-gather as one kernel: `normed_update` with LAMB's work (You et al., algorithm 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from disco_hlo.kernels.adam import Adam, check_step
from disco_hlo.kernels.normed_update import normed_update
from disco_hlo.kernels.tiles import NORMED_RANGE, UpdateTiles
from disco_hlo.kernels.update import update_shard

NAME = "reduce-scatter + LAMB + all-gather"
RANGE = NORMED_RANGE


@dataclasses.dataclass(frozen=True)
class Lamb:
    """The numbers of LAMB that do not change from step to step."""

    adam: Adam = dataclasses.field(default_factory=lambda: Adam(rate=1.0, epsilon=1e-6))
    rate: float = 1e-3
    decay: float = 0.01

    def direction(
        self,
        gradient: jax.Array,
        parameters: jax.Array,
        moments: tuple[jax.Array, jax.Array],
        corrections: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Where the parameters go, before it is scaled, and the new moments."""
        step, mean, square = self.adam.update(gradient, moments, corrections)
        return step + self.decay * parameters, mean, square

    def scale(self, of_parameters: jax.Array, of_direction: jax.Array) -> jax.Array:
        """By which the direction is multiplied, from the sums of both squares."""
        known = jnp.logical_and(of_parameters > 0, of_direction > 0)
        ratio = jnp.sqrt(of_parameters / jnp.where(known, of_direction, 1.0))
        return self.rate * jnp.where(known, ratio, 1.0)


def lamb_update(
    gradients: jax.Array,
    parameters: jax.Array,
    moments: tuple[jax.Array, jax.Array],
    corrections: jax.Array,
    axis_name: str,
    tiles: UpdateTiles = RANGE[0],
    lamb: Lamb = Lamb(),
) -> tuple[jax.Array, ...]:
    """Sum the gradients over the devices and step all parameters, which are one layer's, with LAMB.

    Args and results are those of `adam_update`.

    Raises:
        KernelRefusedError: see `check_step`; more blocks than run at once.
    """
    check_step(NAME, gradients, parameters, moments, corrections, axis_name, tiles)
    mean, square = moments

    def measure(
        total: jax.Array, arrays: Sequence[jax.Array], factors: Sequence[jax.Array]
    ) -> tuple[jax.Array, Sequence[jax.Array], Sequence[jax.Array]]:
        own, *of_moments = arrays
        direction, *new = lamb.direction(total, own, (of_moments[0], of_moments[1]), (factors[0], factors[1]))
        return direction, new, (own * own, direction * direction)

    def step(
        direction: jax.Array,
        again: Sequence[jax.Array],
        _: Sequence[jax.Array],
        sums: Sequence[jax.Array],
    ) -> jax.Array:
        return again[0] - lamb.scale(sums[0], sums[1]) * direction

    arrays, work = (parameters, mean, square), (measure, step, 2, (0,))
    return normed_update(gradients, arrays, (corrections,), axis_name, work, 2, tiles)


def reference(
    gradients: jax.Array,
    parameters: jax.Array,
    moments: tuple[jax.Array, jax.Array],
    corrections: jax.Array,
    axis_name: str,
    lamb: Lamb = Lamb(),
) -> tuple[jax.Array, ...]:
    """The same by XLA's separate operations."""

    def work(total: jax.Array, own: jax.Array) -> tuple[jax.Array, ...]:
        direction, mean, square = lamb.direction(total, own, moments, (corrections[0], corrections[1]))
        sums = lax.psum(jnp.stack([jnp.sum(own * own), jnp.sum(direction * direction)]), axis_name)
        return own - lamb.scale(sums[0], sums[1]) * direction, mean, square

    return update_shard(gradients, parameters, axis_name, work)
