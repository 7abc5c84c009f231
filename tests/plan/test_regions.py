"""Strategies of loop bodies, branches and calls: read, written and verified; and which buffers a body carries on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from disco_hlo.errors import IllegalStrategyError, PlanError
from disco_hlo.hlo import proto
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.regions import Region
from disco_hlo.plan.apply import apply
from disco_hlo.plan.check_module import check_module
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.variants import one_bucket, unfused
from tests.captured import captured, stored
from tests.modules import module
from tests.plan.executed import executed_difference

STEPS = {
    "dp_scan": ("loop1", "loop2"),
    "fsdp_scan": ("loop1", "loop2"),
    "fsdp_scan_rotated": ("loop1", "loop2"),
    "fsdp_scan_rotated_doubled": ("loop1", "loop2"),
}
"""A Llama-like step on two H100, and its loops."""


def renamed(data: bytes) -> bytes:
    """The module with other names and other ids, in its computations and in its instructions."""
    message = proto.parse(data)
    instructions = [one for computation in message.computations for one in computation.instructions]
    numbers = list(range(5000, 5000 + len(instructions)))
    random.Random(1).shuffle(numbers)
    number = {one.id: new for one, new in zip(instructions, numbers, strict=True)}
    computation_number = {
        one.id: 3 * len(instructions) - place for place, one in enumerate(message.computations)
    }
    sequences = {
        computation_number[old]: [number[i] for i in sequence.instruction_ids]
        for old, sequence in message.schedule.sequences.items()
    }
    message.schedule.sequences.clear()
    for new, order in sequences.items():
        message.schedule.sequences[new].instruction_ids.extend(order)
    message.entry_computation_id = computation_number[message.entry_computation_id]
    for computation in message.computations:
        computation.id, computation.root_id = computation_number[computation.id], number[computation.root_id]
        computation.name = f"c{computation.id}"
        if computation.id == message.entry_computation_id:
            message.entry_computation_name = computation.name
        for one in computation.instructions:
            one.id = number[one.id]
            one.name = f"i{one.id}"
            one.operand_ids[:] = [number[i] for i in one.operand_ids]
            one.control_predecessor_ids[:] = [number[i] for i in one.control_predecessor_ids]
            one.called_computation_ids[:] = [computation_number[i] for i in one.called_computation_ids]
    return proto.serialize(message)


@pytest.mark.parametrize("name", STEPS)
def test_a_captured_step_and_a_renamed_copy_have_one_form_and_one_plan(name: str) -> None:
    source, copy = captured(f"h100_llama/{name}"), canonicalize(renamed(stored(f"h100_llama/{name}")))
    assert tuple(region.name for region in source.regions) == STEPS[name]
    for one, other in zip((source, *_bodies(source)), (copy, *_bodies(copy)), strict=True):
        assert (one.graph.fingerprint, one.graph.key) == (other.graph.fingerprint, other.graph.key)
        assert (one.graph.before, one.graph.inplace) == (other.graph.before, other.graph.inplace)
    plan = read(source)
    assert read(copy) == plan
    assert [region for region, _ in plan.regions] == [*STEPS[name]]
    assert all(of_region.order for _, of_region in plan.regions)
    written = apply(plan, source)
    verify(source, written, plan)


def _bodies(source: CanonicalModule) -> list[CanonicalModule]:
    return [one for region in source.regions for one in region.sources]


# --- a loop that was rotated: the next layer's weights are gathered into this layer's buffers -------------------------


def _rotated() -> tuple[CanonicalModule, Region]:
    source = captured("h100_llama/fsdp_scan_rotated")
    return source, source.regions[0]


def test_in_a_rotated_body_sixteen_values_are_read_before_what_comes_next_is_written() -> None:
    _, forward = _rotated()
    graph = forward.source.graph
    assert len(graph.before) == 16
    gathers = [writer for _, writer in graph.before if graph.nodes[writer].opcode == "all-gather"]
    assert len(gathers) == 6


def test_a_gather_before_the_last_reader_of_what_it_overwrites_is_refused_in_a_plan() -> None:
    source, forward = _rotated()
    plan, graph = read(source), forward.source.graph
    buckets = dict(plan.regions)["loop1"].buckets
    token = {node: f"b{i}.start" for i, bucket in enumerate(buckets) for node in bucket.collectives}
    unit = {
        node: f"g{i}" for i, group in enumerate(dict(plan.regions)["loop1"].groups) for node in group.nodes
    }
    pairs = [(a, b) for a, b in graph.before if b in token]
    assert len(pairs) == 6
    for reader, gather in pairs:
        order = list(dict(plan.regions)["loop1"].order)
        order.remove(token[gather])
        order.insert(order.index(unit.get(reader, f"n{reader}")), token[gather])
        with pytest.raises(IllegalStrategyError, match=token[gather].partition(".")[0]):
            apply(_with(plan, "loop1", order=tuple(order)), source)


def _with(plan: Strategy, region: str, **changed: object) -> Strategy:
    regions = dict(plan.regions)
    regions[region] = replace(regions[region], **changed)  # type: ignore[arg-type]
    return replace(plan, regions=tuple(regions.items()))


# --- bodies written by hand ----------------------------------------------------------------------------------------

CARRIES = "(s32[],f32[8],f32[8])"
TURN = f"""
    p = {CARRIES} parameter
    k = s32[] get-tuple-element p number=0
    a = f32[8] get-tuple-element p number=1
    b = f32[8] get-tuple-element p number=2
    one = s32[] constant value=1
    next = s32[] add k one
    {{}}
    t = {CARRIES} tuple next {{}}
