"""All-to-alls, permutations and broadcasts, which plans move as any collective."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Kind
from disco_hlo.hlo.proto import parse
from disco_hlo.plan.apply import apply
from disco_hlo.plan.legal import check_strategy
from disco_hlo.plan.plan import Bucket
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import one_bucket, unfused
from tests.modules import module_of

CONFIG = 'backend_config={"operation_queue_id":"0"}'
ARRAY = "f32[8,4]{1,0}"
EXCHANGES = {
    "all-to-all": "replica_groups={{0,1}}, dimensions={0}",
    "collective-permute": "source_target_pairs={{0,1},{1,0}}",
    "collective-broadcast": "replica_groups={{0,1}}",
}
RING = """
HloModule jit_step, is_scheduled=true, num_partitions=2

%sent (k: f32[8,4], v: f32[8]) -> (f32[8,4], f32[8]) {
  %k = f32[8,4]{1,0} parameter(0)
  %v = f32[8]{0} parameter(1)
  ROOT %both = (f32[8,4]{1,0}, f32[8]{0}) collective-permute(%k, %v), channel_id=1, source_target_pairs={{0,1},{1,0}}
}

%negated (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %negate = f32[8,4]{1,0} negate(%p)
}

ENTRY %main (key: f32[8,4], value: f32[8]) -> (f32[8,4], f32[8,4], f32[8]) {
  %key = f32[8,4]{1,0} parameter(0)
  %value = f32[8]{0} parameter(1)
  %start = ((f32[8,4]{1,0}, f32[8]{0}), (f32[8,4]{1,0}, f32[8]{0})) async-start(%key, %value), calls=%sent
  %beside = f32[8,4]{1,0} fusion(%key), kind=kLoop, calls=%negated
  %done = (f32[8,4]{1,0}, f32[8]{0}) async-done(%start)
  %next_key = f32[8,4]{1,0} get-tuple-element(%done), index=0
  %next_value = f32[8]{0} get-tuple-element(%done), index=1
  ROOT %out = (f32[8,4]{1,0}, f32[8,4]{1,0}, f32[8]{0}) tuple(%beside, %next_key, %next_value)
}
"""
OF_TWO = """
HloModule jit_step, is_scheduled=true, num_partitions=2

ENTRY %main (x: f32[8,4], y: f32[8,4]) -> (f32[8,4], f32[8,4]) {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[8,4]{1,0} parameter(1)
  ROOT %both = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-to-all(%x, %y), channel_id=1, replica_groups={{0,1}}
}
"""
"""Each device gives x to the first and y to the second of its group: no exchange of x and one of y."""


def step(opcode: str) -> CanonicalModule:
    """Two exchanges of arrays of their own as XLA:GPU writes them, with a kernel beside the first."""
    said = EXCHANGES[opcode]
    return canonicalize(module_of(f"""
HloModule jit_step, is_scheduled=true, num_partitions=2

%one (s: f32[8,4]) -> f32[8,4] {{
  %s = {ARRAY} parameter(0)
  ROOT %exchange.1 = {ARRAY} {opcode}(%s), channel_id=1, {said}
}}

%two (q: f32[8,4]) -> f32[8,4] {{
  %q = {ARRAY} parameter(0)
  ROOT %exchange.2 = {ARRAY} {opcode}(%q), channel_id=2, {said}
}}

%negated (p0: f32[8,4]) -> f32[8,4] {{
  %p0 = {ARRAY} parameter(0)
  ROOT %negate.1 = {ARRAY} negate(%p0)
}}

%beside (p2: f32[8,4]) -> f32[8,4] {{
  %p2 = {ARRAY} parameter(0)
  ROOT %abs.1 = {ARRAY} abs(%p2)
}}

ENTRY %main (x: f32[8,4]) -> (f32[8,4], f32[8,4]) {{
  %x = {ARRAY} parameter(0)
  %first = {ARRAY} fusion(%x), kind=kLoop, calls=%negated, {CONFIG}
  %start.1 = (({ARRAY}), {ARRAY}) async-start(%first), calls=%one
  %other = {ARRAY} fusion(%x), kind=kLoop, calls=%beside, {CONFIG}
  %done.1 = {ARRAY} async-done(%start.1)
  %start.2 = (({ARRAY}), {ARRAY}) async-start(%other), calls=%two
  %done.2 = {ARRAY} async-done(%start.2)
  ROOT %out = ({ARRAY}, {ARRAY}) tuple(%done.1, %done.2)
}}
"""))  # fmt: skip


@pytest.mark.parametrize("opcode", EXCHANGES)
def test_xlas_own_order_is_read_and_another_can_be_written(opcode: str) -> None:
    source = step(opcode)
    graph, xla = source.graph, read(source)
    assert [graph.nodes[node].opcode for node in graph.collectives] == [opcode, opcode]
    negated, one, beside, *_ = xla.order
    first = one.removesuffix(".start")
    second = "b1" if first == "b0" else "b0"
    assert xla.order == (
        negated, f"{first}.start", beside, f"{first}.done", f"{second}.start", f"{second}.done",
    )  # fmt: skip
    other = (beside, f"{second}.start", negated, f"{first}.start", f"{second}.done", f"{first}.done")
    for strategy in (xla, unfused(graph), replace(xla, order=other)):
        verify(source, apply(strategy, source), strategy)


@pytest.mark.parametrize("opcode", EXCHANGES)
def test_what_hides_nothing_is_written_where_xla_would_put_it(opcode: str) -> None:
    """An H200 executed such orders another way than they were written: XLA moved the start behind the hook."""
    source = step(opcode)
    xla = read(source)
    negated, _, beside, *_ = xla.order
    order = (negated, beside, "b0.start", "b1.start", "b0.done", "b1.done")
    written = parse(apply(replace(xla, order=order), source))
    entry = next(one for one in written.computations if one.id == written.entry_computation_id)
    asynchronous = [i.name.partition("_")[0] for i in entry.instructions if i.opcode.startswith("async")]
    assert asynchronous == ["b0", "b0", "b1", "b1"]


@pytest.mark.parametrize("opcode", ["all-to-all", "collective-broadcast"])
def test_two_never_share_a_bucket(opcode: str) -> None:
    graph = step(opcode).graph
    together = replace(unfused(graph), buckets=(Bucket(graph.collectives, "variadic"),), order=())
    assert len(one_bucket(graph).buckets) == 2
    with pytest.raises(IllegalStrategyError):
        check_strategy(graph, together, unit_graph(graph, together), ())


def test_permutations_that_xla_combined_are_moved_together_or_apart() -> None:
    """Keys and values on their way around a ring: XLA:GPU makes them one instruction, which stayed where it was."""
    source = canonicalize(module_of(RING))
    graph, xla = source.graph, read(source)
    (bucket,) = xla.buckets
    assert bucket == Bucket(graph.collectives, "variadic")
    assert [graph.nodes[node].opcode for node in bucket.collectives] == ["collective-permute"] * 2
    apart = replace(unfused(graph), order=())
    assert len(apart.buckets) == 2
    for strategy in (xla, apart, one_bucket(graph)):
        verify(source, apply(strategy, source), strategy)


def test_an_all_to_all_of_several_arrays_stays_one_and_where_it_is() -> None:
    graph = canonicalize(module_of(OF_TWO)).graph
    (exchange,) = [node for node in graph.nodes if node.opcode == "all-to-all"]
    assert (exchange.kind, len(exchange.operands), graph.collectives) == (Kind.FIXED, 2, ())
