"""What a kernel refuses: one line that says what was expected and what came."""

import ctypes
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from disco_hlo.kernels.refusals import OLDEST_JAX, KernelRefusedError, refuse_machine

if jax.__version_info__ < OLDEST_JAX:
    pytest.skip(f"jax {jax.__version__} is refused first", allow_module_level=True)

from disco_hlo.kernels.catalog import AXIS, FUSED, ROWS, WHOLE
from disco_hlo.kernels.embedding import BagTiles
from disco_hlo.kernels.norm import RowTiles
from disco_hlo.kernels.normed_update import recipe_update
from disco_hlo.kernels.tiles import MatmulTiles, UpdateTiles
from disco_hlo.kernels.update_pattern import Recipe

TILES = MatmulTiles(tile_m=64, tile_n=64, tile_k=64, blocks=1)
ADAM = UpdateTiles(size=512, blocks=1)
BAG_TILES = BagTiles(blocks=1)
VECTOR_TILES = dataclasses.replace(TILES, tile_k=128)
SCATTER, GATHER, VECTOR = "matmul-reduce-scatter", "all-gather-matmul", "matvec-all-reduce"
BAG, NORM = "embedding-all-to-all", "all-reduce-norm"
ROW_TILES = RowTiles(blocks=1)


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    names = (AXIS, "y")[: len(sizes)]
    count = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    devices = jax.devices()[:count]
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes), devices=devices)


def trace(name: str, tiles: Any, *arrays: Any, sizes: tuple[int, ...] = (4,)) -> Any:
    return jax.eval_shape(FUSED[name].fused(mesh_of(*sizes), tiles), *arrays)


