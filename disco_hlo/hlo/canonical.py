"""Second half of canonical form: from flat ops to the numbered, fingerprinted :class:`Graph`.

Concatenated all-reduces are taken apart, bitcasts folded, identical ops merged, dead ops dropped,
and the rest numbered by structure alone. Together with ``flatten`` this undoes every decision that
a strategy can make, so two compilations of a step that differ in those only have equal graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from disco_hlo.backends import backend_of_module
from disco_hlo.errors import ModuleError
from disco_hlo.hlo import proto as hlo_proto
from disco_hlo.hlo.checks import check_module
from disco_hlo.hlo.collectives import Groups, kind_groups
from disco_hlo.hlo.digests import Body, ComputationDigests, Numbering, Program, Structures, numbered
from disco_hlo.hlo.flatten import (
    CALLER,
    FlatComputation,
    FlatOp,
    ModuleIndex,
    SourceInstruction,
    flatten,
    is_moved_collective,
    unpack_concatenated,
    with_copies,
)
from disco_hlo.hlo.graph import Graph, Kind, Node, Shape, is_cloned
from disco_hlo.hlo.opcodes import COLLECTIVE, COLLECTIVES, Counts, kind_of, operation_counts
from disco_hlo.hlo.overwrites import Overwrites, overwrites
from disco_hlo.hlo.proto import Message, digest
from disco_hlo.hlo.regions import ENTRY, Call, Region, regions_called, scheduled_computations, trip_count
from disco_hlo.hlo.storage import SHOWING, in_place, leaves_of, storage_of
from disco_hlo.hlo.walks import reached

LOGGER = logging.getLogger("disco_hlo")
_MOST_COPIES = 8
"""Each round gives buffers of their own to all values that need one; a second round is seldom needed."""


@dataclass(frozen=True)
class Origin:
    """One instruction of the source module that computes something, by canonical node ids."""

    name: str
    role: str
    """``fusion``, ``start``, ``done`` or ``op``."""
    proto: Message
    nodes: tuple[int, ...]
    """Nodes it computes, ascending; a node may be computed by several instructions. Scalar constants
    are left out: every kernel has its own; of a kernel all constants, as it may as well read them."""
    results: tuple[int, ...]
    """Those of its nodes that leave it: its results."""
    transfer_order: tuple[int, ...]
    """Its nodes in the order they are written; of a collective, the order of transfer."""


@dataclass(frozen=True)
class CanonicalModule:
    """A computation of a module in canonical form, with what is needed to write it again: the entry, or a region."""

    graph: Graph
    module: Message
    index: ModuleIndex
    protos: tuple[Message, ...]
    """The instruction behind each node; its own operand ids and name mean nothing any more."""
    origins: tuple[Origin, ...]
    """The source's instructions in schedule order: XLA's own plan."""
    cut: tuple[int, ...] = field(default=())
    """All-reduces that a kernel which does nothing else cuts out of a packed one."""
    dropped_aliases: tuple[tuple[int, int], ...] = field(default=())
    """(parameter, output) pairs that cannot stay aliased once XLA's fusions are taken apart."""
    computation: int = field(default=0)
    """Id of the computation that this is."""
    regions: tuple[Region, ...] = field(default=())
    """Of the entry: the loop bodies, branches and called computations of the step."""

    @cached_property
    def computations(self) -> Mapping[str, CanonicalModule]:
        """The entry and its regions by name, alike computations by the first of them."""
        return {ENTRY: self, **{region.name: region.source for region in self.regions}}


def canonicalize(data: bytes) -> CanonicalModule:
    """Canonical form of a serialized HloModuleProto: of its entry, with all other computations that have a schedule.

    Raises:
        ModuleError: the bytes are no HLO module, or it is inconsistent.
    """
    module = hlo_proto.parse(data)
    check_module(module)
    try:
        settings = (one.backend_config for inside in module.computations for one in inside.instructions)
        return _canonical(module, backend_of_module(data, settings).name)
    except RecursionError as error:
        raise ModuleError(
            f"module {module.name!r} cannot be read: something in it, such as a backend config, is nested too deep; "
            "expected some hundred levels at most"
        ) from error
    except (ArithmeticError, LookupError, ValueError) as error:  # what no check foresaw
        raise ModuleError(
            f"module {module.name!r} is inconsistent: something in it has an operand, a member or a computation that "
            f"it does not hold ({type(error).__name__}: {error})"
        ) from error