"""
GOES_ON = f"""
    p = {CARRIES} parameter
    k = s32[] get-tuple-element p number=0
    limit = s32[] constant value=4
    less = pred[] compare k limit
"""
STEP = f"""
    x = f32[8] parameter
    y = f32[8] parameter number=1
    zero = s32[] constant value=0
    n = s32[] copy zero
    a = f32[8] negate x
    b = f32[8] exponential y
    t = {CARRIES} tuple n a b
    w = {CARRIES} while t calls=body,condition
    {{}}
    r = f32[8] get-tuple-element w number=1
"""


TWO = "r = f32[8] cosine a\n    m = f32[8] sine a"


def loop(lines: str, returned: str, after: str = "", **called: str) -> bytes:
    """A step of one loop, whose body has these lines and hands on these values."""
    return module(STEP.format(after), {"body": TURN.format(lines, returned), "condition": GOES_ON, **called})


def _opcodes(source: CanonicalModule) -> list[str]:
    return [node.opcode for node in source.graph.nodes]


def _named(source: CanonicalModule, opcode: str) -> str:
    (node,) = (node.id for node in source.graph.nodes if node.opcode == opcode)
    return f"n{node}"


def _accepted(source: CanonicalModule, strategy: Strategy) -> bytes:
    written = apply(strategy, source)
    verify(source, written, strategy)
    assert set(read(canonicalize(written)).regions) >= set(strategy.regions)
    return written


def test_the_next_value_is_written_when_all_have_read_the_present_one() -> None:
    source = canonicalize(loop(TWO, "m r"))
    (region,) = source.regions
    count, sine, cosine = (_named(region.source, opcode) for opcode in ("add", "sine", "cosine"))
    plan = read(source)
    assert dict(plan.regions)["loop1"].order == (count, cosine, sine)
    _accepted(source, plan)
    _accepted(source, _with(plan, "loop1", order=(cosine, count, sine)))
    with pytest.raises(IllegalStrategyError, match=cosine):
        apply(_with(plan, "loop1", order=(count, sine, cosine)), source)


def test_a_body_that_writes_the_next_value_too_early_is_refused_by_gate_and_verify() -> None:
    late, early = (loop(lines, "m r") for lines in (TWO, "m = f32[8] sine a\n    r = f32[8] cosine a"))
    source = canonicalize(late)
    verify(source, late, read(source))
    with pytest.raises(PlanError, match=r"r reads p\{1\}, which m has overwritten before, in body"):
        check_module(early, "cpu")
    with pytest.raises(PlanError, match="in loop1, its order runs something before what it must wait for"):
        verify(source, early, read(source))


def test_a_body_in_which_no_order_helps_gets_a_copy() -> None:
    """Each next value is made of the other present one. A kernel of XLA's that makes both at once needs no copy."""
    both = "both = (f32[8],f32[8]) fusion a b calls=kernel\n"
    parts = "m = f32[8] get-tuple-element both number=0\n    r = f32[8] get-tuple-element both number=1"
    kernel = "v = f32[8] parameter\nu = f32[8] parameter number=1\nm = f32[8] sine u\nr = f32[8] cosine v\n"
    kernel += "t = (f32[8],f32[8]) tuple m r"
    data = loop(both + "    " + parts, "m r", kernel=kernel)
    source = canonicalize(data)
    (region,) = source.regions
    assert _opcodes(region.source).count("copy") == 1
    plain = replace(unfused(source.graph), regions=(("loop1", unfused(region.source.graph)),))
    _accepted_in_some_order(source, plain)


