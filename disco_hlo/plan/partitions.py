"""How many tasks XLA:CPU splits a kernel into.

On CPU a fusion runs on as many threads as its ``outer_dimension_partitions`` say, and the pass that
assigns them has run before our hook. So kernels that we write get the partitions that the pass would
have given them (parallel_task_assignment.cc, shape_partition.cc).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from disco_hlo.hlo.graph import Shape

_BYTES_PER_TASK = 256 << 10
"""A memory-bound task should have at least an L2 cache full of output."""
_CYCLES_PER_TASK = 100_000
"""A compute-bound task should have about 100 microseconds of work."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What the task count of a kernel depends on."""

    result: Shape
    flops: int
    transcendentals: int
    bytes_accessed: int


def task_count(work: KernelWork, parallelism: int) -> int:
    """Tasks XLA:CPU aims at for a kernel on ``parallelism`` threads."""
    if work.flops <= work.bytes_accessed:
        most = min(parallelism, math.ceil(math.sqrt(parallelism)))
        return max(1, min(most, work.result.size_bytes // _BYTES_PER_TASK))
    cycles = work.flops + 2 * work.transcendentals + 10 * work.bytes_accessed
    return max(1, min(parallelism, cycles // _CYCLES_PER_TASK))


def outer_partitions(shape: Shape, tasks: int) -> tuple[int, ...]:
    """Partition counts of the outermost dimensions (major to minor) for about ``tasks`` tasks.

    Empty where the kernel stays whole. Whole outer dimensions are taken until they hold enough
    iterations; the last one taken is then cut so that the product comes close to ``tasks``.
    """
    if tasks <= 1 or not shape.dims:
        return ()
    outer: list[int] = []
    available = 1
    for dimension in reversed(shape.layout):
        outer.append(shape.dims[dimension])
        available *= outer[-1]
        if available >= tasks:
            break
    tasks = min(tasks, available)
    per_dimension = int(tasks ** (1.0 / len(outer)))
    if per_dimension == 0:
        return ()
    counts = [min(extent, per_dimension) for extent in outer]
    if math.prod(counts) < tasks:
        for i, extent in enumerate(outer):
            others = math.prod(counts) // counts[i]
            grown = min(extent, tasks // others)
            if grown > counts[i]:
                counts[i] = grown
                break
    return tuple(counts) if math.prod(counts) > 1 else ()
