"""Compile packs of kernels through the hook and time every kernel of them (DisCo, section 5.2).

A pack (``pack.py``) is the body of a carrier: a jitted function of the same signature that JAX
compiles, and in whose place the pack runs. One trace of a few runs then times all its kernels.
Between two runs the inputs change places, so that no kernel finds in a cache what it read before.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pack import Pack, PackedKernel, Vector, pack

from disco_hlo.backends import backend_of
from disco_hlo.cores import own_cores
from disco_hlo.errors import IllegalStrategyError, UnsupportedError
from disco_hlo.plan.check_module import check_module
from disco_hlo.plugin.measuring.inputs.made_up import skewed_indices
from disco_hlo.plugin.xla import compiles, jaxlink
from disco_hlo.plugin.xla.executables import JAX_NAMES, LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest, OwnTrace
from disco_hlo.printable import counted
from disco_hlo.profiler import trace

FEWEST_RUNS = 6
_PATIENCE = 4
"""How many times its own time limit the fewest runs of a pack may take."""
_PATTERN_ELEMENTS = 1 << 16
_LARGEST_INDEX = 1 << 16
_MADE_ON_HOST_BYTES = 8 << 20


class _RefusedError(BaseException):
    """Ends a compile of JAX's from inside the handler, which must not fall back to the carrier itself."""


class Inputs:
    """Device vectors of synthetic values, made once and given to many packs."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._made: dict[Vector, list[Any]] = defaultdict(list)
        self._held_bytes = 0

    def take(self, vectors: Sequence[Vector]) -> list[Any]:
        """An array for each vector, no two the same; beyond ``most_bytes`` what others needed is freed."""
        needed: dict[Vector, int] = defaultdict(int)
        for vector in vectors:
            needed[vector] += 1
        self._free(needed)
        for vector, count in needed.items():
            for number in range(len(self._made[vector]), count):
                self._made[vector].append(_device_vector(vector, number))
                self._held_bytes += vector.size_bytes
        places: dict[Vector, itertools.count[int]] = defaultdict(itertools.count)
        return [self._made[vector][next(places[vector])] for vector in vectors]

    def _free(self, needed: dict[Vector, int]) -> None:
        missing = sum(v.size_bytes * max(0, count - len(self._made[v])) for v, count in needed.items())
        for vector in list(self._made):
            while (
                self._made[vector][needed.get(vector, 0) :] and self._held_bytes + missing > self.most_bytes
            ):
                self._made[vector].pop()
                self._held_bytes -= vector.size_bytes


def _device_vector(vector: Vector, seed: int) -> Any:
    import jax

    dtype = jax.numpy.dtype(JAX_NAMES[vector.dtype])
    random = np.random.default_rng(seed)
    count = min(_PATTERN_ELEMENTS, vector.length)
    if dtype.kind == "b":
        values = random.integers(0, 2, count)
    elif dtype.kind in "iu":
        # XLA takes the last row for an index outside. Zeros and ones alone would have a gather read two rows, which
        # stay in the nearest cache.
        values = skewed_indices(random, min(_LARGEST_INDEX, np.iinfo(dtype).max) - 1, count)
    else:
        values = random.uniform(0.5, 1.5, count)
    with _x64():
        if vector.size_bytes < _MADE_ON_HOST_BYTES:
            return jax.device_put(np.resize(values.astype(dtype), vector.length))
        return _tiler(vector)(jax.device_put(values.astype(dtype)))


@functools.cache
def _tiler(vector: Vector) -> Any:
    """Makes a long vector of a short one on the device, which is quicker than to send it there."""
    import jax

    def tiled(values: Any) -> Any:
        return jax.numpy.tile(values, -(-vector.length // _PATTERN_ELEMENTS))[: vector.length]

    with _x64():
        short = jax.ShapeDtypeStruct((_PATTERN_ELEMENTS,), JAX_NAMES[vector.dtype])
        return jax.jit(tiled).lower(short).compile()


@dataclass(eq=False)
class PackCompiler:
    """Compiles packs while it is open; takes JAX's compiles over for as long (see ``jaxlink.install``)."""

    parallelism: int
    reuse_after_bytes: int
    held_bytes: int | None = None
    _waiting: dict[str, Pack] = field(default_factory=dict)
    _number: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        jaxlink.install(self._compile)
        return self

    def __exit__(self, *_: object) -> None:
        jaxlink.uninstall()

    def compile(self, kernels: Sequence[PackedKernel]) -> CompiledPack:
        """Compile a pack of ``kernels``.

        Raises:
            IllegalStrategyError: a kernel cannot stand in a pack, would read what was overwritten, or XLA refused one.
            UnsupportedError: JAX did not ask us to compile.
        """

        with self._lock:
            name = f"disco_pack_{next(self._number)}"
        made = pack(kernels, f"jit_{name}", self.parallelism, self.reuse_after_bytes, self.held_bytes)
        for vector in (*made.inputs, *made.outputs):
            if vector.dtype not in JAX_NAMES:
                raise IllegalStrategyError(
                    f"{vector.dtype} arrays cannot stand in a pack; expected one of {', '.join(JAX_NAMES)}"
                )
        for vector in made.inputs:
            if vector.size_bytes >= _MADE_ON_HOST_BYTES:
                _tiler(vector)
        self._waiting[f"jit_{name}"] = made
        try:
            with _x64():
                compiled = _carrier(made, name).compile()
        except _RefusedError as refusal:
            raise IllegalStrategyError(
                f"a pack of {len(kernels)} was refused: {refusal}"
            ) from refusal.__cause__
        if self._waiting.pop(f"jit_{name}", None) is not None:
            raise UnsupportedError(f"{name} was compiled past us: something else took over JAX's compiles")
        return CompiledPack(made, f"jit_{name}", compiled)

    def _compile(self, request: CompileRequest) -> LoadedExecutable | None:
        made = self._waiting.pop(request.module_name, None)
        if made is None:
            return None
        backend = backend_of(request.backend.platform)
        try:
            check_module(made.module, backend.name)
            return compiles.compile_module(request, made.module, backend.singly_options)
        except Exception as error:
            raise _RefusedError(str(error)) from error


