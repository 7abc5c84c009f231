"""Reduce-scatters and all-gathers of one array as transfers of a plan, as XLA:GPU writes them."""

from __future__ import annotations

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.collectives import collective_bytes
from disco_hlo.hlo.graph import Kind
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import Bucket
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.variants import one_bucket, unfused
from tests.modules import ADD, module_of

CONFIG = 'backend_config={"operation_queue_id":"0"}'
STEP = f"""
HloModule jit_step, is_scheduled=true, num_partitions=2

{ADD}
%scattering (s: f32[8,4]) -> f32[4,4] {{
  %s = f32[8,4]{{1,0}} parameter(0)
  ROOT %reduce-scatter.1 = f32[4,4]{{1,0}} reduce-scatter(%s), channel_id=1, replica_groups={{{{0,1}}}},
    use_global_device_ids=true, dimensions={{0}}, to_apply=%add
}}

%negated (p0: f32[8,4]) -> f32[8,4] {{
  %p0 = f32[8,4]{{1,0}} parameter(0)
  ROOT %negate.1 = f32[8,4]{{1,0}} negate(%p0)
}}

%shard (p1: f32[4,4]) -> f32[4,4] {{
  %p1 = f32[4,4]{{1,0}} parameter(0)
  ROOT %tanh.1 = f32[4,4]{{1,0}} tanh(%p1)
}}

%beside (p2: f32[8,4]) -> f32[8,4] {{
  %p2 = f32[8,4]{{1,0}} parameter(0)
  ROOT %abs.1 = f32[8,4]{{1,0}} abs(%p2)
}}

ENTRY %main (x: f32[8,4]) -> (f32[8,4], f32[8,4]) {{
  %x = f32[8,4]{{1,0}} parameter(0)
  %first = f32[8,4]{{1,0}} fusion(%x), kind=kLoop, calls=%negated, {CONFIG}
  %start = ((f32[8,4]{{1,0}}), f32[4,4]{{1,0}}) async-start(%first), calls=%scattering
  %other = f32[8,4]{{1,0}} fusion(%x), kind=kLoop, calls=%beside, {CONFIG}
  %scattered = f32[4,4]{{1,0}} async-done(%start)
  %mine = f32[4,4]{{1,0}} fusion(%scattered), kind=kLoop, calls=%shard, {CONFIG}
  %gathered = f32[8,4]{{1,0}} all-gather(%mine), channel_id=2, replica_groups={{{{0,1}}}},
    use_global_device_ids=true, dimensions={{0}}
  ROOT %out = (f32[8,4]{{1,0}}, f32[8,4]{{1,0}}) tuple(%gathered, %other)
}}
"""


def step() -> CanonicalModule:
    return canonicalize(module_of(STEP))


def test_each_is_a_transfer_in_a_bucket_of_its_own() -> None:
    source = step()
    graph = source.graph
    moved = {graph.nodes[node].opcode: collective_bytes(graph, node) for node in graph.collectives}
    assert graph.backend == "gpu"
    assert moved == {"reduce-scatter": 128, "all-gather": 128}  # 8 x 4 floats
    assert all(graph.nodes[node].kind is Kind.COLLECTIVE for node in graph.collectives)
    assert sorted(read(source).buckets, key=str) == sorted(one_bucket(graph).buckets, key=str)
    assert len(one_bucket(graph).buckets) == 2


def test_xlas_own_order_is_read_and_another_can_be_written() -> None:
    source = step()
    xla = read(source)
    scatter, gather = (
        next(
            f"b{i}"
            for i, b in enumerate(xla.buckets)
            if source.graph.nodes[b.collectives[0]].opcode == opcode
        )
        for opcode in ("reduce-scatter", "all-gather")
    )
    kernels = [token for token in xla.order if "." not in token]
    negated, beside, shard = kernels
    assert xla.order == (
        negated, f"{scatter}.start", beside, f"{scatter}.done", shard, f"{gather}.start", f"{gather}.done",
    )  # fmt: skip
    for strategy in (xla, unfused(source.graph)):
        written = apply(strategy, source)
        verify(source, written, strategy)
    late = (
        negated,
        f"{scatter}.start",
        f"{scatter}.done",
        shard,
        f"{gather}.start",
        beside,
        f"{gather}.done",
    )
    moved = type(xla)(xla.groups, xla.buckets, late)
    verify(source, apply(moved, source), moved)


def test_they_never_share_a_bucket() -> None:
    graph = step().graph
    first, second = graph.collectives
    assert graph.nodes[first].collective != graph.nodes[second].collective
    assert len({graph.nodes[node].collective for node in graph.collectives}) == 2
    assert Bucket((first, second)) not in one_bucket(graph).buckets


def test_a_module_without_settings_is_a_gpus_by_its_schedulers_mark() -> None:
    """A step of one matmul of integers ran by the rules of a CPU, and XLA:GPU refused what was written for it."""
    dot = """
ENTRY %main (a: s32[4,2], b: s32[2,4]) -> s32[4,4] {
  %a = s32[4,2]{1,0} parameter(0)
  %b = s32[2,4]{1,0} parameter(1)
  ROOT %dot = s32[4,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    scheduled = 'is_scheduled=true, frontend_attributes={fingerprint_before_lhs="8e6c"}'
    for said, backend in (("is_scheduled=true", "cpu"), (scheduled, "gpu")):
        text = f"HloModule jit_step, {said}\n{dot}"
        data = module_of(text)
        assert canonicalize(data).graph.backend == backend
