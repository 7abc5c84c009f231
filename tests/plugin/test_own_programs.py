"""Programs of our own that run on each device of this process."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from disco_hlo.hlo.collectives import CollectiveKind
from disco_hlo.hlo.opcodes import MOVED_COLLECTIVES
from disco_hlo.plugin.xla import own_programs
from disco_hlo.plugin.xla.own_programs import on_each_device


def _plus(by: int, values: Any, told: Any) -> tuple[Any]:
    return (values + told * by,)


def test_each_device_is_told_what_the_host_says_to_it_now() -> None:
    devices = tuple(jax.devices()[:2])
    values = [jax.device_put(np.arange(3, dtype=np.float32), one) for one in devices]
    told = [np.array([1.5]), np.array([2.5])]

    def run() -> list[list[float]]:
        [found] = on_each_device(devices, _plus, (2,), values, told)
        assert [one.dtype for one in found] == [np.float64] * 2
        assert [one.devices() for one in found] == [{one} for one in devices]
        return [one.tolist() for one in found]

    assert run() == [[3.0, 4.0, 5.0], [5.0, 6.0, 7.0]]
    told[1][:] = 0.0
    assert run() == [[3.0, 4.0, 5.0], [0.0, 1.0, 2.0]]


def test_what_is_told_many_times_is_brought_to_the_devices_once() -> None:
    devices = tuple(jax.devices()[:2])
    values = [jax.device_put(np.zeros(3, np.float32), one) for one in devices]
    before = own_programs._small.cache_info()
    for _ in range(3):
        on_each_device(devices, _plus, (3,), values, [np.full(1, 38.0)] * 2)
    after = own_programs._small.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 2)


@pytest.mark.parametrize("opcode", sorted(MOVED_COLLECTIVES))
def test_every_collective_that_plans_move_can_be_measured_by_itself(opcode: str) -> None:
    """A broadcast could not, on any GPU: jax 0.12 takes the letters of an axis for its names."""
    devices = jax.devices()[:2]
    pairs = ((0, 1), (1, 0)) if opcode == "collective-permute" else ((0, 1),)
    everywhere = PartitionSpec(own_programs._AXIS)
    mapped = jax.shard_map(
        lambda value: own_programs._one(CollectiveKind(opcode, pairs), value, ((0, 1),), alone=False),
        mesh=Mesh(np.array(devices), (own_programs._AXIS,)),
        in_specs=everywhere, out_specs=everywhere, check_vma=False,
    )  # fmt: skip
    lowered = (
        jax.jit(mapped).trace(jax.ShapeDtypeStruct((16,), np.float32)).lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count(f'"stablehlo.{opcode.replace("-", "_")}"') == 1
