"""A whole module around a new entry computation: what is still called, its schedule, what its outputs take over."""

from __future__ import annotations

from collections.abc import Sequence

from disco_hlo.hlo import proto as hlo_proto
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.proto import Message


def assembled(source: CanonicalModule, called: Sequence[Message], entry: Message) -> bytes:
    """The module of ``source`` with another entry computation, serialized.

    Args:
        called: new computations that the entry calls, each before what calls it.
        entry: the new entry; the order of its instructions is the module's schedule.
    """
    module = hlo_proto.Module()
    module.CopyFrom(source.module)
    retained = _retained(source, [*called, entry])
    old_entry_id = source.module.entry_computation_id
    kept = [c for c in source.module.computations if c.id in retained and c.id != old_entry_id]
    del module.computations[:]
    module.computations.extend([*kept, *called, entry])
    module.entry_computation_id = entry.id
    module.entry_computation_name = entry.name
    _schedule(module, [*called, entry], retained)
    dropped = set(source.dropped_aliases)
    aliases = [
        alias
        for alias in module.input_output_alias.entries
        if (alias.parameter_number, (*alias.output_shape_index, 0)[0]) not in dropped
    ]
    del module.input_output_alias.entries[:]
    module.input_output_alias.entries.extend(aliases)
    return hlo_proto.serialize(module)


def _retained(source: CanonicalModule, new: Sequence[Message]) -> set[int]:
    """Ids of the source's computations that are still called."""
    known = source.index.by_id
    pending = [i for computation in new for i in _calls(computation)]
    found: set[int] = set()
    while pending:
        computation_id = pending.pop()
        if computation_id in found or computation_id not in known:
            continue
        found.add(computation_id)
        pending += _calls(known[computation_id])
    return found


def _calls(computation: Message) -> list[int]:
    return [i for instruction in computation.instructions for i in instruction.called_computation_ids]


def _schedule(module: Message, new: Sequence[Message], retained: set[int]) -> None:
    """The order in which each computation that is no kernel runs: as it was, or as it was written."""
    kept = {
        key: list(sequence.instruction_ids)
        for key, sequence in module.schedule.sequences.items()
        if key in retained
    }
    module.schedule.sequences.clear()
    for computation in new:
        if not computation.is_fusion_computation:
            kept[computation.id] = [instruction.id for instruction in computation.instructions]
    for key, ids in kept.items():
        module.schedule.sequences[key].instruction_ids.extend(ids)
