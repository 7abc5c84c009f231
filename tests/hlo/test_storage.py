"""Who shares a buffer, what must come first since buffers are overwritten, and what gets a buffer of its own.

Of slices written into arrays: what XLA writes into the array itself, and what into a buffer of its own.
"""

from __future__ import annotations

import pytest

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.overwrites import RunningOrder
from disco_hlo.hlo.proto import parse
from disco_hlo.hlo.storage import Storage, storage_of
from disco_hlo.plan.apply import apply
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.variants import unfused
from tests.hlo.small_modules import RETURNED_AND_UPDATED, small_module
from tests.modules import module_of


def stored(entry: str) -> tuple[Storage, dict[str, int]]:
    """The storage of an entry, and the place of each instruction by name."""
    whole = parse(small_module(entry))
    index = ModuleIndex(whole)
    protos = list(index.computation(whole.entry_computation_id).instructions)
    place = {proto.id: number for number, proto in enumerate(protos)}
    found = storage_of(protos, [[place[i] for i in proto.operand_ids] for proto in protos], index)
    return found, {proto.name: number for number, proto in enumerate(protos)}


def same_buffer(entry: str, one: str, other: str, member: int = 0) -> bool:
    storage, place = stored(entry)
    return storage.buffer(storage.of_op[place[one]][0]) == storage.buffer(storage.of_op[place[other]][member])


def same_value(entry: str, one: str, other: str, member: int = 0) -> bool:
    storage, place = stored(entry)
    return storage.of_op[place[one]][0] == storage.of_op[place[other]][member]


LOOP = """%own = f32[8]{0} negate(%x)
%begin = (f32[8]{0}, f32[8]{0}, s32[]) tuple(%own, %y, %n)
%loop = (f32[8]{0}, f32[8]{0}, s32[]) while(%begin), condition=%goes_on, body=%turn
ROOT %last = f32[8]{0} get-tuple-element(%loop), index=0"""
BRANCH = """%two = f32[8]{0} negate(%x)
ROOT %chosen = f32[8]{0} conditional(%n, %two, %two), branch_computations={%adding, %passing}"""
CALL = """%two = f32[8]{0} negate(%x)
ROOT %called = f32[8]{0} call(%two), to_apply=%passing"""
KERNEL = """%two = f32[8]{0} negate(%x)
%part = f32[2]{0} slice(%y), slice={[0:2]}
ROOT %kernel = f32[8]{0} fusion(%two, %part, %n), kind=kLoop, calls=%updating"""


def test_a_loop_writes_over_what_it_carries_and_hands_on_what_it_only_reads() -> None:
    assert same_buffer(LOOP, "own", "loop", 0)
    assert not same_value(LOOP, "own", "loop", 0)
    assert same_value(LOOP, "y", "loop", 1)


MOVING = """%own = f32[8]{{0}} negate(%x)
%begin = (f32[8]{{0}}, f32[8]{{0}}, s32[]) tuple(%own, {}, %n)
%loop = (f32[8]{{0}}, f32[8]{{0}}, s32[]) {}
ROOT %last = f32[8]{{0}} get-tuple-element(%loop), index=0"""


@pytest.mark.parametrize(
    "loop", ["while(%begin), condition=%goes_on, body=%exchanging", "call(%begin), to_apply=%looping"]
)
def test_a_loop_that_exchanges_equal_values_changes_none(loop: str) -> None:
    """XLA has one buffer for both, and makes no copies."""
    equal, unequal = MOVING.format("%own", loop), MOVING.format("%y", loop)
    assert same_value(equal, "own", "loop", 0)
    assert same_value(equal, "own", "loop", 1)
    assert not same_value(unequal, "own", "loop", 0)
    assert not same_value(unequal, "y", "loop", 1)


def test_a_branch_that_hands_its_operand_on_returns_its_buffer() -> None:
    """The other branch writes over it: a subtraction of the operand behind the conditional gave 0."""
    assert same_buffer(BRANCH, "two", "chosen")
    assert not same_value(BRANCH, "two", "chosen")


def test_a_call_that_hands_its_operand_on_returns_its_value() -> None:
    assert same_value(CALL, "two", "called")


def test_a_kernel_that_ends_in_an_update_writes_over_its_operand() -> None:
    assert same_buffer(KERNEL, "two", "kernel")
    assert not same_value(KERNEL, "two", "kernel")


