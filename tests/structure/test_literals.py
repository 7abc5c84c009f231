"""Index arithmetic on each device: exact, or not at all, and never more work than there are ops."""

from __future__ import annotations

import pytest

from disco_hlo.structure import program as literals
from disco_hlo.structure.program import Program, evaluate
from tests.structure.enact import module_of


def doubling(links: int) -> Program:
    """``partition-id`` doubled again and again: every link reads the one before twice."""
    chain = "".join(f"x{i + 1} = u32[] add(x{i}, x{i})\n" for i in range(links))
    return Program(
        module_of(
            f"HloModule m\nENTRY main {{\nx0 = u32[] partition-id()\n{chain}ROOT r = u32[] negate(x{links})\n}}"
        )
    )


def test_a_chain_that_reads_each_link_twice_is_evaluated_once_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    program, evaluated = doubling(30), []
    real = literals.computed_value
    monkeypatch.setattr(
        literals,
        "computed_value",
        lambda instruction, operands: evaluated.append(1) or real(instruction, operands),
    )
    last = next(i for i in program.instructions if i.name == "x30")
    found = evaluate(program, last, partition=3)
    assert found is not None
    assert int(found) == 3 << 30
    assert len(evaluated) == 30


def test_a_longer_chain_is_not_followed() -> None:
    program = doubling(40)
    assert evaluate(program, next(i for i in program.instructions if i.name == "x40"), partition=1) is None


@pytest.mark.parametrize(("dtype", "value"), [("s8", -3), ("u8", 200), ("s16", -300), ("u16", 40000)])
def test_numbers_of_few_bits_are_read(dtype: str, value: int) -> None:
    text = f"HloModule m\nENTRY main {{\nROOT c = {dtype}[2] constant({{{value}, 1}})\n}}"
    [constant] = Program(module_of(text)).instructions
    found = literals.literal_value(constant)
    assert found is not None
    assert found.tolist() == [value, 1]
