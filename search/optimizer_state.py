"""Finds the optimizer in a data-parallel step, and which of its state every device keeps in vain.

CoCoNet, sections 4 and 6.1.1 (RS-Opt-AG; ZeRO's first stage): where all devices hold the same state and the same sum
of gradients, each does the same pointwise work. Of D devices each could do a Dth of it, keep a Dth of the state, and
gather the parameters that come out. What must be known for that is read from the graph: from which sums on
everything is pointwise until the step ends, and which arrays only that work reads and writes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from disco_hlo.hlo.graph import Graph, Kind, Node
from disco_hlo.hlo.opcodes import ELEMENTWISE, REDUCTIONS

_ONE_TO_ONE = ELEMENTWISE | {"bitcast", "reshape", "transpose"}
"""Ops that make each element of one element of each operand of that size: any part of it from the same part of them."""
_REDUCING = REDUCTIONS | {"pad", "bitcast", "reshape"}


@dataclass(frozen=True, slots=True)
class Update:
    """What each of the devices could do a part of."""

    gradients: tuple[int, ...]
    """All-reduces whose sums only the update reads."""
    work: frozenset[int]
    """The ops that could do a share."""
    state: tuple[int, ...]
    """Parameters that the update alone reads and writes, whole on every device."""
    gathered: tuple[tuple[int, int], ...]
    """(result that is needed whole, the gradient in it), by result."""
    norms: bool
    """Whether sums over whole gradients are taken too (clipping, LAMB): of shares they need another all-reduce."""


def find_update(
    graph: Graph, devices: int, replicated: Collection[int], everywhere: Collection[int]
) -> Update | None:
    """The update of a data-parallel step with state of its own; None where there is none to shard.

    Args:
        devices: how many share the work.
        replicated: entry parameters (their nodes) of which every device holds the whole.
        everywhere: all-reduces that all devices take part in together.
    """
    sources = {output: _sources(graph, output) for output in _outputs(graph)}
    written = _written(graph, sources)
    carried = {parameter for parameter, _ in graph.inplace} | set(written)
    if any(graph.nodes[n].kind is Kind.PARAMETER and n not in replicated for n in carried):
        return None  # The model or its state is split already.
    gradients = _gradients(graph, devices, everywhere)
    owner = _owners(gradients, sources)
    shares = _shares(graph, gradients)
    work = shares | _prepared(graph, shares)
    state = {
        parameter: output
        for parameter, output in written.items()
        if output in owner and all(user in work for user in graph.users[parameter])
    }
    results = _results(set(state.values()), owner, sources)
    state = {parameter: output for parameter, output in state.items() if output not in results}
    if not state:
        return None
    moved = tuple(sorted({owner[output] for output in state.values()}))
    shares, kept = _shares(graph, moved), set(state.values())
    norms = _norms(graph, shares.union(moved))
    return Update(
        gradients=moved,
        work=frozenset(shares | _prepared(graph, shares) | norms),
        state=tuple(sorted(state)),
        gathered=tuple(
            sorted((output, made) for output, made in owner.items() if made in moved and output not in kept)
        ),
        norms=bool(norms),
    )


def _gradients(graph: Graph, devices: int, everywhere: Collection[int]) -> tuple[int, ...]:
    """Sums that can be scattered, and from which on nothing but the update's kind of work follows."""
    ends, into_scalars = [False] * len(graph), _into_scalars(graph)
    for node in reversed(graph.nodes):
        followed = all(ends[user] for user in graph.users[node.id])
        ends[node.id] = followed and _is_the_updates_kind(graph, node, into_scalars)
    return tuple(
        node
        for node in graph.all_reduces
        if graph.nodes[node].opcode == "all-reduce"
        and node in everywhere
        and any(extent % devices == 0 for extent in graph.nodes[node].shape.dims)
        and all(ends[user] for user in graph.users[node])
    )


def _is_the_updates_kind(graph: Graph, node: Node, into_scalars: set[int]) -> bool:
    if node.opcode == "tuple":
        return node.id == graph.root
    return _is_one_to_one(graph, node) or _is_spread(graph, node) or node.id in into_scalars


def _is_one_to_one(graph: Graph, node: Node) -> bool:
    sizes = {1, node.shape.element_count}
    return node.opcode in _ONE_TO_ONE and all(_elements(graph, x) in sizes for x in node.operands)


