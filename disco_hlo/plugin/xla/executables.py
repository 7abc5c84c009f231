"""Executables that XLA loaded: what they run, what they take, of which element types, and how they are run.

With :mod:`~disco_hlo.plugin.xla.jaxlink`, which makes them, one of the files that touch jaxlib's private names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from disco_hlo.errors import UnsupportedError
from disco_hlo.hlo.proto import parse, shape_of

LoadedExecutable = Any
"""``jaxlib`` loaded executable; jaxlib ships no types for it."""
_TUNED = frozenset({"fusion", "custom-call", "dot", "convolution"})
"""Ops that XLA:GPU chooses a kernel for by trying some."""
JAX_NAMES = {
    "pred": "bool", "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64", "u8": "uint8",
    "u16": "uint16", "u32": "uint32", "u64": "uint64", "f16": "float16", "bf16": "bfloat16",
    "f32": "float32", "f64": "float64", "c64": "complex64", "c128": "complex128",
}  # fmt: skip
"""By HLO name. Others (``token``, fp8) neither stand in packs nor are swept."""


def read_executable(executable: LoadedExecutable) -> bytes:
    """The module an executable runs, as a serialized HloModuleProto, after everything XLA did to it.

    Raises:
        UnsupportedError: the executable holds no HLO (some deserialized ones do not) or several modules.
    """
    modules = executable.hlo_modules()
    if len(modules) != 1:
        raise UnsupportedError(f"expected an executable with one HLO module, found {len(modules)}")
    return bytes(modules[0].as_serialized_hlo_module_proto())


def module_text(module: bytes) -> str:
    """A serialized HloModuleProto as text, for people (large constants are left out)."""
    from jaxlib import _hlo

    return str(_hlo.HloModule.from_serialized_hlo_module_proto(module).to_string())


@dataclass(frozen=True, slots=True)
class Memory:
    """What one execution needs on each device, as XLA's buffer assignment says."""

    arguments_bytes: int
    outputs_bytes: int
    temporaries_bytes: int
    aliased_bytes: int
    """Outputs that take the storage of donated arguments."""

    @property
    def total_bytes(self) -> int:
        """Arguments, outputs that are not aliased, and temporaries."""
        return self.arguments_bytes + self.outputs_bytes - self.aliased_bytes + self.temporaries_bytes


def memory(executable: LoadedExecutable) -> Memory:
    """Per-device memory of one execution of ``executable``."""
    stats = executable.get_compiled_memory_stats()
    return Memory(
        arguments_bytes=int(stats.argument_size_in_bytes),
        outputs_bytes=int(stats.output_size_in_bytes),
        temporaries_bytes=int(stats.temp_size_in_bytes),
        aliased_bytes=int(stats.alias_size_in_bytes),
    )


def tuning_bytes(module: bytes) -> int:
    """What an autotuner may take of a device to try a kernel of ``module`` (as :func:`read_executable` gives it): its
    operands and twice its results, of which one copy is compared with; of all kernels the most."""
    parsed, most = parse(module), 0
    inside = {
        called
        for body in parsed.computations
        for one in body.instructions
        if one.opcode == "fusion"
        for called in one.called_computation_ids
    }
    for body in (one for one in parsed.computations if one.id not in inside):
        sizes = {one.id: shape_of(one.shape).size_bytes for one in body.instructions}
        for one in body.instructions:
            if one.opcode in _TUNED:
                most = max(most, sum(sizes[operand] for operand in one.operand_ids) + 2 * sizes[one.id])
    return most


@dataclass(frozen=True, slots=True)
class Parameter:
    """An entry parameter of a compiled module, as one device holds it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharded: bool
    """Each device holds other values; where false, some hold copies and all must agree."""


def _program_shape(module: bytes) -> tuple[Sequence[Any], Sequence[Any]]:
    """Shapes of the parameters and of the results, as one device holds them."""
    import jaxlib._hlo as _hlo

    head = parse(module)
    head.ClearField("computations")  # XLA would read all of them for it: 1 s of 14,000 instructions
    shape = _hlo.XlaComputation(head.SerializeToString()).program_shape()
    result = shape.result_shape()
    return shape.parameter_shapes(), result.tuple_shapes() if result.is_tuple() else [result]


def parameters(
    executable: LoadedExecutable, module: bytes | None = None, like: Sequence[Parameter] = ()
) -> tuple[Parameter, ...]:
    """The entry parameters of ``executable`` with their per-device shapes. Raises UnsupportedError: one is a token
    or tuple, has a layout of its own, or lives in host memory.

    Args:
        module: what it runs, where that has been read.
        like: the parameters of another executable of the same program. Where shapes and types are theirs, so are the
            shardings, for which jaxlib would read the whole module again.
    """
    shapes, _ = _program_shape(read_executable(executable) if module is None else module)
    arrays = [_array(index, shape) for index, shape in enumerate(shapes)]
    if arrays == [(one.shape, one.dtype) for one in like]:
        return tuple(like)
    shardings = executable.get_parameter_shardings() or [None] * len(shapes)
    return tuple(Parameter(*array, _is_sharded(one)) for array, one in zip(arrays, shardings, strict=True))


def results(executable: LoadedExecutable) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and type of each result that is an array, as one device holds it."""
    _, shapes = _program_shape(read_executable(executable))
    return [(tuple(one.dimensions()), np.dtype(one.numpy_dtype())) for one in shapes if one.is_array()]


