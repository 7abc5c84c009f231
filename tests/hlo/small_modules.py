"""Scheduled modules of a few instructions, as text."""

from __future__ import annotations

from tests.modules import module_of

CALLED = """
%adding (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %more = f32[8]{0} add(%a, %a)
}
%passing (b: f32[8]) -> f32[8] {
  ROOT %b = f32[8]{0} parameter(0)
}
%turn (t: (f32[8], f32[8], s32[])) -> (f32[8], f32[8], s32[]) {
  %t = (f32[8]{0}, f32[8]{0}, s32[]) parameter(0)
  %t0 = f32[8]{0} get-tuple-element(%t), index=0
  %t1 = f32[8]{0} get-tuple-element(%t), index=1
  %t2 = s32[] get-tuple-element(%t), index=2
  %next = f32[8]{0} add(%t0, %t1)
  %one = s32[] constant(1)
  %count = s32[] add(%t2, %one)
  ROOT %back = (f32[8]{0}, f32[8]{0}, s32[]) tuple(%next, %t1, %count)
}
%goes_on (c: (f32[8], f32[8], s32[])) -> pred[] {
  %c = (f32[8]{0}, f32[8]{0}, s32[]) parameter(0)
  %c2 = s32[] get-tuple-element(%c), index=2
  %end = s32[] constant(3)
  ROOT %is_less = pred[] compare(%c2, %end), direction=LT
}
%exchanging (u: (f32[8], f32[8], s32[])) -> (f32[8], f32[8], s32[]) {
  %u = (f32[8]{0}, f32[8]{0}, s32[]) parameter(0)
  %first_one = f32[8]{0} get-tuple-element(%u), index=0
  %other_one = f32[8]{0} get-tuple-element(%u), index=1
  %so_far = s32[] get-tuple-element(%u), index=2
  %first = s32[] constant(1)
  %turns = s32[] add(%so_far, %first)
  ROOT %exchanged = (f32[8]{0}, f32[8]{0}, s32[]) tuple(%other_one, %first_one, %turns)
}
%looping (v: (f32[8], f32[8], s32[])) -> (f32[8], f32[8], s32[]) {
  %v = (f32[8]{0}, f32[8]{0}, s32[]) parameter(0)
  ROOT %inner = (f32[8]{0}, f32[8]{0}, s32[]) while(%v), condition=%goes_on, body=%exchanging
}
%updating (array: f32[8], part: f32[2], at: s32[]) -> f32[8] {
  %array = f32[8]{0} parameter(0)
  %part = f32[2]{0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %updated = f32[8]{0} dynamic-update-slice(%array, %part, %at)
}
"""
ARGUMENTS = "%x = f32[8]{0} parameter(0)\n%y = f32[8]{0} parameter(1)\n%n = s32[] parameter(2)\n"


def small_module(entry: str, header: str = "") -> bytes:
    """A scheduled module with arguments x, y and n."""
    return module_of(
        f"HloModule jit_step, is_scheduled=true{header}\n{CALLED}\nENTRY %main {{\n{ARGUMENTS}{entry}\n}}\n"
    )


RETURNED_AND_UPDATED = """%one = f32[8]{0} reverse(%x), dimensions={0}
%two = f32[8]{0} reverse(%x), dimensions={0}
%part = f32[2]{0} slice(%y), slice={[0:2]}
%new = f32[8]{0} dynamic-update-slice(%two, %part, %n)
ROOT %out = (f32[8]{0}, f32[8]{0}) tuple(%one, %new)"""
