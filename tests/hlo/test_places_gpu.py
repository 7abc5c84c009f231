"""The place of a loop's slice, which XLA:GPU notes beside the operands that say it: a part of what a step is, of no
account for the time that copying the slice takes."""

from __future__ import annotations

import json

from disco_hlo.estimator.analytic import AnalyticModel, DeviceModel
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from tests.modules import module_of


def step(offset: int, stride: int) -> CanonicalModule:
    """One that takes a row out of an array, and puts another into it, on a stream of their own."""
    place = {"loop_index": "0", "byte_offset": str(offset), "byte_stride": str(stride)}
    note = f"backend_config={json.dumps({'operation_queue_id': '0', 'dynamic_slice_config': place})}"
    text = f"""
HloModule jit_step, is_scheduled=true

%taken (p0: f32[16,4096], p1: s32[]) -> f32[1,4096] {{
  %p0 = f32[16,4096]{{1,0}} parameter(0)
  %p1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  ROOT %slice.1 = f32[1,4096]{{1,0}} dynamic-slice(%p0, %p1, %zero.1), dynamic_slice_sizes={{1,4096}}, {note}
}}

%put (p2: f32[16,4096], p3: s32[], p4: f32[1,4096]) -> f32[16,4096] {{
  %p2 = f32[16,4096]{{1,0}} parameter(0)
  %p3 = s32[] parameter(1)
  %p4 = f32[1,4096]{{1,0}} parameter(2)
  %zero.2 = s32[] constant(0)
  ROOT %update.1 = f32[16,4096]{{1,0}} dynamic-update-slice(%p2, %p4, %p3, %zero.2), {note}
}}

ENTRY %main (x: f32[16,4096], y: f32[16,4096], i: s32[]) -> f32[16,4096] {{
  %x = f32[16,4096]{{1,0}} parameter(0)
  %y = f32[16,4096]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %begun = ((f32[16,4096]{{1,0}}, s32[]), f32[1,4096]{{1,0}}, u32[]) async-start(%x, %i), calls=%taken
  %row = f32[1,4096]{{1,0}} async-done(%begun)
  %again = ((f32[16,4096]{{1,0}}, s32[], f32[1,4096]{{1,0}}), f32[16,4096]{{1,0}}, u32[]) async-start(%y, %i, %row),
    calls=%put
  ROOT %out = f32[16,4096]{{1,0}} async-done(%again)
}}
"""
    return canonicalize(module_of(text))


def test_the_place_of_a_slice_is_of_no_account_for_its_time() -> None:
    """The body of a doubled loop steps twice as far, and its second half has an offset. The slices of such a loop were
    ones that never ran: a double-buffered step was predicted 8 % too fast (2 x H100)."""
    every, second = step(0, 16384), step(16384, 32768)
    assert [one.key for one in every.graph.nodes] == [one.key for one in second.graph.nodes]
    assert every.graph.fingerprint != second.graph.fingerprint


def test_a_slice_that_is_copied_on_a_stream_of_its_own_moves_that_slice() -> None:
    """Estimated at nothing, a loop with many of them seemed faster than any other."""
    graph = step(0, 16384).graph
    device = DeviceModel(memory_bandwidth=1e9, flops_per_s=1e12, hoists=False)
    times_ns = AnalyticModel(device).op_ns(graph)
    starts = [one.id for one in graph.nodes if one.opcode == "async-start"]
    assert [int(times_ns[one]) for one in starts] == [2 * 16384, 2 * 16384]
