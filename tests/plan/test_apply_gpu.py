"""Reading and rewriting of a real GPU step, 1571 nodes of VGG19; and of a plan on a module that XLA did not fuse."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from jaxlib import _hlo

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo import proto
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Kind
from disco_hlo.plan.apply import apply
from disco_hlo.plan.legal import check_order
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import normal_form, one_at_a_time, one_bucket, unfused
from disco_hlo.profiler.costs import kernel_times
from disco_hlo.profiler.instructions import InstructionTimes
from disco_hlo.profiler.keys import kernel_keys
from disco_hlo.simulator.orders import list_schedule
from tests.captured import captured, stored
from tests.plan.executed import executed_difference

UNWRAPPED = {
    "parameter", "constant", "fusion", "custom-call", "get-tuple-element", "bitcast", "tuple", "async-start",
    "async-done", "partition-id",
}  # fmt: skip
"""All that XLA:GPU executes outside fusions in this step."""


@pytest.fixture(scope="module")
def default() -> CanonicalModule:
    return captured("h200_models/vgg19")


@pytest.fixture(scope="module")
def xla(default: CanonicalModule) -> Strategy:
    return read(default)


@pytest.fixture(scope="module")
def strategies(default: CanonicalModule, xla: Strategy) -> dict[str, Strategy]:
    graph = default.graph
    separate = replace(unfused(graph, xla.groups), order=())
    return {
        "XLA's own": xla,
        "unfused": unfused(graph),
        "separate, list order": list_ordered(default, separate),
        "one concatenated bucket": one_bucket(graph, xla.groups),
        "one group of all-reduces": one_bucket(graph, xla.groups, form="variadic"),
    }


@pytest.fixture(scope="module")
def rewritten(default: CanonicalModule, strategies: dict[str, Strategy]) -> dict[str, bytes]:
    return {name: apply(strategy, default) for name, strategy in strategies.items()}


@pytest.fixture(scope="module")
def entries(rewritten: dict[str, bytes]) -> dict[str, Entry]:
    return {name: Entry(module) for name, module in rewritten.items()}


def list_ordered(source: CanonicalModule, strategy: Strategy) -> Strategy:
    units = unit_graph(source.graph, strategy)
    compute = [0 if unit.is_bucket else 10_000 * len(unit.nodes) for unit in units.units]
    transfer = [1_000_000 if unit.is_bucket else 0 for unit in units.units]
    return replace(strategy, order=list_schedule(units, compute, transfer))


class Entry:
    """The scheduled entry of a serialized module."""

    def __init__(self, module: bytes) -> None:
        self.module = parsed = proto.parse(module)
        computation = next(c for c in parsed.computations if c.id == parsed.entry_computation_id)
        by_id = {i.id: i for i in computation.instructions}
        self.instructions = [by_id[i] for i in parsed.schedule.sequences[computation.id].instruction_ids]
        self.place = {instruction.id: i for i, instruction in enumerate(self.instructions)}
        self.root = by_id[computation.root_id]
        self.aliases = parsed.input_output_alias.entries
        self.users: dict[int, list[Any]] = {}
        for instruction in self.instructions:
            for operand in instruction.operand_ids:
                self.users.setdefault(operand, []).append(instruction)

    def maker(self, value: int) -> int:
        """The instruction that computes a value, behind bitcasts and tuples."""
        while self.instructions[self.place[value]].opcode in ("bitcast", "get-tuple-element"):
            value = self.instructions[self.place[value]].operand_ids[0]
        return value

    def last_read(self, value: int) -> int:
        """Place in the schedule of the last instruction that reads the storage of a value."""
        while self.instructions[self.place[value]].opcode == "bitcast":
            value = self.instructions[self.place[value]].operand_ids[0]
        last, pending = -1, [value]
        while pending:
            for user in self.users.get(pending.pop(), ()):
                if user.opcode == "bitcast":
                    pending.append(user.id)
                elif user.id != self.root.id:
                    last = max(last, self.place[user.id])
        return last


# Reading ------------------------------------------------------------------------------------------


def test_combined_all_reduces_come_apart(default: CanonicalModule, xla: Strategy) -> None:
    assert sorted(len(bucket.collectives) for bucket in xla.buckets) == [1, 1, 2, 11, 12, 12]
    graph = default.graph
    total = sum(graph.nodes[n].shape.size_bytes for n in graph.collectives)
    assert total == 574_668_964
    for number in graph.collectives:
        node = graph.nodes[number]
        assert node.shape == graph.nodes[node.operands[0]].shape


def test_what_xla_chose_is_read(xla: Strategy) -> None:
    assert Counter(group.kind for group in xla.groups) == {"loop": 48, "input": 40, "triton": 16}
    assert sum(token.endswith(".start") for token in xla.order) == 6
    assert sum(token.endswith(".done") for token in xla.order) == 6


def test_xlas_plan_carries_over_to_the_unfused_module() -> None:
    default = captured("h200_transformer_default")
    xla = read(default)
    written = canonicalize(apply(xla, captured("h200_transformer_unfused")))
    assert written.graph.fingerprint == default.graph.fingerprint
    found, wanted = read(written), normal_form(default.graph, xla)
    assert found.groups == wanted.groups
    assert found.buckets == wanted.buckets
    assert found.order == wanted.order


# Writing ------------------------------------------------------------------------------------------


def test_every_rewrite_is_the_same_program_with_the_strategy_asked_for(
    default: CanonicalModule, strategies: dict[str, Strategy], rewritten: dict[str, bytes]
) -> None:
    for name, module in rewritten.items():
        verify(default, module, strategies[name])


def test_xla_accepts_every_rewrite(rewritten: dict[str, bytes]) -> None:
    for module in rewritten.values():
        _hlo.HloModule.from_serialized_hlo_module_proto(module)


# The modules are jax 0.11's; an older jaxlib forgets what it does not know (the order of a comparison).
def test_a_module_comes_back_from_xla_as_the_same_program(rewritten: dict[str, bytes]) -> None:
    """The way a module takes to the device and back leads through XLA's classes, which write out
    defaults: every executed module once had another fingerprint than the captured one."""
    for module in (stored("h200_models/vgg19"), rewritten["separate, list order"]):
        returned = _hlo.HloModule.from_serialized_hlo_module_proto(module).as_serialized_hlo_module_proto()
        assert executed_difference(module, returned) is None


def test_no_op_is_left_outside_a_kernel(entries: dict[str, Entry]) -> None:
    for entry in entries.values():
        assert {instruction.opcode for instruction in entry.instructions} <= UNWRAPPED


def test_every_transfer_starts_and_ends_once(
    strategies: dict[str, Strategy], entries: dict[str, Entry]
) -> None:
    for name, entry in entries.items():
        starts = [i.id for i in entry.instructions if i.opcode == "async-start"]
        dones = [i.operand_ids[0] for i in entry.instructions if i.opcode == "async-done"]
        assert sorted(starts) == sorted(dones)
        assert len(starts) == len(strategies[name].buckets)
        inner = [i for c in entry.module.computations for i in c.instructions if i.opcode == "all-reduce"]
        assert len({i.channel_id for i in inner}) == len(inner) == len(starts)


def test_nothing_touches_a_gradient_while_it_is_reduced_in_place(entries: dict[str, Entry]) -> None:
    for entry in entries.values():
        starts = [i for i in entry.instructions if i.opcode == "async-start"]
        for start in starts:
            assert [pair.operand_index for pair in start.output_operand_aliasing] == list(
                range(len(start.operand_ids))
            )
            for operand in start.operand_ids:
                assert entry.last_read(operand) == entry.place[start.id]


def test_alone_every_transfer_ends_before_anything_else_runs(default: CanonicalModule, xla: Strategy) -> None:
    strategy = one_at_a_time(default.graph, xla)
    tokens = strategy.order
    starts = [i for i, token in enumerate(tokens) if token.endswith(".start")]
    assert len(starts) == 6
    assert all(tokens[i + 1] == tokens[i].removesuffix("start") + "done" for i in starts)
    check_order(unit_graph(default.graph, xla), tokens, asynchronous=True)


def test_measured_kernels_are_found_by_the_keys_that_a_cost_model_asks_for(
    default: CanonicalModule, xla: Strategy, entries: dict[str, Entry]
) -> None:
    """A kernel's results depend on what other kernels recompute; every fifth one of XLA's was once
    measured under a key that nobody asked for, and Triton's all were."""
    names = [instruction.name for instruction in entries["XLA's own"].instructions]
    times = {name: InstructionTimes(1000, 1, 6, 1000) for name in names}
    kernels = unit_graph(default.graph, xla).kernels(default.graph)
    assert {*kernel_keys(default.graph, kernels)} == set(kernel_times(default.graph, kernels, times))


