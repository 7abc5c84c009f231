"""What each kind of collectives takes in a traced step, those in loops included (DisCo, section 4.2: T = C x + D)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from disco_hlo.backends import BACKENDS
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import collective_bytes, collective_kind
from disco_hlo.hlo.graph import Kind
from disco_hlo.profiler.in_step import InStep
from disco_hlo.profiler.transfers import Moved, unit_of_name


@dataclass(frozen=True, slots=True)
class Issued:
    """A collective as a module issues it, be it of one array or of several."""

    units: frozenset[str]
    """What traces may call it (:func:`~disco_hlo.profiler.collectives.unit_of_name`)."""
    kind: str
    """By its name."""
    sizes_bytes: tuple[int, ...]
    """As it is transferred: on CPU one array of several after the other."""


def issued(module: CanonicalModule, owner: Mapping[str, str]) -> tuple[Issued, ...]:
    """The collectives of an entry, or of a body, that travel as a plan says.

    Args:
        owner: instruction that runs in it -> its own instruction that runs it: of what is asynchronous, GPUs name what
            is inside.
    """
    inside: dict[str, set[str]] = defaultdict(set)
    for name, by in owner.items():
        inside[by].add(unit_of_name(name))
    found = []
    graph = module.graph
    for one in module.origins:
        members = [node for node in one.nodes if graph.nodes[node].kind is Kind.ALL_REDUCE]
        if not members or one.role not in ("start", "op"):
            continue
        kind = str(collective_kind(graph.nodes[members[0]]))
        units = frozenset({unit_of_name(one.name), *inside[one.name]})
        sizes = tuple(collective_bytes(graph, node) for node in members)
        one_by_one = not BACKENDS[graph.backend].asynchronous and len(one.proto.operand_ids) > 1
        found.append(Issued(units, kind, sizes if one_by_one else (sum(sizes),)))
    return tuple(found)


def in_step_by_kind(found: Iterable[Issued], moved: Moved) -> dict[str, InStep]:
    """What the collectives of each kind take together in one run of the step, by the kind's name.

    A run that shows another number of them than most do was cut off, and is left out. So is a kind of which no run
    shows anything.
    """
    times_ns: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for (run, unit, _), ns in moved.items():
        times_ns[unit][run].append(ns)
    runs = sorted({run for run, _, _ in moved})
    by_kind: dict[str, list[Issued]] = defaultdict(list)
    for one in found:
        by_kind[one.kind].append(one)
    told: dict[str, InStep] = {}
    for kind, members in sorted(by_kind.items()):
        sizes: Counter[int] = Counter()
        total_ns: Counter[int] = Counter()
        whole = set(runs)
        for one in members:
            taken = {run: [ns for unit in one.units for ns in times_ns[unit][run]] for run in runs}
            count = _usual(len(ns) for ns in taken.values())
            sizes.update({size: count * times for size, times in Counter(one.sizes_bytes).items()})
            whole -= {run for run, ns in taken.items() if len(ns) != count}
            total_ns.update({run: sum(ns) for run, ns in taken.items()})
        totals = [total_ns[run] for run in sorted(whole) if total_ns[run] > 0]
        counted = tuple(sorted((size, count) for size, count in sizes.items() if count))
        if totals and counted:
            middle = median(totals)
            spread = median(abs(ns - middle) for ns in totals)
            told[kind] = InStep(counted, round(middle), round(spread), len(totals))
    return told


def _usual(counts: Iterable[int]) -> int:
    """The most frequent of these, the largest of several; 0 of none."""
    seen = Counter(counts)
    return max(seen, key=lambda count: (seen[count], count), default=0)
