"""What of an HLO instruction counts as structure, and what is XLA's or the process's business.

Fingerprints and cost keys rest on :func:`attribute_digest`: it keeps every attribute that changes
what an instruction computes, and leaves out names, metadata, channel numbers, shardings already
applied, parallel partitions, stream numbers, autotuned algorithms, and the process-local handles
of Python callbacks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from disco_hlo.hlo.graph import Shape
from disco_hlo.hlo.proto import Message, digest, shape_of

_NOT_STRUCTURE = (
    "name", "metadata", "id", "operand_ids", "control_predecessor_ids", "called_computation_ids",
    "shape", "channel_id", "all_reduce_id", "sharding", "frontend_attributes", "statistics_viz",
    "original_value", "backend_config", "operand_shapes_with_layout",
)  # fmt: skip

_NOT_STRUCTURE_IN_CONFIG = frozenset({
    "outer_dimension_partitions", "operation_queue_id", "wait_on_operation_queues",
    "force_earliest_schedule", "reification_cost", "device_type", "selected_algorithm", "algorithm",
    "collective_backend_config", "block_level_fusion_config", "autotune_workspace_size",
    "triton_gemm_config", "lhs_stride", "rhs_stride", "workspace_size", "is_sync", "no_parallel_custom_call",
    "autotuned",
})  # fmt: skip

_TRITON_GEMM_KINDS = frozenset({"__triton_gemm", "__triton_nested_gemm_fusion"})


def backend_config(instruction: Message) -> dict[str, Any]:
    """The backend config as a dict; empty where there is none or it is no JSON object."""
    raw = instruction.backend_config
    if not raw.startswith(b"{"):
        return {}
    try:
        parsed = json.loads(raw)
    except (ValueError, UnicodeDecodeError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def custom_fusion_kind(instruction: Message) -> str:
    """``__triton``, ``__ynn_fusion`` and the like for a kCustom fusion, else the empty string."""
    config = backend_config(instruction)
    settings = config.get("fusion_backend_config") or config.get("fusion_config") or {}
    kind = settings.get("kind", "") if isinstance(settings, dict) else ""
    return kind if isinstance(kind, str) else ""


def is_callback(instruction: Message) -> bool:
    """Whether this is a call into the Python interpreter of this process (``jax.debug.print`` and others)."""
    return instruction.opcode == "custom-call" and "callback" in instruction.custom_call_target


def structural_shape(instruction: Message) -> Shape:
    """The result shape with library workspaces left out: their size is the autotuner's choice."""
    shape = shape_of(instruction.shape)
    if instruction.opcode == "custom-call" and shape.dtype == "tuple" and _has_workspace(instruction, shape):
        return Shape("tuple", elements=(*shape.elements[:-1], Shape("u8", (0,), (0,))))
    return shape


def _has_workspace(instruction: Message, shape: Shape) -> bool:
    target: str = instruction.custom_call_target
    last = shape.elements[-1] if shape.elements else None
    return target.startswith(("__cublas", "__cudnn")) and last is not None and last.dtype in ("s8", "u8")


def _without(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(inner, names) for key, inner in sorted(value.items()) if key not in names}
    if isinstance(value, list):
        return [_without(inner, names) for inner in value]
    return value


def _config_digest_bytes(instruction: Message) -> bytes:
    if is_callback(instruction):
        return b"callback"
    config = backend_config(instruction)
    if not config:
        return bytes(instruction.backend_config) if not instruction.backend_config.startswith(b"{") else b""
    return json.dumps(_without(config, _NOT_STRUCTURE_IN_CONFIG), sort_keys=True).encode()


def attribute_digest(instruction: Message, computation_digest: Callable[[int], str]) -> str:
    """Digest of everything but operands and shapes.

    Args:
        instruction: an Instruction message.
        computation_digest: digest of a called computation, by its id.
    """
    stripped = type(instruction)()
    stripped.CopyFrom(instruction)
    for name in _NOT_STRUCTURE:
        stripped.ClearField(name)
    if instruction.opcode != "fusion":
        stripped.ClearField("fusion_kind")
    called = [computation_digest(called_id).encode() for called_id in instruction.called_computation_ids]
    return digest(stripped.SerializeToString(deterministic=True), _config_digest_bytes(instruction), *called)


def is_inlinable_fusion(instruction: Message, contains_dot: Callable[[int], bool]) -> bool:
    """Whether a fusion is XLA's own grouping of ops, to be taken apart: loop, input and output
    fusions, and block-level Triton fusions that hold no matmul."""
    if instruction.opcode != "fusion":
        return False
    if instruction.fusion_kind in ("kLoop", "kInput", "kOutput"):
        return True
    return custom_fusion_kind(instruction) == "__triton" and not contains_dot(
        instruction.called_computation_ids[0]
    )
