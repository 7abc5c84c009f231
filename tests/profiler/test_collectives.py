"""What each kind of collectives takes in a traced step."""

from __future__ import annotations

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.profiler.collectives import InStep, Issued, in_step_by_kind, issued
from disco_hlo.profiler.keys import bodies_of, owners, travelling
from tests.hlo.small_modules import module_of

ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}"""
LOOP = f"""
HloModule jit_step, is_scheduled=true, num_partitions=2

{ADD}

%gathering (part: f32[4]) -> f32[8] {{
  %part = f32[4]{{0}} parameter(0)
  ROOT %inner = f32[8]{{0}} all-gather(%part), channel_id=1, replica_groups={{{{0,1}}}}, use_global_device_ids=true,
    dimensions={{0}}
}}, execution_thread="main"

%turn (state: (s32[], f32[8], f32[4])) -> (s32[], f32[8], f32[4]) {{
  %state = (s32[], f32[8]{{0}}, f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8]{{0}} get-tuple-element(%state), index=1
  %w = f32[4]{{0}} get-tuple-element(%state), index=2
  %begun = ((f32[4]{{0}}), f32[8]{{0}}) async-start(%w), async_execution_thread="main", calls=%gathering
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %whole = f32[8]{{0}} async-done(%begun)
  %y = f32[8]{{0}} add(%x, %whole)
  ROOT %out = (s32[], f32[8]{{0}}, f32[4]{{0}}) tuple(%next, %y, %w)
}}

%more (state: (s32[], f32[8], f32[4])) -> pred[] {{
  %state = (s32[], f32[8]{{0}}, f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %all = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %all), direction=LT
}}

ENTRY %main (p: f32[8], q: f32[4]) -> (f32[8], f32[8], f32[4]) {{
  %p = f32[8]{{0}} parameter(0)
  %q = f32[4]{{0}} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{{0}}, f32[4]{{0}}) tuple(%zero, %p, %q)
  %loop = (s32[], f32[8]{{0}}, f32[4]{{0}}) while(%start), condition=%more, body=%turn,
    backend_config={{"known_trip_count":{{"n":"3"}}}}
  %last = f32[8]{{0}} get-tuple-element(%loop), index=1
  %both = (f32[8]{{0}}, f32[4]{{0}}) all-reduce(%last, %q), channel_id=2, replica_groups={{{{0,1}}}},
    use_global_device_ids=true, to_apply=%add
  %big = f32[8]{{0}} get-tuple-element(%both), index=0
  %small = f32[4]{{0}} get-tuple-element(%both), index=1
  ROOT %out = (f32[8]{{0}}, f32[8]{{0}}, f32[4]{{0}}) tuple(%last, %big, %small)
}}
"""


def step() -> tuple[CanonicalModule, bytes]:
    module = module_of(LOOP)
    return canonicalize(module), module


def test_collectives_are_known_by_what_traces_call_them() -> None:
    source, module = step()
    (body,) = bodies_of(source)
    assert (body.turns, body.around, body.repeats) == (3, None, True)
    assert body.owner["inner"] == "begun"
    assert body.owner["y"] == "y"
    assert "less" not in body.owner, "of the condition"
    assert issued(body.canonical, body.owner) == (
        Issued(frozenset({"begun", "inner", "part"}), "all-gather", (32,)),
    )
    # XLA:CPU transfers the arrays of one all-reduce one after the other.
    (both,) = issued(source, owners(module))
    assert "both" in both.units
    assert (both.kind, both.sizes_bytes) == ("all-reduce", (32, 16))
    assert {str(kind): sorted(sizes) for kind, sizes in travelling(source).items()} == {
        "all-reduce": [16, 32],
        "all-gather": [32],
    }


def test_what_a_kind_takes_counts_every_turn() -> None:
    found = (
        Issued(frozenset({"begun", "inner"}), "all-gather", (32,)),
        Issued(frozenset({"both"}), "all-reduce", (32, 16)),
    )
    moved = {
        (run, "inner", turn): 10 + run + turn for run in range(3) for turn in range(3)
    } | {(run, "both", 0): 100 * (run + 1) for run in range(2)}  # fmt: skip
    assert in_step_by_kind(found, moved) == {
        "all-gather": InStep(((32, 3),), 36, 3, 3),  # 33, 36 and 39
        "all-reduce": InStep(((16, 1), (32, 1)), 150, 50, 2),  # the third run was cut off
    }
