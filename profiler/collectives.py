"""The lines of collectives: from a sweep of the message size on the real devices, and from the step itself.

DisCo (section 4.2) predicts an all-reduce of x bytes as T = C x + D, C the time per byte and D the
start-up cost, both by regression. One line does not always fit: small messages take another
algorithm (or, on GPU, another kernel), large ones leave a cache. So up to three lines are tried and
the number is chosen by the Bayesian information criterion; the fit says how well it fits.
The regression minimizes relative errors, since a microsecond matters at 4 KiB and not at 256 MiB,
and damps outliers (Huber weights).

The swept lines then get the latency and the bytes that collectives have in the step. Where collectives block (CPU),
what a small one costs is how soon a waiting rank is woken, and that depends
on what the cores do meanwhile: the sweep's chains compute a millisecond on all cores before each, a step with
short kernels leaves them idle. The step's own traces hold all of its collectives, one by one and in one bucket. So the
latency is what makes the lines add up to the first, and what bytes take beyond it is what the one bucket took, in which
a rank also waits for the one that computes longer. Between the two the lines have the shape of the sweep's.

On GPU a link's rate changes from hour to hour (sockets) and from host to host, and the traced step moves XLA's own
buckets, each alone: there all lines are as much slower or faster as those were. Where they have several sizes, a
latency is told apart from that: with the rate alone that large ones had, small ones were a tenth too fast.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import ProfileError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import collective_bytes, collective_kind
from disco_hlo.hlo.cost_model import Line, LinearPieces, never_falls
from disco_hlo.hlo.graph import Kind
from disco_hlo.profiler.calibrate import median_and_spread
from disco_hlo.profiler.fields import Bytes, Nanoseconds, Positive, Spread
from disco_hlo.profiler.trace import Moved, unit_of_name

MAXIMUM_PIECES = 3
MINIMUM_POINTS = 3
"""Distinct sizes a piece needs."""

_EVIDENCE = 10.0
"""How much lower the criterion must be before another piece is believed (Kass and Raftery: very strong)."""
_FINEST_RELATIVE_ERROR = 1e-3
"""Clocks and scheduling leave no measurement better than this; keeps exact data from growing pieces."""
_HUBER = 1.345
_HUBER_ROUNDS = 20
_NEIGHBOURS = 3
"""On either side of a point by size: their usual time is the least that its error is relative to."""


class SweepPoint(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Repeated measurement of one message size."""

    size_bytes: Bytes
    median_ns: Positive
    spread_ns: Nanoseconds
    """Median absolute deviation."""
    samples: Positive


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """The fitted line or lines, and how far the points lie from them."""

    line: LinearPieces
    """Never falls with size."""
    points: tuple[SweepPoint, ...]
    median_error: Spread
    """Median over the points of abs(predicted - measured) / measured."""
    maximum_error: Spread


def sweep_sizes(
    minimum_bytes: int = 1 << 10, maximum_bytes: int = 1 << 28, per_octave: int = 2
) -> tuple[int, ...]:
    """Message sizes in geometric steps, multiples of 64 bytes, both ends included."""
    if not 64 <= minimum_bytes < maximum_bytes or per_octave < 1:
        raise ProfileError(
            "expected 64 <= minimum < maximum bytes and at least one size per octave, "
            f"got {minimum_bytes}, {maximum_bytes} and {per_octave}"
        )
    steps = math.ceil(math.log2(maximum_bytes / minimum_bytes) * per_octave)
    ratio = (maximum_bytes / minimum_bytes) ** (1 / steps)
    return tuple(sorted({round(minimum_bytes * ratio**step / 64) * 64 for step in range(steps + 1)}))


def point_of(size_bytes: int, times_ns: Sequence[int]) -> SweepPoint:
    """Median and spread of repeated times of one size; :class:`ProfileError` for non-times."""
    middle, spread = median_and_spread(times_ns, f"a collective of {size_bytes} bytes")
    return SweepPoint(int(size_bytes), max(round(middle), 1), round(spread), len(times_ns))


