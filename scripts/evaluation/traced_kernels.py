"""What kernels and transfers of a row took in its trace, and what each cost the other (DisCo assumes: nothing).

A row's kernels are known by the ops that they compute, so rows of one cell can be held against each other: XLA's
default against the same kernels in another order, or with nothing beside them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.units import UnitGraph, unit_graph
from disco_hlo.profiler.intervals import Interval, covered_ns, merged
from disco_hlo.profiler.trace import Execution, Trace
from disco_hlo.profiler.transfers import UNIT, by_place, is_transfer

TRANSFER = "transfer"
KINDS = ("while", "custom-call", "convolution", "dot", "scatter", "gather", "sort", "reduce")
"""What a kernel is called by, the first that it holds; others compute element by element."""
ELEMENTWISE = "element by element"
_AT_ITS_END_NS = 3_000
"""A transfer that begins so shortly behind the end of a kernel was waiting for it."""
_WAITS_NS = 5_000


@dataclass(frozen=True, slots=True)
class Piece:
    """A kernel or transfer of a row: medians over the runs and devices of a trace, of a transfer over the runs of
    what it took on the device that came last."""

    nodes: tuple[int, ...]
    """That it computes, ascending: which kernel it is, in whatever row."""
    what: str
    """:data:`TRANSFER`, one of :data:`KINDS` or :data:`ELEMENTWISE`."""
    length_ns: int
    shared_ns: int
    """How much of it had something of the other kind beside it."""
    waited_ns: int = 0
    """Of a transfer: behind the kernels that were started before it, and the transfer before it."""
    behind: str = ""
    """And what it waited for: the kind of the kernel at whose end it began, where it began at one's end."""


@dataclass(frozen=True, slots=True)
class _Seen:
    length_ns: int
    shared_ns: int
    waited_ns: int
    behind: str


def pieces(
    source: CanonicalModule, owner: Mapping[str, str], strategy: Strategy | None, trace: Trace
) -> list[Piece]:
    """What ran in the trace of a row.

    Args:
        source: the step in canonical form.
        owner: of instructions inside loops, the one that runs them (:func:`disco_hlo.profiler.keys.owners`).
        strategy: the row's; None for XLA's default, whose instructions have their own names.

    Raises:
        DiscoError: the trace holds nothing of the step.
    """
    graph = source.graph
    units = unit_graph(graph, strategy or read(source))
    tokens = _Tokens(source, owner, units, ours=strategy is not None)
    found: dict[str, dict[int, list[_Seen]]] = defaultdict(lambda: defaultdict(list))
    order = (strategy or read(source)).order
    for (run, _), executions in by_place(trace, _module_in(trace, graph.module_name)).items():
        for token, seen in _seen_at(graph, units, order, tokens.by_unit(executions)).items():
            found[token][run].append(seen)
    if not found:
        raise DiscoError(f"the trace holds nothing of {graph.module_name}")
    return [_piece(graph, units, token, by_run) for token, by_run in found.items()]


def _module_in(trace: Trace, name: str) -> str:
    """The step's module in a trace; what is compiled beside XLA's own has a number of ours behind its name."""
    names = {one.module for one in trace.executions}
    return min((one for one in names if one == name or one.startswith(f"{name}__disco_")), default=name)


class _Tokens:
    """Units by the names of instructions in a trace."""

    def __init__(
        self, source: CanonicalModule, owner: Mapping[str, str], units: UnitGraph, *, ours: bool
    ) -> None:
        self._ours = ours
        self._units = units.index
        self._owner = owner
        unit_of = {node: unit.token for unit in units.units for node in unit.nodes}
        self._of_instruction = {
            origin.name: next(unit_of[node] for node in (*origin.results, *origin.nodes) if node in unit_of)
            for origin in source.origins
            if any(node in unit_of for node in (*origin.results, *origin.nodes))
        }

    def by_unit(self, executions: Iterable[Execution]) -> dict[str, list[Execution]]:
        found: dict[str, list[Execution]] = defaultdict(list)
        for one in executions:
            token = self._of(one.op) or self._of(
                one.kernel
            )  # in a command buffer the kernel has its name alone
            if token is not None and (token[0] == "b") == is_transfer(one):
                found[token].append(one)
        return found

    def _of(self, op: str) -> str | None:
        named = UNIT.match(op) if self._ours else None
        if named is not None:
            return named[0] if named[0] in self._units else None
        return self._of_instruction.get(op) or self._of_instruction.get(self._owner.get(op, ""))


