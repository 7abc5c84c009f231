"""What no XLA has written is refused before anything reckons with it, in words that say where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.errors import ModuleError
from disco_hlo.hlo import proto
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.checks import MOST_BYTES, check_module
from tests.cli.large_steps import large_step

MODULE = Path(__file__).parents[1] / "data" / "cases" / "search_never_returns.hlo.pb"


def entry(module: Any) -> Any:
    return next(one for one in module.computations if one.id == module.entry_computation_id)


def first(module: Any, opcode: str) -> Any:
    """Of the entry."""
    return next(i for i in entry(module).instructions if i.opcode == opcode)


def duplicate_id(module: Any) -> None:
    entry(module).instructions.add().CopyFrom(entry(module).instructions[0])


def calls_itself(module: Any) -> None:
    entry(module).instructions[-1].called_computation_ids.append(module.entry_computation_id)


def missing_computation(module: Any) -> None:
    first(module, "fusion").called_computation_ids[0] = 12345


def deep_tuple(module: Any) -> None:
    shape = entry(module).instructions[0].shape
    for _ in range(80):
        shape.element_type = 13
        shape = shape.tuple_shapes.add()
    shape.element_type = 11


def negative_extent(module: Any) -> None:
    first(module, "parameter").shape.dimensions[0] = -1


def petabytes(module: Any) -> None:
    first(module, "parameter").shape.dimensions[0] = MOST_BYTES


def wrong_layout(module: Any) -> None:
    first(module, "parameter").shape.layout.minor_to_major[:] = [7, 7]


def later_operand(module: Any) -> None:
    entry(module).instructions[2].operand_ids[:] = [entry(module).instructions[-1].id]


def too_few_operands(module: Any) -> None:
    del first(module, "dot").operand_ids[1:]


def no_operand(module: Any) -> None:
    del first(module, "tanh").operand_ids[:]


def same_parameter_twice(module: Any) -> None:
    parameters = [i for i in entry(module).instructions if i.opcode == "parameter"]
    parameters[0].parameter_number = parameters[1].parameter_number


def no_root(module: Any) -> None:
    entry(module).root_id = 99_999_999


def contracts_what_is_not_there(module: Any) -> None:
    first(module, "dot").dot_dimension_numbers.lhs_contracting_dimensions[:] = [9]


def negative_alias(module: Any) -> None:
    module.input_output_alias.entries.add(parameter_number=-1)


def schedule_with_one_twice(module: Any) -> None:
    listed = module.schedule.sequences[module.entry_computation_id].instruction_ids
    listed[:] = [*listed[:-1], listed[0]]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (duplicate_id, "lists instruction .* twice"),
        (calls_itself, "calls itself"),
        (missing_computation, "calls computation 12345, which is missing"),
        (deep_tuple, "tuple in a tuple"),
        (negative_extent, "has the dimensions"),
        (petabytes, "has the dimensions"),
        (wrong_layout, "dimensions in the order"),
        (later_operand, "which no earlier instruction defines"),
        (too_few_operands, "has 1 operands, expected at least 2"),
        (no_operand, "has 0 operands, expected 1"),
        (same_parameter_twice, "does not number its parameters"),
        (no_root, "has no root"),
        (contracts_what_is_not_there, "has the dimension 9"),
        (negative_alias, "has the parameter -1"),
        (schedule_with_one_twice, "does not list its instructions exactly once"),
    ],
)
def test_what_is_wrong_is_said(change: Callable[[Any], None], why: str) -> None:
    of_layers = change in (too_few_operands, no_operand, contracts_what_is_not_there)
    module = proto.parse(large_step(2) if of_layers else MODULE.read_bytes())
    check_module(module)
    change(module)
    with pytest.raises(ModuleError, match=why) as caught:
        canonicalize(proto.serialize(module))
    assert "\n" not in str(caught.value)
