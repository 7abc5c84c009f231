"""Between which devices a value may differ, after collectives over groups of them and arithmetic on their numbers."""

from __future__ import annotations

import numpy as np
import pytest

from disco_hlo.hlo.proto import DetailedInstruction, Message
from disco_hlo.plugin.measuring.inputs.decisions import (
    EQUAL,
    Devices,
    DeviceValue,
    collected,
    differing,
    either,
    elementwise,
    joined,
    numbered,
    of_parameter,
)

FOUR = Devices(1, 4)
S32, U32 = 4, 8
COLUMNS = ((0, 2), (1, 3))


def collective(opcode: str, groups: tuple[tuple[int, ...], ...] = (), **more: object) -> Message:
    made = DetailedInstruction(opcode=opcode, **{"channel_id": 1, "use_global_device_ids": True} | more)
    for group in groups:
        made.replica_groups.add().replica_ids.extend(group)
    return made


def whole(opcode: str, dims: tuple[int, ...] = ()) -> Message:
    made = DetailedInstruction(opcode=opcode)
    made.shape.element_type = S32
    made.shape.dimensions.extend(dims)
    return made


def own_numbers() -> DeviceValue:
    return numbered([np.array(number, np.int32) for number in range(4)], "number")


def test_a_table_of_offsets_tells_which_devices_hold_the_same_part() -> None:
    table = whole("constant", (4,))
    table.literal.s32s.extend([0, 0, 8, 8])
    taken = whole("dynamic-slice", (1,))
    taken.dynamic_slice_sizes.append(1)
    offset = elementwise(taken, [elementwise(table, [], FOUR), own_numbers()], FOUR)
    assert offset.kinds == (0, 0, 1, 1)
    assert [value.tolist() for value in offset.numbers] == [[0], [0], [8], [8]]
    # A sum over devices that hold all parts between them is equal everywhere.
    assert collected(FOUR, collective("all-reduce", COLUMNS), [offset]) == EQUAL
    assert collected(FOUR, collective("all-reduce", ((0, 1), (2, 3))), [offset]).kinds == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("opcode", "numbers"), [("divide", [0, 0, 1, 1]), ("remainder", [0, 1, 0, 1]), ("add", [2, 3, 4, 5])]
)
def test_a_place_in_a_mesh_follows_from_the_device_s_number(opcode: str, numbers: list[int]) -> None:
    two = numbered([np.array(2, np.int32)] * 4, "")
    found = elementwise(whole(opcode), [own_numbers(), two], FOUR)
    assert [int(value) for value in found.numbers] == numbers
    assert len(set(found.kinds)) == len(set(numbers))


def test_a_collective_over_all_devices_makes_equal_and_one_over_groups_does_not() -> None:
    shard = of_parameter(3)
    assert collected(FOUR, collective("all-reduce"), [shard]) == EQUAL
    assert collected(FOUR, collective("all-gather-start"), [shard]) == EQUAL
    assert collected(FOUR, collective("all-reduce", COLUMNS), [shard]) == shard
    assert collected(FOUR, collective("reduce-scatter"), [shard]).parameters == {3}
    assert collected(FOUR, collective("reduce-scatter", COLUMNS), [EQUAL]).kinds == (0, 0, 1, 1)
    assert collected(FOUR, collective("collective-permute"), [EQUAL]).kinds == (0, 1, 2, 3)


def test_what_is_summed_over_replicas_alone_stays_each_partition_s_own() -> None:
    alone = collective("all-reduce", channel_id=0)
    assert collected(FOUR, alone, [of_parameter(0)]).parameters == {0}
    # Without device ids and with a channel all partitions of the replicas take part.
    assert (
        collected(FOUR, collective("all-reduce", ((0,),), use_global_device_ids=False), [of_parameter(0)])
        == EQUAL
    )
    assert collected(Devices(4, 1), alone, [of_parameter(0)]) == EQUAL
    assert collected(Devices(2, 2), collective("all-reduce"), [EQUAL]).kinds == (0, 1, 2, 3)


def test_what_is_computed_of_several_differs_where_any_does() -> None:
    rows, columns = DeviceValue(kinds=(0, 0, 1, 1)), DeviceValue(kinds=(0, 1, 0, 1))
    assert joined([rows, columns]).kinds == (0, 1, 2, 3)
    assert joined([rows, EQUAL, of_parameter(2), rows]) == DeviceValue(frozenset({2}), (0, 0, 1, 1))
    assert joined([]) == EQUAL


def test_members_of_a_tuple_are_told_apart() -> None:
    one, other = DeviceValue(members=(of_parameter(0), EQUAL)), DeviceValue(members=(EQUAL, EQUAL))
    both = either(one, other)
    assert [both.member(place) for place in (0, 1)] == [of_parameter(0), EQUAL]
    assert both.decided_by(of_parameter(5)).member(1) == of_parameter(5)
    assert differing(FOUR, "rng").member(7).kinds == (0, 1, 2, 3)