def _x64() -> Any:
    """Packs hold 64-bit integers even where the user's program may not."""
    import jax

    return jax.enable_x64(True)


def _carrier(made: Pack, name: str) -> Any:
    """A lowered function of the pack's signature."""
    import jax

    def carrier(*_: Any) -> Any:
        return tuple(jax.numpy.zeros(vector.length, JAX_NAMES[vector.dtype]) for vector in made.outputs)

    carrier.__name__ = carrier.__qualname__ = name
    shapes = [jax.ShapeDtypeStruct((vector.length,), JAX_NAMES[vector.dtype]) for vector in made.inputs]
    return jax.jit(carrier, keep_unused=True).lower(*shapes)


class CompiledPack:
    """A pack ready to run."""

    def __init__(self, made: Pack, module_name: str, compiled: Any) -> None:
        self.pack = made
        self._module_name = module_name
        self._compiled = compiled
        self._turn = 0

    def measure(
        self,
        inputs: Inputs,
        sessions: int,
        repeats: int,
        seconds: float,
        alone: AbstractContextManager[object] | None = None,
    ) -> NDArray[np.int64]:
        """Nanoseconds of every kernel in every run, ``[kernels, runs]``; 0 where the trace lacks it.

        The runs are spread over ``sessions`` traces of ``repeats`` runs; fewer (but ``FEWEST_RUNS``)
        where they would take longer than ``seconds``. The device is used only inside ``alone``, which
        other processes that measure on it wait for.

        Raises:
            UnsupportedError: even those take far too long, or the trace lacks a run.
        """
        with alone or nullcontext():
            traces = self._traces(inputs.take(self.pack.inputs), sessions, repeats, seconds)
        return np.concatenate([self._times(taken, runs) for taken, runs in traces], axis=1)

    def _traces(
        self, arguments: Sequence[Any], sessions: int, repeats: int, seconds: float
    ) -> list[tuple[bytes, int]]:
        """Traces, and how many runs are in each."""
        self._run(arguments)
        started = time.perf_counter()
        self._run(arguments)
        once = max(time.perf_counter() - started, 1e-6)
        if FEWEST_RUNS * once > _PATIENCE * seconds:
            raise UnsupportedError(
                f"one run of {counted(len(self.pack.names), 'kernel')} takes {once:.1f} s, too long to repeat"
            )
        repeats = min(repeats, max(-(-FEWEST_RUNS // sessions), int(seconds / once) // sessions))
        return [
            (trace.collect(OwnTrace(), lambda: self._run(arguments), repeats), repeats)
            for _ in range(sessions)
        ]

    def outputs(self, inputs: Inputs) -> list[Any]:
        """Run once; the results of all kernels as vectors, in their order."""
        return self._run(inputs.take(self.pack.inputs))

    def _run(self, arguments: Sequence[Any]) -> list[Any]:
        import jax

        results = jax.block_until_ready(self._compiled(*self._rotated(arguments)))
        self._turn += 1
        return list(results)

    def _rotated(self, arguments: Sequence[Any]) -> list[Any]:
        """The inputs of each kind moved on by one place for every run before."""
        places: dict[Vector, list[int]] = defaultdict(list)
        for place, vector in enumerate(self.pack.inputs):
            places[vector].append(place)
        rotated = list(arguments)
        for same in places.values():
            for i, place in enumerate(same):
                rotated[place] = arguments[same[(i + self._turn) % len(same)]]
        return rotated

    def _times(self, xspace: bytes, repeats: int) -> NDArray[np.int64]:
        row = {name: i for i, name in enumerate(self.pack.names)}
        taken = trace.read(xspace)
        ours = [e for e in taken.executions if e.module == self._module_name and e.op in row]
        runs = {run: i for i, run in enumerate(sorted({e.run for e in ours}))}
        if len(runs) != repeats:
            raise UnsupportedError(
                f"the trace shows {len(runs)} of {counted(repeats, 'run')} of {self._module_name}"
            )
        times = np.zeros((len(row), repeats), np.int64)
        for execution in ours:
            times[row[execution.op], runs[execution.run]] += execution.end_ns - execution.start_ns
        return times


def load_per_core() -> float:
    """Processes that want to run, per core this process may use, over the last minute."""
    return os.getloadavg()[0] / len(own_cores())
