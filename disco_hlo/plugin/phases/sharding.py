"""The advice to split the optimizer's state over the devices, on a captured step (CoCoNet, section 4).

The module says what the graph leaves out: which parameters every device holds whole, and which sums are over all
devices. What would be gained is computed in ``disco_hlo.search.sharding_advice``.
"""

from __future__ import annotations

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.proto import DetailedInstruction, DetailedModule, Message
from disco_hlo.plan.plan import Sharding
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plugin.logs import LEAST_GAIN, LOGGER, one_line
from disco_hlo.search.sharding_advice import sharding_advice
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.structure.groups import replicated_parameters, spans_all


def advice_for(
    source: CanonicalModule, strategy: Strategy, costs: CostModel, machine: MachineModel
) -> Sharding | None:
    """What the step, carried out by ``strategy``, would gain; None where it has no replicated state to split.

    It is no more than advice: whatever goes wrong costs one line in the log.
    """
    try:
        module = DetailedModule.FromString(source.module.SerializeToString())
        protos = [DetailedInstruction.FromString(proto.SerializeToString()) for proto in _sums(source)]
        pairs = zip(source.graph.all_reduces, protos, strict=True)
        return sharding_advice(
            source.graph,
            strategy,
            costs,
            machine,
            devices=module.device_assignment.computation_count,
            replicated=replicated_parameters(module),
            everywhere={node for node, proto in pairs if spans_all(module, proto)},
        )
    except Exception as error:
        LOGGER.warning("nothing can be said of sharding the optimizer's state: %s", one_line(error))
        return None


def worth_saying(advice: Sharding) -> bool:
    """Whether the advice gains something: time, by more than is no gain, or a MiB a device."""
    return advice.sharded_ns < (1 - LEAST_GAIN) * advice.step_ns or advice.saved_bytes >= 1 << 20


def _sums(source: CanonicalModule) -> list[Message]:
    return [source.protos[node] for node in source.graph.all_reduces]
