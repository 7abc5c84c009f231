"""What the kernels do alike inside: who the other devices are, and how the same blocks of all wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

Ref = Any
"""A reference to memory: jax has no public type for it."""


def peers_of(axis: str, devices: int) -> list[jax.Array]:
    """The other devices along an axis, from the next one on."""
    return [lax.rem(lax.axis_index(axis) + offset, jnp.int32(devices)) for offset in range(1, devices)]


def meet(flag: Ref, axis: str, peers: Sequence[jax.Array], signals: int) -> None:
    """Raise this flag on the peers, and wait until it was raised here `signals` times."""
    for peer in peers:
        pl.semaphore_signal(flag, device_id={axis: peer})
    pl.semaphore_wait(flag, signals, decrement=False)