def _array(index: int, shape: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if not _is_plain_array(shape):
        raise UnsupportedError(f"parameter {index} is {shape}: expected a row-major array in device memory")
    return tuple(shape.dimensions()), np.dtype(shape.numpy_dtype())


def _is_sharded(sharding: Any) -> bool:
    import jaxlib._hlo as _hlo

    if sharding is None:
        return False
    hlo = _hlo.HloSharding.from_proto(sharding)
    return bool(hlo.is_tiled() and not hlo.replicate_on_last_tile_dim() and not hlo.subgroup_types())


def _is_plain_array(shape: Any) -> bool:
    if not shape.is_array():
        return False
    row_major = tuple(reversed(range(len(shape.dimensions()))))
    return tuple(shape.layout().minor_to_major()) == row_major and "S(" not in str(shape.layout())


def execute(executable: LoadedExecutable, arguments: Sequence[Any]) -> Any:
    """Start ``executable`` on its local devices; :func:`wait` and :func:`result_arrays` take the result."""
    return executable.execute_sharded(arguments, with_tokens=True)


def wait(result: Any) -> None:
    """Block until the execution has ended on every local device."""
    token_of(result).block_until_ready()


def token_of(result: Any) -> Any:
    """What is ready when the execution has ended; unlike ``result`` it does not keep the outputs alive."""
    return result.consume_token()


def is_all_ready(backend: Any) -> bool:
    """Whether all arrays that there are on a backend's devices have been computed; false where one was deleted
    meanwhile."""
    try:
        return all(one.is_ready() for one in backend.live_arrays())
    except RuntimeError:
        return False


def result_arrays(result: Any) -> list[list[Any]]:
    """Outputs of an execution as single-device arrays: ``[output][local device]``."""
    arrays: list[list[Any]] = result.disassemble_into_single_device_arrays()
    return arrays


def storage_taken(executable: LoadedExecutable, module: bytes | None = None) -> dict[int, int]:
    """By parameter, the number of the output that takes over its storage: a training step's next state. ``module`` is
    as for :func:`parameters`."""
    entries = parse(read_executable(executable) if module is None else module).input_output_alias.entries
    return {
        int(entry.parameter_number): int(entry.output_shape_index[0]) if entry.output_shape_index else 0
        for entry in entries
        if not entry.parameter_shape_index and len(entry.output_shape_index) < 2
    }


def call_signature(executable: LoadedExecutable) -> dict[str, object]:
    """What must be equal of two executables that are called for each other, by what it is; shapes have layouts."""
    module = read_executable(executable)
    taken, returned = _program_shape(module)
    return {
        "parameters": [str(one) for one in taken],
        "results": [str(one) for one in returned],
        "shardings of parameters": _protos(executable.get_parameter_shardings()),
        "shardings of results": _protos(executable.get_output_shardings()),
        "memories of results": executable.get_output_memory_kinds(),
        "devices": [device.id for device in executable.local_devices()],
        "donated storage (parameter: result)": storage_taken(executable, module),
        "bytes of donated storage": memory(executable).aliased_bytes,
    }


def _protos(shardings: Sequence[Any] | None) -> list[str]:
    return [sharding.SerializeToString().hex() for sharding in shardings or ()]


def count_results(module: bytes) -> int:
    """How many results a serialized HloModuleProto has."""
    return len(_program_shape(module)[1])


def chosen_outputs(result: Any, handlers: Sequence[Any]) -> list[Any]:
    """What handlers make of the outputs of an execution, ready or not: arrays over all devices
    (:func:`disco_hlo.plugin.xla.jaxlink.array_handler`), None for one that is dropped."""
    outputs: list[Any] = result.consume_with_handlers(handlers)
    return outputs


def is_whole(dtype: np.dtype[Any]) -> bool:
    """Whether it is of whole numbers or truth values."""
    return dtype.kind in "biu" or "int" in dtype.name
