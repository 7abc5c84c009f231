"""What of an HLO instruction counts as structure, and what is XLA's or the process's business.

Fingerprints and cost keys rest on :func:`attribute_digest`: it keeps every attribute that changes
what an instruction computes, and leaves out names, metadata, channel numbers, shardings already
applied, parallel partitions, stream numbers and autotuned algorithms.

The hook hands over a module as XLA holds it; an executable's module comes back through a proto,
and XLA fills in defaults on the way (the precision of a library call, the type of a comparison).
So an attribute that says no more than its default counts as absent. Of XLA:GPU's backend configs
only the settings that say what is computed count; a config of a kind unknown here counts whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

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

_GPU_STRUCTURE: dict[str, frozenset[str]] = {
    "gemm_backend_config": frozenset({
        "alpha_real", "alpha_imag", "beta", "dot_dimension_numbers", "precision_config", "epilogue",
        "grad_x", "grad_y", "damax_output", "scale_mode",
    }),
    "cudnn_conv_backend_config": frozenset({
        "conv_result_scale", "activation_mode", "side_input_scale", "leakyrelu_alpha",
        "reordered_int8_nchw_vect", "serialized_graph",
    }),
    "cudnn_norm_backend_config": frozenset({"epsilon", "kind"}),
    "fusion_backend_config": frozenset({"kind", "custom_fusion_config"}),
    "collective_backend_config": frozenset(),
    "native_emitter_backend_config": frozenset(),
    "bitcast_backend_config": frozenset(),
}  # fmt: skip
"""Of each config that XLA:GPU writes (``backend_configs.proto``), the fields that say what is computed.
The others are the autotuner's, the scheduler's, or follow from the shapes."""

_GPU_BOOKKEEPING = frozenset({
    "operation_queue_id", "wait_on_operation_queues", "force_earliest_schedule", "reification_cost",
    "device_type",
})  # fmt: skip
PLACE = "dynamic_slice_config"
_AUTOTUNED = frozenset({"algorithm", "kernel_index", "plan_id"})
_GEMM_KINDS = frozenset({"__triton_gemm", "__triton_nested_gemm_fusion", "__cudnn$fusion"})
"""Fusions around one matmul: which compiler emits it is the autotuner's choice."""

_DEFAULT_ACCURACY = b"\x08\x00"
"""ResultAccuracy.mode = DEFAULT, written out."""
_DEFAULTS = frozenset({"", "DEFAULT", "ALG_UNSET", "kNone"})
"""Strings that stand for nothing in a config: the zeros of its enums."""
_WHOLE = re.compile("0|-?[1-9][0-9]{0,18}")


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
    kind = _fusion_settings(instruction).get("kind", "")
    return kind if isinstance(kind, str) else ""


def triton_settings(instruction: Message) -> str:
    """Emitter settings of a Triton fusion (its tiles), as canonical JSON."""
    return json.dumps(_fusion_settings(instruction), sort_keys=True, separators=(",", ":"))


def _fusion_settings(instruction: Message) -> dict[str, Any]:
    """What XLA:GPU or XLA:CPU says of a fusion; empty where it says nothing."""
    config = backend_config(instruction)
    settings = config.get("fusion_backend_config") or config.get("fusion_config")
    return settings if isinstance(settings, dict) else {}


def is_callback(instruction: Message) -> bool:
    """Whether this is a call into the Python interpreter of this process (``jax.debug.print`` and others)."""
    return instruction.opcode == "custom-call" and "callback" in instruction.custom_call_target


def structural_shape(instruction: Message) -> Shape:
    """The result shape with library workspaces left out: their size is the autotuner's choice."""
    shape = shape_of(instruction.shape)
    is_library = instruction.opcode == "custom-call" and instruction.custom_call_target.startswith(
        ("__cublas", "__cudnn")
    )
    if is_library and shape.elements and shape.elements[-1].dtype in ("s8", "u8"):
        return Shape("tuple", elements=(*shape.elements[:-1], Shape("u8", (0,), (0,))))
    return shape


def _without(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(inner, names) for key, inner in sorted(value.items()) if key not in names}
    if isinstance(value, list):
        return [_without(inner, names) for inner in value]
    return value


def _config_digest_bytes(instruction: Message, *, placed: bool) -> bytes:
    config = backend_config(instruction)
    if not config:
        # No JSON: the attributes of a call through the FFI, in MLIR's way of writing, or an older call's own bytes.
        raw = bytes(instruction.backend_config)
        return b"" if raw == b"{}" else raw
    if not placed:
        config.pop(PLACE, None)
    if instruction.opcode == "dot":
        return b""  # a dot inside a Triton fusion carries its tile there, and no other dot has a config
    is_typed = "operation_queue_id" in config  # a GpuBackendConfig
    kept = _gpu_structure(config) if is_typed else _without(config, _NOT_STRUCTURE_IN_CONFIG)
    return json.dumps(kept, sort_keys=True).encode() if kept else b""


