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
    if name == "matvec-all-reduce":
        return array(8192, 8192), array(8192)
    if name == "adam":
        n = 1 << 20
        whole, shard = array(n, dtype=jnp.float32), array(n, dtype=jnp.float32)
        return array(n * devices, dtype=jnp.float32), whole, (shard, shard), array(2, dtype=jnp.float32)
    return array(4096, 4096), array(4096, 4096)


@pytest.mark.parametrize(
    ("name", "remote_first"),
    [(name, order) for name, fused in FUSED.items() for order in (True, False) if order or fused.has_order],
)
def test_a_kernel_lowers_to_one_custom_call(
    name: str, remote_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = FUSED[name]
    tiles = dataclasses.replace(fused.tuning[0], blocks=MULTIPROCESSORS)
    if fused.has_order:
        tiles = dataclasses.replace(tiles, remote_first=remote_first)
    monkeypatch.setattr(collective_matmul_mgpu, "jax", JaxOnHopper())
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    lowered = fused.fused(mesh, tiles).trace(*shapes(name, devices)).lower(lowering_platforms=("cuda",))
    assert re.findall(r"custom_call @(\w+)", lowered.as_text()).count("mosaic_gpu_v2") == 1
