"""Collectives inside loops and branches: no plan moves them, and no simulation has them."""

from __future__ import annotations

from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.opcodes import COLLECTIVES

_AROUND = ("while", "conditional")


def inner_collectives(index: ModuleIndex) -> int:
    """How many collectives the loops and branches of a module hold, each counted once however often it runs.

    Raises:
        ModuleError: a computation is called that there is not.
    """
    pending = [(index.module.entry_computation_id, False)]
    seen: set[tuple[int, bool]] = set()
    found = 0
    while pending:
        here = pending.pop()
        if here in seen:
            continue
        seen.add(here)
        computation, inside = here
        for instruction in index.computation(computation).instructions:
            found += inside and instruction.opcode.removesuffix("-start") in COLLECTIVES
            within = inside or instruction.opcode in _AROUND
            pending += [(called, within) for called in instruction.called_computation_ids]
    return found


def not_simulated(index: ModuleIndex) -> tuple[str, ...]:
    """One line on these collectives, for whoever reads predicted times; none where there are none."""
    count = inner_collectives(index)
    if not count:
        return ()
    lie = "collective lies" if count == 1 else "collectives lie"
    return (f"{count} {lie} inside loops or branches and {'is' if count == 1 else 'are'} not simulated",)