def test_a_copy_that_xlas_kernels_do_without_has_a_place_in_the_order_of_its_plan() -> None:
    """One kernel overwrites what it reads, element by element. Its two results apart need a copy, so canonical form has
    one, which no instruction of XLA's is. A plan that left the loop as it was could not be verified."""
    both = "both = (f32[8],f32[8]) fusion a calls=kernel\n"
    parts = "m = f32[8] get-tuple-element both number=0\n    r = f32[8] get-tuple-element both number=1"
    kernel = "v = f32[8] parameter\nm = f32[8] sine v\nr = f32[8] add m v\nt = (f32[8],f32[8]) tuple m r"
    source = canonicalize(loop(both + "    " + parts, "m r", kernel=kernel))
    (region,) = source.regions
    copy = _opcodes(region.source).index("copy")
    assert read(region.source).order[-1] == f"n{copy}"
    for strategy in (Strategy(), read(source)):
        verify(source, apply(strategy, source), strategy)


def _accepted_in_some_order(source: CanonicalModule, strategy: Strategy) -> None:
    written = apply(strategy, source)
    verify(source, written, strategy)
    found = read(canonicalize(written))
    assert apply(found, source) == written


def test_bodies_that_are_alike_are_one_region_and_both_are_written() -> None:
    again = f"w2 = {CARRIES} while w calls=body2,condition2"
    lines, returned = TWO, "m r"
    data = module(
        STEP.format(again).replace("get-tuple-element w number", "get-tuple-element w2 number"),
        {
            "body": TURN.format(lines, returned), "condition": GOES_ON,
            "body2": TURN.format(lines, returned), "condition2": GOES_ON,
        },
    )  # fmt: skip
    source = canonicalize(data)
    (region,) = source.regions
    assert (region.name, len(region.calls), len(region.sources)) == ("loop1", 2, 2)
    kernel = Strategy(regions=(("loop1", read(region.source)),))
    written = proto.parse(_accepted(source, kernel))
    bodies = [one for one in written.computations if one.name in ("body", "body2")]
    names = {body.name: [i.name for i in body.instructions if i.opcode == "fusion"] for body in bodies}
    assert names == {
        "body": ["loop1_n3_wrapped_add", "loop1_n6_wrapped_cosine", "loop1_n5_wrapped_sine"],
        "body2": ["loop1_2_n3_wrapped_add", "loop1_2_n6_wrapped_cosine", "loop1_2_n5_wrapped_sine"],
    }


def test_a_loop_inside_of_a_loop_is_a_region_of_its_own() -> None:
    inner = f"v = {CARRIES} tuple zero a b\n    w = {CARRIES} while v calls=inner,inside\n"
    lines = f"z = s32[] constant value=0\n    zero = s32[] copy z\n    {inner}"
    lines += "    m = f32[8] get-tuple-element w number=1\n    o = f32[8] get-tuple-element w number=2"
    data = loop(lines, "m o", inner=TURN.format(TWO, "m r"), inside=GOES_ON)
    source = canonicalize(data)
    assert [(one.name, one.calls[0].caller) for one in source.regions] == [
        ("loop1", "entry"),
        ("loop2", "loop1"),
    ]
    plan = read(source)
    _accepted(source, plan)
    for alone in plan.regions:
        _accepted(source, replace(plan, regions=(alone,)))
    early = _with(plan, "loop2", order=dict(plan.regions)["loop2"].order[::-1])
    with pytest.raises(IllegalStrategyError, match="n6"):
        apply(early, source)


CALLS = """
    p = s32[] parameter
    x = f32[8] parameter number=1
    y = f32[8] negate x
    c = f32[8] {}
    s = f32[8] sine c
"""
PLAIN = "v = f32[8] parameter\ne = f32[8] exponential v\nr = f32[8] tanh e"
UPDATES = "v = f32[8] parameter\ni = s32[] constant value=1\nu = f32[1] constant\n"
UPDATES += "n = f32[8] dynamic-update-slice v u i"


def test_a_called_computation_is_a_region() -> None:
    source = canonicalize(module(CALLS.format("call y calls=one"), {"one": PLAIN}))
    assert [(one.name, one.calls[0].trips) for one in source.regions] == [("call1", 1)]
    _accepted(source, read(source))


def test_branches_are_regions_and_one_that_would_need_a_copy_stays_as_it_is() -> None:
    source = canonicalize(
        module(CALLS.format("conditional p y y calls=one,two"), {"one": UPDATES, "two": PLAIN})
    )
    assert [(one.name, _opcodes(one.source)) for one in source.regions] == [
        ("branch1", ["parameter", "exponential", "tanh"])
    ]
    written = proto.parse(_accepted(source, read(source)))
    kept = next(one for one in written.computations if one.name == "one")
    assert [one.opcode for one in kept.instructions][-1] == "dynamic-update-slice"


