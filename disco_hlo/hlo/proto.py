"""A private, minimal schema of XLA's HloModuleProto.

jaxlib ships no Python classes for HLO protos, and TensorFlow's would bring TensorFlow along.
Only the fields that the graph and the rewriter touch are named here (numbers from
``xla/service/hlo.proto`` and ``xla/xla_data.proto``); all others travel as unknown fields, so
``serialize(parse(data))`` keeps every byte of meaning. Sub-messages that are only ever compared
or copied are declared ``bytes``: on the wire a message and a byte string look alike.

The schema lives in a descriptor pool of its own and cannot collide with another ``xla`` package.
"""

from __future__ import annotations

import hashlib
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from disco_hlo.errors import ModuleError
from disco_hlo.hlo.graph import Shape
from disco_hlo.printable import counted

Message = Any
"""A message of this private schema; protobuf builds the classes at run time, so they have no static type."""

_SCHEMA = """
Layout: minor_to_major 1 int64*
Shape: element_type 2 int32, dimensions 3 int64*, tuple_shapes 4 Shape*, layout 5 Layout
OpMetadata: op_type 1 string, op_name 2 string, source_file 3 string, source_line 4 int32, stack_frame_id 15 int32
SliceDimensions: start 1 int64, limit 2 int64, stride 3 int64
DotDimensionNumbers: lhs_contracting_dimensions 1 int64*, rhs_contracting_dimensions 2 int64*,
    lhs_batch_dimensions 3 int64*, rhs_batch_dimensions 4 int64*
ConvolutionDimensionNumbers: kernel_input_feature_dimension 3 int64
WindowDimension: size 1 int64, stride 2 int64
Window: dimensions 1 WindowDimension*
OutputOperandAliasing: output_shape_index 1 int64*, operand_index 2 int64, operand_shape_index 3 int64*
PrecisionConfig: operand_precision 1 int32*, algorithm 2 int32
Instruction: name 1 string, opcode 2 string, shape 3 Shape, metadata 7 OpMetadata, literal 8 bytes,
    parameter_number 9 int64, fusion_kind 11 string, tuple_index 13 int64, dimensions 14 int64*, window 15 Window,
    convolution_dimension_numbers 16 ConvolutionDimensionNumbers, slice_dimensions 17 SliceDimensions*,
    channel_id 26 int64, custom_call_target 28 string, dot_dimension_numbers 30 DotDimensionNumbers, id 35 int64,
    operand_ids 36 int64*, control_predecessor_ids 37 int64*, called_computation_ids 38 int64*, sharding 40 bytes,
    backend_config 43 bytes, all_reduce_id 45 int64, replica_groups 49 bytes*, precision_config 51 PrecisionConfig,
    operand_shapes_with_layout 57 bytes*, custom_call_has_side_effect 65 bool, frontend_attributes 68 bytes,
    comparison_type 72 string, output_operand_aliasing 74 OutputOperandAliasing*, statistics_viz 82 bytes,
    collective_device_list 87 bytes, original_value 88 bytes, result_accuracy 91 bytes
ProgramShape: parameters 1 Shape*, result 2 Shape, parameter_names 3 string*
Computation: name 1 string, instructions 2 Instruction*, program_shape 4 ProgramShape, id 5 int64, root_id 6 int64,
    is_fusion_computation 7 bool, execution_thread 8 string
Sequence: instruction_ids 1 int64*
Schedule: sequences 1 map:Sequence
AliasEntry: output_shape_index 1 int64*, parameter_number 2 int64, parameter_shape_index 3 int64*, kind 4 int32
InputOutputAlias: entries 1 AliasEntry*
FileLocation: file_name_id 1 int32, function_name_id 2 int32, line 3 int32
StackFrame: file_location_id 1 int32, parent_frame_id 2 int32
StackFrameIndex: file_names 1 string*, function_names 2 string*, file_locations 3 FileLocation*,
    stack_frames 4 StackFrame*
Module: name 1 string, entry_computation_name 2 string, computations 3 Computation*,
    host_program_shape 4 ProgramShape, id 5 int64, entry_computation_id 6 int64, schedule 7 Schedule,
    input_output_alias 8 InputOutputAlias, stack_frame_index 17 StackFrameIndex
"""
"""Messages, and the name, number and type of each field; ``*`` stands behind types of lists."""

