"""The last check refuses modules that computed wrong numbers, and accepts XLA's own."""

from __future__ import annotations

import ast
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from disco_hlo.errors import PlanError
from disco_hlo.hlo import proto
from disco_hlo.plan.apply import apply
from disco_hlo.plan.check_module import check_module, faults
from disco_hlo.plan.check_reader import Values
from disco_hlo.plan.read import read, verify
from tests.captured import DATA, captured, stored
from tests.modules import run_before

# --- modules that were written, compiled, and gave wrong numbers or ended the process -----------------

REFUSED = {
    "cond-passes-its-operand-on-1": ("n11_wrapped_subtract reads g1_multiply_fusion, which n9_conditional"),
    "cond-passes-its-operand-on-2": ("n11_wrapped_subtract reads g0_multiply_fusion, which n9_conditional"),
    "donated-cumsum-1": "g4_bitcast_fusion writes g4_bitcast_fusion over a_0_.1 and reads that at other",
    "donated-cumsum-2": "g5_bitcast_fusion writes g5_bitcast_fusion over a_0_.1 and reads that at other",
    "donated-read-through-a-reshape-1": "g0_subtract_fusion writes g0_subtract_fusion over a_0_.1 and reads",
    "sum-with-its-transpose-1": "g0_add_fusion reads n5_dot by two names and may write g0_add_fusion over it",
    "sum-with-its-transpose-2": "g1_add_fusion reads n5_dot by two names and may write g1_add_fusion over it",
    "transposed-scatter-1": "n15_tuple reads g2_copy_fusion, which n14_wrapped_scatter has overwritten",
    "transposed-scatter-2": "n15_tuple reads g1_copy_fusion, which n14_wrapped_scatter has overwritten",
    "transposed-scatter-then-product-1": "n18_tuple reads g1_copy_fusion, which n14_wrapped_scatter has over",
    "transposed-scatter-then-product-2": "n18_tuple reads g0_copy_fusion, which n14_wrapped_scatter has over",
    "two-results-one-buffer-1": "n3_tuple returns n1_wrapped_broadcast and n2_bitcast, which are in one buffer",
}
"""Modules that gave wrong numbers or ended the process, and what is said of them."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_gave_wrong_numbers_is_refused(name: str) -> None:
    with pytest.raises(PlanError) as error:
        check_module(stored(f"refused/{name}"), "cpu")
    assert REFUSED[name] in str(error.value)


def test_each_stored_module_is_checked() -> None:
    assert {path.name.removesuffix(".hlo.pb.gz") for path in (DATA / "refused").glob("*.gz")} == set(REFUSED)


# --- modules of XLA's own ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "h200_transformer_default", "h200_transformer_unfused", "h200_plan/default",
        *(f"h200_models/{name}" for name in ("bert", "reformer", "resnet50", "rnnlm", "transformer", "vgg19")),
        *(f"h100_llama/{name}" for name in ("dp_scan", "fsdp_scan", "fsdp_scan_rotated", "fsdp_scan_rotated_doubled",
                                            "fsdp_unroll")),
    ],
)  # fmt: skip
def test_what_xla_made_is_accepted(name: str) -> None:
    assert faults(stored(name), "gpu") == []


def repeated(data: bytes, times: int) -> bytes:
    """A module whose entry does the same again and again; the first repetition is what it returns."""
    message = proto.parse(data)
    entry = next(c for c in message.computations if c.id == message.entry_computation_id)
    sequence = message.schedule.sequences[entry.id].instruction_ids
    once, order = list(entry.instructions), list(sequence)
    largest = max(one.id for c in message.computations for one in c.instructions)
    for turn in range(1, times):
        again = {one.id: largest + turn * len(once) + place for place, one in enumerate(once)}
        again |= {one.id: one.id for one in once if one.opcode == "parameter"}
        for one in once:
            if one.opcode == "parameter":
                continue
            copied = entry.instructions.add()
            copied.CopyFrom(one)
            copied.id, copied.name = again[one.id], f"{one.name}.{turn}"
            copied.operand_ids[:] = [again[read] for read in one.operand_ids]
            copied.control_predecessor_ids[:] = [again[read] for read in one.control_predecessor_ids]
        sequence.extend(again[one] for one in order if again[one] != one)
    message.ClearField("input_output_alias")
    return proto.serialize(message)


def test_a_step_of_more_than_45000_instructions_is_checked() -> None:
    data = repeated(stored("h200_transformer_unfused"), 6)
    assert sum(len(computation.instructions) for computation in proto.parse(data).computations) > 45_000
    assert faults(data, "gpu") == []


# --- independence -----------------------------------------------------------------------------------


def test_the_check_shares_no_code_with_what_writes_modules() -> None:
    package = Path(check_module.__code__.co_filename).parent
    files = sorted(package.glob("check_*.py"))
    assert len(files) == 3
    # What is known of backends and opcodes is data.
    allowed = {
        "disco_hlo.backends",
        "disco_hlo.errors",
        "disco_hlo.hlo",
        "disco_hlo.hlo.opcodes",
        "disco_hlo.hlo.proto",
    }
    for file in files:
        modules = {
            node.module
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        ours = {name for name in modules if name.startswith("disco_hlo")} - allowed
        assert all(name.startswith("disco_hlo.plan.check_") for name in ours), file
        assert "from disco_hlo.hlo import proto" in file.read_text() or "disco_hlo.hlo" not in modules


# --- a rotated loop ----------------------------------------------------------------------------------

FORWARD = "region_0.3_spmd.clone.1"
GATHERS = {
    "all-gather-start.5": "custom-call.13", "all-gather-start.6": "custom-call.14",
    "all-gather-start.8": "custom-call.6", "all-gather-start.9": "custom-call.2",
}  # fmt: skip
"""Gathers of the next layer's weights, and what reads this layer's from the same buffer."""


@pytest.mark.parametrize("gather", GATHERS)
def test_a_gather_that_starts_before_the_last_reader_of_what_it_overwrites_is_refused(gather: str) -> None:
    other = run_before(stored("h100_llama/fsdp_scan_rotated"), FORWARD, gather, GATHERS[gather])
    with pytest.raises(
        PlanError, match=rf"{GATHERS[gather]} reads param.40{{\d+}}, which {gather}{{\d}} has overw"
    ):
        check_module(other, "gpu")


def test_an_order_inside_a_loop_that_overwrites_what_is_read_later_is_refused() -> None:
    source = captured("h100_llama/fsdp_scan_rotated")
    strategy = replace(read(source), regions=())
    module = apply(strategy, source)
    verify(source, module, strategy)
    bodies = proto.parse(module).computations
    body = next(c.name for c in bodies if any(one.name == "all-gather-start.5" for one in c.instructions))
    other = run_before(module, body, "all-gather-start.5", "custom-call.13")
    with pytest.raises(PlanError, match=r"would compute wrong numbers: custom-call\.13 reads"):
        check_module(other, "gpu")
    with pytest.raises(PlanError, match="in loop1, its order runs something before what it must wait for"):
        verify(source, other, strategy)


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_what_can_only_be_one_value_is_that_whatever_is_looked_at_first(order: tuple[int, ...]) -> None:
    """One loop carries x, then z. One inside begins with that, and carries y next. What a third begins with is the
    second's, and it hands that on."""
    values = Values()
    one = proto.Instruction(opcode="add")
    x, y, z, outer, inner, kept = (values.new(one, leaf, one.shape) for leaf in range(6))
    of_phi = {outer: [x, z], inner: [outer, y], kept: [inner, kept]}
    for place in order:
        phi = [outer, inner, kept][place]
        values.choose([phi], [[value] for value in of_phi[phi]])
    values.settle()
    assert [*map(values.itself, (outer, inner, kept))] == [outer, inner, inner]