class _Points(NamedTuple):
    """A sweep, by ascending size."""

    sizes: NDArray[np.float64]
    times: NDArray[np.float64]
    usual: NDArray[np.float64]
    """What errors are relative to: the point's own time, or the median around it where that is more. Else one time that
    noise left nothing of (1 ns, less the work around it) would outweigh all others."""


def fit(points: Sequence[SweepPoint]) -> CollectiveFit:
    """Fit one to :data:`MAXIMUM_PIECES` lines; the prediction never falls with the size.

    Raises :class:`ProfileError` for fewer than three distinct sizes or impossible points.
    """
    points = tuple(sorted(points, key=lambda point: (point.size_bytes, point.median_ns)))
    for point in points:
        if point.size_bytes < 0 or point.median_ns <= 0:
            raise ProfileError(f"not a measurement of a collective: {point}")
    sizes = np.array([point.size_bytes for point in points], dtype=np.float64)
    times = np.array([point.median_ns for point in points], dtype=np.float64)
    distinct = np.unique(sizes).size
    if distinct < MINIMUM_POINTS:
        raise ProfileError(f"a collective's line needs {MINIMUM_POINTS} sizes, the sweep has {distinct}")
    around = (times[max(0, i - _NEIGHBOURS) : i + _NEIGHBOURS + 1] for i in range(times.size))
    usual = np.maximum(times, [float(np.median(some)) for some in around])
    line = LinearPieces(_best_pieces(_Points(sizes, times, usual)))
    errors = np.abs(line([point.size_bytes for point in points]) / times - 1.0)
    return CollectiveFit(line, points, float(np.median(errors)), float(np.max(errors)))


def _best_pieces(points: _Points) -> tuple[Line, ...]:
    scale = _noise_scale(points)
    best: tuple[float, tuple[Line, ...]] | None = None
    for count in range(1, MAXIMUM_PIECES + 1):
        found = _best_split(points, count, scale)
        if found is None:
            continue
        loss, pieces = found
        criterion = loss + (3 * count - 1) * math.log(points.sizes.size)
        if best is None or criterion < best[0] - _EVIDENCE:
            best = (criterion, pieces)
    assert best is not None  # one piece always fits
    return best[1]


def _noise_scale(points: _Points) -> float:
    """Relative noise of the points, from what the most flexible fit leaves over."""
    for count in range(MAXIMUM_PIECES, 0, -1):
        found = _best_split(points, count, _FINEST_RELATIVE_ERROR)
        if found is not None:
            rest = np.abs(LinearPieces(found[1]).exact(points.sizes) / points.times - 1.0)
            return max(1.4826 * float(np.median(rest)), _FINEST_RELATIVE_ERROR)
    return _FINEST_RELATIVE_ERROR


def _best_split(points: _Points, count: int, scale: float) -> tuple[float, tuple[Line, ...]] | None:
    """Least robust loss over all ways to cut the sizes into ``count`` runs of enough points."""
    distinct = np.unique(points.sizes)
    lines: dict[tuple[int, int], tuple[float, float, float]] = {}
    best: tuple[float, tuple[Line, ...]] | None = None
    for cuts in combinations(range(MINIMUM_POINTS, distinct.size - MINIMUM_POINTS + 1), count - 1):
        bounds = (0, *cuts, distinct.size)
        if any(right - left < MINIMUM_POINTS for left, right in pairwise(bounds)):
            continue
        for left, right in pairwise(bounds):
            if (left, right) not in lines:
                lines[left, right] = _line(points, distinct[left], distinct[right - 1], left == 0, scale)
        chosen = [lines[pair] for pair in pairwise(bounds)]
        loss = sum(line[2] for line in chosen)
        starts = [0, *(int(distinct[cut]) for cut in cuts)]
        pieces = tuple(Line(start, line[0], line[1]) for start, line in zip(starts, chosen, strict=True))
        if (best is None or loss < best[0]) and never_falls(pieces):
            best = (loss, pieces)
    return best


