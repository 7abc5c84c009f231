"""A step whose structure is changed before XLA lays out, fuses and orders it (CoCoNet, section 3).

The hook's early stage shows the step of one device with every collective and every op by itself. Moves (splitting,
reordering, chunking: ``disco_hlo.structure``) make another module of it, XLA compiles that, and what it makes is a
step like any other: canonical graph, kernels, buckets and order are read, searched and written as ever.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from disco_hlo.backends import BACKENDS, backend_of
from disco_hlo.elsewhere import Run, here
from disco_hlo.errors import IllegalMoveError, PlanError, UnsupportedError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.hlo.opcodes import COLLECTIVE, PRODUCTS
from disco_hlo.kernels.fuse import KERNEL_SCHEDULES, Pays, fuse, kernel_schedules
from disco_hlo.kernels.refusals import refuse_machine
from disco_hlo.optimize.pipeline import Case
from disco_hlo.optimize.regions import StepTimes
from disco_hlo.plan import plan as plans
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.compiles import Halted
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.structure.moves import Fuse, Move, Widen, apply_moves, from_json, to_json
from disco_hlo.structure.program import Program
from disco_hlo.structure.propose import schedules
from disco_hlo.structure.propose_loops import FLOAT32_SUMS
from disco_hlo.structure.widen import is_coarse_sum

EXPOSED_SHARE = 0.03
"""Share of a step that its communication must leave exposed before any structure is tried."""
INSIDE_SHARE = 0.02
"""Share of a step's op time that must lie between transfers; a data-parallel step has none there."""
KEEPS = "keep"
"""With this begin the names of schedules that keep what is computed twice."""
GAIN_ALONE = (KEEPS, FLOAT32_SUMS)
"""With these begin the names of schedules that gain where nothing communicates, too."""
_RECOMPUTED = "rematted_computation"
"""In the names of ops that ``jax.checkpoint`` computes again."""


@dataclass(frozen=True)
class Early:
    """The step at the hook's early stage."""

    module: bytes = field(repr=False)
    key: str
    """Of its canonical graph."""
    copies: bool
    """Whether XLA inserted its copies before that stage."""
    devices: tuple[Any, ...]
    """On which it runs."""
    in_float32: bool = True
    """Whether what it adds up in 16 bits may be added up in float32."""
    run: Run = here
    """Calls what takes Python long and needs no device."""

    @functools.cached_property
    def schedules(self) -> Mapping[str, tuple[Move, ...]]:
        """By name, as of :func:`~disco_hlo.structure.propose.schedules`; of thousands of ops that takes seconds."""
        return self.run(schedules, self.module, copies=self.copies, in_float32=self.in_float32)

    def moved(self, moves: Sequence[dict[str, Any]]) -> bytes:
        """The module after moves.

        Raises:
            IllegalMoveError: a move does not fit.
            PlanError: ``moves`` are none.
        """
        read = from_json(list(moves))
        if not self.in_float32 and any(isinstance(move, Widen) for move in read):
            raise IllegalMoveError(
                "sums in float32: xla_allow_excess_precision is off, so XLA keeps to 16 bits"
            )
        if any(isinstance(move, Fuse) for move in read):
            return apply_moves(self.module, read, copies=self.copies, fuser=self._fuse)
        return self.run(apply_moves, self.module, read, copies=self.copies)

    def _fuse(self, program: Program, move: Fuse) -> None:
        """Put in kernels, which the step's devices must be able to run."""
        if reason := no_kernel_runs(self):
            raise IllegalMoveError(reason)
        from disco_hlo.kernels.lowering import lowered

        fuse(program, move, lowered)


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
    whole: Early = field(repr=False)
    """The step before the moves."""

    def with_finer_sums(self) -> bytes | None:
        """The early module after those of the moves alone that add up in float32 what is added up in 16 bits; None
        where there are none. They come first, so they fit without the others."""
        made = self.record.moves
        finer = [
            one for one, move in zip(made, from_json(list(made)), strict=True) if isinstance(move, Widen)
        ]
        return self.whole.moved(finer) if finer else None


