"""All fused kernels side by side: how their arrays lie on a mesh, what they replace, what they are tuned over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from disco_hlo.kernels import adam, embedding, gather_matmul, lamb, matvec, norm, reduce_matmul

AXIS = "x"
"""The axis of the meshes here."""

ROWS, COLUMNS, WHOLE = PartitionSpec(AXIS), PartitionSpec(None, AXIS), PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Fused:
    """A kernel and what it replaces.

    Attributes:
        kernel: arrays of one device, name of the axis, tiles -> arrays of one device.
        reference: the same by XLA's separate operations, without tiles.
        arguments, results: how the global arrays lie on the mesh.
        tuning: the tiles worth trying, the likeliest first.
        has_order: whether its tiles have `remote_first`.
    """

    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: tuple[Any, ...]
    results: Any
    tuning: tuple[Any, ...]
    has_order: bool = True

    def fused(self, mesh: jax.sharding.Mesh, chosen: Any) -> Callable[..., Any]:
        """The kernel over global arrays, compiled on first call."""
        return self._compiled(mesh, lambda *arrays: self.kernel(*arrays, AXIS, chosen))

    def separate(self, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
        """What it replaces, over the same arrays."""
        return self._compiled(mesh, lambda *arrays: self.reference(*arrays, AXIS))

    def _compiled(self, mesh: jax.sharding.Mesh, local: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=self.arguments, out_specs=self.results, check_vma=False)
        )


FUSED: dict[str, Fused] = {
    "all-gather-matmul": Fused(
        gather_matmul.all_gather_matmul,
        gather_matmul.reference,
        (ROWS, COLUMNS),
        COLUMNS,
        gather_matmul.RANGE,
        has_order=False,
    ),
    "matmul-reduce-scatter": Fused(
        reduce_matmul.matmul_reduce_scatter,
        reduce_matmul.scatter_reference,
        (COLUMNS, ROWS),
        ROWS,
        reduce_matmul.RANGE,
    ),
    "matmul-all-reduce": Fused(
        reduce_matmul.matmul_all_reduce,
        reduce_matmul.all_reduce_reference,
        (COLUMNS, ROWS),
        WHOLE,
        reduce_matmul.RANGE,
    ),
    "matmul-all-to-all": Fused(
        reduce_matmul.matmul_all_to_all,
        reduce_matmul.exchange_reference,
        (ROWS, ROWS),
        ROWS,
        reduce_matmul.RANGE,
    ),
    "matvec-all-reduce": Fused(
        matvec.matvec_all_reduce,
        matvec.reference,
        (COLUMNS, ROWS),
        WHOLE,
        matvec.RANGE,
        has_order=False,
    ),
    "embedding-all-to-all": Fused(
        embedding.embedding_bag_all_to_all,
        embedding.reference,
        (ROWS, ROWS),
        ROWS,
        embedding.RANGE,
    ),
    "all-reduce-norm": Fused(
        norm.all_reduce_norm,
        norm.reference,
        (ROWS, WHOLE, WHOLE, WHOLE),
        WHOLE,
        norm.RANGE,
        has_order=False,
    ),
    "adam": Fused(
        adam.adam_update,
        adam.reference,
        (ROWS, WHOLE, (ROWS, ROWS), WHOLE),
        (WHOLE, ROWS, ROWS),
        adam.RANGE,
        has_order=False,
    ),
    "lamb": Fused(
        lamb.lamb_update,
        lamb.reference,
        (ROWS, WHOLE, (ROWS, ROWS), WHOLE),
        (WHOLE, ROWS, ROWS),
        lamb.RANGE,
        has_order=False,
    ),
}