def _canonical(module: Message, backend: str) -> CanonicalModule:
    index = ModuleIndex(module)
    digests = ComputationDigests(index)
    forms: dict[int, _Form] = {}
    for computation, kind in scheduled_computations(index):
        try:
            form = forms[computation] = _settled_form(index, computation, kind, digests)
        except ModuleError as error:
            if kind == ENTRY:
                raise
            LOGGER.debug("a %s stays as XLA compiled it: %s", kind, error)
            continue
        digests.know(computation, Body(form.structures, form.numbering))
    modules = {
        computation: _canonical_module(index, computation, form, digests, backend)
        for computation, form in forms.items()
    }
    entry = modules[module.entry_computation_id]
    return replace(entry, regions=_regions(entry, modules))


def _settled_form(index: ModuleIndex, computation: int, kind: str, digests: ComputationDigests) -> _Form:
    """The form of a computation in which every value that needs a buffer of its own has one.

    Raises:
        ModuleError: no copy helps; or only copies do in a branch or called computation, where XLA did without.
    """
    flat = unpack_concatenated(flatten(index, index.computation(computation)))
    for _ in range(_MOST_COPIES):
        form = _form(flat, index, kind, digests)
        if not form.edges_to_copy or kind not in (ENTRY, "loop"):
            break
        # What a loop is given XLA has copied where that was needed. Where it was not, since values are equal that the
        # body alone does not show to be, a copy would change what the loop does to its caller's buffers.
        if kind == "loop" and _copies_given(flat, form, index):
            break
        flat = with_copies(flat, form.edges_to_copy)
    if form.edges_to_copy or form.rules.too_soon or form.rules.shared_results:
        raise ModuleError(
            f"{index.computation(computation).name} in module {index.module.name!r} overwrites values that are read "
            f"later, and no copy helps: nodes {form.rules.too_soon}, results {form.rules.shared_results}"
        )
    return form


def _canonical_module(
    index: ModuleIndex, computation: int, form: _Form, digests: ComputationDigests, backend: str
) -> CanonicalModule:
    numbering, nodes, rules = form.numbering, form.nodes, form.rules
    kept = tuple(one[:2] for one in form.aliases if one[:2] not in rules.dropped_aliases)
    program = Program(computation, digests.bodies, kept, backend)
    graph = Graph(
        nodes=nodes,
        root=numbering.root,
        before=rules.before,
        backend=backend,
        module_name=index.module.name,
        fingerprint=program.identity,
        inplace=rules.inplace,
        shown=rules.shown,
        lies_in=rules.lies_in,
        key=program.key,
    )
    flat = form.structures.flat
    return CanonicalModule(
        graph,
        index.module,
        index,
        form.protos,
        _origins(flat, numbering, graph),
        _cut(flat, numbering, graph),
        rules.dropped_aliases,
        computation,
    )


def _regions(entry: CanonicalModule, modules: Mapping[int, CanonicalModule]) -> tuple[Region, ...]:
    """The step's regions but for the entry, in the order in which ops call them, those alike as one."""
    named: dict[tuple[str, str], str] = {}
    calls: dict[str, list[Call]] = {}
    sources: dict[str, list[CanonicalModule]] = {}
    visited: set[int] = set()
    pending = [(ENTRY, entry)]
    while pending:
        caller, source = pending.pop()
        for node, proto in enumerate(source.protos):
            for kind, computation in regions_called(proto):
                if computation not in modules:
                    continue
                called = modules[computation]
                name = named.setdefault((kind, called.graph.key), f"{kind}{len(named) + 1}")
                calls.setdefault(name, []).append(Call(caller, node, trip_count(proto)))
                if computation not in visited:
                    visited.add(computation)
                    sources.setdefault(name, []).append(called)
                    pending.append((name, called))
    return tuple(Region(name, tuple(calls[name]), tuple(sources[name])) for name in named.values())


@dataclass(frozen=True, slots=True)
class _Form:
    """A flat computation with its ops merged as far as they may be."""

    structures: Structures
    numbering: Numbering
    nodes: tuple[Node, ...]
    protos: tuple[Message, ...]
    aliases: tuple[tuple[int, int, int], ...]
    rules: Overwrites
    edges_to_copy: frozenset[tuple[int, int]]
    """(flat op, number of its operand) that need a copy, since nothing else keeps a value from being overwritten."""


