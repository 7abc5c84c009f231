"""A program as a jax function, what the function takes, and a third opinion on what it gives.

The third opinion (:func:`evaluate`) is the program evaluated op by op: nothing is fused, ordered or updated in place,
loops and branches are Python's, and a collective is computed from what all devices hold. The inputs follow from the
program's seed: numbers that are all different, so that any two that change places are seen.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from tests.fuzz.operations import AXIS, COLLECTIVES, DTYPE_OF, NAME_OF, OPS
from tests.fuzz.program import Argument, Body, Op, Program, ProgramError, Type

Values = list[Any]
_BF16_DIFFERENT = 2048
"""So many numbers of bf16 lie between 2**-6 and 4 on either side of 0, and a few more."""


def run_body(body: Body, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a body, one device's part of it."""
    values: Values = list(arguments)
    for op in body.ops:
        values.extend(run_op(op, [values[x] for x in op.operands]))
    return tuple(values[x] for x in body.results)


def run_op(op: Op, operands: Sequence[Any]) -> tuple[Any, ...]:
    """The results of an op."""
    if op.name in COLLECTIVES:
        return _collective(op, operands)
    if op.name == "cond":
        return _cond(op, operands)
    if op.name == "scan":
        return _scan(op, operands)
    if op.name == "while":
        return _while(op, operands)
    if op.name not in OPS:
        raise ProgramError(f"{op.name!r} is no op that is known")
    result = OPS[op.name](op.attributes, *operands)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _cond(op: Op, operands: Sequence[Any]) -> tuple[Any, ...]:
    decides, *rest = operands
    branches = [lambda *xs, body=body: run_body(body, xs) for body in op.bodies]
    if len(branches) == 2:
        return tuple(lax.cond(decides > 0, *branches, *rest))
    return tuple(lax.switch(decides, branches, *rest))


def _scan(op: Op, operands: Sequence[Any]) -> tuple[Any, ...]:
    carried, sliced = int(op.attributes["carried"]), int(op.attributes["sliced"])
    captured = operands[carried + sliced :]

    def step(carry: tuple[Any, ...], parts: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        results = run_body(op.bodies[0], [*carry, *parts, *captured])
        return results[:carried], results[carried:]

    last, stacked = lax.scan(
        step, tuple(operands[:carried]), tuple(operands[carried : carried + sliced]),
        length=int(op.attributes["length"]), reverse=bool(op.attributes["reverse"]),
        unroll=int(op.attributes["unroll"]),
    )  # fmt: skip
    return (*last, *stacked)


def _while(op: Op, operands: Sequence[Any]) -> tuple[Any, ...]:
    carried, most = int(op.attributes["carried"]), int(op.attributes["most"])
    trips, *rest = operands
    captured = rest[carried:]

    def step(i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        return run_body(op.bodies[0], [i, *carry, *captured])

    if op.attributes["how"] == "fori":
        return tuple(lax.fori_loop(jnp.int32(0), jnp.int32(most), step, tuple(rest[:carried])))
    limit = jnp.clip(trips, 0, most)
    _, last = lax.while_loop(
        lambda state: state[0] < limit,
        lambda state: (state[0] + 1, step(state[0], state[1])),
        (jnp.int32(0), tuple(rest[:carried])),
    )
    return tuple(last)


def _collective(op: Op, operands: Sequence[Any]) -> tuple[Any, ...]:
    a = op.attributes
    groups = a.get("groups")
    if op.name == "psum":
        return tuple(lax.psum(tuple(operands), AXIS, axis_index_groups=groups))
    if op.name == "pmax":
        return tuple(lax.pmax(tuple(operands), AXIS, axis_index_groups=groups))
    (x,) = operands
    if op.name == "all_gather":
        return (lax.all_gather(x, AXIS, axis=int(a["axis"]), tiled=True),)
    if op.name == "psum_scatter":
        return (lax.psum_scatter(x, AXIS, scatter_dimension=int(a["axis"]), tiled=True),)
    if op.name == "all_to_all":
        return (lax.all_to_all(x, AXIS, int(a["axis"]), int(a["axis"]), tiled=True),)
    return (lax.ppermute(x, AXIS, [(int(one), int(two)) for one, two in a["pairs"]]),)


# Types ------------------------------------------------------------------------------------------


def infer(
    name: str, operands: Sequence[Type], attributes: Mapping[str, Any], bodies: Sequence[Body], devices: int
) -> tuple[Type, ...]:
    """The types of what an op gives.

    Raises:
        ProgramError: jax refuses the op.
    """
    given = tuple(operands), json.dumps(attributes, sort_keys=True)
    return _traced(name, *given, tuple(bodies), devices) if bodies else _traced_once(name, *given, devices)


@functools.lru_cache(maxsize=20_000)
def _traced_once(name: str, operands: tuple[Type, ...], attributes: str, devices: int) -> tuple[Type, ...]:
    return _traced(name, operands, attributes, (), devices)


def _traced(
    name: str, operands: tuple[Type, ...], attributes: str, bodies: tuple[Body, ...], devices: int
) -> tuple[Type, ...]:
    op = Op(name, tuple(range(len(operands))), (), json.loads(attributes), bodies)
    axes = [(AXIS, devices)] if devices > 1 else []
    traced = jax.make_jaxpr(lambda *xs: run_op(op, xs), axis_env=axes, return_shape=True)
    try:
        _, shapes = traced(*(jax.ShapeDtypeStruct(one.shape, DTYPE_OF[one.dtype]) for one in operands))
    except Exception as error:  # jax refuses in many ways
        raise ProgramError(f"{name} of {', '.join(map(str, operands))}: {error}") from error
    return tuple(Type(NAME_OF[np.dtype(one.dtype)], tuple(one.shape)) for one in shapes)


def check_types(program: Program) -> None:
    """Refuse a program whose ops do not give what it says they give.

    Raises:
        ProgramError: naming the op.
    """
    _check_types(program.body, program.devices if program.mode == "shard_map" else 1)


def _check_types(body: Body, devices: int) -> None:
    types = body.types
    for op in body.ops:
        found = infer(op.name, [types[x] for x in op.operands], op.attributes, op.bodies, devices)
        if found != op.results:
            raise ProgramError(f"{op.name} gives {[*map(str, found)]}, not {[*map(str, op.results)]}")
        for inner in op.bodies:
            _check_types(inner, devices)


# The step ---------------------------------------------------------------------------------------


def mesh(devices: int) -> Mesh:
    """The first devices, along one axis."""
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,))


