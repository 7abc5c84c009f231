"""A jitted function as XLA:CPU compiles it, with and without structural moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import numpy as np
from jax.extend import xla
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from disco_hlo.plugin.xla import hook
from disco_hlo.structure.moves import Move, apply_moves
from disco_hlo.structure.program import Program

PLAIN_OPS = {
    "xla_disable_hlo_passes": "fusion,fusion-wrapper,multi_output_fusion,cpu-all-reduce-combiner,"
    "dot-library-rewriter,algsimp",
    "xla_backend_optimization_level": 0,
}
"""Without these passes XLA:CPU ends with plain ops. ``algsimp`` is among them because XLA (jax 0.12) makes wrong
bitcasts of transposes where neither fusion pass runs; without any move such a step gives wrong numbers."""

_NAME = "disco-hlo-structure-test"
_numbers = count()


@dataclass(frozen=True, slots=True)
class Run:
    """What was handed to the hook, what came out, and the compiled module."""

    module: bytes
    outputs: tuple[NDArray[Any], ...]
    text: str
    memory_bytes: int
    """What XLA allocates on each device: arguments, results and temporaries."""
    lowered: jax.stages.Lowered
    arguments: Sequence[Any]


class _Seen(Exception):
    """Ends a compile whose module is all that was asked for."""


def run(function: Callable[..., Any], arguments: Sequence[Any], **jit: Any) -> Run:
    """Compile and run ``function`` as XLA does by itself."""
    return _run(_lowered(function, arguments, jit), arguments, ())


def moved(before: Run, moves: Sequence[Move], arguments: Sequence[Any] | None = None) -> Run:
    """Compile and run the same with ``moves`` applied before XLA schedules it; on other ``arguments`` where it takes
    its own over."""
    return _run(before.lowered, before.arguments if arguments is None else arguments, moves)


def handed_over(function: Callable[..., Any], arguments: Sequence[Any], **jit: Any) -> bytes:
    """The module on which moves of ``function`` are made; no code is generated."""
    lowered, seen = _lowered(function, arguments, jit), []

    def note(module: bytes) -> None:
        seen.append(module)
        raise _Seen

    with _hook(lowered, note), suppress(jax.errors.JaxRuntimeError):
        lowered.compile()
    return seen[0]


def _lowered(
    function: Callable[..., Any], arguments: Sequence[Any], jit: dict[str, Any]
) -> jax.stages.Lowered:
    def renamed(*values: Any) -> Any:
        return function(*values)

    renamed.__name__ = f"moved_{next(_numbers)}"
    return jax.jit(renamed, compiler_options=dict(PLAIN_OPS), **jit).lower(*arguments)


def _run(lowered: jax.stages.Lowered, arguments: Sequence[Any], moves: Sequence[Move]) -> Run:
    seen: list[bytes] = []

    def move(module: bytes) -> bytes | None:
        seen.append(module)
        return apply_moves(module, moves) if moves else None

    with _hook(lowered, move):
        # JAX keeps what it has compiled for the same options; this one says nothing where no dump is asked for.
        compiled = lowered.compile({"xla_dump_max_hlo_modules": next(_numbers)})
    outputs = tuple(np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(compiled(*arguments)))
    memory = compiled.memory_analysis()
    taken = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    taken += memory.temp_size_in_bytes
    return Run(seen[0], outputs, compiled.as_text(), taken, lowered, arguments)


@contextmanager
def _hook(lowered: jax.stages.Lowered, decide: Callable[[bytes], bytes | None]) -> Iterator[None]:
    name = lowered.compiler_ir("stablehlo").operation.attributes["sym_name"].value

    def on_module(module: bytes) -> bytes | None:
        return decide(module) if hook.module_name(module) == name else None

    jax.devices()
    stage = xla.PipelineStage.PRE_SCHEDULER
    xla.register_hlo_module_transformation(on_module, name=_NAME, stage=stage, platforms="cpu")
    try:
        yield
    finally:
        xla.clear_hlo_module_transformation(_NAME, stage, "cpu")


def assert_same(found: Run, expected: Run, tolerance: float) -> None:
    """Every output equal to ``tolerance`` times its largest element."""
    assert len(found.outputs) == len(expected.outputs)
    for new, old in zip(found.outputs, expected.outputs, strict=True):
        np.testing.assert_allclose(
            new, old, rtol=0, atol=tolerance * max(1e-6, float(np.abs(old).max(initial=0)))
        )


def assert_equal(found: Run, expected: Run) -> None:
    """Every output equal, bit by bit."""
    for new, old in zip(found.outputs, expected.outputs, strict=True):
        np.testing.assert_array_equal(new, old)


def count_ops(text: str, opcode: str) -> int:
    """How many instructions of a compiled module have this opcode."""
    return text.count(f" {opcode}(")


def opcodes(module: bytes) -> list[str]:
    """The opcodes of a module's entry, in order."""
    return [i.opcode for i in Program(module).instructions]


def run_early(module: bytes, shards: Sequence[Sequence[NDArray[Any]]]) -> list[NDArray[Any]]:
    """What a module gives that XLA has still to optimize, on a device for each entry of an argument."""
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jaxlib import _jax

    devices = jax.devices()[: len(shards[0])]
    options = compiler.get_compile_options(
        num_replicas=len(devices), num_partitions=1, device_assignment=np.arange(len(devices))[:, None]
    )
    with mlir.make_ir_context():
        text = mlir.ir.Module.parse(_jax.mlir.hlo_to_stablehlo(module))
        compiled = devices[0].client.compile_and_load(text, _jax.DeviceList(tuple(devices)), options, [])
    on = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    arguments = [
        jax.make_array_from_single_device_arrays(
            (len(devices) * one[0].shape[0], *one[0].shape[1:]),
            on,
            [jax.device_put(part, device) for part, device in zip(one, devices, strict=True)],
        )
        for one in shards
    ]
    results = compiled.execute_sharded(arguments).disassemble_into_single_device_arrays()
    return [np.asarray(part) for result in results for part in result]
