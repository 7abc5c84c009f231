"""A step whose structure is changed before XLA lays out, fuses and orders it (CoCoNet, section 3).

The hook's early stage shows the step of one device with every collective and every op by itself. Moves (splitting,
reordering, chunking: ``disco_hlo.structure``) make another module of it, XLA compiles that, and what it makes is a
step like any other: canonical graph, kernels, buckets and order are read, searched and written as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from disco_hlo.backends import BACKENDS, backend_of
from disco_hlo.errors import IllegalMoveError, PlanError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plan import plan as plans
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.structure.moves import apply_moves, from_json, to_json
from disco_hlo.structure.propose import schedules


@dataclass(frozen=True)
class Early:
    """The step at the hook's early stage."""

    module: bytes = field(repr=False)
    key: str
    """Of its canonical graph."""
    copies: bool
    """Whether XLA inserted its copies before that stage."""

    def moved(self, moves: Sequence[dict[str, Any]]) -> bytes:
        """The module after moves.

        Raises:
            IllegalMoveError: a move does not fit.
            PlanError: ``moves`` are none.
        """
        return apply_moves(self.module, from_json(list(moves)), copies=self.copies)


@dataclass(frozen=True)
class Restructured:
    """The step after some moves, and what XLA makes of it."""

    early: bytes = field(repr=False)
    """The early module after the moves."""
    module: bytes = field(repr=False)
    """What XLA would run: scheduled."""
    source: CanonicalModule = field(repr=False)
    """The same in canonical form."""
    record: plans.Structure
    """What a plan says of it."""


def early_module(request: CompileRequest) -> Early:
    """The step that moves are made on.

    Raises:
        UnsupportedError: this jax has no early stage.
        ModuleError: the module cannot be read.
    """
    module = compiles.capture_structure(request)
    return Early(module, canonicalize(module).graph.key, backend_of(request.backend.platform).copies_early)


def named_schedules(early: Early) -> dict[str, list[dict[str, Any]]]:
    """The schedules that this step has the pattern for, as JSON, without the one that changes nothing."""
    found = schedules(early.module, copies=early.copies)
    return {name: to_json(moves) for name, moves in found.items() if moves}


def restructured(
    request: CompileRequest, early: Early, name: str, moves: Sequence[dict[str, Any]]
) -> Restructured:
    """The step after ``moves``.

    Raises:
        IllegalMoveError: a move does not fit.
        PlanError: ``moves`` are none.
        IllegalStrategyError: XLA refuses what they make.
    """
    changed = early.moved(moves)
    if changed == early.module:
        raise IllegalMoveError(f"the schedule {name} changes nothing")
    module = compiles.capture(request, changed)
    source = canonicalize(module)
    refuse_unsupported(source)
    record = plans.Structure(name, early.key, source.graph.key, tuple(moves))
    return Restructured(changed, module, source, record)


def refuse_unsupported(source: CanonicalModule) -> None:
    """Refuse what XLA would compile and compute wrongly.

    XLA:CPU puts the parts of an all-gather one behind the other, and cuts those of a reduce-scatter so: the
    dimension must be the outermost in memory. XLA's own layout assignment sees to that, but comes before.

    Raises:
        IllegalMoveError: naming the collective.
    """
    graph = source.graph
    for node in graph.nodes if BACKENDS[graph.backend].gathers_outermost_only else ():
        if node.opcode not in ("all-gather", "reduce-scatter") or not node.shape.layout:
            continue
        outside = node.shape.layout[node.shape.layout.index(node.dimensions[0]) + 1 :]
        if any(node.shape.dims[dimension] > 1 for dimension in outside):
            raise IllegalMoveError(
                f"{node.name} ({node.opcode}): dimension {node.dimensions[0]} of {node.shape} is not the outermost "
                "in memory, where alone XLA:CPU gathers and scatters"
            )


def enacted(request: CompileRequest, structure: plans.Structure) -> Restructured:
    """This step restructured as a plan says.

    Raises:
        PlanError: the moves are for another step, or XLA makes something else of them here.
        IllegalMoveError: a move does not fit.
        IllegalStrategyError: XLA refuses what they make.
    """
    early = early_module(request)
    if early.key != structure.key:
        raise PlanError(
            f"the plan's moves were made for another step: early module {structure.key[:16]}, this is "
            f"{early.key[:16]}; search again"
        )
    found = restructured(request, early, structure.name, structure.moves)
    if found.record.result != structure.result:
        raise PlanError(
            f"XLA makes another step of the plan's moves ({structure.name}) than when it was searched: "
            f"{found.record.result[:16]}, expected {structure.result[:16]}; search again"
        )
    return found