def ordered(source: CanonicalModule) -> set[tuple[str, str]]:
    """Pairs of opcodes of which the first must run before the second."""
    nodes = source.graph.nodes
    return {(nodes[a].opcode, nodes[b].opcode) for a, b in source.graph.before}


def made(entry: str, header: str = "") -> CanonicalModule:
    return canonicalize(small_module(entry, header))


ALIAS = ", input_output_alias={ {0}: (0, {}, may-alias) }"
SWAPPED = ", input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }"


def test_readers_of_a_donated_argument_come_before_what_is_updated_into_its_place() -> None:
    """The update's operand is made in the argument's buffer already, as the update must end there."""
    source = made(
        """%first = f32[8]{0} reverse(%x), dimensions={0}
%seed = f32[8]{0} negate(%y)
%part = f32[2]{0} slice(%y), slice={[0:2]}
%new = f32[8]{0} dynamic-update-slice(%seed, %part, %n)
ROOT %out = (f32[8]{0}, f32[8]{0}) tuple(%new, %first)""",
        ALIAS,
    )
    assert ("reverse", "negate") in ordered(source)


def test_an_argument_that_is_read_behind_its_new_value_is_not_overwritten() -> None:
    source = made(
        """%new = f32[8]{0} reverse(%x), dimensions={0}
%late = f32[8]{0} subtract(%new, %x)
ROOT %out = (f32[8]{0}, f32[8]{0}) tuple(%new, %late)""",
        ALIAS,
    )
    assert source.dropped_aliases == ((0, 0),)
    written = apply(unfused(source.graph), source)
    assert not parse(written).input_output_alias.entries
    assert canonicalize(written).graph.fingerprint == source.graph.fingerprint
    verify(source, written, unfused(source.graph))


def test_two_arguments_that_take_each_others_place_do_not_wait_in_a_circle() -> None:
    """Each result reads both: one kernel could write both in place, and single ops cannot."""
    source = made(
        """%sum = f32[8]{0} add(%x, %y)
%difference = f32[8]{0} subtract(%x, %y)
ROOT %out = (f32[8]{0}, f32[8]{0}) tuple(%sum, %difference)""",
        SWAPPED,
    )
    assert len(source.dropped_aliases) == 1
    verify(source, apply(unfused(source.graph), source), unfused(source.graph))


def test_an_op_that_moves_elements_does_not_write_where_it_reads() -> None:
    source = made("ROOT %new = f32[8]{0} reverse(%x), dimensions={0}", ALIAS.replace("{0}", "{}"))
    assert source.dropped_aliases == ((0, 0),)


@pytest.mark.parametrize("op", ["negate(%x)", "parameter"])
def test_a_value_that_is_two_results_gets_a_second_buffer(op: str) -> None:
    """XLA:CPU aborts on two results in one buffer; a kernel of XLA's that only moves the layout is a bitcast here."""
    first = "%own = f32[8]{0} copy(%x)" if op == "parameter" else f"%own = f32[8]{{0}} {op}"
    source = made(f"""{first}
%other = f32[2,4]{{1,0}} bitcast(%own)
ROOT %out = (f32[8]{{0}}, f32[2,4]{{1,0}}) tuple(%own, %other)""")
    shown = source.graph.shown
    results = [shown[x] for x in source.graph.nodes[source.graph.root].operands]
    assert results[0] != results[1]
    verify(source, apply(unfused(source.graph), source), unfused(source.graph))


def test_an_argument_that_is_returned_under_other_dimensions_is_copied() -> None:
    source = made("ROOT %other = f32[2,4]{1,0} bitcast(%x)")
    assert [node.opcode for node in source.graph.nodes].count("copy") == 1


def test_what_is_returned_is_not_scattered_into() -> None:
    """XLA had the transpose twice, and merging made one buffer of it."""
    source = made(RETURNED_AND_UPDATED)
    assert [node.opcode for node in source.graph.nodes].count("reverse") == 2
    assert canonicalize(apply(unfused(source.graph), source)).graph.fingerprint == source.graph.fingerprint


def test_a_running_order_refuses_circles_and_keeps_what_it_had() -> None:
    order = RunningOrder([(), (), (0,), (1,)])
    assert order.add(3, 0)
    assert not order.add(2, 1)
    assert not order.add_all([(0, 3), (1, 2)])
    assert order.add(1, 2)
    assert not order.add(2, 2)


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
