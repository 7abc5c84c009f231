"""Which attributes of a GPU instruction say what it computes, and which are the autotuner's or defaults."""

from __future__ import annotations

import json
from typing import Any

from disco_hlo.hlo.attributes import attribute_digest
from disco_hlo.hlo.proto import Instruction

GEMM = {
    "operation_queue_id": "0",
    "gemm_backend_config": {
        "selected_algorithm": "4",
        "alpha_real": 1,
        "beta": 0,
        "dot_dimension_numbers": {
            "lhs_contracting_dimensions": ["1"], "rhs_contracting_dimensions": ["0"],
            "lhs_batch_dimensions": [], "rhs_batch_dimensions": [],
        },
        "precision_config": {"operand_precision": ["DEFAULT", "DEFAULT"], "algorithm": "ALG_UNSET"},
        "epilogue": "BIAS",
        "lhs_stride": "16777216",
        "autotune_workspace_size": "33554432",
    },
    "force_earliest_schedule": False,
    "reification_cost": [],
    "device_type": "DEVICE_TYPE_INVALID",
}  # fmt: skip


def digest(instruction: Any) -> str:
    return attribute_digest(instruction, lambda _: "")


def gemm(**changed: object) -> str:
    config = json.loads(json.dumps(GEMM))
    config["gemm_backend_config"].update(changed)
    text = json.dumps(config).encode()
    return digest(
        Instruction(opcode="custom-call", custom_call_target="__cublas$lt$matmul", backend_config=text)
    )


def test_what_the_autotuner_picked_does_not_count() -> None:
    assert gemm(selected_algorithm="7", autotune_workspace_size="0") == gemm()


def test_a_setting_at_its_default_counts_as_absent() -> None:
    assert gemm(alpha_imag=0, grad_x=False, damax_output=False, scale_mode=0, precision_config={}) == gemm()


def test_a_whole_number_counts_the_same_in_quotes_and_without() -> None:
    """XLA writes the seed of an attention apart in the two copies of a doubled loop's body. One of them was a kernel
    that never ran, estimated at 89 us for 473: a double-buffered step was predicted 10 % too fast (2 x H100)."""

    def attention(seed: object) -> str:
        config = {
            "operation_queue_id": "0",
            "cudnn_fmha_backend_config": {"seed": seed, "mask_type": "CAUSAL"},
        }
        target, text = "__cudnn$fmhaSoftmaxBackward", json.dumps(config).encode()
        return digest(Instruction(opcode="custom-call", custom_call_target=target, backend_config=text))

    assert attention("42") == attention(42) != attention(43)
    assert attention("0") == attention(0) != attention(42)


def test_what_a_matmul_computes_does_count() -> None:
    dimensions = GEMM["gemm_backend_config"]["dot_dimension_numbers"]  # type: ignore[index]
    others = [
        gemm(epilogue="RELU"),
        gemm(beta=1),
        gemm(alpha_real=0.5),
        gemm(dot_dimension_numbers={**dimensions, "lhs_contracting_dimensions": ["0"]}),
        gemm(dot_dimension_numbers={**dimensions, "lhs_contracting_dimensions": []}),
        gemm(precision_config={"operand_precision": ["HIGHEST", "DEFAULT"]}),
    ]
    assert len({gemm(), *others}) == 7


def test_a_config_of_an_unknown_kind_counts_whole() -> None:
    def unknown(value: int) -> str:
        config = {"operation_queue_id": "3", "new_backend_config": {"setting": value}}
        return digest(Instruction(opcode="custom-call", backend_config=json.dumps(config).encode()))

    assert unknown(1) != unknown(2)


def test_attributes_of_a_call_through_the_ffi_count_to_the_letter() -> None:
    """Ranks whose calls hold addresses of their own compile different steps, and say so before they run one."""

    def call(address: int) -> str:
        attributes = f"{{context = {address} : i64}}".encode()
        return digest(Instruction(opcode="custom-call", custom_call_target="mine", backend_config=attributes))

    assert call(0x7F00) == call(0x7F00) != call(0x7F10)


def test_who_emits_a_matmul_fusion_and_with_what_tiles_does_not_count() -> None:
    def fusion(kind: str, **settings: object) -> str:
        config = {"operation_queue_id": "0", "fusion_backend_config": {"kind": kind, **settings}}
        return digest(
            Instruction(opcode="fusion", fusion_kind="kCustom", backend_config=json.dumps(config).encode())
        )

    nested = fusion("__triton_nested_gemm_fusion", block_level_fusion_config={"num_warps": "2"})
    assert nested == fusion("__triton_gemm", triton_gemm_config={"block_m": "64"})
    assert nested == fusion("__cudnn$fusion", cudnn_fusion_config={"plan_id": "3"})
    assert nested != fusion("__custom_fusion", custom_fusion_config={"name": "cutlass_gemm"})


def test_precision_written_out_is_precision_left_out() -> None:
    bare, full, high = (Instruction(opcode="dot") for _ in range(3))
    full.precision_config.operand_precision.extend([0, 0])
    high.precision_config.operand_precision.extend([2, 0])
    assert digest(bare) == digest(full) != digest(high)


def test_the_type_of_a_comparison_follows_from_its_operands_but_a_total_order_does_not() -> None:
    kinds = {
        name: digest(Instruction(opcode="compare", comparison_type=name))
        for name in ("", "FLOAT", "SIGNED", "TOTALORDER")
    }
    assert kinds[""] == kinds["FLOAT"] == kinds["SIGNED"] != kinds["TOTALORDER"]


def test_a_field_that_is_not_named_here_counts_unless_it_is_empty() -> None:
    bare, empty, filled = (Instruction(opcode="dot") for _ in range(3))
    empty.MergeFromString(b"\x92\x06\x00")  # field 98, no bytes
    filled.MergeFromString(b"\x92\x06\x02\x08\x01")
    assert digest(bare) == digest(empty) != digest(filled)
