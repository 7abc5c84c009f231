"""Every kernel becomes its custom call on a machine without a GPU: layouts, shared memory and types all fit."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from disco_hlo.kernels.refusals import OLDEST_JAX

if jax.__version_info__ < OLDEST_JAX:
    pytest.skip(f"jax {jax.__version__} lacks what the kernels use", allow_module_level=True)

from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu

from disco_hlo.kernels.catalog import AXIS, FUSED

MULTIPROCESSORS = 132


class Hopper:
    core_count = MULTIPROCESSORS


class JaxOnHopper:
    """jax as JAX's own kernel sees it on a Hopper GPU: it asks the first device for its multiprocessors."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def devices(self) -> list[Hopper]:
        return [Hopper()]


def shapes(name: str, devices: int) -> tuple[Any, ...]:
    """Arrays as large as those of one layer."""

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    if name == "all-gather-matmul":
        return array(1024 * devices, 4096), array(4096, 1024 * devices)
    if name == "matmul-all-to-all":
        return array(4096 * devices, 4096), array(4096 * devices, 4096)
    if name == "matvec-all-reduce":
        return array(8192, 8192), array(8192)
    if name == "all-reduce-norm":
        return array(1024 * devices, 4096), array(1024, 4096), array(4096), array(4096)
    if name == "embedding-all-to-all":
        return array(4 * devices, 1024, 256), array(4 * devices, 64, 10, dtype=jnp.int32)
    if name in ("adam", "lamb"):
        n = 1 << 20
        whole, shard = array(n, dtype=jnp.float32), array(n, dtype=jnp.float32)
        return array(n * devices, dtype=jnp.float32), whole, (shard, shard), array(2, dtype=jnp.float32)
    return array(4096, 4096), array(4096, 4096)


def calls(name: str, tiles: Any) -> int:
    """How many kernels of Mosaic GPU `name` becomes."""
    tiles = dataclasses.replace(tiles, blocks=MULTIPROCESSORS)
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    traced = FUSED[name].fused(mesh, tiles).trace(*shapes(name, devices))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @(\w+)", text).count("mosaic_gpu_v2")


@pytest.mark.parametrize("name", FUSED)
def test_a_kernel_lowers_to_one_custom_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_matmul_mgpu, "jax", JaxOnHopper())
    assert calls(name, FUSED[name].tuning[0]) == 1


@pytest.mark.parametrize("name", [name for name, fused in FUSED.items() if fused.has_order])
def test_it_does_in_the_other_order(name: str) -> None:
    assert calls(name, dataclasses.replace(FUSED[name].tuning[0], remote_first=False)) == 1


@pytest.mark.parametrize(
    ("name", "tiles"),
    [
        (name, tiles)
        for name in ("matmul-reduce-scatter", "matvec-all-reduce")
        for tiles in FUSED[name].tuning[1:6]
    ],
)
def test_every_shape_of_a_tuning_range_fits_into_shared_memory(name: str, tiles: Any) -> None:
    assert calls(name, tiles) == 1
