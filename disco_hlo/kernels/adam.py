"""Reduce-scatter + Adam + all-gather as one kernel: each device updates its shard while the rest travels.

CoCoNet's fused collective (section 4.3; measured in 5.2): what stands between the two halves of an all-reduce is
computed on the shard, in registers, so that the sum of the gradients is never written to memory and read again. A
device reads its shard of the gradients from every device's memory, adds, updates its shard of the moments, and stores
the new parameters to every device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from disco_hlo.kernels.refusals import devices_along, multiple, one_dtype, require

NAME = "reduce-scatter + Adam + all-gather"

LANES = 128
"""Threads of the one warpgroup that a block has."""

Ref = Any
"""A reference to memory: jax has no public type for it."""


@dataclasses.dataclass(frozen=True)
class AdamTiles:
    """How the update is cut.

    Attributes:
        size: elements that a block updates at once; a multiple of 512, which is 16 bytes a thread.
        blocks: thread blocks; all multiprocessors, `blocks_each` times, where None.
        blocks_each: blocks that share a multiprocessor, so that one reads while another computes.
    """

    size: int = 2048
    blocks_each: int = 2
    blocks: int | None = None


RANGE: tuple[AdamTiles, ...] = tuple(
    AdamTiles(size=size, blocks_each=each) for size, each in itertools.product((2048, 1024, 4096), (2, 4, 1))
)
"""What the update is tuned over, the likeliest first."""


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
        step = mean * (self.rate * corrections[0]) / (jnp.sqrt(square * corrections[1]) + self.epsilon)
        return step, mean, square


def adam_update(
    gradients: jax.Array,
    parameters: jax.Array,
    moments: tuple[jax.Array, jax.Array],
    corrections: jax.Array,
    axis_name: str,
    tiles: AdamTiles = RANGE[0],
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
        KernelRefusedError: see `devices_along`; other dtypes than float32; n that devices and tiles do not divide.
    """
    devices = devices_along(axis_name, NAME)
    mean, square = moments
    named = {"gradients": gradients, "parameters": parameters, "mean": mean, "square": square}
    one_dtype(NAME, named | {"corrections": corrections}, (jnp.dtype(jnp.float32),))
    multiple(NAME, "n", gradients.size, devices, "devices")
    shard = gradients.size // devices
    shapes = [array.shape for array in (*named.values(), corrections)]
    expected = [(devices * shard,)] * 2 + [(shard,)] * 2 + [(2,)]
    require(shapes == expected, NAME, f"needs shapes {expected}, got {shapes}")
    multiple(NAME, "tiles.size", tiles.size, 4 * LANES, "16 bytes a thread")
    multiple(NAME, "n / devices", shard, tiles.size, "tiles.size")
    blocks = tiles.blocks or tiles.blocks_each * int(jax.devices()[0].core_count)
    new_parameters, new_mean, new_square = plgpu.kernel(
        functools.partial(_kernel, axis_name, devices, tiles.size, blocks, adam),
        out_type=[jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (parameters, mean, square)],
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(gradients, parameters, mean, square, corrections)
    return new_parameters, new_mean, new_square


def reference(
    gradients: jax.Array,
    parameters: jax.Array,
    moments: tuple[jax.Array, jax.Array],
    corrections: jax.Array,
    axis_name: str,
    adam: Adam = Adam(),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same by XLA's separate operations."""
    shard = moments[0].size
    own = lax.dynamic_slice(parameters, (lax.axis_index(axis_name) * shard,), (shard,))
    total = lax.psum_scatter(gradients, axis_name, tiled=True)
    step, mean, square = adam.update(total, moments, (corrections[0], corrections[1]))
    return lax.all_gather(own - step, axis_name, tiled=True), mean, square


def _kernel(axis: str, devices: int, size: int, blocks: int, adam: Adam, *refs: Ref) -> None:
    """One block's tiles of this device's shard."""
    gradients, parameters, mean, square, corrections, new_parameters, new_mean, new_square = refs
    here = lax.axis_index(axis)
    peers = [lax.rem(here + offset, jnp.int32(devices)) for offset in range(1, devices)]
    shard = mean.shape[0]
    # Registers as the copies between memory and them are fastest: each thread has four neighbours.
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=4)

    def load(ref: Ref, part: Any) -> jax.Array:
        loaded: jax.Array = plgpu.layout_cast(ref[part], layout)
        return loaded

    factors = corrections[0], corrections[1]

    @plgpu.nd_loop((shard // size,), collective_axes="block")
    def _(loop: plgpu.NDLoopInfo) -> None:
        of_shard = pl.ds(loop.index[0] * size, size)
        of_all = pl.ds(here * shard + loop.index[0] * size, size)
        there = [load(plgpu.remote_ref(gradients, {axis: peer}), of_all) for peer in peers]
        total = functools.reduce(jnp.add, there, load(gradients, of_all))
        step, new_mean[of_shard], new_square[of_shard] = adam.update(
            total, (load(mean, of_shard), load(square, of_shard)), factors
        )
        new = load(parameters, of_all) - step
        new_parameters[of_all] = new
        for peer in peers:
            plgpu.remote_ref(new_parameters, {axis: peer})[of_all] = new

    # The others have read this device's gradients, and written its parameters, when all have come here.
    finished = pl.get_global(plgpu.SemaphoreType.REGULAR((blocks,))).at[lax.axis_index("block")]
    for peer in peers:
        pl.semaphore_signal(finished, device_id={axis: peer})
    pl.semaphore_wait(finished, devices - 1, decrement=False)