def spec(sharded: bool) -> PartitionSpec:
    """How an argument or result lies on the devices."""
    return PartitionSpec(AXIS) if sharded else PartitionSpec()


def step_of(program: Program, name: str) -> Any:
    """The program as a jitted function called ``name``."""

    def step(*arguments: Any) -> tuple[Any, ...]:
        return run_body(program.body, arguments)

    function: Callable[..., Any] = step
    settings: dict[str, Any] = {"donate_argnums": program.donated, "keep_unused": True}
    if program.devices > 1:
        on = mesh(program.devices)
        inputs = tuple(spec(one.sharded) for one in program.arguments)
        outputs = tuple(spec(one) for one in program.sharded)
        if program.mode == "shard_map":
            function = jax.shard_map(step, mesh=on, in_specs=inputs, out_specs=outputs, check_vma=False)
        else:
            settings["in_shardings"] = tuple(NamedSharding(on, one) for one in inputs)
            settings["out_shardings"] = tuple(NamedSharding(on, one) for one in outputs)

    def named(*arguments: Any) -> tuple[Any, ...]:
        return tuple(function(*arguments))

    named.__name__ = named.__qualname__ = name
    return jax.jit(named, **settings)


def global_shape(program: Program, number: int) -> tuple[int, ...]:
    """Shape of a whole argument, of which the body of a ``shard_map`` sees one device's part."""
    shape = program.body.parameters[number].shape
    if program.mode == "shard_map" and program.arguments[number].sharded:
        return (shape[0] * program.devices, *shape[1:])
    return shape


def abstract_arguments(program: Program) -> list[Any]:
    """What to lower the step with."""
    found = []
    for number, (one, argument) in enumerate(zip(program.body.parameters, program.arguments, strict=True)):
        where = NamedSharding(mesh(program.devices), spec(argument.sharded)) if program.devices > 1 else None
        found.append(jax.ShapeDtypeStruct(global_shape(program, number), DTYPE_OF[one.dtype], sharding=where))
    return found


# Inputs -----------------------------------------------------------------------------------------


def make_inputs(program: Program) -> list[NDArray[Any]]:
    """One whole array for each argument."""
    dice = np.random.default_rng([program.seed, 20261])
    return [
        _values(argument, Type(one.dtype, global_shape(program, number)), dice)
        for number, (one, argument) in enumerate(zip(program.body.parameters, program.arguments, strict=True))
    ]