def _seen_at(
    graph: Graph, units: UnitGraph, order: Sequence[str], ran: Mapping[str, Sequence[Execution]]
) -> dict[str, _Seen]:
    """In one run on one device."""
    spans = {token: merged((one.start_ns, one.end_ns) for one in parts) for token, parts in ran.items()}
    transfers = merged(span for token, own in spans.items() if token[0] == "b" for span in own)
    kernels = merged(span for token, own in spans.items() if token[0] != "b" for span in own)
    waits = _waits(graph, units, order, spans)
    found = {}
    for token, own in spans.items():
        others = kernels if token[0] == "b" else transfers
        shared_ns = sum(covered_ns(span, others) for span in own)
        found[token] = _Seen(sum(end - start for start, end in own), shared_ns, *waits.get(token, (0, "")))
    return found


def _waits(
    graph: Graph, units: UnitGraph, order: Sequence[str], spans: Mapping[str, Sequence[Interval]]
) -> dict[str, tuple[int, str]]:
    """For each transfer how long it waited once it could have begun, and the kind of the kernel that ended then."""
    ends = sorted((own[-1][1], token) for token, own in spans.items() if token[0] != "b")
    found: dict[str, tuple[int, str]] = {}
    before_ns = 0
    for token in order:
        base = token.removesuffix(".start").removesuffix(".done")
        if base not in spans or token.endswith(".done"):
            continue
        start_ns, end_ns = spans[base][0][0], spans[base][-1][1]
        if base[0] == "b":
            waited_ns = max(0, start_ns - before_ns)
            place = bisect_right(ends, (start_ns, "~")) - 1
            at_an_end = place >= 0 and start_ns - ends[place][0] < _AT_ITS_END_NS and waited_ns >= _WAITS_NS
            found[base] = (waited_ns, _kind(graph, units, ends[place][1]) if at_an_end else "")
        before_ns = max(before_ns, end_ns)
    return found


def _piece(graph: Graph, units: UnitGraph, token: str, by_run: Mapping[int, Sequence[_Seen]]) -> Piece:
    of_one_run = [min(seen, key=lambda one: one.length_ns) for seen in by_run.values()]
    everywhere = [one for seen in by_run.values() for one in seen]
    transfer = token[0] == "b"
    kept = sorted(of_one_run if transfer else everywhere, key=lambda one: one.length_ns)
    middle = kept[len(kept) // 2]
    unit = units.units[units.index[token]]
    return Piece(
        tuple(sorted((*unit.nodes, *unit.duplicates))),
        TRANSFER if transfer else _kind(graph, units, token),
        middle.length_ns,
        middle.shared_ns,
        round(median(one.waited_ns for one in of_one_run)) if transfer else 0,
        middle.behind,
    )


def _kind(graph: Graph, units: UnitGraph, token: str) -> str:
    unit = units.units[units.index[token]]
    opcodes = {graph.nodes[node].opcode for node in (*unit.nodes, *unit.duplicates)}
    return next((kind for kind in KINDS if kind in opcodes), ELEMENTWISE)


# --- rows held against each other ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loss:
    """What kernels of one kind, or transfers, took in a row over what the same took alone, ns."""

    what: str
    count: int
    alone_ns: int
    shared_ns: int
    lost_ns: int


Pairs = Sequence[tuple[Piece, Piece]]
"""What ran in both of two rows."""


def paired(alone: Sequence[Piece], row: Sequence[Piece]) -> list[tuple[Piece, Piece]]:
    """What ran in both, by what it computes."""
    known = {(one.what, one.nodes): one for one in alone}
    return [(known[one.what, one.nodes], one) for one in row if (one.what, one.nodes) in known]


def drift(pairs: Pairs) -> float:
    """What kernels that shared nothing took over what they took alone: by how much the machine was slower meanwhile,
    or their code worse. 1 where there is none."""
    free = [(before, one) for before, one in pairs if not one.shared_ns and one.what != TRANSFER]
    alone_ns = sum(before.length_ns for before, _ in free)
    return sum(one.length_ns for _, one in free) / alone_ns if alone_ns else 1.0


def losses(pairs: Pairs) -> list[Loss]:
    """By kind, beyond :func:`drift`; transfers last."""
    slower = drift(pairs)
    by_kind: dict[str, list[tuple[Piece, Piece]]] = defaultdict(list)
    for before, one in pairs:
        by_kind[one.what].append((before, one))
    found = [_loss(what, of_kind, 1.0 if what == TRANSFER else slower) for what, of_kind in by_kind.items()]
    return sorted(found, key=lambda one: (one.what == TRANSFER, -one.alone_ns))


def _loss(what: str, pairs: Pairs, slower: float) -> Loss:
    alone_ns = sum(before.length_ns for before, _ in pairs)
    shared_ns = sum(one.shared_ns for _, one in pairs)
    lost_ns = round(sum(one.length_ns for _, one in pairs) - slower * alone_ns)
    return Loss(what, len(pairs), alone_ns, shared_ns, lost_ns)