def _form(flat: FlatComputation, index: ModuleIndex, kind: str, digests: ComputationDigests) -> _Form:
    structures = Structures(flat, digests)
    facts = _Facts(structures, index)
    apart: set[int] = set()
    while True:
        numbering = numbered(structures, apart)
        nodes = _nodes(flat, numbering, facts, apart)
        protos = tuple(flat.ops[position].proto for position in numbering.representative)
        aliases = _aliases(index.module, nodes, numbering.root) if kind == ENTRY else ()
        control = _control_pairs(flat, numbering, nodes, digests)
        rules = overwrites(nodes, numbering.root, protos, aliases, control, index, is_carried=kind == "loop")
        if _copy_first(flat, numbering, rules.needing_a_copy):
            continue
        edges = _endangered(flat, numbering, rules, index)
        found = {_maker(flat, reader, number) for reader, number in edges}
        if found <= apart:
            return _Form(structures, numbering, nodes, protos, aliases, rules, frozenset(edges))
        apart |= found


def _copy_first(flat: FlatComputation, numbering: Numbering, needing: Collection[int]) -> bool:
    """Let updates that overwrite nothing in XLA's kernels read copies, where they would overwrite what others need if
    they ran by themselves; whether there are any. Inside a kernel the copy is no array, and takes no time."""
    updates = [
        op
        for position, op in enumerate(flat.ops)
        if op.spare is not None and numbering.node_of.get(position) in needing
    ]
    for update in updates:
        assert update.spare is not None
        update.operands[0], update.spare = update.spare, None
    return bool(updates)


def _endangered(
    flat: FlatComputation, numbering: Numbering, rules: Overwrites, index: ModuleIndex
) -> set[tuple[int, int]]:
    """(flat op, number of an operand) by which ops get an array that they overwrite too soon, and the root one that is
    another result as well. XLA had a buffer for each: the zeros that a gradient is scattered into are not those that a
    relu's mask selects later."""
    holder = flat.root if flat.ops[flat.root].proto.opcode == "tuple" else CALLER
    edges = {(holder, number) for number in rules.shared_results}
    written_by: dict[int, list[int]] = {writer: [] for _, writer in rules.too_soon}
    for position in range(len(flat.ops)):
        written_by.get(numbering.node_of.get(position, -1), []).append(position)
    for value, writer in rules.too_soon:
        for position in written_by[writer]:
            op = flat.ops[position]
            shapes = [flat.ops[operand].proto.shape for operand in op.operands]
            written = [operand for _, operand, _ in in_place(op.proto, shapes, index)]
            for number in written or range(len(op.operands)):
                edges |= set(_edges_of_arrays(flat, numbering, position, number, rules.shown[value], rules))
    return edges


def _edges_of_arrays(
    flat: FlatComputation, numbering: Numbering, reader: int, number: int, value: int, rules: Overwrites
) -> Iterator[tuple[int, int]]:
    """Where an operand, or a member of it if it is a tuple, shows a value."""
    position = flat.ops[reader].operands[number]
    op = flat.ops[position]
    if op.proto.opcode == "tuple":
        for member in range(len(op.operands)):
            yield from _edges_of_arrays(flat, numbering, position, member, value, rules)
    elif rules.shown[numbering.node_of[position]] == value:
        yield reader, number


def _maker(flat: FlatComputation, reader: int, number: int) -> int:
    """What writes an operand's buffer: it must not be merged with what writes other buffers."""
    position = flat.root if reader == CALLER else flat.ops[reader].operands[number]
    while flat.ops[position].proto.opcode in SHOWING and len(flat.ops[position].operands) == 1:
        position = flat.ops[position].operands[0]
    return position


def _copies_given(flat: FlatComputation, form: _Form, index: ModuleIndex) -> bool:
    """Whether something that a loop is given needs a copy, be it behind a loop or branches that hand it on. All that it
    is given counts as equal: what is exchanged without a copy XLA knows to be."""
    equal = [0] * leaves_of(form.protos[0].shape)
    storage = storage_of(form.protos, [node.operands for node in form.nodes], index, equal)
    given = set(storage.arguments.values())
    read = (flat.ops[reader].operands[number] for reader, number in form.edges_to_copy)
    return any(not given.isdisjoint(storage.of_op[form.numbering.node_of[one]]) for one in read)


