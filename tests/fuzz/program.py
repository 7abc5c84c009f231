"""Programs as data: what the fuzzer writes, shrinks, saves as JSON (by msgspec) and runs again.

A :class:`Body` numbers its values: first its parameters, then the results of each op in turn. A :class:`Program` is a
body with what its arguments are. Loops and branches hold bodies of their own, which see nothing but their parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_MAX_ELEMENTS = 1 << 20


class Type(NamedTuple):
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
    """``values``: numbers that are all different; ``index``: indices below ``limit``, all different; ``scalar``: a
    small number that decides something; ``key``: a random key; ``flags``: booleans."""
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


def has_regions(program: Program) -> bool:
    """Whether it has loops or branches."""
    return any(op.bodies for op in program.body.ops)


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
