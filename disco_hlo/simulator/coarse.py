"""Times in a coarser unit than nanoseconds, for who computes with a cost model and a machine and knows one unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.collectives import CollectiveKind
from disco_hlo.hlo.cost_model import CostModel, Kernels, LinearPieces
from disco_hlo.hlo.graph import Graph
from disco_hlo.simulator.costs import MachineModel


def coarse(model: CostModel, machine: MachineModel, unit_ns: int) -> tuple[CostModel, MachineModel]:
    """The same model and machine, all of whose times are in units of so many nanoseconds, rounded up."""
    if unit_ns == 1:
        return model, machine
    return _Coarse(model, unit_ns), replace(
        machine,
        launch_ns=-(-machine.launch_ns // unit_ns),
        transfer_wait_ns=machine.transfer_wait_ns // unit_ns,
        memory_bytes_per_us=machine.memory_bytes_per_us * unit_ns,
    )


@dataclass(frozen=True, slots=True)
class _Coarse(CostModel):
    model: CostModel
    unit_ns: int

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        return self._counted(self.model.op_ns(graph))

    def kernels_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        return self._counted(self.model.kernels_ns(graph, kernels))

    def first_collective_ns(self, graph: Graph) -> Mapping[int, int]:
        return {node: -(-ns // self.unit_ns) for node, ns in self.model.first_collective_ns(graph).items()}

    def collective(self, kind: CollectiveKind) -> LinearPieces:
        return self.model.collective(kind).times(1 / self.unit_ns)

    def read_classes(self, graph: Graph) -> NDArray[np.int64]:
        return self.model.read_classes(graph)

    def hold_shares(self, graph: Graph) -> NDArray[np.float64]:
        return self.model.hold_shares(graph)

    def _counted(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-np.asarray(times_ns, np.int64) // self.unit_ns)
