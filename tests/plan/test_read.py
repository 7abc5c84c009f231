"""Which of XLA's kernels a strategy holds, and when a module is enacted: if it is its source, as the plan says.

Every step that XLA runs can be read and written again, also where its kernels compute again what others compute.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.errors import IllegalStrategyError, ModuleError, PlanError
from disco_hlo.hlo import proto
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.hlo.proto import Instruction, Message
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.read import Repeat, describe_difference, read, repeats, verify
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import normal_form, one_bucket, unfused
from tests import modules
from tests.captured import captured, stored
from tests.graphs import graph_of


def module(step: Graph, *origins: Any) -> Any:
    for number, origin in enumerate(origins):
        origin.name = f"kernel {number}"
    return Namespace(graph=step, origins=origins, cut=(), regions=())


def kernel(*nodes: int, returns: tuple[int, ...] = (), role: str = "fusion") -> Any:
    """A kernel that returns its last node, or others."""
    return Namespace(
        role=role,
        proto=Instruction(opcode="fusion", fusion_kind="kLoop"),
        nodes=nodes,
        results=returns or nodes[-1:],
        transfer_order=nodes,
    )


SHAPES = {
    "repeats_in_a_row": (48, 10, 1, 2),
    "h100_llama/fsdp_scan": (552, 50, 7, 0),
    "h100_llama/fsdp_scan_rotated_doubled": (1360, 111, 31, 6),
    "h100_llama/fsdp_unroll": (6021, 457, 182, 17),
}
"""Nodes, XLA's kernels and buckets, and the kernels that only repeat others."""


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_is_not_given_up_for_a_kernel_of_xlas(name: str) -> None:
    """Nothing read what one kernel produced, and units waited for each other in a circle: the step was left to XLA."""
    source = captured(name)
    xla, again = read(source), [one for one in repeats(source) if one.members]
    assert (len(source.graph), len(xla.groups), len(xla.buckets), len(again)) == SHAPES[name]
    assert xla.order
    assert normal_form(source.graph, xla) == xla


def test_a_kernel_that_repeats_what_another_returns_is_written_and_read() -> None:
    """Of the Llama-like steps test_regions.py shows the same."""
    source = captured("repeats_in_a_row")
    written = apply(read(source), source)
    verify(source, written, read(source))
    assert read(canonicalize(written)) == read(source)