def early_module(request: CompileRequest, run: Run = here) -> Early:
    """The step that moves are made on.

    Args:
        run: as :attr:`Early.run`.

    Raises:
        UnsupportedError: this jax has no early stage.
        ModuleError: the module cannot be read.
    """
    return early_of(request, compiles.capture_structure(request), run)


def early_of(request: CompileRequest, module: bytes, run: Run = here) -> Early:
    """As :func:`early_module`, of what was captured."""
    key, copies = run(canonicalize, module).graph.key, backend_of(request.backend.platform).copies_early
    return Early(module, key, copies, request.devices, compiles.may_compute_finer(request), run)


def named_schedules(
    early: Early, asked: Collection[str] = (), pays: Pays | None = None
) -> dict[str, list[dict[str, Any]]]:
    """The schedules that this step has the pattern for, as JSON, without the one that changes nothing. Fused kernels
    take every pair where their schedule is ``asked`` for by name, else those that they pay for."""
    found = dict(early.schedules)
    kernels = KERNEL_SCHEDULES.keys() & set(asked)
    if (kernels or pays) and not no_kernel_runs(early):
        # JAX's kernels take a second to import, and an older jax has none.
        from disco_hlo.kernels.lowering import lowered

        takes = pays if pays and not kernels else lambda *_: True
        fused = kernel_schedules(early.module, found, copies=early.copies, lower=lowered, pays=takes)
        found |= {name: moves for name, moves in fused.items() if name in kernels or not kernels}
    return {name: to_json(moves) for name, moves in found.items() if moves}


def no_kernel_runs(early: Early) -> str:
    """Why no fused kernel runs on the step's devices, as one line; empty where they do."""
    try:
        refuse_machine(early.devices)
    except UnsupportedError as error:
        return str(error)
    except OSError as error:  # no driver to ask
        return f"no fused kernel: {one_line(error)}"
    return ""


def restructured(
    early: Early, name: str, moves: Sequence[dict[str, Any]], compiled: Callable[[bytes], bytes]
) -> Restructured:
    """The step after ``moves``.

    Args:
        compiled: gives what XLA makes of an early module (:func:`compiles.capture`).

    Raises:
        IllegalMoveError: a move does not fit.
        PlanError: ``moves`` are none.
        IllegalStrategyError: XLA refuses what they make.
    """
    changed = moved(early, name, moves)
    return of_module(early, name, moves, changed, compiled(changed))


def moved(early: Early, name: str, moves: Sequence[dict[str, Any]]) -> bytes:
    """The early module after ``moves``, which change it; raises as :func:`restructured`."""
    changed = early.moved(moves)
    if changed == early.module:
        raise IllegalMoveError(f"the schedule {name} changes nothing")
    return changed


def of_module(
    early: Early, name: str, moves: Sequence[dict[str, Any]], changed: bytes, module: bytes
) -> Restructured:
    """The step after ``moves``, which make an early module ``changed``, of which XLA makes ``module``. Raises
    IllegalMoveError: XLA would compile it and compute wrongly."""
    source = early.run(canonicalize, module)
    refuse_unsupported(source)
    record = plans.Structure(name, early.key, source.graph.key, tuple(moves))
    return Restructured(changed, module, source, record, early)


def refuse_unsupported(source: CanonicalModule) -> None:
    """Refuse what XLA would compile and compute wrongly.

    XLA:CPU puts the parts of an all-gather one behind the other, and cuts those of a reduce-scatter so: the
    dimension must be the outermost in memory. XLA's own layout assignment sees to that, but comes before.

    Raises:
        IllegalMoveError: naming the collective.
    """
    graph = source.graph
    for node in graph.nodes if BACKENDS[graph.backend].gathers_outermost_only else ():
        if node.opcode not in COLLECTIVE or not COLLECTIVE[node.opcode].along or not node.shape.layout:
            continue
        outside = node.shape.layout[node.shape.layout.index(node.dimensions[0]) + 1 :]
        if any(node.shape.dims[dimension] > 1 for dimension in outside):
            raise IllegalMoveError(
                f"{node.name} ({node.opcode}): dimension {node.dimensions[0]} of {node.shape} is not the outermost "
                "in memory, where alone XLA:CPU gathers and scatters"
            )


