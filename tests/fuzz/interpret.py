"""A program as a jax function, and what the function takes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.fuzz.operations import AXIS, COLLECTIVES, DTYPE_OF, NAME_OF, OPS
from tests.fuzz.program import Body, Op, Program, ProgramError, Type

Values = list[Any]


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
    branches = [functools.partial(_flat, body) for body in op.bodies]
    if len(branches) == 2:
        return tuple(lax.cond(decides > 0, *branches, *rest))
    return tuple(lax.switch(decides, branches, *rest))


def _flat(body: Body, *arguments: Any) -> tuple[Any, ...]:
    return run_body(body, arguments)


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


# Types -------------------------------------------------------------------------------------------


def infer(
    name: str,
    operands: Sequence[Type],
    attributes: Mapping[str, Any],
    bodies: Sequence[Body],
    devices: int,
) -> tuple[Type, ...]:
    """The types of what an op gives.

    Raises:
        ProgramError: jax refuses the op.
    """
    return _inferred(name, tuple(operands), json.dumps(attributes, sort_keys=True), tuple(bodies), devices)


def _inferred(
    name: str, operands: tuple[Type, ...], attributes: str, bodies: tuple[Body, ...], devices: int
) -> tuple[Type, ...]:
    if bodies:
        return _traced(name, operands, attributes, bodies, devices)
    return _traced_once(name, operands, attributes, devices)


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


# The step ----------------------------------------------------------------------------------------


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
