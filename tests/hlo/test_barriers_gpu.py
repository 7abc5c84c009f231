"""Optimization barriers, which XLA:GPU keeps until after the hook (``jax.checkpoint`` makes them)."""

from __future__ import annotations

from dataclasses import replace

from jaxlib import _hlo

from disco_hlo.core.legality import group_refusal
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Kind
from disco_hlo.plan.apply import apply
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import unfused
from tests.modules import ADD, module_of

CONFIG = 'backend_config={"operation_queue_id":"0"}'
STEP = f"""
HloModule jit_step, is_scheduled=true, input_output_alias={{ {{0}}: (0, {{}}, may-alias) }}

{ADD}
%negated (p0: f32[8]) -> f32[8] {{
  %p0 = f32[8]{{0}} parameter(0)
  ROOT %negate.1 = f32[8]{{0}} negate(%p0)
}}

%reversed (p1: f32[8]) -> f32[8] {{
  %p1 = f32[8]{{0}} parameter(0)
  ROOT %reverse.1 = f32[8]{{0}} reverse(%p1), dimensions={{0}}
}}

%again (p2: f32[8]) -> f32[8] {{
  %p2 = f32[8]{{0}} parameter(0)
  ROOT %negate.2 = f32[8]{{0}} negate(%p2)
}}

%updated (p3: f32[8], p4: f32[8]) -> f32[8] {{
  %p3 = f32[8]{{0}} parameter(0)
  %p4 = f32[8]{{0}} parameter(1)
  ROOT %add.1 = f32[8]{{0}} add(%p3, %p4)
}}

ENTRY %main (weight: f32[8], x: f32[8]) -> (f32[8], f32[8], f32[8]) {{
  %weight = f32[8]{{0}} parameter(0)
  %x = f32[8]{{0}} parameter(1)
  %first = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%negated, {CONFIG}
  %pair = (f32[8]{{0}}, f32[8]{{0}}) tuple(%x, %weight)
  %barrier = (f32[8]{{0}}, f32[8]{{0}}) opt-barrier(%pair)
  %x.again = f32[8]{{0}} get-tuple-element(%barrier), index=0
  %weight.again = f32[8]{{0}} get-tuple-element(%barrier), index=1
  %second = f32[8]{{0}} fusion(%x.again), kind=kLoop, calls=%again, {CONFIG}
  %backward = f32[8]{{0}} fusion(%weight.again), kind=kLoop, calls=%reversed, {CONFIG}
  %reduced = f32[8]{{0}} all-reduce(%first), replica_groups={{{{0,1}}}}, to_apply=%add
  %new = f32[8]{{0}} fusion(%weight, %reduced), kind=kLoop, calls=%updated, {CONFIG}
  ROOT %out = (f32[8]{{0}}, f32[8]{{0}}, f32[8]{{0}}) tuple(%new, %second, %backward)
}}
"""


def step() -> CanonicalModule:
    return canonicalize(module_of(STEP))


def node(source: CanonicalModule, opcode: str) -> int:
    return next(n.id for n in source.graph.nodes if n.opcode == opcode)


def test_what_is_computed_again_behind_a_barrier_stays_apart() -> None:
    graph = step().graph
    assert graph.backend == "gpu"
    assert [n.opcode for n in graph.nodes].count("negate") == 2
    assert all(n.kind is Kind.FREE for n in graph.nodes if n.opcode == "opt-barrier")


def test_what_reads_one_array_of_a_barrier_waits_for_none_of_the_others() -> None:
    """Gathers behind the barrier of jax.checkpoint waited for every saved array, a third of a millisecond a layer."""
    data = module_of(STEP.replace("tuple(%x, %weight)", "tuple(%first, %weight)"))
    source = canonicalize(data)
    units = unit_graph(source.graph, unfused(source.graph))
    first, again = (units.index[f"n{n.id}"] for n in source.graph.nodes if n.opcode == "negate")
    backward = units.index[f"n{node(source, 'reverse')}"]
    assert units.dependencies[again] == (first,)
    assert units.dependencies[backward] == ()
    ahead = replace(unfused(source.graph), order=(
        units.units[backward].token, units.units[first].token, "b0.start", units.units[again].token, "b0.done",
        f"n{node(source, 'add')}",
    ))  # fmt: skip
    module = apply(ahead, source)
    verify(source, module, ahead)
    assert read(canonicalize(module)).order == ahead.order
    _hlo.HloModule.from_serialized_hlo_module_proto(module)


def test_a_reader_behind_a_barrier_runs_before_the_parameter_is_overwritten() -> None:
    """The backward pass reads the weight through the barrier: the update must wait for it."""
    source = step()
    backward, update = node(source, "reverse"), node(source, "add")
    assert (backward, update) in source.graph.before
    units = unit_graph(source.graph, unfused(source.graph))
    assert units.index[f"n{backward}"] in units.dependencies[units.index[f"n{update}"]]


def test_a_kernel_does_not_overwrite_what_it_reads_elsewhere_through_a_barrier() -> None:
    source = step()
    backward, update = node(source, "reverse"), node(source, "add")
    reason = group_refusal(source.graph, {backward, update}, [update, backward])
    assert reason is not None
    assert "reads at other elements in the same kernel" in reason


def test_barriers_survive_a_rewrite() -> None:
    source = step()
    module = apply(unfused(source.graph), source)
    assert b"opt-barrier" in module
    assert canonicalize(module).graph.fingerprint == source.graph.fingerprint
    _hlo.HloModule.from_serialized_hlo_module_proto(module)


def test_a_synchronous_all_reduce_is_a_start_and_a_done() -> None:
    source = step()
    assert {"b0.start", "b0.done"} <= set(read(source).order)
    apply(read(source), source)
