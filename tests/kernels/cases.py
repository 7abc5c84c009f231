"""All kernels on interpreted devices, each case one row of a JSON object: `python -m tests.kernels.cases [NAME ...]`.

A process of its own, under `environment(devices)`: the interpreter's threads wait for each other inside XLA's pool,
which must have more of them than a machine of two cores gets, and XLA reads their number once.
"""

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from disco_hlo.kernels import normed_update, reduce_matmul
from disco_hlo.kernels.catalog import AXIS, FUSED, ROWS, WHOLE, Fused
from disco_hlo.kernels.embedding import BagTiles
from disco_hlo.kernels.norm import RowTiles
from disco_hlo.kernels.normed_update import recipe_update
from disco_hlo.kernels.tiles import MatmulTiles, UpdateTiles
from disco_hlo.kernels.update import update_shard
from disco_hlo.kernels.update_pattern import Recipe
from tests.kernels.interpreter import interpreted

SMALL = MatmulTiles(tile_m=64, tile_n=64, tile_k=64, steps=2, panel=1)
RACES = "does not wait", "signals before its stores have arrived", "ends before the others"
"""Kernels that are wrong on purpose."""
NORMED = "an update with a norm, by recipe"
RECIPE = Recipe(
    whole=(False, True),
    scalars=1,
    steps=(
        ("add", (0, 1)),
        ("multiply", (4, 4)),
        ("sum", (5,)),
        ("sqrt", (6,)),
        ("compare.LE", (7, (0.0).hex())),
        ("divide", (3, 7)),
        ("select", (8, (1.0).hex(), 9)),
        ("multiply", (4, 10)),
        ("subtract", (2, 11)),
    ),
    kept=(4,),
    gathered=12,
)