@dataclass(frozen=True, slots=True)
class _Fact:
    """What a node has of its op and of the shapes it reads."""

    shape: Shape
    key: str
    counts: Counts
    collective: str
    groups: Groups
    source: str


class _Facts:
    """What nodes have of their ops, found once for each op: it is the same however ops are merged and numbered."""

    def __init__(self, structures: Structures, index: ModuleIndex) -> None:
        self.structures, self.index = structures, index
        self._known: list[_Fact | None] = [None] * len(structures.flat.ops)

    def __getitem__(self, position: int) -> _Fact:
        found = self._known[position]
        if found is None:
            op, own = self.structures.flat.ops[position], self.structures[position]
            operands = [self.structures[operand] for operand in op.operands]
            found = self._known[position] = _Fact(
                own.shape,
                digest(own.cost_bytes, b";".join(operand.shape_bytes for operand in operands))[:24],
                operation_counts(op.proto, own.shape, [operand.shape for operand in operands], self.index),
                own.attributes[:16] if op.proto.opcode in COLLECTIVES else "",
                kind_groups(op.proto),
                _source_line(op.proto, self.index.module.stack_frame_index),
            )
        return found


def _nodes(
    flat: FlatComputation, numbering: Numbering, facts: _Facts, apart: Collection[int]
) -> tuple[Node, ...]:
    readers = _readers_of_apart(flat, numbering, apart)
    nodes: list[Node] = []
    for node_id, position in enumerate(numbering.representative):
        op, fact = flat.ops[position], facts[position]
        nodes.append(
            Node(
                id=node_id,
                opcode=op.proto.opcode,
                shape=fact.shape,
                operands=tuple(numbering.node_of[o] for o in op.operands),
                kind=_kind(op, fact.shape, shared=readers.get(position, 0) > 1),
                key=fact.key,
                flops=fact.counts.flops,
                transcendentals=fact.counts.transcendentals,
                dimensions=tuple(op.proto.dimensions),
                collective=_of_bucket(op.proto.opcode, fact.collective, node_id),
                groups=fact.groups,
                name=op.proto.name,
                source=fact.source,
                op_name=op.proto.metadata.op_name,
            )
        )
    return tuple(nodes)


def _of_bucket(opcode: str, attributes: str, node: int) -> str:
    """What those of one bucket have in common; what shares none has a name of its own."""
    return attributes if not attributes or COLLECTIVE[opcode].shares else f"{attributes} n{node}"


def _readers_of_apart(flat: FlatComputation, numbering: Numbering, apart: Collection[int]) -> dict[int, int]:
    """How many ops read each of those that must not be merged, under whatever name."""
    if not apart:
        return {}
    readers = [0] * len(flat.ops)
    for position in sorted(numbering.node_of, reverse=True):
        op = flat.ops[position]
        for operand in set(op.operands):
            readers[operand] += (
                readers[position] if op.proto.opcode in SHOWING and position != flat.root else 1
            )
    return {position: readers[position] for position in apart}


def _kind(op: FlatOp, shape: Shape, *, shared: bool) -> Kind:
    """What may be done with an op; ``shared``: others read the buffer that is overwritten. Computed again for them it
    would be merged with the ops that it is to be kept apart from."""
    if len(op.operands) == 1 and is_moved_collective(op.proto, 1):
        return Kind.COLLECTIVE
    kind = kind_of(op.proto.opcode)
    # XLA:CPU divides by zero, and the process ends, where it compiles a fusion of an array without elements.
    return Kind.FIXED if kind is Kind.FUSIBLE and (shared or 0 in shape.dims) else kind


def _source_line(proto: Message, frames: Message) -> str:
    """The user's source line of an instruction, from inline metadata or the module's stack frames."""
    metadata = proto.metadata
    if metadata.source_file:
        return f"{metadata.source_file}:{metadata.source_line}"
    if not 0 < metadata.stack_frame_id <= len(frames.stack_frames):
        return ""
    location_id = frames.stack_frames[metadata.stack_frame_id - 1].file_location_id
    if not 0 < location_id <= len(frames.file_locations):
        return ""
    location = frames.file_locations[location_id - 1]
    if not 0 < location.file_name_id <= len(frames.file_names):
        return ""
    return f"{frames.file_names[location.file_name_id - 1]}:{location.line}"