def _line(
    points: _Points, first: float, last: float, starts_at_zero: bool, scale: float
) -> tuple[float, float, float]:
    """(slope, base, robust loss) of the points from ``first`` to ``last`` bytes."""
    inside = (points.sizes >= first) & (points.sizes <= last)
    x, t, usual = (values[inside] for values in points)
    weights = 1.0 / usual**2
    slope, base = _weighted_line(x, t, weights, starts_at_zero)
    for _ in range(_HUBER_ROUNDS):
        errors = np.abs(slope * x + base - t) / usual / scale
        slope, base = _weighted_line(x, t, weights / np.maximum(errors / _HUBER, 1.0), starts_at_zero)
    errors = np.abs(slope * x + base - t) / usual / scale
    loss = np.where(errors <= _HUBER, errors**2, 2 * _HUBER * errors - _HUBER**2)
    return slope, base, float(np.sum(loss))


def _weighted_line(
    x: NDArray[np.float64], t: NDArray[np.float64], weights: NDArray[np.float64], starts_at_zero: bool
) -> tuple[float, float]:
    """Weighted least squares with a slope that is never negative, nor the base of a line from zero."""
    total = np.sum(weights)
    mean_x, mean_t = np.sum(weights * x) / total, np.sum(weights * t) / total
    variance = np.sum(weights * (x - mean_x) ** 2)
    slope = float(np.sum(weights * (x - mean_x) * (t - mean_t)) / variance) if variance > 0 else 0.0
    if slope <= 0:
        return 0.0, float(mean_t)
    base = float(mean_t - slope * mean_x)
    if base < 0 and starts_at_zero:
        return float(np.sum(weights * x * t) / np.sum(weights * x * x)), 0.0
    return slope, base


@dataclass(frozen=True, slots=True)
class InStep:
    """What the collectives of one kind take in a step."""

    sizes: tuple[tuple[Bytes, Positive], ...]
    """(bytes, how many of that size), by ascending size, as they are transferred."""
    total_ns: Positive
    """All of them together, in one run of the step."""
    spread_ns: Nanoseconds
    """Median absolute deviation."""
    samples: Positive
    each_ns: tuple[Positive, ...] = ()
    """One of each size, the median; none where sizes are not timed apart."""

    def __post_init__(self) -> None:
        counts = [count for _, count in self.sizes]
        ascend = all(left < right for (left, _), (right, _) in pairwise(self.sizes))
        times = self.total_ns > 0 and self.spread_ns >= 0 and self.samples > 0
        ascend = ascend and len(self.each_ns) in (0, len(counts))
        if not (times and ascend and min(counts, default=0) > 0):
            raise ProfileError(f"not what a step's collectives take: {self}")


def in_the_step(swept: LinearPieces, apart: InStep | None, together: InStep | None) -> LinearPieces:
    """The swept lines as the step has them, as far as it is known what its collectives take apart and together. Where
    both are of the same sizes, they cannot tell latency from bytes: then those apart count, which ran as XLA has them.
    """
    lines = swept if apart is None else with_latency_of(apart, swept)
    if together is None or (apart is not None and apart.sizes == together.sizes):
        return lines
    lines = with_bytes_of(together, lines)
    # Many small collectives have bytes too: with steeper lines these would take longer than they did.
    return lines if apart is None else with_latency_of(apart, lines)


def with_total_of(step: InStep, swept: LinearPieces) -> LinearPieces:
    """The swept lines, all times multiplied by what the step's collectives took over what the lines say of them; first
    by the factor, and with the latency more, that are nearest to each of at least three sizes."""
    lines = _nearest(step, swept)
    predicted_ns = _predicted_ns(step, lines)
    return lines.times(step.total_ns / predicted_ns if predicted_ns else 1.0)


