"""An optimized module is enacted only if it is its source, executed as the plan says, and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from disco_hlo.errors import ModuleError, PlanError
from disco_hlo.hlo import proto
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.proto import Message
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import describe_difference, read, verify
from disco_hlo.plan.variants import one_bucket
from tests.captured import captured, stored


def source() -> CanonicalModule:
    return captured("h200_models/rnnlm")


@cache
def rewritten() -> tuple[Strategy, bytes]:
    strategy = one_bucket(source().graph, read(source()).groups)
    return strategy, apply(strategy, source())


def tampered(change: Callable[[Message], None]) -> bytes:
    """The rewritten module after ``change`` was made to its entry computation."""
    module = proto.parse(rewritten()[1])
    change(next(c for c in module.computations if c.id == module.entry_computation_id))
    return proto.serialize(module)


def test_our_own_rewrite_passes() -> None:
    strategy, module = rewritten()
    verify(source(), module, strategy)


def test_loops_that_xla_rotated_and_doubled_verify_as_they_came() -> None:
    """What the loops only read was taken for overwritten by them, so kernels behind them seemed to read too late."""
    step = captured("h100_llama/fsdp_scan_rotated_doubled")
    verify(step, stored("h100_llama/fsdp_scan_rotated_doubled"), read(step))


def test_an_order_that_is_not_possible_is_noticed_where_any_would_do() -> None:
    strategy, module = rewritten()
    found, open_order = read(canonicalize(module)), replace(strategy, order=())
    assert describe_difference(source().graph, found, open_order) is None
    said = "its order runs something before what it must wait for"
    assert describe_difference(source().graph, replace(found, order=()), open_order) == said


def test_another_strategy_is_noticed() -> None:
    strategy, module = rewritten()
    with pytest.raises(PlanError, match=r"does not execute its plan: in its entry, \d+ buckets, expected 10"):
        verify(
            source(),
            module,
            replace(
                strategy,
                buckets=tuple(
                    replace(strategy.buckets[0], all_reduces=(node,)) for node in source().graph.all_reduces
                ),
            ),
        )


@pytest.mark.parametrize(
    ("opcode", "said"),
    [
        ("custom-call", "adds custom call 'run_anything', which its source does not have"),
        ("outfeed", "computes something else"), ("infeed", "computes something else"),
        ("send", "computes something else"), ("recv", "computes something else"),
    ],
)  # fmt: skip
def test_an_added_way_out_is_refused_although_nothing_reads_it(opcode: str, said: str) -> None:
    def add(entry: Message) -> None:
        call = entry.instructions.add()
        call.CopyFrom(next(i for i in entry.instructions if i.opcode == "parameter"))
        call.name, call.opcode, call.custom_call_target = "call", opcode, "run_anything"
        call.id = max(i.id for i in entry.instructions) + 1

    module = proto.parse(tampered(add))
    for key, sequence in module.schedule.sequences.items():
        if key == module.entry_computation_id:
            sequence.instruction_ids.append(
                max(i.id for c in module.computations if c.id == key for i in c.instructions)
            )
    with pytest.raises(PlanError, match=said):
        verify(source(), proto.serialize(module), rewritten()[0])


def test_another_computation_is_refused() -> None:
    def double(entry: Message) -> None:
        root = next(i for i in entry.instructions if i.id == entry.root_id)
        root.operand_ids[0] = root.operand_ids[1]

    with pytest.raises(PlanError, match="computes something else"):
        verify(source(), tampered(double), rewritten()[0])


def test_bytes_that_are_no_module_are_refused() -> None:
    with pytest.raises(ModuleError, match="expected"):
        verify(source(), b"\x00\x01nonsense", rewritten()[0])
