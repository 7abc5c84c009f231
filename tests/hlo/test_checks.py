"""What no XLA has written is refused before anything reckons with it, in words that say where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from disco_hlo.errors import ModuleError
from disco_hlo.hlo import proto
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.checks import MOST_BYTES, check_module
from tests.captured import CPU_MODULE
from tests.cli.large_steps import large_step


def entry(module: Any) -> Any:
    return next(one for one in module.computations if one.id == module.entry_computation_id)


def first(module: Any, opcode: str) -> Any:
    """Of the entry."""
    return next(i for i in entry(module).instructions if i.opcode == opcode)


def put(values: Any, place: int | slice, value: Any) -> None:
    values[place] = value


def deep_tuple(module: Any) -> None:
    shape = entry(module).instructions[0].shape
    for _ in range(80):
        shape.element_type = 13
        shape = shape.tuple_shapes.add()
    shape.element_type = 11


def schedule_with_one_twice(module: Any) -> None:
    listed = module.schedule.sequences[module.entry_computation_id].instruction_ids
    listed[-1] = listed[0]


ALL = slice(None)
WRONG: dict[str, Callable[[Any], None]] = {
    "lists instruction .* twice": lambda m: entry(m).instructions.add().CopyFrom(entry(m).instructions[0]),
    "calls itself": lambda m: entry(m).instructions[-1].called_computation_ids.append(m.entry_computation_id),
    "calls computation 12345, which is missing": lambda m: put(
        first(m, "fusion").called_computation_ids, 0, 12345
    ),
    "tuple in a tuple": deep_tuple,
    r"has the dimensions \[-1": lambda m: put(first(m, "parameter").shape.dimensions, 0, -1),
    f"has the dimensions .*{MOST_BYTES}": lambda m: put(
        first(m, "parameter").shape.dimensions, 0, MOST_BYTES
    ),
    "dimensions in the order": lambda m: put(first(m, "parameter").shape.layout.minor_to_major, ALL, [7, 7]),
    "which no earlier instruction defines": lambda m: put(
        entry(m).instructions[2].operand_ids, ALL, [entry(m).instructions[-1].id]
    ),
    "does not number its parameters": lambda m: setattr(first(m, "parameter"), "parameter_number", 1),
    "has no root": lambda m: setattr(entry(m), "root_id", 99_999_999),
    "has the parameter -1": lambda m: m.input_output_alias.entries.add(parameter_number=-1),
    "does not list its instructions exactly once": schedule_with_one_twice,
}
WRONG_IN_LAYERS: dict[str, Callable[[Any], None]] = {
    "has 1 operands, expected at least 2": lambda m: put(first(m, "dot").operand_ids, slice(1, None), []),
    "has 0 operands, expected 1": lambda m: put(first(m, "tanh").operand_ids, ALL, []),
    "has the dimension 9": lambda m: put(
        first(m, "dot").dot_dimension_numbers.lhs_contracting_dimensions, ALL, [9]
    ),
}


@pytest.mark.parametrize("why", [*WRONG, *WRONG_IN_LAYERS])
def test_what_is_wrong_is_said(why: str) -> None:
    module = proto.parse(large_step(2) if why in WRONG_IN_LAYERS else CPU_MODULE.read_bytes())
    check_module(module)
    (WRONG | WRONG_IN_LAYERS)[why](module)
    with pytest.raises(ModuleError, match=why) as caught:
        canonicalize(proto.serialize(module))
    assert "\n" not in str(caught.value)