def _values(argument: Argument, of: Type, dice: np.random.Generator) -> NDArray[Any]:
    count, dtype = of.elements, DTYPE_OF[of.dtype]
    if argument.role == "index":
        return _distinct_below(max(1, argument.limit), count, dice).reshape(of.shape).astype(dtype)
    if argument.role == "scalar":
        return dice.integers(0, max(1, argument.limit), of.shape).astype(dtype)
    if argument.role == "key":
        return dice.integers(0, 1 << 32, of.shape, np.uint64).astype(dtype)
    if of.dtype == "pred":
        return dice.integers(0, 2, of.shape).astype(dtype)
    if of.dtype in ("s32", "u32"):
        return (
            (dice.permutation(count) - (count // 2 if of.dtype == "s32" else 0))
            .reshape(of.shape)
            .astype(dtype)
        )
    if of.dtype == "bf16":
        return _distinct_bf16(count, dice).reshape(of.shape)
    # Odd multiples of what is left over: no two add up to 0, and none is 0.
    spread = (2 * dice.permutation(count) + 1 - count) / max(1, count) * 2 + 1 / (3 * count + 1)
    return np.asarray(spread, np.float64).reshape(of.shape).astype(dtype)


def _distinct_below(limit: int, count: int, dice: np.random.Generator) -> NDArray[np.int64]:
    """Different as long as there are enough."""
    rounds = [dice.permutation(limit) for _ in range(-(-count // limit))]
    return np.concatenate(rounds or [np.zeros(0, np.int64)])[:count]


def _distinct_bf16(count: int, dice: np.random.Generator) -> NDArray[Any]:
    patterns = np.arange(_BF16_DIFFERENT // 2, dtype=np.uint16) + np.uint16(0x3C80)  # from 2**-6 up
    both = np.concatenate([patterns, patterns | np.uint16(0x8000)])
    return both[_distinct_below(_BF16_DIFFERENT, count, dice)].view(DTYPE_OF["bf16"])


def moved_by_a_bit(arrays: Sequence[NDArray[Any]], seed: int) -> list[NDArray[Any]]:
    """The same with each float moved to a neighbour, up or down by chance."""
    dice = np.random.default_rng([seed, 77])
    moved = []
    for one in arrays:
        bits = {2: np.int16, 4: np.int32}.get(one.dtype.itemsize)
        if one.dtype.kind in "iub" or bits is None:
            moved.append(one)
            continue
        step = dice.choice(np.array([-1, 1], bits), one.shape)
        moved.append((one.view(bits) + step).astype(bits).view(one.dtype))
    return moved


def place(program: Program, arrays: Sequence[NDArray[Any]]) -> list[Any]:
    """The arrays on the devices; new ones with every call, since a step may take their storage."""
    if program.devices == 1:
        return [jax.device_put(one, jax.devices()[0]) for one in arrays]
    on = mesh(program.devices)
    return [
        jax.device_put(one, NamedSharding(on, spec(argument.sharded)))
        for one, argument in zip(arrays, program.arguments, strict=True)
    ]


def parts_of(array: NDArray[Any], sharded: bool, devices: int) -> list[NDArray[Any]]:
    """What each device holds of an array."""
    return np.split(array, devices) if sharded and devices > 1 else [array] * devices


# By hand ----------------------------------------------------------------------------------------


Held = list[Any]
"""One value, as each device holds it."""


@dataclass
class ByHand:
    """What a program gives, ``[result][device]``."""

    outputs: list[list[NDArray[Any]]] = field(default_factory=list)
    largest: float = 0.0
    """Of all numbers that were floats, on any device, on the way."""


def evaluate(program: Program) -> ByHand:
    """Evaluate ``program`` on its own inputs."""
    inputs = make_inputs(program)
    apart = program.mode == "shard_map" and program.devices > 1
    devices = program.devices if apart else 1
    found = ByHand()
    with jax.default_device(jax.devices("cpu")[0]), jax.disable_jit():
        held = [
            [jnp.asarray(part) for part in parts_of(one, argument.sharded and devices > 1, devices)]
            for one, argument in zip(inputs, program.arguments, strict=True)
        ]
        results = _Evaluator(devices, found).body(program.body, held)
    for value, sharded in zip(results, program.sharded, strict=True):
        if apart or program.devices == 1:
            found.outputs.append([np.asarray(part) for part in value])
        else:
            found.outputs.append(parts_of(np.asarray(value[0]), sharded, program.devices))
    return found


class _Evaluator:
    def __init__(self, devices: int, found: ByHand) -> None:
        self.devices, self.found = devices, found

    def body(self, body: Body, arguments: Sequence[Held]) -> list[Held]:
        values = list(arguments)
        for value in values:
            self.note(value)
        for op in body.ops:
            results = self.op(op, [values[x] for x in op.operands])
            for value in results:
                self.note(value)
            values.extend(results)
        return [values[x] for x in body.results]

    def note(self, value: Held) -> None:
        for part in value:
            if part.size and jnp.issubdtype(part.dtype, jnp.floating):
                magnitudes = np.abs(np.asarray(part).astype(np.float64))
                finite = magnitudes[np.isfinite(magnitudes)]
                self.found.largest = max(self.found.largest, float(finite.max(initial=0.0)))

    def op(self, op: Op, operands: Sequence[Held]) -> list[Held]:
        if op.name in COLLECTIVES:
            return self.collective(op, operands)
        if op.name == "cond":
            return self.cond(op, operands)
        if op.name == "scan":
            return self.scan(op, operands)
        if op.name == "while":
            return self.loop(op, operands)
        each = [run_op(op, [value[d] for value in operands]) for d in range(self.devices)]
        return [list(value) for value in zip(*each, strict=True)]

    def cond(self, op: Op, operands: Sequence[Held]) -> list[Held]:
        each = []
        for d in range(self.devices):
            decides = int(operands[0][d])
            chosen = (
                (0 if decides > 0 else 1) if len(op.bodies) == 2 else min(max(decides, 0), len(op.bodies) - 1)
            )
            alone = _Evaluator(1, self.found)
            each.append([value[0] for value in alone.body(op.bodies[chosen], [[v[d]] for v in operands[1:]])])
        return [list(value) for value in zip(*each, strict=True)]

    def scan(self, op: Op, operands: Sequence[Held]) -> list[Held]:
        a = op.attributes
        carried, sliced, length = int(a["carried"]), int(a["sliced"]), int(a["length"])
        carry = list(operands[:carried])
        stacks: list[list[Held]] = []
        for i in range(length - 1, -1, -1) if a["reverse"] else range(length):
            parts = [[one[i] for one in value] for value in operands[carried : carried + sliced]]
            results = self.body(op.bodies[0], [*carry, *parts, *operands[carried + sliced :]])
            carry = results[:carried]
            stacks.append(results[carried:])
        if a["reverse"]:
            stacks.reverse()
        stacked = [
            [jnp.stack([turn[k][d] for turn in stacks]) for d in range(self.devices)]
            for k in range(len(op.results) - carried)
        ]
        return [*carry, *stacked]

    def loop(self, op: Op, operands: Sequence[Held]) -> list[Held]:
        carried, most = int(op.attributes["carried"]), int(op.attributes["most"])
        trips = most if op.attributes["how"] == "fori" else min(max(int(operands[0][0]), 0), most)
        carry = list(operands[1 : 1 + carried])
        for i in range(trips):
            counter = [jnp.int32(i)] * self.devices
            carry = self.body(op.bodies[0], [counter, *carry, *operands[1 + carried :]])
        return carry

    def collective(self, op: Op, operands: Sequence[Held]) -> list[Held]:
        a = op.attributes
        if op.name in ("psum", "pmax"):
            groups = a.get("groups") or [list(range(self.devices))]
            return [self.reduced(value, groups, op.name) for value in operands]
        (value,) = operands
        if op.name == "ppermute":
            source = {two: one for one, two in a["pairs"]}
            return [
                [value[source[d]] if d in source else jnp.zeros_like(value[d]) for d in range(self.devices)]
            ]
        axis = int(a["axis"])
        if op.name == "all_gather":
            return [[jnp.concatenate(value, axis)] * self.devices]
        if op.name == "psum_scatter":
            whole = self.reduced(value, [list(range(self.devices))], "psum")[0]
            return [jnp.split(whole, self.devices, axis)]
        pieces = [jnp.split(one, self.devices, axis) for one in value]
        return [[jnp.concatenate([piece[d] for piece in pieces], axis) for d in range(self.devices)]]

    def reduced(self, value: Held, groups: Sequence[Sequence[int]], how: str) -> Held:
        result: Held = [None] * self.devices
        for group in groups:
            parts = [value[d] for d in group]
            add = jnp.add if how == "psum" else jnp.maximum
            *_, total = itertools.accumulate(parts, add)
            for d in group:
                result[d] = total
        return result
