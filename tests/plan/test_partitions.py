"""The tasks XLA:CPU splits a kernel into (what XLA itself assigns is checked in test_apply)."""

from __future__ import annotations

import pytest

from disco_hlo.hlo.graph import Shape
from disco_hlo.plan.writer import KernelWork, outer_partitions, task_count


def matrix(rows: int, columns: int) -> Shape:
    return Shape("f32", (rows, columns), (1, 0))


def work(shape: Shape, flops: int, bytes_accessed: int) -> KernelWork:
    return KernelWork(shape, flops, 0, bytes_accessed)


@pytest.mark.parametrize(
    ("shape", "threads", "tasks"),
    [
        (matrix(64, 64), 16, 1),  # 16 KiB of output: less than one L2 cache
        (matrix(256, 512), 16, 2),  # 512 KiB: two
        (matrix(4096, 4096), 16, 4),  # memory-bound kernels stop at the root of the threads
        (matrix(4096, 4096), 2, 2),
    ],
)
def test_memory_bound_kernels_go_by_their_output(shape: Shape, threads: int, tasks: int) -> None:
    assert task_count(work(shape, 0, 2 * shape.size_bytes), threads) == tasks


def test_compute_bound_kernels_go_by_their_work() -> None:
    assert task_count(work(matrix(8, 8), 1_000_000, 512), 16) == 10
    assert task_count(work(matrix(8, 8), 10_000_000, 512), 16) == 16


@pytest.mark.parametrize(
    ("shape", "tasks", "counts"),
    [
        (matrix(64, 64), 1, ()),
        (matrix(64, 64), 4, (4,)),
        (matrix(2, 64), 4, (2, 2)),
        (matrix(1, 64), 4, (1, 4)),
        (Shape("f32"), 4, ()),
        (Shape("f32", (64, 8), (0, 1)), 4, (4,)),  # the outermost dimension in memory is the second
    ],
)
def test_partitions_are_cut_from_the_outermost_dimensions(
    shape: Shape, tasks: int, counts: tuple[int, ...]
) -> None:
    assert outer_partitions(shape, tasks) == counts