OVERWRITTEN = graph_of("param\nneg 0\nexp 1\ndot 1\nmul 2 3\ntuple 4", before=((2, 3),), inplace=((1, 3),))
READ: dict[str, tuple[Any, tuple[Group, ...], str, tuple[Repeat, ...]]] = {
    "a kernel that only a repeat reads is a repeat too": (
        module(graph_of("param\nneg 0\nexp 1\ntuple 2"), kernel(1), kernel(1, 2), kernel(2)),
        (Group((1, 2)),), "g0", (Repeat((1,), (1,), before=1), Repeat((2,), (2,), before=-1)),
    ),
    # It returned node 2 as well, which nothing in it reads: a duplicate that nothing reads is no strategy.
    "a kernel computes no more than what is taken from it": (
        module(graph_of("param\nneg 0\nexp 1\nmul 1\ntuple 2 3"), kernel(1, 2), kernel(1, 2, 3, returns=(2, 3))),
        (Group((1, 2)), Group((3,), (1,))), "g0 g1", (),
    ),
    # XLA computes 1 twice, since a loop overwrites it; node 2 is read before the loop begins, as one value.
    "a kernel that reads a second copy of what was overwritten takes it in time": (
        module(OVERWRITTEN, kernel(1), kernel(3, role="op"), kernel(1), kernel(2, 4)),
        (), "n1 n2 n3 n4", (Repeat((1,), (1,), before=4),),
    ),
    "a kernel that recomputes what was overwritten stays as it is": (
        module(OVERWRITTEN, kernel(1), kernel(3, role="op"), kernel(1, 2, 4)),
        (Group((2, 4), (1,)),), "n1 n3 g0", (),
    ),
    "a kernel that would wait for itself runs as single ops": (
        module(
            graph_of("param\nneg 0\ndot 1\nexp 2\nmul 0\ntuple 3 4"),
            kernel(1, 3, 4, returns=(1, 3, 4)), kernel(2, role="op"),
        ),
        (), "n1 n2 n3 n4", (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_which_of_xlas_kernels_a_strategy_holds(name: str) -> None:
    source, groups, order, repeated = READ[name]
    assert (read(source).groups, " ".join(read(source).order), repeats(source)) == (groups, order, repeated)


def test_a_kernel_that_no_rule_allows_without_one_of_its_results_runs_as_single_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("disco_hlo.plan.legal.group_refusal", lambda *_: "too much")
    step = graph_of("param\nneg 0\nexp 1\nmul 2\ntuple 1 3")
    source = module(step, kernel(1), kernel(1, 2, 3, returns=(1, 3)))
    assert read(source).groups == ()
    assert read(source).order == ("n1", "n2", "n3")


def random_module(dice: Random) -> Any:
    """A step and kernels for it, run one after the other: what one reads is there, some compute the same again."""
    count = dice.randrange(3, 14)
    lines, returned = ["param"], set()
    for node in range(1, count):
        opcode = dice.choice(("neg", "neg", "neg", "dot", "bitcast"))
        read = sorted(
            {dice.randrange(max(0, node - 4), node) for _ in range(1 if opcode == "bitcast" else 2)}
        )
        lines.append(f"{opcode} {' '.join(map(str, read))}")
        returned.add(node)
        if dice.random() < 0.8:
            returned.difference_update(read)
    step = graph_of("\n".join([*lines, f"tuple {' '.join(map(str, sorted(returned)))}"]))
    there, origins = {0}, []
    while not returned <= there:
        node = dice.randrange(1, count)
        is_kernel = step.nodes[node].kind is not Kind.FIXED
        inside = _closure(step, node, there, dice) if is_kernel else {node} if node not in there else set()
        if not inside or not all(set(step.nodes[one].operands) <= inside | there for one in inside):
            continue
        also = {one for one in inside if is_kernel and dice.random() < 0.2}
        origin = kernel(
            *sorted(inside), returns=tuple(sorted(also | {node})), role="fusion" if is_kernel else "op"
        )
        origins.append(origin)
        there |= also | {node}
    return module(step, *origins)


def _closure(step: Graph, node: int, there: set[int], dice: Random) -> set[int]:
    """What a kernel computes to return a node: an op that it reads is there, or is computed once more."""
    inside, pending = set(), [node]
    while pending:
        one = pending.pop()
        inside.add(one)
        for operand in step.nodes[one].operands:
            may_read, may_compute = operand in there, step.nodes[operand].kind in (Kind.FUSIBLE, Kind.FREE)
            if may_compute and not (may_read and dice.random() < 0.6):
                pending.append(operand)
    return inside


@given(st.integers(0, 1 << 32))
def test_every_module_can_be_read_in_its_own_order(seed: int) -> None:
    source = random_module(Random(seed))
    found = read(source)
    units = unit_graph(source.graph, found)
    assert found == normal_form(source.graph, found)
    assert len(found.order) == len(units.units)
    for one in repeats(source):
        owners = {node for group in found.groups for node in group.nodes} | set(units.alone.tolist())
        assert {n for n in one.results if source.graph.nodes[n].kind is not Kind.FREE} <= owners | _idle(
            source.graph, found
        )


def _idle(step: Graph, strategy: Any) -> set[int]:
    """Ops that every reader recomputes."""
    copies = {node for group in strategy.groups for node in group.duplicates}
    return {node.id for node in step.nodes if node.kind is Kind.FUSIBLE and node.id in copies}


@pytest.mark.parametrize(
    "config", ['{"fusion_config":%s}', '{"fusion_backend_config":{},"fusion_config":%s}']
)
def test_tiles_are_found_where_the_kind_of_their_kernel_is(config: str) -> None:
    """XLA:CPU has another name for the settings of a fusion; a file that had Triton's kind there was no module to read,
    but a KeyError."""
    tiles = '{"kind":"__triton"}'
    text = f"""
    fused {{ p = f32[8]{{0}} parameter(0)
            n = f32[8]{{0}} negate(p)
            ROOT e = f32[8]{{0}} exponential(n) }}
    ENTRY main {{ a = f32[8]{{0}} parameter(0)
                 ROOT f = f32[8]{{0}} fusion(a), kind=kCustom, calls=fused, backend_config={config % tiles} }}"""
    (group,) = read(canonicalize(modules.module_of(text, scheduled=True))).groups
    assert (group.kind, group.config) == ("triton", tiles)


def test_what_nothing_reads_is_read_where_it_stands() -> None:
    """``jax.debug.print`` was read as the last op of the step, and every plan that ran it earlier was refused."""
    text = """
        x = f32[8] parameter
        a = f32[8] negate x
        told = f32[8] custom-call a target=xla_ffi_python_cpu_callback
        b = f32[8] tanh a
        c = f32[8] negate b
    """
    source = canonicalize(modules.module(text))
    (told,) = [f"n{node.id}" for node in source.graph.nodes if node.opcode == "custom-call"]
    xla = read(source)
    assert xla.order.index(told) == 1
    for place in range(1, 4):
        others = [token for token in xla.order if token != told]
        strategy = replace(xla, order=(*others[:place], told, *others[place:]))
        verify(source, apply(strategy, source), strategy)


def test_python_is_called_in_the_order_that_xla_has() -> None:
    """Two lines of ``jax.debug.print`` may come one after the other; readers of a log take them so."""
    text = """
        x = f32[8] parameter
        a = f32[8] negate x
        one = () custom-call a target=xla_ffi_python_cpu_callback
        two = () custom-call x target=xla_ffi_python_cpu_callback
        other = f32[8] custom-call x target=no_python
        b = f32[8] add a other
    """
    source = canonicalize(modules.module(text))
    xla = read(source)
    one, two, other = (
        f"n{[node.name for node in source.graph.nodes].index(name)}" for name in ("one", "two", "other")
    )
    assert xla.order.index(one) < xla.order.index(two) < xla.order.index(other)
    first = [token for token in xla.order if token != two]
    with pytest.raises(IllegalStrategyError, match="before"):
        apply(replace(xla, order=(two, *first)), source)
    strategy = replace(xla, order=(other, *(token for token in xla.order if token != other)))
    verify(source, apply(strategy, source), strategy)


def test_a_branch_that_acts_and_gives_nothing_is_kept() -> None:
    """``lax.cond(bad, report, nothing)`` with a callback inside was left out of every plan, and verified."""
    text = """
        x = f32[8] parameter
        which = s32 parameter number=1
        a = f32[8] negate x
        told = () conditional which a a calls=tell,keep_quiet
        b = f32[8] tanh a
    """
    tell = """
        v = f32[8] parameter
        told = f32[8] custom-call v target=xla_ffi_python_cpu_callback
        nothing = () tuple
    """
    keep_quiet = """
        v = f32[8] parameter
        nothing = () tuple
    """
    source = canonicalize(modules.module(text, {"tell": tell, "keep_quiet": keep_quiet}))
    xla = read(source)
    assert [source.graph.nodes[int(token[1:])].opcode for token in xla.order] == [
        "negate", "conditional", "tanh",
    ]  # fmt: skip
    for strategy in (xla, unfused(source.graph)):
        module = apply(strategy, source)
        verify(source, module, strategy)
        ops = [one.opcode for called in proto.parse(module).computations for one in called.instructions]
        assert ops.count("conditional") == ops.count("custom-call") == 1


STEP = graph_of("param\nmul 0\nneg 1\nadd 2\nexp 3\ntuple 3 4")


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        # One that owns nothing runs before the next that does,
        ("12 12 3 2 4", [((1, 2), (2,), 3), ((2,), (2,), 4)]),
        # at the end before nothing, and before an op alone.
        ("12 3 12 4op 3", [((1, 2), (2,), 4), ((3,), (3,), -1)]),
        ("12 3 1234", []),
    ],
)
def test_a_kernel_that_owns_nothing_is_a_repeat(kernels: str, expected: list[tuple[Any, Any, int]]) -> None:
    ran = [
        kernel(*map(int, one.removesuffix("op")), role="op" if "op" in one else "fusion")
        for one in kernels.split()
    ]
    assert repeats(module(STEP, *ran)) == tuple(Repeat(*one[:2], before=one[2]) for one in expected)


def test_a_kernel_that_only_cuts_a_gradient_out_of_its_bucket_runs_before_the_first_that_reads_it() -> None:
    source = module(graph_of("param\nmul 0\nallreduce 1\nneg 2\nexp 2\nadd 3 4"), kernel(1), kernel(3, 4, 5))
    source.cut = (2,)
    assert repeats(source) == (Repeat((), (2,), before=3),)


def test_xla_cuts_every_gradient_of_its_own_buckets_of_several_once() -> None:
    source = captured("h200_models/vgg19")
    packed = {
        node for bucket in read(source).buckets if len(bucket.collectives) > 1 for node in bucket.collectives
    }
    assert packed
    assert sorted(source.cut) == sorted(packed)


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


def test_loops_that_xla_rotated_and_doubled_verify_as_they_came() -> None:
    """What the loops only read was taken for overwritten by them, so kernels behind them seemed to read too late."""
    step = captured("h100_llama/fsdp_scan_rotated_doubled")
    verify(step, stored("h100_llama/fsdp_scan_rotated_doubled"), read(step))


def test_an_order_that_is_not_possible_is_noticed_where_any_would_do() -> None:
    strategy, module = rewritten()
    verify(source(), module, strategy)
    found, open_order = read(canonicalize(module)), replace(strategy, order=())
    assert describe_difference(source().graph, found, open_order) is None
    said = "its order runs something before what it must wait for"
    assert describe_difference(source().graph, replace(found, order=()), open_order) == said


def test_another_strategy_is_noticed() -> None:
    strategy, module = rewritten()
    alone = tuple(Bucket((node,)) for node in source().graph.collectives)
    with pytest.raises(PlanError, match=r"does not execute its plan: in its entry, \d+ buckets, expected 10"):
        verify(source(), module, replace(strategy, buckets=alone))


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
