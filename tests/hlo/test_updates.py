"""Slices written into arrays: what XLA writes into the array itself, and what into a buffer of its own."""

from __future__ import annotations

import pytest

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plan.apply import apply
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.variants import unfused
from tests.hlo.small_modules import module_of

ON_GPU = ', backend_config={"operation_queue_id":"0"}'
UPDATE = "dynamic-update-slice(%p, %s, %i)"
IN_PLACE = {
    "returned": f"ROOT %u = f32[8]{{0}} {UPDATE}",
    "returned with another": f"""%u = f32[8]{{0}} {UPDATE}
  %n = f32[8]{{0}} negate(%p)
  ROOT %t = (f32[8]{{0}}, f32[8]{{0}}) tuple(%u, %n)""",
    "of a bitcast": """%b = f32[8]{0} bitcast(%p)
  ROOT %u = f32[8]{0} dynamic-update-slice(%b, %s, %i)""",
}
ELSEWHERE = {
    "read in the kernel": f"""%u = f32[8]{{0}} {UPDATE}
  ROOT %n = f32[8]{{0}} negate(%u)""",
    "of what the kernel computes": """%n = f32[8]{0} negate(%p)
  %u = f32[8]{0} dynamic-update-slice(%n, %s, %i)
  ROOT %a = f32[8]{0} add(%u, %n)""",
}


def step(body: str, *, gpu: bool = False) -> CanonicalModule:
    """A parameter is copied, a kernel writes a slice, and what others read was not written into."""
    result = "(f32[8], f32[8])" if "tuple" in body else "f32[8]"
    config = ON_GPU if gpu else ""
    first = "%first = f32[8]{0} get-tuple-element(%made), index=0" if "tuple" in body else ""
    made = "%first" if first else "%made"
    text = f"""
HloModule jit_step, is_scheduled=true

%updating (p: f32[8], s: f32[2], i: s32[]) -> {result} {{
  %p = f32[8]{{0}} parameter(0)
  %s = f32[2]{{0}} parameter(1)
  %i = s32[] parameter(2)
  {body}
}}

%backward (q: f32[8]) -> f32[8] {{
  %q = f32[8]{{0}} parameter(0)
  ROOT %reverse = f32[8]{{0}} reverse(%q), dimensions={{0}}
}}

ENTRY %main (x: f32[8], part: f32[2], at: s32[]) -> (f32[8], f32[8]) {{
  %x = f32[8]{{0}} parameter(0)
  %part = f32[2]{{0}} parameter(1)
  %at = s32[] parameter(2)
  %own = f32[8]{{0}} copy(%x)
  %backwards = f32[8]{{0}} fusion(%own), kind=kLoop, calls=%backward{config}
  %made = {result} fusion(%own, %part, %at), kind=kLoop, calls=%updating{config}
  {first}
  ROOT %out = (f32[8]{{0}}, f32[8]{{0}}) tuple(%backwards, {made})
}}
"""
    return canonicalize(module_of(text))


def opcodes(source: CanonicalModule, pairs: tuple[tuple[int, int], ...]) -> set[tuple[str, ...]]:
    return {tuple(source.graph.nodes[node].opcode for node in pair) for pair in pairs}


@pytest.mark.parametrize("body", IN_PLACE.values(), ids=IN_PLACE)
def test_what_a_kernel_writes_into_its_operand_is_read_before(body: str) -> None:
    source = step(body)
    assert [node.opcode for node in source.graph.nodes].count("copy") == 1
    assert ("reverse", "dynamic-update-slice") in opcodes(source, source.graph.before)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("body", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_a_kernel_computes_element_by_element_overwrites_nothing(body: str, gpu: bool) -> None:
    """Taken for an update in place, it had to wait for all who read the array, though XLA's kernel does not. Written by
    itself it does overwrite, so it gets a copy, which is no buffer in XLA's kernel."""
    source = step(body, gpu=gpu)
    assert source.graph.before == ()
    assert opcodes(source, source.graph.inplace) == {("copy", "dynamic-update-slice")}
    ((copied, _),) = source.graph.inplace
    assert len(source.graph.users[copied]) == 1
    for strategy in (read(source), unfused(source.graph)):
        verify(source, apply(strategy, source), strategy)
        again = canonicalize(apply(strategy, source))
        assert again.graph.inplace == source.graph.inplace


def test_an_update_of_what_nobody_else_has_needs_no_copy() -> None:
    """Zeros that a kernel makes to write into: by themselves they have a buffer that may be written into."""
    source = step("""%z = f32[] constant(0)
  %zeros = f32[8]{0} broadcast(%z), dimensions={}
  ROOT %u = f32[8]{0} dynamic-update-slice(%zeros, %s, %i)""")
    assert opcodes(source, source.graph.inplace) == {("broadcast", "dynamic-update-slice")}


def test_an_update_of_an_argument_of_the_step_reads_a_copy_of_it() -> None:
    """Nobody else in the step reads it, but it is the caller's: a kernel of the update alone wrote into it."""
    text = """
HloModule jit_step, is_scheduled=true

%updating (p: f32[8], s: f32[2], i: s32[]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %s = f32[2]{0} parameter(1)
  %i = s32[] parameter(2)
  %u = f32[8]{0} dynamic-update-slice(%p, %s, %i)
  ROOT %n = f32[8]{0} negate(%u)
}

ENTRY %main (x: f32[8], part: f32[2], at: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %part = f32[2]{0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %made = f32[8]{0} fusion(%x, %part, %at), kind=kLoop, calls=%updating
}
"""
    source = canonicalize(module_of(text))
    assert opcodes(source, source.graph.inplace) == {("copy", "dynamic-update-slice")}


def test_constants_of_a_kernel_are_no_part_of_what_it_computes() -> None:
    """Each plan's kernels read them: XLA's own kernel was not known again, and could not be written."""
    source = step("""%c = f32[8]{0} constant({1, 2, 3, 4, 5, 6, 7, 8})
  %u = f32[8]{0} dynamic-update-slice(%p, %s, %i)
  ROOT %a = f32[8]{0} add(%u, %c)""")
    apply(read(source), source)