def enacted(
    request: CompileRequest,
    structure: plans.Structure,
    waiting: Halted,
    together: contextlib.AbstractContextManager[object] | None = None,
) -> Restructured:
    """This step restructured as a plan says, in a compile that waits for it from its early stage on.

    Args:
        together: around what comes before XLA's autotuner, in which a rank waits for all others.

    Raises:
        PlanError: the moves are for another step, or XLA makes something else of them here.
        IllegalMoveError: a move does not fit.
        IllegalStrategyError: XLA refuses what they make.
    """
    with together or contextlib.nullcontext():
        early = early_of(request, waiting.early_module())
        if early.key != structure.key:
            raise PlanError(
                f"the plan's moves were made for another step: early module {structure.key[:16]}, this is "
                f"{early.key[:16]}; search again"
            )
        changed = early.moved(structure.moves)
    found = of_module(early, structure.name, structure.moves, changed, waiting.restructured(changed))
    if found.record.result != structure.result:
        raise PlanError(
            f"XLA makes another step of the plan's moves ({structure.name}) than when it was searched: "
            f"{found.record.result[:16]}, expected {structure.result[:16]}; search again"
        )
    return found


def why_not(case: Case, times: StepTimes) -> str:
    """Why no other structure of a step is tried, as a sentence's end; empty where one is.

    Args:
        times: of the step as it would be executed without.
    """
    if gains_alone(case.source):
        return ""
    graph, costs = case.source.graph, case.costs
    if not costs.machine.asynchronous:
        return "collectives block on this device, so nothing can overlap them"
    if works_in_loops(case.source):
        return ""
    exposed = times.exposed_ns / max(1, times.makespan_ns)
    if exposed < EXPOSED_SHARE:
        return f"the plan leaves {exposed:.1%} of the step to communication alone"
    nodes_ns = [int(ns) for ns in costs.op_ns(graph)]
    if not lies_inside(case.source, nodes_ns):
        return f"only {inside_share(graph, nodes_ns):.1%} of the ops' time lies between transfers"
    return ""


def gains_alone(source: CanonicalModule) -> bool:
    """Whether a step's backward pass computes again what the forward pass has computed, or adds up rows in 16 bits."""
    return any(
        _RECOMPUTED in one.metadata.op_name or is_coarse_sum(one)
        for inside in source.module.computations
        for one in inside.instructions
    )


def lies_inside(source: CanonicalModule, weights: Sequence[int]) -> bool:
    """Whether a step's communication lies inside of what it computes: in loops, or between ops that weigh something."""
    graph = source.graph
    if works_in_loops(source) or len(graph.collectives) < 2:
        return True
    return inside_share(graph, weights) >= INSIDE_SHARE


def works_in_loops(source: CanonicalModule) -> bool:
    """Whether a loop of a step, or what it calls, communicates or multiplies. Written out, it may have less to copy and
    to compute, too."""
    return any(
        node.kind is Kind.COLLECTIVE or node.opcode in PRODUCTS
        for region in source.regions
        for node in region.source.graph.nodes
    )


def inside_share(graph: Graph, weights: Sequence[int]) -> float:
    """Share of the ops' weight (their time, say) in ops that wait for one transfer and that another waits for."""
    after = [False] * len(graph)
    for node in graph.nodes:
        after[node.id] = any(after[x] or graph.nodes[x].kind is Kind.COLLECTIVE for x in node.operands)
    before = [False] * len(graph)
    for node in reversed(graph.nodes):
        users = graph.users[node.id]
        before[node.id] = any(before[x] or graph.nodes[x].kind is Kind.COLLECTIVE for x in users)
    inside = sum(weight for weight, a, b in zip(weights, after, before, strict=True) if a and b)
    return inside / max(1, sum(weights))
