"""Read the strategy that a module already embodies, and verify that it is the plan's.

A module is XLA's own, or one of ours after compilation. XLA computes some values twice, and a graph in canonical form
has each once. So of two kernels that return a value one owns it, and the other one is needed only for what it returns
beside. What a kernel reads may be overwritten before it runs, where XLA had a second copy of it. And a kernel may be
one that no rule allows, once it returns less than XLA's. Whatever follows from that is settled here
(:func:`source_kernels`), so that a step is never given up for one kernel.

A plan's optimized module may come from a file or from another rank. It is enacted only if it is the
same program as the module XLA would run here: same canonical graph, the plan's strategy and nothing
else, and no way to the outside that the source did not have. And only if nothing in it reads a buffer
that was written over (:mod:`~disco_hlo.plan.check_module`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import CircleError, IllegalStrategyError, PlanError
from disco_hlo.hlo.attributes import triton_settings
from disco_hlo.hlo.canonical import CanonicalModule, Origin, canonicalize
from disco_hlo.hlo.flatten import emitter_of
from disco_hlo.hlo.graph import Graph, Kind, behind_bitcasts, once_per_graph, readers
from disco_hlo.hlo.opcodes import SIDE_EFFECTS
from disco_hlo.hlo.walks import needed_first
from disco_hlo.plan.apply import attested_groups, readers_of
from disco_hlo.plan.check_module import check_module
from disco_hlo.plan.legal import bucket_of, check_order, planned_regions, refused_groups
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.units import UnitGraph, overwritten_by, reads_own_copies, unit_graph
from disco_hlo.plan.variants import normal_form


def read(source: CanonicalModule) -> Strategy:
    """The strategy of a module in canonical form: its kernels, buckets and schedule, in its entry and in its regions.

    What of its kernels a strategy can hold is said in :func:`~disco_hlo.plan.read.source_kernels`. Kernels of
    one op are no groups, unless Triton emits them, since its tiles are part of the plan.

    The order is left open where it runs something before what it must wait for.
    """
    regions = tuple(sorted((region.name, read(region.source)) for region in source.regions))
    return replace(_read(source), regions=regions)


def verify(source: CanonicalModule, optimized: bytes, strategy: Strategy) -> None:
    """Refuse ``optimized`` unless it is ``source`` executed as ``strategy`` says.

    Raises:
        ModuleError: the bytes are no HLO module.
        PlanError: it is another program, another strategy, reaches outside where the source does not, or reads
            what was overwritten.
    """
    written = canonicalize(optimized)
    if written.graph.fingerprint != source.graph.fingerprint:
        raise PlanError(
            f"the optimized module of {source.graph.module_name} computes something else: fingerprint "
            f"{written.graph.fingerprint[:16]}, expected {source.graph.fingerprint[:16]}"
        )
    added = _doors(written) - _doors(source)
    if added:
        raise PlanError(
            f"the optimized module adds {', '.join(sorted(added))}, which its source does not have"
        )
    if [region.name for region in written.regions] != [region.name for region in source.regions]:
        raise PlanError("the optimized module does not have the loops and branches of its source")
    _compare(source, written, strategy, "its entry")
    planned = planned_regions(source, strategy)
    for mine, theirs in zip(source.regions, written.regions, strict=True):
        for original, rewritten in zip(mine.sources, theirs.sources, strict=True):
            _compare(original, rewritten, planned.get(mine.name), mine.name)
    check_module(optimized, source.graph.backend)


# What a module is checked for -------------------------------------------------------------------


def _compare(
    source: CanonicalModule, written: CanonicalModule, strategy: Strategy | None, where: str
) -> None:
    """Refuse a rewritten computation that does not do what a strategy says, or what the source does where there is
    none."""
    # The kernels that the strategy which :func:`read` gives of it does not have as they are: XLA's own that no strategy
    # can hold. A module that was written by a strategy has none.
    otherwise = source_kernels(written).changed if strategy is not None else ()
    if otherwise:
        raise PlanError(
            f"the optimized module does not execute its plan: in {where} {', '.join(otherwise[:3])} would wait for "
            "itself, read what is overwritten before it runs, or be what no rule allows"
        )
    difference = describe_difference(
        source.graph, _read(written), _read(source) if strategy is None else strategy
    )
    if difference:
        raise PlanError(f"the optimized module does not execute its plan: in {where}, {difference}")


def describe_difference(graph: Graph, found: Strategy, wanted: Strategy) -> str | None:
    """How a module's strategy differs from the one wanted, in one clause; None where it does not.

    Their regions are not looked at. An empty order of ``wanted`` stands for any that is possible; :func:`read` leaves
    one open that is not.
    """
    wanted, found = replace(normal_form(graph, wanted), regions=()), replace(found, regions=())
    if not found.order and any(
        node.kind in (Kind.FUSIBLE, Kind.FIXED, Kind.COLLECTIVE) for node in graph.nodes
    ):
        return "its order runs something before what it must wait for"
    if not wanted.order:
        found = replace(found, order=())
    if found == wanted:
        return None
    for what, have, want in (
        ("op groups", found.groups, wanted.groups),
        ("buckets", found.buckets, wanted.buckets),
    ):
        if have != want:
            differing = len(set(map(str, have)) ^ set(map(str, want)))
            return f"{len(have)} {what}, expected {len(want)} ({differing} differ)"
    first = next(
        i for i, (a, b) in enumerate(zip((*found.order, ""), (*wanted.order, ""), strict=False)) if a != b
    )
    return f"order differs from position {first}"


def _doors(module: CanonicalModule) -> Counter[str]:
    """Instructions that leave XLA: custom calls by target, infeeds, outfeeds, host transfers."""
    found: Counter[str] = Counter()
    for computation in module.module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "custom-call":
                found[f"custom call {instruction.custom_call_target!r}"] += 1
            elif instruction.opcode in SIDE_EFFECTS:
                found[instruction.opcode] += 1
    return found


# Buckets and order ------------------------------------------------------------------------------


@once_per_graph
def _read(source: CanonicalModule) -> Strategy:
    graph = source.graph
    buckets, bucket_of = _buckets(graph, source)
    kernels = source_kernels(source)
    groups: list[Group] = []
    token_of: dict[str, str] = {}
    for name, group in kernels.groups.items():
        token_of[name] = f"g{len(groups)}" if is_listed(group) else f"n{group.nodes[0]}"
        groups += [group] if is_listed(group) else []
    asynchronous = BACKENDS[graph.backend].asynchronous
    strategy = Strategy(tuple(groups), buckets, _order(source, kernels, token_of, bucket_of))
    units = unit_graph(graph, strategy)
    # A copy that canonical form gives a value, and XLA's own module does without, is no instruction.
    if kernels.changed or {unit.done_token(asynchronous) for unit in units.units} - {*strategy.order}:
        strategy = replace(strategy, order=_in_time(units, strategy.order, asynchronous))
    found = normal_form(graph, strategy)
    try:
        check_order(unit_graph(graph, found), found.order, asynchronous)
    except IllegalStrategyError:
        return replace(found, order=())
    return found


def _buckets(graph: Graph, source: CanonicalModule) -> tuple[tuple[Bucket, ...], dict[str, str]]:
    buckets: list[Bucket] = []
    token_of: dict[str, str] = {}
    seen: set[int] = set()
    for origin in source.origins:
        members = tuple(
            n for n in origin.transfer_order if graph.nodes[n].kind is Kind.COLLECTIVE and n not in seen
        )
        if origin.role == "done" or not members:
            continue
        seen.update(members)
        token_of[origin.name] = f"b{len(buckets)}"
        form = "variadic" if len(origin.proto.operand_ids) > 1 else "concat"
        buckets.append(bucket_of(graph, members, form))
    return tuple(buckets), token_of


def _order(
    source: CanonicalModule, kernels: SourceKernels, token_of: dict[str, str], bucket_of: dict[str, str]
) -> tuple[str, ...]:
    graph = source.graph
    order: dict[str, None] = {}
    starts: dict[int, str] = {}
    for origin in source.origins:
        if origin.role == "fusion":
            token = token_of.get(origin.name)
        elif origin.name in bucket_of:
            token = bucket_of[origin.name] + (".start" if origin.role == "start" else "")
            if (
                origin.role != "start" and BACKENDS[graph.backend].asynchronous
            ):  # and yet nothing overlaps with it
                order.setdefault(f"{token}.start")
                token += ".done"
            starts.update(dict.fromkeys(origin.nodes, bucket_of[origin.name]))
        elif origin.role == "done":
            token = starts[origin.nodes[0]] + ".done"
        else:
            alone = _single(graph, origin)
            token = f"n{alone}" if alone is not None and kernels.owner.get(alone) == origin.name else None
        if token:
            order.setdefault(token)
    return tuple(order)


def _single(graph: Graph, origin: Origin) -> int | None:
    """The op that an instruction is, where it is one that runs."""
    return next((n for n in origin.nodes if graph.nodes[n].kind in (Kind.FUSIBLE, Kind.FIXED)), None)


def _in_time(units: UnitGraph, order: Sequence[str], asynchronous: bool) -> tuple[str, ...]:
    """The order with whatever a unit must wait for right before it, where that comes later or is left out."""
    needed: dict[str, list[str]] = {}
    for unit, waits in zip(units.units, units.dependencies, strict=True):
        start, done = unit.start_token(asynchronous), unit.done_token(asynchronous)
        needed[done] = [start]
        needed[start] = [units.units[i].done_token(asynchronous) for i in waits]
    placed = needed_first((one for one in (*order, *needed) if one in needed), needed.__getitem__)
    return tuple(placed)


# What a module executes beside its strategy -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Repeat:
    """A kernel of a module that computes again what others compute as well, and nothing else; or that only copies a
    gradient out of its bucket.

    No strategy holds it, since none owns an op twice, and kernels that we write read a gradient where it lies: plans,
    and XLA's kernels as we write them, go without.
    """

    members: tuple[int, ...]
    """Ops that it computes, ascending; empty where it only copies."""
    results: tuple[int, ...]
    """Those that leave it, ascending."""
    before: int
    """A node of the kernel or op that runs next; -1 at the end of the step."""


def repeats(source: CanonicalModule) -> tuple[Repeat, ...]:
    """What a module executes beside the strategy that :func:`read` gives of it, in its order."""
    graph = source.graph
    kernels = source_kernels(source)
    found: list[Repeat] = []
    following = -1
    for origin in reversed(source.origins):
        group = kernels.groups.get(origin.name)
        if group is not None:
            following = group.nodes[0]
        elif (
            origin.role == "fusion"
            and (ops := computes(graph, origin))
            and origin.name not in kernels.changed
        ):
            shown = behind_bitcasts(graph)
            found.append(
                Repeat(ops, tuple(x for x in ops if x in {shown[y] for y in origin.results}), following)
            )
        elif origin.role == "op" and (alone := _single(graph, origin)) is not None:
            following = alone
    cut = [Repeat((), (gradient,), _first_reader(graph, gradient)) for gradient in source.cut]
    return (*reversed(found), *cut)


def _first_reader(graph: Graph, node: int) -> int:
    """What runs and reads a node, also by another shape; -1 where nothing does."""
    read = (x for x in readers(graph, node) if graph.nodes[x].kind in (Kind.FUSIBLE, Kind.FIXED))
    return min(read, default=-1)


# Kernels ----------------------------------------------------------------------------------------


Computed = Mapping[str, frozenset[int]]
"""By the name of each kernel the ops that it computes: fewer than in the module where it reads one instead, none where
it runs as single ops."""


@dataclass(frozen=True)
class SourceKernels:
    """The kernels of a module as a strategy holds them."""

    owner: Mapping[int, str]
    """From which instruction a node is taken; "" where it runs by itself although no instruction of the module is it
    alone."""
    groups: Mapping[str, Group]
    """By instruction, its ops, in the order of the module. Missing are kernels that own nothing."""
    changed: tuple[str, ...] = ()
    """Instructions that no strategy can hold as they are: they recompute less, or their ops run by themselves."""


@once_per_graph
def source_kernels(source: CanonicalModule) -> SourceKernels:
    """What a strategy holds of the kernels of ``source``.

    A node is owned by the first kernel that returns it, and recomputed in the others that need it. Kernels of which
    nobody needs anything are left out. A kernel that recomputes a node after what the node reads was overwritten reads
    the node instead; a kernel that would wait for itself, or that is no kernel of XLA's any more and that no rule
    allows, runs as single ops.
    """
    graph = source.graph
    buckets, _ = _buckets(graph, source)
    whole: Computed = {
        origin.name: frozenset(computes(graph, origin))
        for origin in source.origins
        if origin.role == "fusion" and computes(graph, origin)
    }
    computed: Computed = {
        name: frozenset() if _updates_what_it_recomputes(graph, nodes) else nodes
        for name, nodes in whole.items()
    }
    while True:
        found = _settled(source, computed)
        mended = _reading_in_time(source, computed, found) or _legal(source, computed, found, buckets)
        if mended is None:
            changed = tuple(name for name, nodes in computed.items() if nodes != whole[name])
            return replace(found, changed=changed)
        computed = mended


def computes(graph: Graph, origin: Origin) -> tuple[int, ...]:
    """The ops of a kernel, ascending; none of one that only renames dimensions."""
    return tuple(n for n in origin.nodes if graph.nodes[n].kind in (Kind.FUSIBLE, Kind.FIXED))


def is_listed(group: Group) -> bool:
    """Whether a strategy lists the kernel: it has several ops, or Triton emits it, whose tiles are part of the plan."""
    return len(group.nodes) + len(group.duplicates) > 1 or group.kind == "triton"


def _updates_what_it_recomputes(graph: Graph, inside: frozenset[int]) -> bool:
    """Whether a kernel computes an array again beside the one that it writes a slice into: one array in canonical
    form, and the kernel would write over what it reads."""
    return any(
        graph.nodes[node].opcode == "dynamic-update-slice"
        and (value := graph.shown[graph.nodes[node].operands[0]]) in inside
        and readers_of(graph, value) != {node}
        for node in inside
    )


def _settled(source: CanonicalModule, computed: Computed) -> SourceKernels:
    shown = behind_bitcasts(source.graph)
    maker: dict[int, str] = {}
    for origin in source.origins:
        # What acts beyond its results (a callback) may have none that anything reads, and runs where it stands.
        for node in origin.results or (origin.nodes if origin.role == "op" else ()):
            if shown[node] in origin.nodes:
                is_in = shown[node] in computed.get(origin.name, origin.nodes)
                maker.setdefault(shown[node], origin.name if is_in else "")
    read, inside = _needed(source.graph, computed, maker)
    owner = {node: maker.get(node, "") for node in read}
    groups: dict[str, Group] = {}
    for origin in source.origins:
        members = sorted(inside.get(origin.name, ()))
        for node in members:
            owner.setdefault(node, origin.name)
        nodes = tuple(node for node in members if owner[node] == origin.name)
        if nodes:
            duplicates = tuple(node for node in members if owner[node] != origin.name)
            kind = emitter_of(origin.proto)
            config = triton_settings(origin.proto) if kind == "triton" else ""
            groups[origin.name] = Group(nodes, duplicates, kind, config)
    return SourceKernels(owner, groups)


def _needed(
    graph: Graph, computed: Computed, maker: Mapping[int, str]
) -> tuple[set[int], dict[str, set[int]]]:
    """The nodes that are read from memory, from the root back; and what each kernel computes for those that are taken
    from it."""
    fused, shown = frozenset().union(*computed.values()), behind_bitcasts(graph)
    inside: dict[str, set[int]] = {name: set() for name in computed}
    read: set[int] = set()
    pending = [graph.root]
    runs_anyway = (Kind.FIXED, Kind.COLLECTIVE)
    pending += [node.id for node in graph.nodes if node.kind in runs_anyway and node.id not in fused]
    while pending:
        node = pending.pop()
        if node in read:
            continue
        read.add(node)
        name = maker.get(node, "")
        if name not in computed:
            pending += graph.nodes[node].operands
            continue
        wanted = [node]
        while wanted:
            member = wanted.pop()
            if member not in inside[name]:
                inside[name].add(member)
                for operand in map(shown.__getitem__, graph.nodes[member].operands):
                    (wanted if operand in computed[name] else pending).append(operand)
    return read, inside


def _reading_in_time(source: CanonicalModule, computed: Computed, found: SourceKernels) -> Computed | None:
    """Without the ops that kernels recompute after what they read was overwritten: in the module they read another
    copy. None where there are none."""
    graph = source.graph
    place: dict[int, int] = {}
    for number, origin in enumerate(source.origins):
        for node in origin.nodes:
            place.setdefault(node, number)
    later: dict[int, list[int]] = defaultdict(list)
    for first, second in graph.before:
        if second in place:
            later[first].append(second)
    buffers = overwritten_by(graph)
    mended: dict[str, frozenset[int]] = {}
    for number, origin in enumerate(source.origins):
        group = found.groups.get(origin.name)
        if group is None:
            continue
        members = {*group.ops}
        late = {
            node
            for node in members.intersection(later)
            for writer in later[node]
            if writer not in members
            and place[writer] < number
            and not reads_own_copies(graph, group, node, buffers.get(writer, ()))
        }
        if late:
            mended[origin.name] = computed[origin.name] - late
    return {**computed, **mended} if mended else None


def _legal(
    source: CanonicalModule, computed: Computed, found: SourceKernels, buckets: tuple[Bucket, ...]
) -> Computed | None:
    """Without the kernels that wait for themselves, or that no rule allows; None where there are none."""
    listed = {name: group for name, group in found.groups.items() if is_listed(group)}
    names = tuple(listed)
    strategy = Strategy(tuple(listed.values()), buckets)
    try:
        units = unit_graph(source.graph, strategy)
    except CircleError as error:
        waiting = [int(token[1:]) for token in error.tokens if token[0] == "g"]
        if not waiting:
            raise
        refused = {min(waiting, key=lambda i: len(listed[names[i]].nodes))}
    else:
        refused = {i for i, _ in refused_groups(source.graph, strategy, units, attested_groups(source))}
    return {**computed, **{names[i]: frozenset() for i in refused}} if refused else None