_DETAILS = """
WindowDimension: padding_low 3 int64, padding_high 4 int64, window_dilation 5 int64, base_dilation 6 int64,
    window_reversal 7 bool
GatherDimensionNumbers: offset_dims 1 int64*, collapsed_slice_dims 2 int64*, start_index_map 3 int64*,
    index_vector_dim 4 int64, operand_batching_dims 5 int64*, start_indices_batching_dims 6 int64*
ScatterDimensionNumbers: update_window_dims 1 int64*, inserted_window_dims 2 int64*,
    scatter_dims_to_operand_dims 3 int64*, index_vector_dim 4 int64, input_batching_dims 5 int64*,
    scatter_indices_batching_dims 6 int64*
PaddingDimension: edge_padding_low 1 int64, edge_padding_high 2 int64, interior_padding 3 int64
PaddingConfig: dimensions 1 PaddingDimension*
Literal: shape 1 Shape, preds 2 bool*, u8s 3 bytes, s32s 4 int32*, s64s 5 int64*, u32s 6 uint32*, f32s 8 float*,
    f64s 9 double*, f16s 11 bytes, bf16s 13 bytes, s8s 15 bytes, u16s 16 bytes, s16s 17 bytes
MeshAxis: name 1 string, size 2 int64
Mesh: axes 1 MeshAxis*, device_ids 2 int64*
SubAxis: pre_size 1 int64, size 2 int64
AxisRef: mesh_axis_index 1 int64, sub_axis_info 2 SubAxis
DimensionSharding: axes 1 AxisRef*
NamedSharding: tuple_shardings 1 NamedSharding*, mesh 2 Mesh, dim_shardings 3 DimensionSharding*,
    unreduced_axes 5 AxisRef*
OpSharding: type 1 int32, tile_assignment_dimensions 3 int64*, tile_assignment_devices 4 int64*,
    replicate_on_last_tile_dim 6 bool, last_tile_dims 8 int32*, iota_reshape_dims 9 int64*,
    iota_transpose_perm 10 int32*, named_sharding 14 NamedSharding
ReplicaGroup: replica_ids 1 int64*
IotaGroups: num_replica_groups 1 int64, num_devices_per_group 2 int64, iota_reshape_dims 3 int64*,
    iota_transpose_perm 4 int32*
DeviceList: replica_groups 1 ReplicaGroup*, iota_replica_group_list 2 IotaGroups
SourceTarget: source 1 int64, target 2 int64
MeshGroups: mesh 1 Mesh, axes 2 AxisRef*
DeviceAssignment: replica_count 1 int32, computation_count 2 int32
Instruction: literal 8 Literal, exponent_bits 18 int32, mantissa_bits 19 int32, dynamic_slice_sizes 20 int64*,
    padding_config 21 PaddingConfig, gather_dimension_numbers 33 GatherDimensionNumbers, gather_slice_sizes 34 int64*,
    scatter_dimension_numbers 48 ScatterDimensionNumbers, replica_groups 49 ReplicaGroup*,
    source_target_pairs 52 SourceTarget*, comparison_direction 63 string, unique_indices 69 bool,
    use_global_device_ids 71 bool, collective_device_list 87 DeviceList, iota_groups 92 IotaGroups,
    mesh_axes_groups 93 MeshGroups
Module: spmd_parameters_shardings 14 OpSharding*, device_assignment 15 DeviceAssignment
"""
"""What the moves inside a layer (``disco_hlo/structure``), the rules on made-up inputs and the kinds of collectives
read beyond :data:`_SCHEMA`.
Kept apart: fingerprints hash the fields that the schema does not name as they lie in the bytes, so naming one more
would change them."""

_SCALARS = ("float", "double", "uint32", "int32", "int64", "bool", "string", "bytes")


def _add_field(package: str, message: Any, name: str, number: int, kind: str) -> None:
    added = message.field.add(name=name, number=number)
    repeated = kind.endswith("*")
    added.label = added.LABEL_REPEATED if repeated else added.LABEL_OPTIONAL
    base = kind.rstrip("*")
    if base.startswith("map:"):
        entry = message.nested_type.add(name="SequencesEntry")
        entry.options.map_entry = True
        _add_field(package, entry, "key", 1, "int64")
        _add_field(package, entry, "value", 2, base[4:])
        added.label = added.LABEL_REPEATED
        added.type = added.TYPE_MESSAGE
        added.type_name = f".{package}.{message.name}.SequencesEntry"
    elif base in _SCALARS:
        added.type = getattr(added, f"TYPE_{base.upper()}")
    else:
        added.type = added.TYPE_MESSAGE
        added.type_name = f".{package}.{base}"


def _fields(table: str) -> dict[str, dict[str, tuple[int, str]]]:
    """Number and type of each field, by message and name."""
    messages = (line.split(": ", 1) for line in table.replace("\n    ", " ").split("\n") if line)
    return {
        message: {name: (int(number), kind) for name, number, kind in map(str.split, fields.split(", "))}
        for message, fields in messages
    }


