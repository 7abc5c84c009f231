"""What an executable holds against what it was compiled from, and what XLA may change on the way."""

from __future__ import annotations

import pytest
from jaxlib import _hlo

from disco_hlo.plan.plan import Strategy
from tests.hlo.small_modules import module_of
from tests.plan.executed import executed_difference, settled, without_barriers, without_unmoved_starts

GIVEN = """
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

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
BARRIER = "  %barrier = (f32[8]{0}, f32[8]{0}) opt-barrier(%pair)\n"
WITHOUT_BARRIER = GIVEN.replace(BARRIER, "").replace("%barrier", "%pair")


ASYNCHRONOUS = """
HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%exchange (p: s32[8,2]) -> s32[8,2] {
  %p = s32[8,2]{1,0} parameter(0)
  ROOT %inner = s32[8,2]{1,0} all-to-all(%p), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}
}

%negated (n: s32[8,2]) -> s32[8,2] {
  %n = s32[8,2]{1,0} parameter(0)
  ROOT %negate = s32[8,2]{1,0} negate(%n)
}

ENTRY %main (x: s32[8,2], y: f32[8]) -> (s32[8,2], f32[8], s32[8,2]) {
  %x = s32[8,2]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %kernel = s32[8,2]{1,0} fusion(%x), kind=kLoop, calls=%negated, backend_config={"operation_queue_id":"0"}
  %sum-start = f32[8]{0} all-reduce-start(%y), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%add
  %start = ((s32[8,2]{1,0}), s32[8,2]{1,0}) async-start(%x), calls=%exchange
  %done = s32[8,2]{1,0} async-done(%start)
  %reduced = f32[8]{0} all-reduce-done(%sum-start)
  ROOT %out = (s32[8,2]{1,0}, f32[8]{0}, s32[8,2]{1,0}) tuple(%done, %reduced, %kernel)
}
"""


def line_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines(keepends=True) if f"%{name} =" in line)


START, DONE = line_of(ASYNCHRONOUS, "start"), line_of(ASYNCHRONOUS, "done")
SUM_START, SUM_DONE = line_of(ASYNCHRONOUS, "sum-start"), line_of(ASYNCHRONOUS, "reduced")
EXCHANGED = line_of(ASYNCHRONOUS, "inner").replace("ROOT %inner", "%done").replace("(%p)", "(%x)")
REDUCED = SUM_START.replace("%sum-start", "%reduced").replace("all-reduce-start", "all-reduce")
SYNCHRONOUS = (
    ASYNCHRONOUS.replace(START, "").replace(DONE, EXCHANGED).replace(SUM_START, "").replace(SUM_DONE, REDUCED)
)


def test_a_removed_barrier_is_no_difference() -> None:
    assert b"opt-barrier" in module_of(GIVEN)
    assert executed_difference(module_of(GIVEN), module_of(WITHOUT_BARRIER)) is None


def test_without_barriers_xla_still_reads_the_module() -> None:
    _hlo.HloModule.from_serialized_hlo_module_proto(without_barriers(module_of(GIVEN)))


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
    assert (
        executed_difference(module_of(given), module_of("\n".join(lines))) == "order differs from position 1"
    )


@pytest.mark.parametrize(
    ("given", "executed"),
    [
        ("b0.start n1 b0.done", "b0.start n1 b0.done"),
        ("b0.start b1.start b0.done b1.done n1", "b0.start b0.done b1.start b1.done n1"),
        ("b0.start n1 b1.start b0.done b1.done", "b0.start n1 b0.done b1.start b1.done"),
        ("b0.start b1.start n1 b1.done b0.done", "b0.start b1.start n1 b1.done b0.done"),
        ("b0 n1 b1", "b0 n1 b1"),
    ],
)
def test_a_transfer_that_nothing_runs_beside_is_issued_where_it_is_waited_for(
    given: str, executed: str
) -> None:
    assert settled(Strategy(order=tuple(given.split()))).order == tuple(executed.split())


def test_a_collective_that_no_plan_moves_is_compared_where_it_is_waited_for() -> None:
    """The all-reduce that only an all-to-all runs beside is pulled together as well."""
    assert executed_difference(module_of(ASYNCHRONOUS), module_of(SYNCHRONOUS)) is None
    kernel = line_of(ASYNCHRONOUS, "kernel")
    beside = ASYNCHRONOUS.replace(kernel, "").replace(START, START + kernel)
    exchanged = beside.replace(START, "").replace(DONE, EXCHANGED)
    assert executed_difference(module_of(beside), module_of(exchanged)) is None
    assert executed_difference(module_of(beside), module_of(SYNCHRONOUS)) == "order differs from position 0"


def test_a_collective_among_others_is_another_one() -> None:
    other = SYNCHRONOUS.replace(EXCHANGED, EXCHANGED.replace("{0,1},{2,3}", "{0,2},{1,3}"))
    difference = executed_difference(module_of(ASYNCHRONOUS), module_of(other))
    assert difference is not None
    assert difference.startswith("it computes something else: ")
    assert "all-to-all s32[8,2]" in difference


def test_a_permute_starts_with_an_opcode_of_its_own() -> None:
    pairs = "channel_id=1, source_target_pairs={{0,1},{1,0}}"
    shapes = "(s32[8,2]{1,0}, s32[8,2]{1,0})"
    started = ASYNCHRONOUS.replace(START, f"%start = {shapes} collective-permute-start(%x), {pairs}\n")
    started = started.replace("async-done", "collective-permute-done")
    permuted = SYNCHRONOUS.replace(EXCHANGED, f"%done = s32[8,2]{{1,0}} collective-permute(%x), {pairs}\n")
    assert executed_difference(module_of(started), module_of(permuted)) is None
    turned = permuted.replace("{{0,1},{1,0}}", "{{0,1}}")
    assert executed_difference(module_of(started), module_of(turned)) is not None


def test_without_unmoved_starts_xla_still_reads_the_module() -> None:
    data = without_unmoved_starts(module_of(ASYNCHRONOUS))
    text = _hlo.HloModule.from_serialized_hlo_module_proto(data).to_string()
    assert "async-start" not in text
    assert "all-reduce-start" in text