@pytest.mark.parametrize("opcode", ["sine", "cosine"])
def test_what_a_plan_does_not_name_stays_and_must_be_as_it_was(opcode: str) -> None:
    lines = TWO
    source = canonicalize(loop(lines, "m r"))
    plan = unfused(source.graph)
    written = _accepted(source, plan)
    message = proto.parse(written)
    body = next(one for one in message.computations if one.name == "body")
    changed = next(one for one in body.instructions if one.opcode == opcode)
    changed.opcode = "tanh"
    with pytest.raises(PlanError, match="computes something else"):
        verify(source, proto.serialize(message), plan)


def test_a_region_that_the_step_does_not_have_is_refused_in_words() -> None:
    source = canonicalize(loop(TWO, "m r"))
    plan = read(source)
    unknown = replace(plan, regions=(*plan.regions, ("loop7", Strategy())))
    with pytest.raises(IllegalStrategyError, match="names region 'loop7'; the step has loop1"):
        apply(unknown, source)
    with pytest.raises(PlanError, match="names region 'loop7'; the step has loop1"):
        verify(source, apply(plan, source), unknown)


def test_gathers_of_several_arrays_along_another_dimension_are_written_and_read() -> None:
    data = module("""
        x = f32[4,2] parameter
        y = f32[4,2] parameter number=1
        a = f32[4,4] all-gather x dims=1
        b = f32[4,4] all-gather y dims=1
        s = f32[4,4] add a b
    """)  # fmt: skip
    source = canonicalize(data)
    together = one_bucket(source.graph)
    assert [bucket.form for bucket in together.buckets] == ["variadic"]
    _accepted(source, together)


def test_another_order_in_the_loop_of_an_executable_is_a_difference() -> None:
    lines = ["m = f32[8] sine a", "r = f32[8] cosine b"]
    given, other = (loop("\n    ".join(each), "m r") for each in (lines, lines[::-1]))
    assert executed_difference(given, given) is None
    assert executed_difference(given, other) == "in loop1, order differs from position 1"


BARRIER = """g = (f32[8],f32[8]) tuple a b
    k = (f32[8],f32[8]) opt-barrier g
    c = f32[8] get-tuple-element k number=0
    d = f32[8] get-tuple-element k number=1"""


EXCHANGED = f"""z = s32[] copy one
    g = {CARRIES} tuple z a {{}}
    l = {CARRIES} while g calls=exchange,go_on
    c = f32[8] get-tuple-element l number=1
    d = f32[8] get-tuple-element l number=2"""
CHOSEN = """less = pred[] compare next one
    c = f32[8] conditional less a a calls=same,as_well"""
EXCHANGES = {"exchange": TURN.format("", "b a"), "go_on": GOES_ON}
SAME = dict.fromkeys(("same", "as_well"), "v = f32[8] parameter")


@pytest.mark.parametrize(
    ("between", "returned", "called"),
    [
        ("", "b a", {}),
        (BARRIER, "d c", {}),
        (EXCHANGED.format("a"), "d c", EXCHANGES),
        (EXCHANGED.format("b"), "d c", EXCHANGES),
        (CHOSEN, "a c", SAME),
    ],
    ids=["by-itself", "behind-a-barrier", "behind-a-loop", "behind-an-exchange", "behind-branches"],
)
def test_a_body_that_exchanges_equal_values_without_a_copy_stays_as_it_is(
    between: str, returned: str, called: dict[str, str]
) -> None:
    """XLA knows that both begin with one value. With copies the loop would write over it."""
    data = module(STEP.format("").replace("tuple n a b", "tuple n a a"), {
        "body": TURN.format(between, returned), "condition": GOES_ON, **called,
    })  # fmt: skip
    source = canonicalize(data)
    assert "body" not in {one.index.computation(one.computation).name for one in _bodies(source)}
    _accepted(source, read(source))


def test_exchanges_that_make_a_difference_are_other_steps() -> None:
    """The loop begins with two values. It exchanges them in each turn, or a loop inside does, or both, or neither."""
    inner, outer = (
        ("    ".join(f"{new} = f32[8] copy {old}\n" for new, old in (("m", a), ("e", b), ("f", "m"))), "e f")
        for a, b in ("ab", "cd")
    )
    steps = [
        canonicalize(
            loop(
                f"{EXCHANGED.format('b')}\n    {lines}", returned,
                exchange=TURN.format(*exchange), go_on=GOES_ON,
            )
        )
        for lines, returned in (("", "c d"), outer)
        for exchange in (("", "a b"), inner)
    ]  # fmt: skip
    assert len({one.graph.fingerprint for one in steps}) == len({one.graph.key for one in steps}) == 4
    for source in steps:
        written = _accepted(source, read(source))
        for other in steps:
            if other is not source:
                with pytest.raises(PlanError, match="computes something else"):
                    verify(other, written, read(other))
