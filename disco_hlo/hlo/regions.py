"""The regions of a step: the computations that XLA schedules, and the collectives that lie in none of them.

A step is more than its entry. Each loop body, each branch of a conditional and each called computation has a schedule
of its own, so each can have its own kernels, buckets and order. A loop costs its caller as many executions of the body
as it has trips. What stays as XLA compiled it is no region: no plan moves its collectives, and no simulation has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disco_hlo.hlo.attributes import backend_config
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.opcodes import COLLECTIVE, COLLECTIVES
from disco_hlo.hlo.proto import Message
from disco_hlo.hlo.walks import needed_first, reached

if TYPE_CHECKING:
    from disco_hlo.hlo.canonical import CanonicalModule


ENTRY = "entry"
"""Name of the region that every step has: its entry computation."""
_DIGITS = 19
"""XLA counts the turns of a loop in 64 bits."""


@dataclass(frozen=True, slots=True)
class Call:
    """One op that runs a region."""

    caller: str
    """Name of the region that the op is in."""
    node: int
    """The op there."""
    trips: int | None
    """How often it runs the region; None where only a measurement can tell."""


@dataclass(frozen=True)
class Region:
    """A loop body, branch or called computation in canonical form."""

    name: str
    """``loop1``, ``branch2`` or ``call3``: numbered in the order in which the step's ops call them."""
    calls: tuple[Call, ...]
    """The ops that run it: all those whose computations are alike."""
    sources: tuple[CanonicalModule, ...]
    """The computations, which are alike: one strategy fits all of them."""

    @property
    def source(self) -> CanonicalModule:
        """The first of the computations."""
        return self.sources[0]


def regions_called(instruction: Message) -> list[tuple[str, int]]:
    """The computations that an instruction runs by their own schedules: what they are (``loop``, ``branch``, ``call``)
    and their ids. The condition of a loop holds no time and is none of them."""
    called = instruction.called_computation_ids
    if instruction.opcode == "while":
        return [("loop", called[0])]
    if instruction.opcode == "conditional":
        return [("branch", one) for one in called]
    return [("call", one) for one in called] if instruction.opcode == "call" else []


def scheduled_computations(index: ModuleIndex) -> list[tuple[int, str]]:
    """Ids of the computations that run by their own schedules and what they are, each after those that it calls; the
    entry last. What is called in two ways is a branch."""
    entry = index.module.entry_computation_id
    kinds = {entry: ENTRY}

    def called(here: int) -> Iterator[int]:
        found = [
            one for instruction in index.computation(here).instructions for one in regions_called(instruction)
        ]
        for kind, computation in found:
            kinds[computation] = kind if kinds.get(computation, kind) == kind else "branch"
        return (computation for _, computation in reversed(found))

    return [(here, kinds[here]) for here in needed_first([entry], called)]


def trip_count(instruction: Message) -> int | None:
    """How often an op runs what it calls; None where that is not known before it runs.

    Branches count once each: which of them runs is not known either.
    """
    if instruction.opcode != "while":
        return 1
    known = backend_config(instruction).get("known_trip_count")
    count = known.get("n") if isinstance(known, dict) else None
    return int(count) if isinstance(count, str) and count.isdecimal() and len(count) <= _DIGITS else None


def inner_collectives(source: CanonicalModule) -> int:
    """How many collectives lie in computations that stay as XLA compiled them, each counted once however often it runs.

    Raises:
        ModuleError: a computation is called that there is not.
    """
    regions = {one.computation for region in source.regions for one in region.sources}

    def called(here: tuple[int, bool]) -> Iterator[tuple[int, bool]]:
        computation, is_closed = here
        for instruction in source.index.computation(computation).instructions:
            scheduled = {one for _, one in regions_called(instruction)}
            for one in instruction.called_computation_ids:
                yield one, one not in regions if one in scheduled else is_closed

    return sum(
        instruction.opcode.removesuffix("-start") in COLLECTIVES
        for computation, is_closed in reached([(source.computation, False)], called)
        for instruction in (source.index.computation(computation).instructions if is_closed else ())
    )


def reducing_kernels(source: CanonicalModule) -> int:
    """How many all-reduces and reduce-scatters are kernels that XLA compiles itself, as small ones are on the GPUs of
    one process: a plan moves the kernel, and no bucket holds it.

    Raises:
        ModuleError: a computation is called that there is not.
    """

    def called(here: tuple[int, bool]) -> Iterator[tuple[int, bool]]:
        computation, is_kernel = here
        for instruction in source.index.computation(computation).instructions:
            for one in instruction.called_computation_ids:
                yield one, is_kernel or instruction.opcode == "fusion"

    return sum(
        instruction.opcode in COLLECTIVES and COLLECTIVE[instruction.opcode].reduces
        for computation, is_kernel in reached([(source.computation, False)], called)
        for instruction in (source.index.computation(computation).instructions if is_kernel else ())
    )


def not_simulated(source: CanonicalModule) -> tuple[str, ...]:
    """One line on these collectives, for whoever reads predicted times; none where there are none."""
    count = inner_collectives(source)
    if not count:
        return ()
    lie = "collective lies" if count == 1 else "collectives lie"
    are = "is" if count == 1 else "are"
    return (f"{count} {lie} in loops or branches that stay as XLA compiled them, and {are} not simulated",)