def _message_classes(package: str, schema: dict[str, dict[str, tuple[int, str]]]) -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            _add_field(package, message, field_name, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in schema
    }


_PLAIN, _MORE = _fields(_SCHEMA), _fields(_DETAILS)
_CLASSES = _message_classes("disco.hlo", _PLAIN)
Module = _CLASSES["Module"]
Computation = _CLASSES["Computation"]
Instruction = _CLASSES["Instruction"]
ShapeProto = _CLASSES["Shape"]
_HEADS = _message_classes(
    "disco.hlo.head",
    {"Named": {"name": (1, "bytes")}, "Numbered": {"name": (1, "bytes"), "id": (5, "int64")}},
)
NamedModule, NumberedModule = _HEADS["Named"], _HEADS["Numbered"]
"""What tells one compile's module from another's; all else stays as it lies in the bytes."""

_DETAILED = _message_classes(
    "disco.hlo.detailed",
    {name: _PLAIN.get(name, {}) | _MORE.get(name, {}) for name in {**_PLAIN, **_MORE}},
)
DetailedModule = _DETAILED["Module"]
"""A module with every field that the moves inside a layer read."""
DetailedInstruction = _DETAILED["Instruction"]

DTYPES: dict[int, str] = {
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64",
    10: "f16", 11: "f32", 12: "f64", 13: "tuple", 14: "opaque", 15: "c64", 16: "bf16", 17: "token",
    18: "c128", 19: "f8e5m2", 20: "f8e4m3fn", 21: "s4", 22: "u4", 23: "f8e4m3b11fnuz",
    24: "f8e5m2fnuz", 25: "f8e4m3fnuz", 26: "s2", 27: "u2", 28: "f8e4m3", 29: "f8e3m4",
    32: "f4e2m1fn", 33: "f8e8m0fnu",
}  # fmt: skip
"""XLA's PrimitiveType numbers."""

_TAIL_PADDING_OF_ONE = b"\x80\x01\x01"
"""Layout.tail_padding_alignment_in_elements = 1 (field 16): what XLA itself writes."""

_DTYPE_NUMBERS = {name: number for number, name in DTYPES.items()}
TUPLE = _DTYPE_NUMBERS["tuple"]
FLOAT32 = _DTYPE_NUMBERS["f32"]


def parse(data: bytes, message_class: Any = Module) -> Message:
    """Parse a serialized HloModuleProto, as :data:`Module` or :data:`DetailedModule`.

    Raises:
        ModuleError: the bytes are no HLO module, or it has no entry computation.
    """
    module = message_class()
    try:
        module.ParseFromString(data)
    except DecodeError as error:
        raise ModuleError(
            f"expected a serialized HloModuleProto, got {counted(len(data), 'byte')} that cannot be parsed: {error}"
        ) from None
    if not any(computation.id == module.entry_computation_id for computation in module.computations):
        raise ModuleError(
            f"expected an HLO module with an entry computation, got {counted(len(data), 'byte')} naming "
            f"computation {module.entry_computation_id} among {len(module.computations)}"
        )
    return module


def serialize(module: Message) -> bytes:
    """Serialize a module; equal modules give equal bytes."""
    return bytes(module.SerializeToString(deterministic=True))


def shape_of(proto: Message) -> Shape:
    """The :class:`Shape` of a ShapeProto.

    Raises:
        ModuleError: the element type is unknown to this version of disco-hlo.
    """
    dtype = DTYPES.get(proto.element_type)
    if dtype is None:
        raise ModuleError(
            f"element type {proto.element_type} of an HLO shape is unknown; expected one of {sorted(DTYPES)}"
        )
    if dtype == "tuple":
        return Shape("tuple", elements=tuple(shape_of(element) for element in proto.tuple_shapes))
    return Shape(dtype, tuple(proto.dimensions), tuple(proto.layout.minor_to_major))


def shape_to_proto(shape: Shape) -> Message:
    """The ShapeProto of a :class:`Shape`."""
    proto = ShapeProto(element_type=_DTYPE_NUMBERS[shape.dtype])
    if shape.dtype == "tuple":
        proto.tuple_shapes.extend(shape_to_proto(element) for element in shape.elements)
        return proto
    proto.dimensions.extend(shape.dims)
    proto.layout.minor_to_major.extend(shape.layout)
    proto.layout.MergeFromString(_TAIL_PADDING_OF_ONE)
    if shape.dims:
        # is_dynamic_dimension (field 6): XLA wants one flag per dimension.
        proto.MergeFromString(bytes([0x32, len(shape.dims)]) + bytes(len(shape.dims)))
    return proto


def digest(*parts: bytes) -> str:
    """Hex SHA-256 over length-prefixed parts (no two different lists collide)."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()