# Donation -----------------------------------------------------------------------------------------


def test_donated_parameters_stay_donated_and_are_read_before_they_are_overwritten(
    entries: dict[str, Entry],
) -> None:
    for entry in entries.values():
        parameters = {i.parameter_number: i.id for i in entry.instructions if i.opcode == "parameter"}
        assert len(entry.aliases) == 77
        for alias in entry.aliases:
            writer = entry.maker(entry.root.operand_ids[alias.output_shape_index[0]])
            assert entry.last_read(parameters[alias.parameter_number]) <= entry.place[writer]


def test_an_order_that_overwrites_a_donated_parameter_too_early_is_refused(
    default: CanonicalModule, xla: Strategy
) -> None:
    graph = default.graph
    units = unit_graph(graph, xla)
    unit_of = {node: unit.token for unit in units.units for node in (*unit.nodes, *unit.duplicates)}
    reader, writer = next(
        (unit_of[a], unit_of[b])
        for a, b in graph.before
        if unit_of.get(a, "n") != unit_of.get(b, "n")
        and a in unit_of and b in unit_of
        and graph.nodes[a].kind is Kind.FIXED
        and xla.order.index(unit_of[b]) - xla.order.index(unit_of[a]) > 0
    )  # fmt: skip
    order = [token for token in xla.order if token != reader]
    order.insert(order.index(writer) + 1, reader)
    with pytest.raises(IllegalStrategyError, match="which it must wait for"):
        apply(replace(xla, order=tuple(order)), default)
