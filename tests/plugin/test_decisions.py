"""Which made-up inputs are equal on all devices, as they decide about a collective, and which steps are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from disco_hlo.errors import UnsupportedError, is_shared
from disco_hlo.hlo.proto import DetailedInstruction, Message
from disco_hlo.plugin.measuring.inputs.decisions import (
    EQUAL,
    Devices,
    DeviceValue,
    collected,
    differing,
    either,
    elementwise,
    equal_parameters,
    joined,
    numbered,
    of_parameter,
)
from tests.plugin.handled import named_parameters
from tests.steps import models

Array = Any
FLOATS, WHOLE = np.float32, np.int32
SPLIT, EVERYWHERE = PartitionSpec("data"), PartitionSpec()
FOUR = Devices(1, 4)
S32, U32 = 4, 8
COLUMNS = ((0, 2), (1, 3))


def equal_in(*step: Any) -> set[str]:
    """Names of the arguments of a jitted step that are made equal."""
    source, names = named_parameters(step)
    found = equal_parameters(source, Devices(1, models.DEVICES))
    return {names[number].partition("[")[0] for number in found}


def equal(local: Callable[..., Any], donate: tuple[int, ...] = (), **whole: bool) -> set[str]:
    """Names of the arguments that are made equal; each is 8 floats a device, or as many whole numbers."""
    shapes = [jax.ShapeDtypeStruct((16,), WHOLE if integer else FLOATS) for integer in whole.values()]
    mapped = jax.shard_map(local, mesh=models.mesh(), in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    return equal_in(jax.jit(mapped, donate_argnums=donate), tuple(shapes))


def mean(x: Array) -> Array:
    return lax.pmean(x.sum(), "data")


def test_what_decides_a_branch_that_holds_a_collective_is_equal() -> None:
    """XLA ended the job after 40 s: one device took the branch, and the other did not."""
    found = equal(lambda s, x: lax.cond(s[0] > 0, lambda: mean(x) + x, lambda: x), s=False, x=False)
    assert found == {"s"}


def test_branches_without_a_collective_ask_for_nothing() -> None:
    assert (
        equal(lambda s, x: lax.cond(s[0] > 0, lambda: x * 2, lambda: x) + mean(x), s=False, x=False) == set()
    )


def test_what_decides_how_often_a_loop_turns_that_holds_a_collective_is_equal() -> None:
    def until(limit: Array, x: Array) -> Array:
        return lax.while_loop(lambda y: y.sum() < limit[0], lambda y: y * 2 + mean(y * x), jnp.ones(8))

    assert equal(until, limit=False, x=False) == {"limit"}


def test_what_a_loop_carries_decides_after_some_turns() -> None:
    """Three members away from what the condition reads."""

    def until(a: Array, b: Array, c: Array, x: Array) -> Array:
        def turn(carry: Any) -> Any:
            first, second, third, total = carry
            return second, third, first * 0.9, total + mean(total * x) * first

        return lax.while_loop(lambda carry: carry[0].sum() > 1, turn, (a, b, c, x))[3]

    assert equal(until, a=False, b=False, c=False, x=False) == {"a", "b", "c"}


def test_a_loop_that_counts_to_a_whole_number_asks_for_that() -> None:
    def counted(n: Array, x: Array) -> Array:
        return lax.fori_loop(0, n[0], lambda _, y: x + mean(y), x)

    assert equal(counted, n=True, x=False) == {"n"}


def test_a_scan_asks_for_nothing() -> None:
    assert equal(lambda x: lax.scan(lambda c, _: (c + mean(c) * x, None), x, length=3)[0], x=False) == set()


def test_a_switch_asks_for_its_index() -> None:
    def switched(s: Array, x: Array) -> Array:
        branches = [lambda: x, lambda: x + mean(x), lambda: x * mean(x * 2)]
        return lax.switch((s[0] * 3).astype(jnp.int32), branches)

    assert equal(switched, s=False, x=False) == {"s"}


def test_a_branch_inside_a_branch_asks_for_both_decisions() -> None:
    def nested(a: Array, b: Array, x: Array) -> Array:
        inner = lambda: lax.cond(b.sum() > 1, lambda: mean(x) + x, lambda: x)  # noqa: E731
        return lax.cond(a.sum() > 1, inner, lambda: x * 3)

    assert equal(nested, a=False, b=False, x=False) == {"a", "b"}


def test_a_branch_inside_a_loop_asks_for_what_the_loop_carries() -> None:
    def looped(s: Array, x: Array) -> Array:
        def turn(carry: Any, _: Any) -> Any:
            scale, total = carry
            total = lax.cond(scale.sum() > 1, lambda: total + mean(x), lambda: total)
            return (scale * 0.5, total), None

        return lax.scan(turn, (s, x), length=4)[0][1]

    assert equal(looped, s=False, x=False) == {"s"}


def test_a_decision_that_another_decides_asks_for_both() -> None:
    def chosen(a: Array, b: Array, x: Array) -> Array:
        first = lax.cond(a.sum() > 1, lambda: jnp.sin(b).sum(), lambda: jnp.cos(b).prod())
        return lax.cond(first > 0, lambda: mean(x) + x, lambda: x)

    assert equal(chosen, a=False, b=False, x=False) == {"a", "b"}


@pytest.mark.parametrize(
    "reduced",
    [
        lambda s: lax.pmax(s.sum(), "data"),
        lambda s: lax.all_gather(s, "data").sum(),
        lambda s: lax.pmean(jnp.isfinite(s).all().astype(jnp.float32), "data") - 0.5,
    ],
    ids=["largest", "gathered", "all finite"],
)
def test_what_comes_out_of_a_collective_over_all_devices_is_equal_by_itself(
    reduced: Callable[[Array], Array],
) -> None:
    """As loss scaling decides about its update."""
    found = equal(lambda s, x: lax.cond(reduced(s) > 0, lambda: mean(x) + x, lambda: x), s=False, x=False)
    assert found == set()


def test_what_is_handed_on_as_such_an_input_is_equal_too() -> None:
    """Steps are timed one behind the other, each with what the one before returned."""

    def stepped(s: Array, rate: Array, x: Array) -> tuple[Array, Array]:
        y = lax.cond(s[0] > 0, lambda: mean(x) + x, lambda: x)
        return s * rate, y

    assert equal(stepped, donate=(0,), s=False, rate=False, x=False) == {"s", "rate"}


def test_the_parts_of_what_is_scattered_ask_for_what_they_were() -> None:
    def scattered(s: Array, x: Array) -> Array:
        part = lax.all_gather(lax.psum_scatter(s, "data", tiled=True), "data")
        return lax.cond(part.sum() > 0, lambda: mean(x) + x, lambda: x)

    assert equal(scattered, s=False, x=False) == set()


@pytest.mark.parametrize(
    ("decides", "why"),
    [
        (lambda s: lax.axis_index("data") > 0, r"the device's own number \(axis_index\)"),
        (lambda s: s[lax.axis_index("data")] > 0, r"the device's own number \(axis_index\)"),
        (lambda s: lax.psum_scatter(s, "data", tiled=True).sum() > 0, "a reduce-scatter"),
        (lambda s: lax.all_to_all(s, "data", 0, 0, tiled=True)[0] > 0, "an all-to-all"),
        (lambda s: lax.ppermute(s, "data", [(0, 1)])[0] > 0, "a collective-permute"),
    ],
    ids=["number", "chosen by number", "scattered", "exchanged", "permuted"],
)
def test_what_no_input_makes_equal_is_refused(decides: Callable[[Array], Array], why: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"^a branch .* holds a collective and depends on {why}: "
    ) as refused:
        equal(lambda s, x: lax.cond(decides(s), lambda: mean(x) + x, lambda: x), s=False, x=False)
    assert is_shared(refused.value)


def test_a_loop_that_turns_as_often_as_its_device_says_is_refused() -> None:
    def counted(x: Array) -> Array:
        return lax.fori_loop(0, lax.axis_index("data") + 1, lambda _, y: x + mean(y), x)

    with pytest.raises(UnsupportedError, match=r"^a loop .* depends on the device's own number"):
        equal(counted, x=False)


def test_a_step_that_hands_on_what_differs_is_refused() -> None:
    def stepped(s: Array, x: Array) -> tuple[Array, Array]:
        y = lax.cond(s[0] > 0, lambda: mean(x) + x, lambda: x)
        return s * lax.axis_index("data"), y

    with pytest.raises(UnsupportedError, match=r"hands on to itself .* depends on the device's own number"):
        equal(stepped, donate=(0,), s=False, x=False)


def test_partitioned_code_finds_its_shard_by_the_device_s_number_and_its_sum_is_equal() -> None:
    """Each device sums its own part of a constant, found by a table of offsets; the total is equal."""

    def partitioned(x: Array) -> Array:
        table = jnp.arange(16.0) * x.sum()
        total = (lax.with_sharding_constraint(table, models.split()) ** 2).sum()
        y = x * total
        return lax.cond(total > 0, lambda: y - y.mean(), lambda: y)

    shape = jax.ShapeDtypeStruct((16,), FLOATS, sharding=models.split())
    assert equal_in(jax.jit(partitioned), (shape,)) == set()


def test_pmap_stacks_what_decides() -> None:
    def local(s: Array, x: Array) -> Array:
        return lax.cond(s > 0, lambda: lax.pmean(x.sum(), "data") + x, lambda: x)

    step = jax.pmap(local, axis_name="data", devices=jax.devices()[: models.DEVICES])
    shapes = jax.ShapeDtypeStruct((2,), FLOATS), jax.ShapeDtypeStruct((2, 8), FLOATS)
    assert len(equal_in(step, shapes)) == 1


def test_a_step_of_any_usual_kind_asks_for_nothing() -> None:
    for make in (models.scanned_layers, models.mapped_by_hand, models.lstm):
        assert equal_in(*make()) == set()


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
