"""What the kernels do alike: how they are launched and load, who the other devices are, and how the same blocks of all
wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from disco_hlo.kernels.tiles import VECTOR

Ref = Any
"""A reference to memory: jax has no public type for it."""


def launch(
    kernel: Callable[..., None],
    blocks: int,
    outputs: Sequence[jax.ShapeDtypeStruct],
    *arrays: jax.Array,
    **options: Any,
) -> list[jax.Array]:
    """What so many blocks of a kernel make of arrays; `options` are those of `plgpu.kernel`."""
    results: list[jax.Array] = plgpu.kernel(
        kernel,
        out_type=list(outputs),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **options,
    )(*arrays)
    return results


def load(ref: Ref, part: Any, count: int, vector: int = VECTOR) -> jax.Array:
    """A part of an array, `count` numbers, over the threads of a warpgroup, `vector` neighbours each."""
    loaded: jax.Array = plgpu.layout_cast(ref[part], plgpu.Layout.WG_STRIDED((count,), vec_size=vector))
    return loaded


def peers_of(axis: str, devices: int) -> list[jax.Array]:
    """The other devices along an axis, from the next one on."""
    return [lax.rem(lax.axis_index(axis) + offset, jnp.int32(devices)) for offset in range(1, devices)]


def meet(flag: Ref, axis: str, peers: Sequence[jax.Array], signals: int) -> None:
    """Raise this flag on the peers, and wait until it was raised here `signals` times."""
    for peer in peers:
        pl.semaphore_signal(flag, device_id={axis: peer})
    pl.semaphore_wait(flag, signals, decrement=False)


def meet_at_the_end(axis: str, peers: Sequence[jax.Array], blocks: int) -> None:
    """Wait until the same block of all devices has come here."""
    finished = pl.get_global(plgpu.SemaphoreType.REGULAR((blocks,))).at[lax.axis_index("block")]
    meet(finished, axis, peers, len(peers))
