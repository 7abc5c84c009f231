"""Which made-up inputs are equal on all devices, as they decide about a collective, and which steps are refused."""

from __future__ import annotations

import inspect
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
from tests.steps.intercept import captured_step

Array = Any
FLOATS, WHOLE = np.float32, np.int32
SPLIT = PartitionSpec("data")
FOUR = Devices(1, 4)
S32 = 4
COLUMNS = ((0, 2), (1, 3))


def equal_in(*step: Any) -> set[str]:
    """Names of the arguments of a jitted step that are made equal."""
    source, names = named_parameters(step)
    found = equal_parameters(source, Devices(1, models.DEVICES))
    return {names[number].partition("[")[0] for number in found}


def equal(local: Callable[..., Any], donate: tuple[int, ...] = ()) -> set[str]:
    """Names of the arguments that are made equal; each is 8 floats a device, or as many whole numbers: ``n``."""
    shapes = [
        jax.ShapeDtypeStruct((16,), WHOLE if name == "n" else FLOATS)
        for name in inspect.signature(local).parameters
    ]
    mapped = jax.shard_map(local, mesh=models.mesh(), in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    return equal_in(jax.jit(mapped, donate_argnums=donate), tuple(shapes))


def mean(x: Array) -> Array:
    return lax.pmean(x.sum(), "data")


def branch(decides: Array, x: Array) -> Array:
    """A branch that holds a collective."""
    return lax.cond(decides, lambda: mean(x) + x, lambda: x)


def until(limit: Array, x: Array) -> Array:
    return lax.while_loop(lambda y: y.sum() < limit[0], lambda y: y * 2 + mean(y * x), jnp.ones(8))


def carried(a: Array, b: Array, c: Array, x: Array) -> Array:
    """The numbers come after some turns, three members away from what the condition reads."""

    def turn(carry: Any) -> Any:
        first, second, third, total = carry
        return second, third, first * 0.9, total + mean(total * x) * first

    return lax.while_loop(lambda carry: carry[0].sum() > 1, turn, (a, b, c, x))[3]


def switched(s: Array, x: Array) -> Array:
    branches = [lambda: x, lambda: x + mean(x), lambda: x * mean(x * 2)]
    return lax.switch((s[0] * 3).astype(jnp.int32), branches)


def branch_in_a_loop(s: Array, x: Array) -> Array:
    def turn(carry: Any, _: Any) -> Any:
        scale, total = carry
        total = lax.cond(scale.sum() > 1, lambda: total + mean(x), lambda: total)
        return (scale * 0.5, total), None

    return lax.scan(turn, (s, x), length=4)[0][1]


def decided_twice(a: Array, b: Array, x: Array) -> Array:
    first = lax.cond(a.sum() > 1, lambda: jnp.sin(b).sum(), lambda: jnp.cos(b).prod())
    return branch(first > 0, x)


def scattered(s: Array, x: Array) -> Array:
    part = lax.all_gather(lax.psum_scatter(s, "data", tiled=True), "data")
    return branch(part.sum() > 0, x)


STEPS: dict[str, tuple[Callable[..., Any], str]] = {
    # XLA ended the job after 40 s: one device took the branch, and the other did not.
    "branch": (lambda s, x: branch(s[0] > 0, x), "s"),
    "branch without a collective": (
        lambda s, x: lax.cond(s[0] > 0, lambda: x * 2, lambda: x) + mean(x), ""
    ),
    "loop": (until, "limit"),
    "loop that carries": (carried, "a b c"),
    "loop that counts": (lambda n, x: lax.fori_loop(0, n[0], lambda _, y: x + mean(y), x), "n"),
    "scan": (lambda x: lax.scan(lambda c, _: (c + mean(c) * x, None), x, length=3)[0], ""),
    "switch": (switched, "s"),
    "branch in a branch": (
        lambda a, b, x: lax.cond(a.sum() > 1, lambda: branch(b.sum() > 1, x), lambda: x * 3), "a b"
    ),
    "branch in a loop": (branch_in_a_loop, "s"),
    "decision that another decides": (decided_twice, "a b"),
    # What comes out of a collective over all devices is equal by itself, as loss scaling decides about its update.
    "largest": (lambda s, x: branch(lax.pmax(s.sum(), "data") > 0, x), ""),
    "gathered": (lambda s, x: branch(lax.all_gather(s, "data").sum() > 0, x), ""),
    "all finite": (
        lambda s, x: branch(lax.pmean(jnp.isfinite(s).all().astype(jnp.float32), "data") > 0.5, x), ""
    ),
    "scattered": (scattered, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_what_decides_whether_a_collective_runs_or_how_often_is_equal(name: str) -> None:
    local, expected = STEPS[name]
    assert equal(local) == set(expected.split())


def test_what_is_handed_on_as_such_an_input_is_equal_too() -> None:
    """Steps are timed one behind the other, each with what the one before returned."""
    found = equal(lambda s, rate, x: (s * rate, branch(s[0] > 0, x)), donate=(0,))
    assert found == {"s", "rate"}


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
        equal(lambda s, x: branch(decides(s), x))
    assert is_shared(refused.value)


def test_a_loop_that_turns_as_often_as_its_device_says_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^a loop .* depends on the device's own number"):
        equal(lambda x: lax.fori_loop(0, lax.axis_index("data") + 1, lambda _, y: x + mean(y), x))


def test_a_step_that_hands_on_what_differs_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"hands on to itself .* depends on the device's own number"):
        equal(lambda s, x: (s * lax.axis_index("data"), branch(s[0] > 0, x)), donate=(0,))


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


@pytest.mark.parametrize("name", ["scanned_layers", "mapped_by_hand", "lstm"])
def test_a_step_of_any_usual_kind_asks_for_nothing(name: str) -> None:
    assert equal_parameters(captured_step(name), Devices(1, models.DEVICES)) == frozenset()


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
