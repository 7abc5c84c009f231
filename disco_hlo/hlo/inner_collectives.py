"""Collectives inside loops and branches that are no regions: no plan moves them, and no simulation has them."""

from __future__ import annotations

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.regions import regions_called


def inner_collectives(source: CanonicalModule) -> int:
    """How many collectives lie in computations that stay as XLA compiled them, each counted once however often it runs.

    Raises:
        ModuleError: a computation is called that there is not.
    """
    regions = {one.computation for region in source.regions for one in region.sources}
    pending = [(source.computation, False)]
    seen: set[tuple[int, bool]] = set()
    found = 0
    while pending:
        here = pending.pop()
        if here in seen:
            continue
        seen.add(here)
        computation, is_closed = here
        for instruction in source.index.computation(computation).instructions:
            found += is_closed and instruction.opcode.removesuffix("-start") in COLLECTIVES
            scheduled = {called for _, called in regions_called(instruction)}
            pending += [
                (called, called not in regions if called in scheduled else is_closed)
                for called in instruction.called_computation_ids
            ]
    return found


def not_simulated(source: CanonicalModule) -> tuple[str, ...]:
    """One line on these collectives, for whoever reads predicted times; none where there are none."""
    count = inner_collectives(source)
    if not count:
        return ()
    lie = "collective lies" if count == 1 else "collectives lie"
    are = "is" if count == 1 else "are"
    return (f"{count} {lie} in loops or branches that stay as XLA compiled them, and {are} not simulated",)
