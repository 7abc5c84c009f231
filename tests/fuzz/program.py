"""Programs as data: what the fuzzer writes, shrinks, saves as JSON and runs again.

A :class:`Body` numbers its values: first its parameters, then the results of each op in turn. A :class:`Program` is a
body with what its arguments are. Loops and branches hold bodies of their own, which see nothing but their parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = "disco-hlo fuzz"
VERSION = 1
MAX_BYTES = 1 << 20
DTYPES = ("f32", "bf16", "s32", "u32", "pred")
ROLES = ("values", "index", "scalar", "key", "flags")
"""Of an argument: numbers that are all different; indices below ``limit``, all different; a small number that decides
something; a random key; booleans."""
MODES = ("jit", "shard_map")
_MAX_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Type:
    """Element type and shape of a value, as one device holds it."""

    dtype: str
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether it rounds."""
        return self.dtype in ("f32", "bf16")


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a body."""

    name: str
    operands: tuple[int, ...]
    results: tuple[Type, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Numbers, texts and lists of them."""
    bodies: tuple[Body, ...] = ()
    """Branches, or what a loop repeats."""


@dataclass(frozen=True, slots=True)
class Body:
    """Ops in the order in which they are evaluated."""

    parameters: tuple[Type, ...]
    ops: tuple[Op, ...]
    results: tuple[int, ...]

    @property
    def types(self) -> list[Type]:
        """Of every value, by its number."""
        return [*self.parameters, *(one for op in self.ops for one in op.results)]


@dataclass(frozen=True, slots=True)
class Argument:
    """What an argument of a program is; its type is the body's parameter."""

    role: str = "values"
    donated: bool = False
    sharded: bool = False
    """Each device has a part of its own; else all have the same."""
    limit: int = 0
    """Of an index: what it stays below."""


@dataclass(frozen=True, slots=True)
class Program:
    """A step to compile: its body, its arguments, and where it runs."""

    body: Body
    arguments: tuple[Argument, ...]
    devices: int = 1
    mode: str = "jit"
    """``shard_map``: the body is what each device does. ``jit``: it is the whole, and XLA divides it."""
    sharded: tuple[bool, ...] = ()
    """Of each result."""
    seed: int = 0
    """Of the values of the arguments."""
    small_calls: bool = True
    """XLA:CPU moves each small loop into a call of its own; else all loops stay where they are."""

    @property
    def donated(self) -> tuple[int, ...]:
        """Numbers of the donated arguments."""
        return tuple(i for i, one in enumerate(self.arguments) if one.donated)


class ProgramError(ValueError):
    """What was read is no program."""


# JSON --------------------------------------------------------------------------------------------


def to_json(program: Program) -> dict[str, Any]:
    """The program as what ``json`` writes."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "devices": program.devices,
        "mode": program.mode,
        "seed": program.seed,
        "small_calls": program.small_calls,
        "arguments": [
            {"role": a.role, "donated": a.donated, "sharded": a.sharded, "limit": a.limit}
            for a in program.arguments
        ],
        "sharded": list(program.sharded),
        "body": _body_to_json(program.body),
    }


def has_regions(program: Program) -> bool:
    """Whether it has loops or branches."""
    return any(op.bodies for op in program.body.ops)


def _body_to_json(body: Body) -> dict[str, Any]:
    return {
        "parameters": [str(one) for one in body.parameters],
        "ops": [
            {
                "op": op.name,
                "on": list(op.operands),
                "gives": [str(one) for one in op.results],
                **({"with": dict(op.attributes)} if op.attributes else {}),
                **({"bodies": [_body_to_json(one) for one in op.bodies]} if op.bodies else {}),
            }
            for op in body.ops
        ],
        "results": list(body.results),
    }


def from_json(raw: Any) -> Program:
    """Read what :func:`to_json` wrote; whether its ops fit together is judged when it is interpreted.

    Raises:
        ProgramError: it is something else; says what.
    """
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or raw.get("version") != VERSION:
        raise ProgramError(f"expected an object with format {FORMAT!r} and version {VERSION}")
    try:
        program = Program(
            body=_body_from_json(raw["body"], 0),
            arguments=tuple(
                Argument(_one_of(a["role"], ROLES), bool(a["donated"]), bool(a["sharded"]), int(a["limit"]))
                for a in raw["arguments"]
            ),
            devices=int(raw["devices"]),
            mode=_one_of(raw["mode"], MODES),
            sharded=tuple(bool(one) for one in raw["sharded"]),
            seed=int(raw["seed"]),
            small_calls=bool(raw.get("small_calls", True)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProgramError(f"no program: {type(error).__name__}: {error}") from None
    check(program)
    return program


def _body_from_json(raw: Any, depth: int) -> Body:
    if depth > 8:
        raise ProgramError("bodies within bodies, more than 8 deep")
    return Body(
        tuple(type_of(one) for one in raw["parameters"]),
        tuple(
            Op(
                str(op["op"]),
                tuple(int(x) for x in op["on"]),
                tuple(type_of(one) for one in op["gives"]),
                dict(op.get("with", {})),
                tuple(_body_from_json(one, depth + 1) for one in op.get("bodies", ())),
            )
            for op in raw["ops"]
        ),
        tuple(int(x) for x in raw["results"]),
    )


def type_of(text: str) -> Type:
    """Read a type as it is written, ``f32[8,12]``."""
    dtype, _, rest = str(text).partition("[")
    if not rest.endswith("]"):
        raise ProgramError(f"{text!r}: expected a type like f32[8,12]")
    return Type(_one_of(dtype, DTYPES), tuple(int(x) for x in rest[:-1].split(",") if x))


def _one_of(value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ProgramError(f"{value!r}: expected one of {', '.join(known)}")
    return str(value)


def check(program: Program) -> None:
    """Refuse a program whose numbers lead nowhere.

    Raises:
        ProgramError: naming what does not fit.
    """
    if not 1 <= program.devices <= 64:
        raise ProgramError(f"{program.devices} devices, expected 1 to 64")
    if len(program.arguments) != len(program.body.parameters):
        raise ProgramError(f"{len(program.arguments)} arguments of {len(program.body.parameters)} parameters")
    if len(program.sharded) != len(program.body.results):
        raise ProgramError(f"{len(program.sharded)} shardings of {len(program.body.results)} results")
    _check_body(program.body)


def _check_body(body: Body) -> None:
    count = len(body.parameters)
    for op in body.ops:
        if any(not 0 <= x < count for x in op.operands):
            raise ProgramError(f"{op.name} reads {op.operands}, of {count} values")
        if any(one.elements > _MAX_ELEMENTS for one in op.results):
            raise ProgramError(f"{op.name} gives more than {_MAX_ELEMENTS} elements")
        for inner in op.bodies:
            _check_body(inner)
        count += len(op.results)
    if any(not 0 <= x < count for x in body.results):
        raise ProgramError(f"results {body.results}, of {count} values")
    if not body.results:
        raise ProgramError("a body without results")
