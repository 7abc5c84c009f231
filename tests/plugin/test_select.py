"""Which module is the training step, by what is counted of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disco_hlo.hlo.graph import Graph, Kind, Node, Shape
from disco_hlo.plugin.step import Choice, ModuleFacts, choose, facts_of

VECTOR = Shape("f32", (256,), (0,))
STEP = ModuleFacts("jit_step", 4, 8, 4 << 20, 900)
SMALLER = ModuleFacts("jit_evaluate", 4, 1, 4, 300)
EVALUATION = ModuleFacts("jit_loss", 8, 1, 4, 45, numbers_only=True)
INITIALIZATION = ModuleFacts("jit_create_model", 8, 1, 512, 304, keys_only=True)
SINGLE_OP = ModuleFacts("jit_reduce_sum", 4, 1, 4, 4)


def node(number: int, opcode: str, kind: Kind, *operands: int, shape: Shape = VECTOR) -> Node:
    return Node(number, opcode, shape, operands, kind, key=opcode)


def facts(*nodes: Node) -> ModuleFacts:
    """Of a module on two devices; its last node is the root."""
    root = nodes[-1].id
    return facts_of(Graph(nodes, root, (), backend="cpu", module_name="jit_step", fingerprint="0"), 2)


@pytest.mark.parametrize(
    ("module", "before", "chosen", "reason"),
    [
        (STEP, [], True, "the largest module with all-reduces so far (900 instructions, 8 all-reduces, 4.00 MiB)"),
        (ModuleFacts("jit_init", 1, 8, 4 << 20, 900), [], False, "runs on one device"),
        (ModuleFacts("jit_init", 4, 0, 4, 5000), [], False, "has no all-reduce of a computed value"),
        (
            ModuleFacts("jit_accumulate", 4, 0, 0, 200, inner_collective_count=6), [], False,
            "has no all-reduce of a computed value outside loops and branches that stay as XLA compiled them (6 "
            "collectives inside); what a plan may change must stand elsewhere: one step a call, gradients averaged "
            "after the loop, layers unrolled",
        ),
        (SMALLER, [STEP], False, "not larger than jit_step (900 instructions, 8 all-reduces, 4.00 MiB)"),
        # A script that looked at its loss before it trained had two evaluations searched first, the step third.
        (
            EVALUATION, [], False,
            "returns nothing but single numbers, as an evaluation does (45 instructions, 1 all-reduce, 0.00 MiB)",
        ),
        # Made as sharded arrays, a model took more instructions than its step, which was then never searched.
        (
            INITIALIZATION, [], False,
            "takes nothing but single numbers and random keys, as an initialization does "
            "(304 instructions, 1 all-reduce, 0.00 MiB)",
        ),
        # Each such op outside of any jit was searched for a plan: jit_reduce_sum was "the training step".
        (SINGLE_OP, [], False, "is a single op (4 instructions, 1 all-reduce, 0.00 MiB)"),
    ],
    ids=[
        "first", "one device", "no all-reduce", "all-reduces in loops", "smaller", "evaluation", "initialization",
        "single op",
    ],
)  # fmt: skip
def test_a_module_is_the_step_or_is_not_for_a_reason(
    module: ModuleFacts, before: list[ModuleFacts], chosen: bool, reason: str
) -> None:
    assert choose(module, before) == Choice(chosen, reason)


@pytest.mark.parametrize(
    ("module", "before"),
    [
        (STEP, [SMALLER]),
        (STEP, [ModuleFacts("jit_init", 4, 0, 0, 5000), ModuleFacts("jit_data", 1, 3, 64, 5000)]),
        (STEP, [replace(EVALUATION, instruction_count=5000)]),
        (ModuleFacts("jit_train_step", 8, 5, 4096, 200), [INITIALIZATION]),
        (ModuleFacts("jit_other", 4, 1, 8 << 20, 900), [STEP]),
    ],
    ids=["smaller", "no steps", "longer evaluation", "longer initialization", "communicates less"],
)
def test_what_came_before_does_not_hide_a_larger_step(module: ModuleFacts, before: list[ModuleFacts]) -> None:
    assert choose(module, before).chosen is True


def test_among_modules_of_one_length_the_one_that_communicates_no_more_is_not_larger() -> None:
    assert choose(ModuleFacts("jit_other", 4, 1, 4 << 20, 900), [STEP]).chosen is False


@pytest.mark.parametrize(
    "module", [ModuleFacts("jit_step", 1, 0, 0, 10), EVALUATION, INITIALIZATION, SINGLE_OP]
)
def test_the_users_word_overrides_the_rule(module: ModuleFacts) -> None:
    assert choose(module, [STEP], named=True) == Choice(True, "named by DISCO_MODULE")
    assert choose(STEP, [], named=False) == Choice(False, "DISCO_MODULE names another")


def test_facts_count_all_reduces_of_computed_values_through_bitcasts() -> None:
    found = facts(
        node(0, "parameter", Kind.PARAMETER),
        node(1, "bitcast", Kind.FREE, 0),
        node(2, "all-reduce", Kind.ALL_REDUCE, 1),
        node(3, "multiply", Kind.FUSIBLE, 0, 0),
        node(4, "bitcast", Kind.FREE, 3),
        node(5, "all-reduce", Kind.ALL_REDUCE, 4),
        node(6, "all-reduce", Kind.ALL_REDUCE, 5),
        node(7, "constant", Kind.CONSTANT),
        node(8, "all-reduce", Kind.ALL_REDUCE, 7),
        node(9, "tuple", Kind.FREE, 2, 6, 8),
    )
    assert found == ModuleFacts("jit_step", 2, 2, 4 * 1024, 10)


def test_facts_count_all_reduces_of_loop_bodies() -> None:
    nodes = (node(0, "parameter", Kind.PARAMETER), node(1, "exp", Kind.FUSIBLE, 0))
    body = (*nodes, node(2, "all-reduce", Kind.ALL_REDUCE, 1))
    entry, region = (
        Graph(one, one[-1].id, (), backend="cpu", module_name="jit_step", fingerprint="0")
        for one in (nodes, body)
    )
    assert facts_of(entry, 2, regions=[region]) == ModuleFacts("jit_step", 2, 1, 1024, 5)


@pytest.mark.parametrize(
    ("argument", "keys_only"),
    [
        (Shape("f32"), True),
        (Shape("u32", (2,), (0,)), True),
        (Shape("u32", (4, 4), (1, 0)), True),
        (Shape("u32", (64,), (0,)), False),
        (Shape("f32", (2,), (0,)), False),
    ],
)
def test_facts_tell_an_initialization_by_its_arguments(argument: Shape, keys_only: bool) -> None:
    found = facts(
        node(0, "parameter", Kind.PARAMETER, shape=argument),
        node(1, "broadcast", Kind.FUSIBLE, 0),
        node(2, "all-reduce", Kind.ALL_REDUCE, 1),
    )
    assert found.keys_only is keys_only


NUMBER, ONE, TWO = Shape("f32"), Shape("f32", (1,), (0,)), Shape("f32", (2,), (0,))


@pytest.mark.parametrize(
    ("result", "numbers_only"),
    [
        (NUMBER, True),
        (TWO, False),
        (Shape("tuple", elements=(NUMBER, ONE)), True),
        (Shape("tuple", elements=(NUMBER, Shape("tuple", elements=(TWO,)))), False),
    ],
)
def test_facts_tell_an_evaluation_by_what_it_returns(result: Shape, numbers_only: bool) -> None:
    """By what it all-reduces it is not told: with split parameters that is activations."""
    found = facts(node(0, "parameter", Kind.PARAMETER), node(1, "negate", Kind.FUSIBLE, 0, shape=result))
    assert found.numbers_only is numbers_only