def bf16(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def of_adam(n: int, dtype: Any = jnp.float32, moments: int | None = None) -> tuple[Any, ...]:
    moment = bf16(n if moments is None else moments, dtype=jnp.float32)
    return bf16(4 * n, dtype=dtype), bf16(n, dtype=jnp.float32), (moment, moment), bf16(2, dtype=jnp.float32)


def of_bags(columns: int = 128, samples: int = 16, bag: int = 4) -> tuple[Any, ...]:
    return bf16(8, 16, columns), bf16(8, samples, bag, dtype=jnp.int32)


def of_norm(rows: int = 1024, columns: int = 512) -> tuple[Any, ...]:
    return bf16(4 * rows, columns), bf16(rows, columns), bf16(columns), bf16(columns)


GOOD = bf16(1024, 1024), bf16(1024, 256)


@pytest.mark.parametrize(
    ("name", "tiles", "arrays", "says"),
    [
        (SCATTER, TILES, (bf16(1024, 1024, dtype=jnp.float32), GOOD[1]), "got lhs float32, rhs bfloat16"),
        (SCATTER, TILES, tuple(bf16(1024, 1024, dtype=jnp.float32) for _ in "ab"),
            "must be bfloat16 or float16"),
        (SCATTER, TILES, (bf16(1024, 1024), bf16(2048, 256)), r"got \(1024, 256\) and \(512, 256\)"),
        (SCATTER, TILES, (bf16(1026, 1024), GOOD[1]), r"M = 1026 must be a multiple of 4 \(devices\)"),
        (SCATTER, TILES, (bf16(1152, 1024), GOOD[1]), "rows of one device = 288 must be a multiple of 64"),
        (SCATTER, TILES, (GOOD[0], bf16(1024, 64)), "N = 64 must be a multiple of 128"),
        (SCATTER, TILES, (bf16(1024, 384), bf16(384, 256)), "K of one device = 96 must be a multiple of 64"),
        (SCATTER, TILES, (bf16(1024, 256), bf16(256, 256)), "K of one device must be at least 128, got 64"),
        (SCATTER, dataclasses.replace(TILES, steps=1), GOOD, "tiles.steps must be from 2 to 64, got 1"),
        (SCATTER, dataclasses.replace(TILES, tile_k=0), GOOD, "tiles.tile_k must be from 1 to 1024, got 0"),
        (SCATTER, dataclasses.replace(TILES, panel=0), GOOD, "tiles.panel must be from 1 to 65536, got 0"),
        (SCATTER, dataclasses.replace(TILES, blocks=9999), GOOD, "tiles.blocks must be from 1 to .*, got 9999"),
        (SCATTER, dataclasses.replace(TILES, tile_m=32), GOOD, "tiles.tile_m = 32 must be a multiple of 64"),
        (GATHER, TILES, (bf16(1024, 1024), bf16(1024, 128)), "N = 32 must be a multiple of 128"),
        (VECTOR, VECTOR_TILES, GOOD, r"needs an \(M, K\) and a \(K,\) array"),
        (VECTOR, VECTOR_TILES, (bf16(1056, 1024), bf16(1024)), "M = 1056 must be a multiple of 64"),
        (VECTOR, VECTOR_TILES, (bf16(1024, 768), bf16(768)), "K of one device = 192 must be a multiple of 128"),
        (VECTOR, TILES, (bf16(1024, 1024), bf16(1024)), "tiles.tile_k = 64 must be a multiple of 128"),
        (VECTOR, dataclasses.replace(VECTOR_TILES, steps=0), (bf16(1024, 512), bf16(512)),
            "tiles.steps must be from 1 to 64, got 0"),
        (BAG, BAG_TILES, (bf16(8, 16, 128), bf16(8, 16, 4)), "must be int32, got indices bfloat16"),
        (BAG, BAG_TILES, (of_bags()[0], bf16(4, 16, 4, dtype=jnp.int32)),
            r"got \(2, 16, 128\) and \(1, 16, 4\)"),
        (BAG, BAG_TILES, of_bags(columns=96), "D = 96 must be a multiple of 128"),
        (BAG, BAG_TILES, of_bags(columns=1152), "D must be at most 1024, got 1152"),
        (BAG, BAG_TILES, of_bags(samples=18), r"B = 18 must be a multiple of 4 \(devices\)"),
        (BAG, BAG_TILES, of_bags(bag=0), "needs at least one row in a bag, got P = 0"),
        (NORM, ROW_TILES, of_norm(rows=1026), r"M = 1026 must be a multiple of 4 \(devices\)"),
        (NORM, ROW_TILES, of_norm(columns=768), "N = 768 must be a multiple of 512"),
        (NORM, ROW_TILES, (*of_norm()[:3], bf16(256)), r"needs two \(M, N\) and two \(N,\) arrays, got"),
        ("adam", ADAM, of_adam(8192, jnp.bfloat16), "gradients bfloat16, parameters float32"),
        ("adam", ADAM, of_adam(8192, moments=4096), r"needs shapes .*, got .*\(1024,\)"),
        ("adam", ADAM, of_adam(8192 + 1024), "n / devices = 2304 must be a multiple of 512"),
        ("adam", UpdateTiles(size=768, blocks=1), of_adam(8192), "tiles.size = 768 must be a multiple of 512"),
    ],
)  # fmt: skip
def test_arrays_and_tiles_that_do_not_fit_are_refused(name: str, tiles: Any, arrays: Any, says: str) -> None:
    with pytest.raises(KernelRefusedError, match=says) as refused:
        trace(name, tiles, *arrays)
    assert "\n" not in str(refused.value)


def test_the_same_arrays_are_taken_where_nothing_is_wrong() -> None:
    assert trace(SCATTER, TILES, *GOOD).shape == (1024, 256)
    assert trace(VECTOR, VECTOR_TILES, bf16(1024, 512), bf16(512)).shape == (1024,)
    assert trace(NORM, ROW_TILES, *of_norm()).shape == (1024, 512)
    assert trace(BAG, BAG_TILES, *of_bags()).shape == (16, 8, 128)
    assert [result.shape for result in trace("adam", ADAM, *of_adam(8192))] == [(8192,), (8192,), (8192,)]


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        (SCATTER, (1,), "works with 2 to 8 devices, axis 'x' has 1"),
        (SCATTER, (2, 2), "axis 'x' of 2 devices must be the only one of a mesh of 4"),
        (GATHER, (2,), "all 4 devices of the process must take part, 2 do"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(name: str, sizes: tuple[int, ...], says: str) -> None:
    with pytest.raises(KernelRefusedError, match=says):
        trace(name, TILES, *GOOD, sizes=sizes)


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blackwell:
        compute_capability = "10.0"

    mesh = mesh_of(4)
    monkeypatch.setattr(jax, "devices", lambda: [Blackwell()])
    with pytest.raises(KernelRefusedError, match=r"needs a GPU of compute capability 9.0, this one has 10.0"):
        jax.eval_shape(FUSED[SCATTER].fused(mesh, TILES), *GOOD)


def test_an_older_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(KernelRefusedError, match=r"needs jax 0\.11\.2 or newer"):
        trace(SCATTER, TILES, *GOOD)


class Hopper:
    """A GPU as a refusal sees it."""

    compute_capability, platform = "9.0", "a GPU"

    def __init__(self, number: int) -> None:
        self.id = self.local_hardware_id = number


class Driver:
    """CUDA's driver, which answers that GPU 1 reaches nobody."""

    def cuDeviceCanAccessPeer(self, answer: Any, one: int, _: int) -> int:  # noqa: N802
        answer._obj.value = int(one != 1)
        return 0


MACHINES: dict[str, tuple[dict[str, Any], str]] = {
    "CPUs": ({"devices": jax.devices()}, "needs GPUs of compute capability 9.0, these are cpu"),
    "an older jax": ({"version": (0, 10, 2)}, "needs jax 0.11.2 or newer"),
    "two processes": ({"processes": 2}, "all GPUs must belong to one process, these belong to 2"),
    "three devices of four": ({"devices": [Hopper(n) for n in range(3)]}, r"runs on all 4 devices in order"),
    "another order": ({"devices": [Hopper(n) for n in (1, 0, 2, 3)]}, r"the step on \[1, 0, 2, 3\]"),
    "multicast": ({"multicast": "1"}, "never run with NVLink multicast; NCCL_NVLS_ENABLE=0"),
    "no peer access wanted": ({"no_peers": "1"}, "which NCCL_P2P_DISABLE forbids"),
    "no peer access": ({}, r"there is none between \[\(1, 0\), \(1, 2\), \(1, 3\)\]"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_refused_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed, says = MACHINES[name]
    monkeypatch.setattr(jax, "__version_info__", changed.get("version", OLDEST_JAX))
    monkeypatch.setattr(jax, "process_count", lambda: changed.get("processes", 1))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", changed.get("multicast", "0"))
    monkeypatch.setenv("NCCL_P2P_DISABLE", changed.get("no_peers", "0"))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    with pytest.raises(KernelRefusedError, match=says) as refused:
        refuse_machine(changed.get("devices", [Hopper(n) for n in range(4)]))
    assert "\n" not in str(refused.value)


def test_a_machine_that_can_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(
        Driver, "cuDeviceCanAccessPeer", lambda _, answer, *__: setattr(answer._obj, "value", 1)
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    refuse_machine([Hopper(n) for n in range(4)])


def test_lamb_refuses_what_adam_does_and_blocks_that_would_wait_for_ever() -> None:
    assert [result.shape for result in trace("lamb", ADAM, *of_adam(8192))] == [(8192,), (8192,), (8192,)]
    for tiles, arrays, says in (
        (ADAM, of_adam(8192, moments=4096), r"needs shapes .*, got .*\(1024,\)"),
        (dataclasses.replace(ADAM, blocks=513), of_adam(8192), "runs in 1 to 512 blocks, got 513"),
    ):
        with pytest.raises(KernelRefusedError, match=says):
            trace("lamb", tiles, *arrays)


def test_an_update_that_a_step_has_refuses_arrays_of_another_size() -> None:
    def kernel(*given: Any) -> Any:
        *arrays, axis, tiles = given
        recipe = Recipe((False,), 2, (("add", (0, 1)),), (), 4)
        return recipe_update(*arrays, axis_name=axis, tiles=tiles, recipe=recipe)

    update = dataclasses.replace(FUSED["adam"], kernel=kernel, arguments=(ROWS, ROWS, WHOLE), results=WHOLE)
    sums, _, _, scalars = of_adam(8192)
    fused = update.fused(mesh_of(4), ADAM)
    assert jax.eval_shape(fused, sums, bf16(8192, dtype=jnp.float32), scalars)[0].shape == (8192,)
    with pytest.raises(KernelRefusedError, match=r"needs arrays of n or n / devices, got .*\(1024,\)"):
        jax.eval_shape(fused, sums, bf16(4096, dtype=jnp.float32), scalars)