def _nearest(step: InStep, swept: LinearPieces) -> LinearPieces:
    """By the squares of relative errors, each size weighted by its share of the time."""
    if len(step.each_ns) < MINIMUM_POINTS:
        return swept
    sizes, counts = np.array(step.sizes, np.float64).T
    took_ns = np.array(step.each_ns, np.float64)
    weights = np.sqrt(counts / took_ns)
    terms = np.stack([swept.exact(sizes), np.ones(sizes.size)], axis=1)
    (factor, more_ns), *_ = np.linalg.lstsq(terms * weights[:, None], took_ns * weights, rcond=None)
    if factor <= 0 or factor * swept.lines[0].offset_ns + more_ns < 0:
        return swept
    return later(swept.times(float(factor)), float(more_ns))


def with_latency_of(step: InStep, swept: LinearPieces) -> LinearPieces:
    """The swept lines, all moved alike so that the step's collectives add up to what they took in it.

    They are lowered by no more than the latency, what no bytes would take: no time becomes negative.
    """
    excess_ns = (step.total_ns - _predicted_ns(step, swept)) / sum(count for _, count in step.sizes)
    moved_ns = max(excess_ns, -swept.lines[0].offset_ns)
    return later(swept, moved_ns)


def later(lines: LinearPieces, by_ns: float) -> LinearPieces:
    """The lines, all moved alike: every collective takes so much longer."""
    return LinearPieces.of(
        *((line.from_bytes, line.ns_per_byte, line.offset_ns + by_ns) for line in lines.lines)
    )


def with_bytes_of(together: InStep, lines: LinearPieces) -> LinearPieces:
    """The lines with the same latency, so much steeper or flatter that those of ``together`` add up to what they took.

    None of them falls then either: steeper is by the byte, flatter is all that lies above the latency by one factor.
    """
    latency_ns = lines.lines[0].offset_ns
    predicted_ns = _predicted_ns(together, lines)
    least_ns = sum(count for _, count in together.sizes) * latency_ns
    more_ns = together.total_ns - predicted_ns
    if more_ns >= 0:
        per_byte = more_ns / max(1, sum(count * size for size, count in together.sizes))
        return LinearPieces.of(
            *((line.from_bytes, line.ns_per_byte + per_byte, line.offset_ns) for line in lines.lines)
        )
    above_ns = predicted_ns - least_ns
    factor = max(0.0, together.total_ns - least_ns) / above_ns if above_ns > 0 else 1.0
    return LinearPieces.of(*(
        (line.from_bytes, factor * line.ns_per_byte, latency_ns + factor * (line.offset_ns - latency_ns))
        for line in lines.lines
    ))  # fmt: skip


def _predicted_ns(step: InStep, lines: LinearPieces) -> int:
    """All of the step's collectives, as the lines have them: of any size and number, since a file may say any."""
    each_ns = lines([size for size, _ in step.sizes]).tolist()
    return sum(count * ns for (_, count), ns in zip(step.sizes, each_ns, strict=True))


@dataclass(frozen=True, slots=True)
class Issued:
    """A collective as a module issues it, be it of one array or of several."""

    units: frozenset[str]
    """What traces may call it (:func:`~disco_hlo.profiler.trace.unit_of_name`)."""
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
        members = [node for node in one.nodes if graph.nodes[node].kind is Kind.COLLECTIVE]
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
            apart_ns = [
                [ns for one in members if one.sizes_bytes == (size,) for unit in one.units
                 for run in whole for ns in times_ns[unit][run]]
                for size, _ in counted
            ]  # fmt: skip
            each_ns = tuple(max(1, round(median(ns))) for ns in apart_ns) if all(apart_ns) else ()
            told[kind] = InStep(counted, round(middle), round(spread), len(totals), each_ns)
    return told


def _usual(counts: Iterable[int]) -> int:
    """The most frequent of these, the largest of several; 0 of none."""
    seen = Counter(counts)
    return max(seen, key=lambda count: (seen[count], count), default=0)
