"""Writing programs: values by number, with the types that jax gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fuzz.interpret import infer
from tests.fuzz.operations import DECIDES, LOOPS, keeps_exact
from tests.fuzz.program import Argument, Body, Op, Program, ProgramError, Type


class Builder:
    """A body under construction.

    Args:
        parameters: of a branch or a loop; a program adds arguments instead.
        exact: of each parameter, whether nothing has rounded it.
        devices: along the axis of collectives; 1 where there is none.
    """

    def __init__(
        self, parameters: Sequence[Type] = (), exact: Sequence[bool] | None = None, devices: int = 1
    ) -> None:
        self.parameters, self.devices = list(parameters), devices
        self.arguments: list[Argument] = []
        self.ops_made: list[Op] = []
        self.types = list(parameters)
        self.exact = list(exact) if exact is not None else [not one.is_float for one in parameters]

    def argument(self, dtype: str, *shape: int, donated: bool = False, sharded: bool = False) -> int:
        """A new argument; all come before the first op."""
        return self._argument(Type(dtype, shape), Argument("values", donated, sharded))

    def index(self, *shape: int, limit: int) -> int:
        """An argument of indices below ``limit``."""
        return self._argument(Type("s32", shape), Argument("index", limit=limit))

    def scalar(self, limit: int) -> int:
        """An argument that decides something."""
        return self._argument(Type("s32"), Argument("scalar", limit=limit))

    def key(self) -> int:
        """A random key."""
        return self._argument(Type("u32", (2,)), Argument("key"))

    def _argument(self, of: Type, argument: Argument) -> int:
        assert not self.ops_made
        self.parameters.append(of)
        self.arguments.append(argument)
        self.types.append(of)
        self.exact.append(True)
        return len(self.types) - 1

    def op(self, name: str, *operands: int, **attributes: Any) -> int:
        """Add an op of one result; its number.

        Raises:
            ProgramError: it does not fit its operands.
        """
        (result,) = self.ops(name, operands, attributes)
        return result

    def ops(
        self,
        name: str,
        operands: Sequence[int],
        attributes: dict[str, Any] | None = None,
        bodies: Sequence[Body] = (),
    ) -> list[int]:
        """Add an op; the numbers of its results.

        Raises:
            ProgramError: it does not fit its operands, or its result would depend on how something was rounded.
        """
        attributes = attributes or {}
        types = [self.types[x] for x in operands]
        exact = [self.exact[x] for x in operands]
        if decides(name, types, attributes) and not all(exact):
            raise ProgramError(f"{name} decides by numbers that may be rounded in several ways")
        results = infer(name, types, attributes, bodies, self.devices)
        first = len(self.types)
        self.ops_made.append(Op(name, tuple(operands), results, attributes, tuple(bodies)))
        self.types += results
        kept = (
            not bodies and all(exact) and keeps_exact(name, attributes) and not rounds(results, types, name)
        )
        self.exact += [kept or not one.is_float for one in results]
        return list(range(first, len(self.types)))

    def inner(self, dtype: str, *shape: int) -> Builder:
        """The body of a branch or loop with one parameter."""
        return Builder([Type(dtype, shape)], None, self.devices)

    def body(self, *results: int) -> Body:
        """What was written, with these results."""
        return Body(tuple(self.parameters), tuple(self.ops_made), results)

    def program(self, *results: int, seed: int = 0) -> Program:
        """The whole, on one device."""
        return Program(self.body(*results), tuple(self.arguments), sharded=(False,) * len(results), seed=seed)


def rounds(results: Sequence[Type], operands: Sequence[Type], name: str) -> bool:
    """Whether an op that keeps exact numbers makes them coarser."""
    return name == "convert" and results[0].dtype == "bf16" and operands[0].dtype != "bf16"


def decides(name: str, operands: Sequence[Type], attributes: dict[str, Any]) -> bool:
    """Whether a rounded operand might lead to quite another result."""
    to_integer = name == "convert" and attributes.get("to") not in ("f32", "bf16") and operands[0].is_float
    return to_integer or name in DECIDES


def is_stable(body: Body, exact: Sequence[bool]) -> bool:
    """Whether no op of a body decides by numbers that may be rounded in several ways."""
    known, types = list(exact), body.types
    for op in body.ops:
        operands = [types[x] for x in op.operands]
        flags = [known[x] for x in op.operands]
        if decides(op.name, operands, dict(op.attributes)) and not all(flags):
            return False
        if not all(is_stable(inner, inner_exact(op, operands, flags)) for inner in op.bodies):
            return False
        kept = not op.bodies and all(flags) and keeps_exact(op.name, op.attributes)
        kept = kept and not rounds(op.results, operands, op.name)
        known += [kept or not one.is_float for one in op.results]
    return True


def inner_exact(op: Op, operands: Sequence[Type], exact: Sequence[bool]) -> list[bool]:
    """What a body within an op may take for exact: of what a loop carries, only what is no float."""
    known = [flag or not one.is_float for flag, one in zip(exact, operands, strict=True)]
    if op.name == "while":
        known[0] = True
    if op.name in LOOPS:
        first = 1 if op.name == "while" else 0
        carried = range(first, first + int(op.attributes["carried"]))
        return [known[i] and (i not in carried or not operands[i].is_float) for i in range(len(known))]
    return known[1:]
