"""A whole module with some computations written anew: what is still called, its schedule, its donated arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from disco_hlo.hlo import proto as hlo_proto
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.proto import Message


def assembled(source: CanonicalModule, written: Sequence[Message]) -> bytes:
    """The module of ``source``, serialized, with these computations: those that it has by the same id, and new ones.

    The order of their instructions is the module's schedule.
    """
    module = hlo_proto.Module()
    module.CopyFrom(source.module)
    new = {computation.id: computation for computation in written}
    called = _callees_first(module.entry_computation_id, {**source.index.by_id, **new})
    del module.computations[:]
    module.computations.extend(called)
    module.schedule.sequences.clear()
    for computation in called:
        if computation.id in new:
            scheduled = not computation.is_fusion_computation
            ids = [instruction.id for instruction in computation.instructions] if scheduled else []
        else:
            ids = _scheduled(source.module, computation.id)
        if ids:
            module.schedule.sequences[computation.id].instruction_ids.extend(ids)
    dropped = set(source.dropped_aliases)
    aliases = [
        alias
        for alias in module.input_output_alias.entries
        if (alias.parameter_number, (*alias.output_shape_index, 0)[0]) not in dropped
    ]
    del module.input_output_alias.entries[:]
    module.input_output_alias.entries.extend(aliases)
    return hlo_proto.serialize(module)


def _scheduled(module: Message, computation: int) -> list[int]:
    sequences = module.schedule.sequences
    return list(sequences[computation].instruction_ids) if computation in sequences else []


def _callees_first(entry: int, by_id: Mapping[int, Message]) -> list[Message]:
    """The computations that run, each after those that it calls, as XLA wants them."""
    found: dict[int, Message] = {}
    pending = [(entry, False)]
    while pending:
        here, are_callees_found = pending.pop()
        if here in found:
            continue
        if are_callees_found:
            found[here] = by_id[here]
            continue
        pending.append((here, True))
        calls = (i for instruction in by_id[here].instructions for i in instruction.called_computation_ids)
        pending += [(called, False) for called in calls if called not in found]
    return list(found.values())
