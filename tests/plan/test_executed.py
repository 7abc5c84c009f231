"""What an executable holds against what it was compiled from, and what XLA may change on the way."""

from __future__ import annotations

from tests.modules import ADD, module_of
from tests.plan.executed import executed_difference

GIVEN = (
    "HloModule jit_step, is_scheduled=true\n"
    + ADD
    + """
ENTRY %main (x: f32[8]) -> (f32[8], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %exponential = f32[8]{0} exponential(%x)
  %pair = (f32[8]{0}, f32[8]{0}) tuple(%x, %exponential)
  %barrier = (f32[8]{0}, f32[8]{0}) opt-barrier(%pair)
  %first = f32[8]{0} get-tuple-element(%barrier), index=0
  %second = f32[8]{0} get-tuple-element(%barrier), index=1
  %again = f32[8]{0} exponential(%first)
  %reduced = f32[8]{0} all-reduce(%second), replica_groups={{0,1}}, to_apply=%add
  ROOT %out = (f32[8]{0}, f32[8]{0}) tuple(%again, %reduced)
}
"""
)
BARRIER = "  %barrier = (f32[8]{0}, f32[8]{0}) opt-barrier(%pair)\n"
WITHOUT_BARRIER = GIVEN.replace(BARRIER, "").replace("%barrier", "%pair")


def test_a_removed_barrier_is_no_difference() -> None:
    assert b"opt-barrier" in module_of(GIVEN)
    assert executed_difference(module_of(GIVEN), module_of(WITHOUT_BARRIER)) is None


def test_another_program_is_named_where_it_first_differs() -> None:
    other = WITHOUT_BARRIER.replace("exponential(%x)", "negate(%x)")
    difference = executed_difference(module_of(GIVEN), module_of(other))
    assert difference is not None
    assert "negate f32[8]" in difference


def test_another_order_of_execution_is_a_difference() -> None:
    given = GIVEN.replace("exponential(%first)", "negate(%first)")
    lines = given.splitlines()
    at = next(i for i, line in enumerate(lines) if "%again =" in line)
    lines[at], lines[at + 1] = lines[at + 1], lines[at]
    found = executed_difference(module_of(given), module_of("\n".join(lines)))
    assert found == "order differs from position 1"