def _aliases(module: Message, nodes: tuple[Node, ...], root: int) -> tuple[tuple[int, int, int], ...]:
    """Donated parameters as (parameter node, output index, node of that output)."""
    outputs = nodes[root].operands if nodes[root].opcode == "tuple" else (root,)
    parameters = [node.id for node in nodes if node.kind is Kind.PARAMETER]
    found = []
    for entry in module.input_output_alias.entries:
        output = entry.output_shape_index[0] if entry.output_shape_index else 0
        if entry.parameter_number >= len(parameters) or output >= len(outputs):
            raise ModuleError(
                f"module {module.name!r} aliases parameter {entry.parameter_number} with output {output}, "
                "which do not both exist"
            )
        found.append((parameters[entry.parameter_number], output, outputs[output]))
    return tuple(sorted(found))


def _control_pairs(
    flat: FlatComputation, numbering: Numbering, nodes: tuple[Node, ...], digests: ComputationDigests
) -> list[tuple[int, int]]:
    """Control dependencies of what acts beyond its results, itself or in a loop; calls of Python stay in the order that
    XLA has them in. All others are XLA's: those that keep a buffer until it is read follow from the buffers, and the
    rest is its schedule. What is free never runs: for a barrier stands what makes its value, or what reads it."""
    pairs = []
    told = [number for number, source in enumerate(flat.sources) if digests.calls_python(source.proto)]
    made_of = [node.operands for node in nodes]
    read_by: list[list[int]] = [[] for _ in nodes]
    for node in nodes:
        for operand in node.operands:
            read_by[operand].append(node.id)
    for before, after in (*flat.control, *pairwise(told)):
        if any(digests.acts(flat.sources[number].proto) for number in (before, after)):
            first = _running(nodes, _live_nodes(flat.sources[before], numbering), made_of)
            then = _running(nodes, _live_nodes(flat.sources[after], numbering), read_by)
            pairs += [(a, b) for a in first for b in then if a != b]
    return pairs


def _running(nodes: tuple[Node, ...], found: Collection[int], beside: Sequence[Collection[int]]) -> list[int]:
    """For nodes that are free those ``beside`` them, through others that are free."""
    around = reached(found, lambda node: beside[node] if nodes[node].kind is Kind.FREE else ())
    return [node for node in around if nodes[node].kind is not Kind.FREE]


def _live_nodes(source: SourceInstruction, numbering: Numbering) -> tuple[int, ...]:
    return tuple(sorted({numbering.node_of[op] for op in source.ops if op in numbering.node_of}))


def _origins(flat: FlatComputation, numbering: Numbering, graph: Graph) -> tuple[Origin, ...]:
    readers: dict[int, set[int]] = {}
    for op in flat.ops:
        for operand in op.operands:
            readers.setdefault(operand, set()).add(op.source)
    origins = []
    for number, source in enumerate(flat.sources):
        live = [op for op in source.ops if op in numbering.node_of]
        results = [op for op in live if op == flat.root or readers.get(op, set()) - {number}]
        needed = _needed(flat, results, set(live)) if source.role == "fusion" else live
        left_out = (lambda node: node.kind is Kind.CONSTANT) if source.role == "fusion" else is_cloned
        nodes = [
            n for n in dict.fromkeys(numbering.node_of[op] for op in needed) if not left_out(graph.nodes[n])
        ]
        returned = tuple(sorted({numbering.node_of[op] for op in results}))
        if nodes:
            origins.append(
                Origin(
                    source.proto.name, source.role, source.proto, tuple(sorted(nodes)), returned, tuple(nodes)
                )
            )
    return tuple(origins)


def _cut(flat: FlatComputation, numbering: Numbering, graph: Graph) -> tuple[int, ...]:
    """All-reduces that kernels cut out of packed ones and do nothing else with, each once, in schedule order."""
    found: dict[int, None] = {}
    for source in flat.sources:
        if source.cuts and all(graph.nodes[n].kind is Kind.FREE for n in _live_nodes(source, numbering)):
            found |= dict.fromkeys(
                numbering.node_of[part] for part in source.cuts if part in numbering.node_of
            )
    return tuple(found)


def _needed(flat: FlatComputation, results: list[int], inside: set[int]) -> list[int]:
    """The ops of a kernel that its results depend on, in the order they are written. (Folding bitcasts
    can leave one behind that only another kernel still reads.)"""
    return sorted(reached(results, lambda op: inside.intersection(flat.ops[op].operands)))
