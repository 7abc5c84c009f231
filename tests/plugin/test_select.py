from __future__ import annotations

from dataclasses import replace

import pytest

from disco_hlo.hlo.graph import Graph, Kind, Node, Shape
from disco_hlo.plugin.select import Choice, ModuleFacts, choose, facts_of

VECTOR = Shape("f32", (256,), (0,))
STEP = ModuleFacts("jit_step", 4, 8, 4 << 20, 900)


def node(number: int, opcode: str, kind: Kind, *operands: int) -> Node:
    return Node(number, opcode, VECTOR, operands, kind, key=opcode)


def test_the_first_module_with_all_reduces_is_chosen() -> None:
    reason = "the largest module with all-reduces so far (900 instructions, 8 all-reduces, 4.00 MiB)"
    assert choose(STEP, []) == Choice(True, reason)


def test_a_module_on_one_device_is_not() -> None:
    assert choose(ModuleFacts("jit_init", 1, 8, 4 << 20, 900), []) == Choice(False, "runs on one device")


def test_a_module_without_an_all_reduce_of_a_computed_value_is_not() -> None:
    facts = ModuleFacts("jit_init", 4, 0, 4, 5000)
    assert choose(facts, []) == Choice(False, "has no all-reduce of a computed value")


def test_all_reduces_inside_loops_are_named_where_there_are_no_others() -> None:
    facts = ModuleFacts("jit_accumulate", 4, 0, 0, 200, inner_collective_count=6)
    reason = (
        "has no all-reduce of a computed value outside its loops and branches, which stay as XLA compiled "
        "them (6 collectives inside); what a plan may change must stand outside of lax.scan and while_loop: one step "
        "a call, gradients averaged after the loop, layers unrolled"
    )
    assert choose(facts, []) == Choice(False, reason)


def test_a_smaller_module_after_the_step_is_not() -> None:
    evaluation = ModuleFacts("jit_evaluate", 4, 1, 4, 300)
    reason = "not larger than jit_step (900 instructions, 8 all-reduces, 4.00 MiB)"
    assert choose(evaluation, [STEP]) == Choice(False, reason)


def test_a_larger_module_after_a_smaller_one_is() -> None:
    evaluation = ModuleFacts("jit_evaluate", 4, 1, 4, 300)
    assert choose(STEP, [evaluation]).chosen is True


def test_large_modules_that_could_not_be_a_step_do_not_count() -> None:
    init = ModuleFacts("jit_init", 4, 0, 0, 5000)
    alone = ModuleFacts("jit_data", 1, 3, 64, 5000)
    assert choose(STEP, [init, alone]).chosen is True


def test_among_modules_of_one_length_the_one_that_communicates_more_is_larger() -> None:
    assert choose(ModuleFacts("jit_other", 4, 1, 8 << 20, 900), [STEP]).chosen is True
    assert choose(ModuleFacts("jit_other", 4, 1, 4 << 20, 900), [STEP]).chosen is False


def test_the_users_word_overrides_the_rule() -> None:
    alone = ModuleFacts("jit_step", 1, 0, 0, 10)
    assert choose(alone, [STEP], named=True) == Choice(True, "named by DISCO_MODULE")
    assert choose(STEP, [], named=False) == Choice(False, "DISCO_MODULE names another")


def test_facts_count_all_reduces_of_computed_values_through_bitcasts() -> None:
    graph = Graph(
        nodes=(
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
        ),
        root=9,
        before=(),
        backend="cpu",
        module_name="jit_step",
        fingerprint="0",
    )
    assert facts_of(graph, device_count=4) == ModuleFacts("jit_step", 4, 2, 4 * 1024, 10)


EVALUATION = ModuleFacts("jit_loss", 8, 1, 4, 45, numbers_only=True)


def test_an_evaluation_before_the_training_is_no_step() -> None:
    """A script that looked at its loss before it trained had two evaluations searched first, the step third."""
    reason = (
        "returns nothing but single numbers, as an evaluation does (45 instructions, 1 all-reduce, 0.00 MiB)"
    )
    assert choose(EVALUATION, []) == Choice(False, reason)
    assert choose(EVALUATION, [], named=True).chosen is True


def test_an_evaluation_longer_than_the_step_does_not_hide_it() -> None:
    assert choose(STEP, [replace(EVALUATION, instruction_count=5000)]).chosen is True


def test_an_initialization_before_the_training_is_no_step() -> None:
    """Made as sharded arrays, a model took more instructions than its step, which was then never searched."""
    init = ModuleFacts("jit_create_model", 8, 1, 512, 304, keys_only=True)
    reason = (
        "takes nothing but single numbers and random keys, as an initialization does "
        "(304 instructions, 1 all-reduce, 0.00 MiB)"
    )
    assert choose(init, []) == Choice(False, reason)
    assert choose(init, [], named=True).chosen is True
    step = ModuleFacts("jit_train_step", 8, 5, 4096, 200)
    assert choose(step, [init]).chosen is True


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
    graph = Graph(
        nodes=(
            Node(0, "parameter", argument, (), Kind.PARAMETER, key="parameter"),
            node(1, "broadcast", Kind.FUSIBLE, 0),
            node(2, "all-reduce", Kind.ALL_REDUCE, 1),
        ),
        root=2,
        before=(),
        backend="cpu",
        module_name="jit_init",
        fingerprint="0",
    )
    assert facts_of(graph, device_count=2).keys_only is keys_only


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
    graph = Graph(
        nodes=(
            node(0, "parameter", Kind.PARAMETER),
            Node(1, "negate", result, (0,), Kind.FUSIBLE, key="negate"),
        ),
        root=1,
        before=(),
        backend="cpu",
        module_name="jit_loss",
        fingerprint="0",
    )
    assert facts_of(graph, device_count=2).numbers_only is numbers_only


def test_an_op_on_a_sharded_array_outside_of_any_jit_is_no_step() -> None:
    """Each such op was searched for a plan: jit_reduce_sum was "the training step"."""
    facts = ModuleFacts("jit_reduce_sum", 4, 1, 4, 4)
    reason = "is a single op (4 instructions, 1 all-reduce, 0.00 MiB)"
    assert choose(facts, []) == Choice(False, reason)
    assert choose(facts, [], named=True).chosen is True