def _is_spread(graph: Graph, node: Node) -> bool:
    return node.opcode == "broadcast" and _elements(graph, node.operands[0]) == 1


def _into_scalars(graph: Graph) -> set[int]:
    """Reductions of whole arrays: XLA makes several of a large one, with padding between."""
    found: set[int] = set()
    for node in reversed(graph.nodes):
        if node.opcode not in _REDUCING:
            continue
        users = graph.users[node.id]
        if node.shape.element_count == 1 or (users and found.issuperset(users)):
            found.add(node.id)
    return {
        node for node in found if _elements(graph, node) != _elements(graph, graph.nodes[node].operands[0])
    }


def _elements(graph: Graph, node: int) -> int:
    return graph.nodes[node].shape.element_count


def _shares(graph: Graph, gradients: tuple[int, ...]) -> set[int]:
    """What is made of gradients, element by element."""
    found = set(gradients)
    for node in graph.nodes:
        if (
            node.shape.element_count > 1
            and _is_one_to_one(graph, node)
            and not found.isdisjoint(node.operands)
        ):
            found.add(node.id)
    return found - set(gradients)


def _prepared(graph: Graph, shares: set[int]) -> set[int]:
    """What is made of state and scalars for the shares alone (b1 * m)."""
    found: set[int] = set()
    for node in reversed(graph.nodes):
        users = graph.users[node.id]
        if node.id in shares or not (_is_one_to_one(graph, node) or _is_spread(graph, node)):
            continue
        if users and all(user in shares or user in found for user in users):
            found.add(node.id)
    return found


def _norms(graph: Graph, parts: set[int]) -> set[int]:
    """Sums over all of a share, and what XLA puts before them."""
    found: set[int] = set()
    for node in sorted(_into_scalars(graph)):
        if not (parts | found).isdisjoint(graph.nodes[node].operands):
            found.add(node)
    return found


def _outputs(graph: Graph) -> tuple[int, ...]:
    root = graph.nodes[graph.root]
    return tuple(dict.fromkeys(root.operands if root.opcode == "tuple" else (graph.root,)))


def _sources(graph: Graph, output: int) -> set[int]:
    """All that an output is made of element by element, itself included."""
    found, pending = {output}, [output]
    while pending:
        node = graph.nodes[pending.pop()]
        if not _is_one_to_one(graph, node):
            continue
        for operand in node.operands:
            if operand not in found and _elements(graph, operand) == node.shape.element_count:
                found.add(operand)
                pending.append(operand)
    return found


def _owners(gradients: tuple[int, ...], sources: dict[int, set[int]]) -> dict[int, int]:
    """The gradient in each output that is made of one; the first where there are several."""
    found = {output: cone.intersection(gradients) for output, cone in sources.items()}
    return {output: min(inside) for output, inside in found.items() if inside}


def _written(graph: Graph, sources: dict[int, set[int]]) -> dict[int, int]:
    """The new value of each parameter, where the step returns one.

    Which buffer an output takes over says nothing: jax pairs them by shape. But m' is made of m alone, v' of v, and
    p' of all three: outputs of fewer parameters choose first.
    """
    made_of = {
        output: sorted(n for n in cone if n != output and _may_be(graph, n, output))
        for output, cone in sources.items()
    }
    found: dict[int, int] = {}
    for output in sorted(made_of, key=lambda output: (len(made_of[output]), output)):
        parameter = next((p for p in made_of[output] if p not in found), None)
        if parameter is not None:
            found[parameter] = output
    return found


def _may_be(graph: Graph, parameter: int, output: int) -> bool:
    before, after = graph.nodes[parameter], graph.nodes[output].shape
    return before.kind is Kind.PARAMETER and (before.shape.dtype, before.shape.dims) == (
        after.dtype,
        after.dims,
    )


def _results(state: set[int], owner: dict[int, int], sources: dict[int, set[int]]) -> set[int]:
    """New values of parameters that look like state because the step has no forward pass that reads them.

    An update whose result nobody gets whole would be none. So where a gradient ends in state alone, what no other
    output is made of is its result.
    """
    found = set()
    for gradient in set(owner.values()):
        ends = [output for output in owner if owner[output] == gradient]
        if state.issuperset(ends):
            used = {inner for output in ends for inner in sources[output] if inner != output}
            found |= set(ends) - used
    return found
