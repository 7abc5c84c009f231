"""Which devices a collective joins, however XLA writes it, and which values they are proven to share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.proto import DetailedInstruction, Message
from disco_hlo.structure.moves import Reorder, apply_moves
from disco_hlo.structure.program import Program
from disco_hlo.structure.sharded import SameValues, groups_of
from tests.modules import module_of
from tests.structure import steps
from tests.structure.enact import Run, assert_same, moved, run

P = steps.P
EMPTY = module_of("ENTRY main { ROOT x = f32[8] parameter(0) }")


def collective() -> Message:
    return DetailedInstruction(name="c", opcode="all-reduce", channel_id=1, use_global_device_ids=True)


def test_groups_as_lists() -> None:
    made = collective()
    for ids in ((0, 2), (1, 3)):
        made.collective_device_list.replica_groups.add(replica_ids=ids)
    assert groups_of(Program(EMPTY), made) == ((0, 2), (1, 3))


def test_groups_as_lists_in_the_old_field() -> None:
    made = collective()
    made.replica_groups.add(replica_ids=(1, 0))
    assert groups_of(Program(EMPTY), made) == ((1, 0),)


@pytest.mark.parametrize("newer", [False, True])
def test_groups_as_a_transposed_iota(newer: bool) -> None:
    made = collective()
    iota = made.iota_groups if newer else made.collective_device_list.iota_replica_group_list
    iota.num_replica_groups, iota.num_devices_per_group = 2, 2
    iota.iota_reshape_dims.extend((2, 2))
    iota.iota_transpose_perm.extend((1, 0))
    assert groups_of(Program(EMPTY), made) == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ((0,), ((0, 4), (1, 5), (2, 6), (3, 7))),
        ((1,), ((0, 1, 2, 3), (4, 5, 6, 7))),
        ((1, 0), ((0, 4, 1, 5, 2, 6, 3, 7),)),
    ],
)
def test_groups_as_axes_of_a_mesh(axes: tuple[int, ...], expected: tuple[tuple[int, ...], ...]) -> None:
    made = collective()
    for name, size in (("data", 2), ("model", 4)):
        made.mesh_axes_groups.mesh.axes.add(name=name, size=size)
    for axis in axes:
        made.mesh_axes_groups.axes.add(mesh_axis_index=axis)
    assert groups_of(Program(EMPTY), made) == expected


def test_groups_as_part_of_an_axis() -> None:
    made = collective()
    made.mesh_axes_groups.mesh.axes.add(name="all", size=8)
    reference = made.mesh_axes_groups.axes.add(mesh_axis_index=0)
    reference.sub_axis_info.pre_size, reference.sub_axis_info.size = 2, 2
    assert groups_of(Program(EMPTY), made) == ((0, 2), (1, 3), (4, 6), (5, 7))


def two_axes(spec: P) -> Run:
    """An all-gather over ``model`` of a 2 by 2 mesh, added to a value sharded as ``spec``."""
    on = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))

    def local(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, "model", tiled=True) + y

    specs = (P("model"), spec)
    mapped = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=P(("data", "model")), check_vma=False)
    rows = 8 * int(np.prod([2 for axis in spec if axis]))
    values = (steps.normal(1, (8, 4), jnp.float32), steps.normal(2, (rows, 4), jnp.float32))
    return run(mapped, tuple(steps.place(on, values, specs)))


def reorder_of(module: bytes) -> Reorder:
    program = Program(module)
    (gather,) = [i for i in program.instructions if i.opcode == "all-gather"]
    (reader,) = program.readers(gather)
    return Reorder(program.position(gather), program.position(reader), reader.opcode)


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_an_operand_equal_along_the_gathered_axis_is_cut(spec: P) -> None:
    expected = two_axes(spec)
    assert_same(moved(expected, [reorder_of(expected.module)]), expected, 1e-6)


def test_an_operand_sharded_along_the_gathered_axis_is_not() -> None:
    expected = two_axes(P("model"))
    with pytest.raises(IllegalMoveError, match="not proven equal"):
        apply_moves(expected.module, [reorder_of(expected.module)])


def test_the_partition_number_differs_and_what_follows_from_it() -> None:
    program = Program(
        module_of("ENTRY main { p = u32[] partition-id()\nc = u32[] constant(1)\nROOT s = u32[] add(p, c) }")
    )
    same = SameValues(program, ((0, 1),))
    assert [i.opcode for i in program.instructions if i.id in same.proven] == ["constant"]
