"""Times in a coarser unit than nanoseconds, for who computes with a cost model and a machine and knows one unit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.kernel_times import KernelTimes, TellsReadsApart
from disco_hlo.simulator.costs import CostModel, HoldsTransfers, LinearPieces, LinearTransfers, MachineModel


def coarse(model: CostModel, machine: MachineModel, unit_ns: int) -> tuple[CostModel, MachineModel]:
    """The same model and machine, all of whose times are in units of so many nanoseconds, rounded up."""
    if unit_ns == 1:
        return model, machine
    untyped: Any = model
    offered = (
        (KernelTimes, _CoarseKernels), (TellsReadsApart, _CoarseReads),
        (HoldsTransfers, _CoarseHolds), (LinearTransfers, _CoarseTransfers),
    )  # fmt: skip
    parts = [part for what, part in offered if isinstance(untyped, what)]
    made: CostModel = type("CoarseCosts", (*parts, _Coarse), {})(model, unit_ns)
    return made, replace(
        machine,
        launch_ns=-(-machine.launch_ns // unit_ns),
        transfer_wait_ns=machine.transfer_wait_ns // unit_ns,
        memory_bytes_per_us=machine.memory_bytes_per_us * unit_ns,
    )


class _Coarse:
    """What every cost model offers."""

    def __init__(self, model: Any, unit_ns: int) -> None:
        self.model, self.unit_ns = model, unit_ns

    def nodes_ns(self, graph: Graph) -> NDArray[np.int64]:
        return self._counted(self.model.nodes_ns(graph))

    def groups_ns(self, graph: Graph, groups: Any) -> NDArray[np.int64]:
        return self._counted(self.model.groups_ns(graph, groups))

    def all_reduce_ns(self, sizes_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._counted(self.model.all_reduce_ns(sizes_bytes))

    def _counted(self, times_ns: Any) -> NDArray[np.int64]:
        found: NDArray[np.int64] = -(-np.asarray(times_ns, np.int64) // self.unit_ns)
        return found


class _CoarseKernels(_Coarse):
    """See ``KernelTimes``."""

    def kernels_ns(self, graph: Graph, *kernels: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._counted(self.model.kernels_ns(graph, *kernels))


class _CoarseReads(_Coarse):
    """See ``TellsReadsApart``."""

    def read_classes(self, graph: Graph) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.model.read_classes(graph)
        return found


class _CoarseHolds(_Coarse):
    """See ``HoldsTransfers``."""

    def hold_shares(self, graph: Graph) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self.model.hold_shares(graph)
        return found


class _CoarseTransfers(_Coarse):
    """See ``LinearTransfers``."""

    @property
    def pieces(self) -> LinearPieces:
        own: LinearPieces = self.model.pieces
        return LinearPieces(
            own.from_bytes,
            tuple(slope / self.unit_ns for slope in own.ns_per_byte),
            tuple(fixed / self.unit_ns for fixed in own.fixed_ns),
        )