def _gpu_structure(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a GpuBackendConfig that say what is computed, without those at their default."""
    kept: dict[str, Any] = {}
    for name, settings in config.items():
        if name in _GPU_BOOKKEEPING:
            continue
        fields = _GPU_STRUCTURE.get(name)
        if fields is not None and isinstance(settings, dict):
            settings = {field: value for field, value in settings.items() if field in fields}
        kept[name] = _without_defaults(_without(settings, _AUTOTUNED))
    fusion = kept.get("fusion_backend_config")
    if isinstance(fusion, dict) and fusion.get("kind") in _GEMM_KINDS:
        fusion["kind"] = "gemm"
    return {name: settings for name, settings in kept.items() if settings}


def _without_defaults(value: Any) -> Any:
    """JSON without the fields that hold what protobuf reads where they are left out. A whole number is one, in quotes
    or not: XLA writes those of 64 bits either way, and the two copies of a doubled loop's body apart."""
    if not isinstance(value, dict):
        return int(value) if isinstance(value, str) and _WHOLE.fullmatch(value) else value
    kept = {name: _without_defaults(inner) for name, inner in value.items()}
    return {name: inner for name, inner in kept.items() if not _is_default(inner)}


def _is_default(value: Any) -> bool:
    if isinstance(value, list):
        return all(inner == "DEFAULT" for inner in value)  # a precision for each operand, or nothing
    return value in _DEFAULTS if isinstance(value, str) else not value


def attribute_digest(instruction: Message, computation_digest: Callable[[int], str]) -> str:
    """Digest of everything but operands and shapes.

    Args:
        instruction: an Instruction message.
        computation_digest: digest of a called computation, by its id.
    """
    return whole_digest(instruction, cost_digest(instruction, computation_digest))


def whole_digest(instruction: Message, cost: str) -> str:
    """As :func:`attribute_digest`, of an instruction whose :func:`cost_digest` is known."""
    unnamed = _unnamed_inside(instruction)
    return digest(cost.encode(), unnamed) if unnamed else cost


def _unnamed_inside(instruction: Message) -> bytes:
    """What the attributes hold that this schema does not name, such as the padding of a window."""
    found: list[bytes] = []
    for name in ("window", "convolution_dimension_numbers", "dot_dimension_numbers", "precision_config"):
        if not instruction.HasField(name):
            found.append(b"")
            continue
        whole = getattr(instruction, name)
        named = type(whole)()
        named.CopyFrom(whole)
        named.DiscardUnknownFields()
        every = whole.SerializeToString(deterministic=True)
        found.append(b"" if every == named.SerializeToString(deterministic=True) else every)
    return repr(found).encode() if any(found) else b""


def cost_digest(
    instruction: Message, computation_digest: Callable[[int], str], *, placed: bool = True
) -> str:
    """Digest of the attributes on which an op's time depends: all of them but how windows are padded and dilated, and
    the order of a convolution's dimensions.

    Args:
        instruction: as for :func:`attribute_digest`.
        computation_digest: as for it.
        placed: whether the place of a loop's slice counts as well, on which no time depends (:data:`PLACE`).
    """
    stripped = type(instruction)()
    stripped.CopyFrom(instruction)
    for name in _NOT_STRUCTURE:
        stripped.ClearField(name)
    if instruction.opcode != "fusion":
        stripped.ClearField("fusion_kind")
    _clear_defaults(stripped)
    called = [computation_digest(called_id).encode() for called_id in instruction.called_computation_ids]
    return digest(_significant_bytes(stripped), _config_digest_bytes(instruction, placed=placed), *called)


def _clear_defaults(instruction: Message) -> None:
    """Clear the attributes that say no more than their absence would."""
    for name in ("window", "dot_dimension_numbers"):
        if not getattr(instruction, name).ByteSize():
            instruction.ClearField(name)
    precision = instruction.precision_config
    if not precision.algorithm and not any(precision.operand_precision):
        instruction.ClearField("precision_config")
    if instruction.comparison_type != "TOTALORDER":
        instruction.ClearField("comparison_type")  # follows from the operands' type
    if instruction.result_accuracy in (b"", _DEFAULT_ACCURACY):
        instruction.ClearField("result_accuracy")


def _significant_bytes(instruction: Message) -> bytes:
    """All fields that hold something, those that this schema does not name included."""
    fields: Message = UnknownFieldSet(instruction)
    unnamed = [(field.field_number, field.data) for field in fields if field.data not in (b"", 0)]
    instruction.DiscardUnknownFields()
    return bytes(instruction.SerializeToString(deterministic=True)) + repr(sorted(unnamed)).encode()


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