def main() -> None:
    """Run every case and print what came of it."""
    # Each of these places is written by a callback; 512 of them take 44 s.
    normed_update._SLOTS = normed_update.LANES
    mesh = jax.sharding.Mesh(jax.devices(), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    chosen = tuple(sys.argv[1:] or [""])
    rows = {name: outcome(run) for name, run in cases(mesh, mesh.size) if name.startswith(chosen)}
    json.dump(rows, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # cases that are meant to fail may leave threads that wait for each other


def outcome(run: Callable[[], str]) -> str:
    """What a case says, or what it raised."""
    try:
        return run()
    except RuntimeError as error:  # all that comes through XLA
        return f"{type(error).__name__}: {error}"


def cases(mesh: jax.sharding.Mesh, devices: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """Names and functions that say "equal", or how the result differs."""
    for name, fused in FUSED.items():
        arrays = arrays_for(name, devices)
        for chosen in tiles_for(name, devices):
            yield (
                case_name(name, chosen),
                lambda n=name, f=fused, c=chosen, a=arrays: compared(n, f, mesh, c, a),
            )
    if devices == 2:
        yield NORMED, lambda: with_a_norm(mesh)
        yield RACES[0], lambda: without(mesh, "semaphore_wait", reduce_matmul.pl, no_wait)
        yield RACES[1], lambda: without(mesh, "wait_smem_to_gmem", reduce_matmul.plgpu, no_wait_for_stores)
        yield RACES[2], lambda: left_behind(mesh)


def case_name(name: str, chosen: Any) -> str:
    """The kernel, its order where it has one, its blocks."""
    order = {True: " remote first", False: " in order of rows"}.get(getattr(chosen, "remote_first", None), "")
    return f"{name}{order if FUSED[name].has_order else ''}, {chosen.blocks} blocks"


def tiles_for(name: str, devices: int) -> list[Any]:
    """One block, which orders everything; two, whose tiles alternate; three, of which some have none of a shard. On
    four devices each kernel runs once, and what runs there is left out on two where others are like it."""
    if name == "adam":
        return [UpdateTiles(size=512, blocks=3)]
    if name == "lamb":  # its blocks wait for each other, and here they run one after the other, for long
        return [UpdateTiles(size=512, blocks=1)] if devices == 2 else []
    if name == "all-reduce-norm":
        return [RowTiles(blocks=3)]
    if name == "embedding-all-to-all":
        return [
            BagTiles(rows=2, blocks=2) if devices == 4 else BagTiles(rows=8, remote_first=False, blocks=3)
        ]
    if name == "matvec-all-reduce":
        return [dataclasses.replace(SMALL, tile_k=128, blocks=3 if devices == 4 else 2)]
    if not FUSED[name].has_order:
        return [dataclasses.replace(SMALL, blocks=1)] if devices == 4 else []
    chosen = [(1, True, "n", "m", 64), (2, False, "m", "m", 64)]
    if devices == 4:
        chosen = [(3, True, "m", "n", 64)]
    elif name == "matmul-reduce-scatter":
        chosen += [(1, False, "n", "n", 256), (4, True, "n", "m", 256)]  # four pieces in two slots
    return [
        dataclasses.replace(SMALL, blocks=blocks, remote_first=first, split=split, minor=minor, tile_m=rows)
        for blocks, first, split, minor, rows in chosen
    ]


def arrays_for(name: str, devices: int) -> tuple[Any, ...]:
    """Small whole numbers, whose sums are exact in any order."""
    random = np.random.default_rng(7)

    def whole(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(random.integers(-3, 4, shape), dtype)

    if name == "all-gather-matmul":
        return whole(128 * devices, 128), whole(128, 128 * devices)
    if name == "matvec-all-reduce":
        return whole(512, 256 * devices), whole(256 * devices)
    if name == "matmul-all-to-all":
        return whole(256 * devices * devices, 128), whole(128 * devices, 128)
    if name == "all-reduce-norm":
        return whole(4 * devices * devices, 512), whole(4 * devices, 512), whole(512), whole(512)
    if name == "embedding-all-to-all":
        indices = random.integers(-1, 9, (2 * devices, 2 * devices, 5))  # the first and the last are outside
        return whole(2 * devices, 8, 128, dtype=jnp.float32), jnp.asarray(indices, jnp.int32)
    if name in ("adam", "lamb"):
        n = 2048 * devices
        positive = [jnp.asarray(random.uniform(0.5, 1, n), jnp.float32) for _ in range(3)]
        corrections = jnp.asarray([10.0, 1000.0], jnp.float32)
        return whole(n * devices, dtype=jnp.float32), positive[0], (positive[1], positive[2]), corrections
    return whole(256 * devices, 128 * devices), whole(128 * devices, 128)


def compared(name: str, fused: Fused, mesh: jax.sharding.Mesh, chosen: Any, arrays: tuple[Any, ...]) -> str:
    """Run a kernel interpreted, with the detector of races, and compare it with its reference."""
    expected = fused.separate(mesh)(*arrays)
    # JAX's kernel fetches a tile's first operands while the copy of the last tile's last to the neighbour may still be
    # reading them there: the detector is right, and the time between the two is what makes it work.
    with interpreted(detect_races=name != "all-gather-matmul"):
        got = jax.block_until_ready(fused.fused(mesh, chosen)(*arrays))
    different = [
        f"{np.sum(np.asarray(a) != np.asarray(b))} of {a.size} differ, by at most {np.max(np.abs(np.asarray(a - b)))}"
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        if not np.allclose(
            a, b, rtol=4e-7 if name == "lamb" else 0, atol=0
        )  # its norms are sums in another order
    ]
    return "; ".join(different) or "equal"


def with_a_norm(mesh: jax.sharding.Mesh) -> str:
    """RECIPE, with three tiles of a shard."""

    def kernel(*given: Any) -> Any:
        *arrays, axis, tiles = given
        return recipe_update(*arrays, axis_name=axis, tiles=tiles, recipe=RECIPE)

    def reference(summands: Any, mean: Any, parameters: Any, scale: Any, axis: str) -> Any:
        def work(total: jax.Array, own: jax.Array) -> tuple[jax.Array, ...]:
            new = mean + total
            norm = jnp.sqrt(jax.lax.psum(jnp.sum(new * new), axis))
            return own - jnp.where(norm <= 0, 1.0, scale[0] / norm) * new, new

        return update_shard(summands, parameters, axis, work)

    fused = Fused(kernel, reference, (ROWS, ROWS, WHOLE, WHOLE), (WHOLE, ROWS), ())
    random, n = np.random.default_rng(7), 1536 * mesh.size
    arrays = [jnp.asarray(random.integers(-3, 4, size), jnp.float32) for size in (n * mesh.size, n, n)]
    tiles = UpdateTiles(size=512, blocks=1)
    return compared("lamb", fused, mesh, tiles, (*arrays, jnp.asarray([3.0])))


def without(mesh: jax.sharding.Mesh, name: str, module: Any, instead: Callable[..., None]) -> str:
    """Matmul + reduce-scatter that leaves out one kind of waiting: the detector must say so."""
    original = getattr(module, name)
    setattr(module, name, functools.partial(instead, original))
    try:
        fused, chosen = FUSED["matmul-reduce-scatter"], dataclasses.replace(SMALL, blocks=1)
        return compared("", fused, mesh, chosen, arrays_for("matmul-reduce-scatter", mesh.size))
    finally:
        setattr(module, name, original)


def no_wait(_: Callable[..., None], *__: Any, **___: Any) -> None:
    """Go on at once."""


def no_wait_for_stores(original: Callable[..., None], count: int, *, wait_read_only: bool) -> None:
    """Wait until copies have read shared memory, not until they have arrived."""
    original(count, wait_read_only=True)


def left_behind(mesh: jax.sharding.Mesh) -> str:
    """A kernel that stores to its neighbour and ends without a word: the neighbour may have ended before."""

    def body(x: Any, y: Any) -> None:
        neighbour = jax.lax.rem(jax.lax.axis_index(AXIS) + 1, jnp.int32(mesh.size))
        plgpu.remote_ref(y, {AXIS: neighbour})[...] = x[...]

    def local(x: jax.Array) -> Any:
        return plgpu.kernel(
            body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(1,), grid_names=("block",)
        )(x)

    rows = jax.sharding.PartitionSpec(AXIS)
    x = jnp.arange(128.0 * mesh.size)
    with interpreted():
        jax.block_until_ready(
            jax.jit(jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))(x)
        )
    return "not found"


if __name__ == "__main__":
    main()
