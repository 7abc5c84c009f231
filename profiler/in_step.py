"""All-reduces as they run in the step itself, and the swept lines with the latency and the bytes that they have there.

Where collectives block (CPU), what a small all-reduce costs is how soon a waiting rank is woken, and that depends
on what the cores do meanwhile: the sweep's chains compute a millisecond on all cores before each, a step with
short kernels leaves them idle. The step's own traces hold all of its all-reduces, one by one and in one bucket. So the
latency is what makes the lines add up to the first, and what bytes take beyond it is what the one bucket took, in which
a rank also waits for the one that computes longer. Between the two the lines have the shape of the sweep's.

On GPU a link's rate changes from hour to hour (sockets) more than its latency counts, and the traced step moves
XLA's own buckets, each alone: there all lines are as much slower or faster as those were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.profiler.fields import Bytes, Nanoseconds, Positive


@dataclass(frozen=True, slots=True)
class InStep:
    """What the all-reduces of one step take in it."""

    sizes: tuple[tuple[Bytes, Positive], ...]
    """(bytes, how many of that size), by ascending size, as they are transferred."""
    total_ns: Positive
    """All of them together, in one run of the step."""
    spread_ns: Nanoseconds
    """Median absolute deviation."""
    samples: Positive

    def __post_init__(self) -> None:
        counts = [count for _, count in self.sizes]
        possible = (
            self.total_ns > 0 and self.spread_ns >= 0 and self.samples > 0 and min(counts, default=0) > 0
        )
        if not possible or not _ascend(self.sizes):
            raise ProfileError(f"not what a step's all-reduces take: {self}")


def counted(sizes_bytes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Sizes as :class:`InStep` has them."""
    return tuple(sorted(Counter(sizes_bytes).items()))


def in_the_step(swept: LinearPieces, apart: InStep | None, together: InStep | None) -> LinearPieces:
    """The swept lines as the step has them, as far as it is known what its all-reduces take apart and together. Where
    both are of the same sizes, they cannot tell latency from bytes: then those apart count, which ran as XLA has them.
    """
    lines = swept if apart is None else with_latency_of(apart, swept)
    if together is None or (apart is not None and apart.sizes == together.sizes):
        return lines
    lines = with_bytes_of(together, lines)
    # Many small all-reduces have bytes too: with steeper lines these would take longer than they did.
    return lines if apart is None else with_latency_of(apart, lines)


def with_total_of(step: InStep, swept: LinearPieces) -> LinearPieces:
    """The swept lines, all times multiplied by what the step's all-reduces took over what the lines say of them."""
    predicted_ns = _predicted_ns(step, swept)
    return swept.times(step.total_ns / predicted_ns if predicted_ns else 1.0)


def with_latency_of(step: InStep, swept: LinearPieces) -> LinearPieces:
    """The swept lines, all moved alike so that the step's all-reduces add up to what they took in it.

    They are lowered by no more than the latency, what no bytes would take: no time becomes negative.
    """
    excess_ns = (step.total_ns - _predicted_ns(step, swept)) / sum(count for _, count in step.sizes)
    return _moved(swept, max(excess_ns, -swept.lines[0].offset_ns))


def _moved(lines: LinearPieces, moved_ns: float) -> LinearPieces:
    return LinearPieces.of(
        *((line.from_bytes, line.ns_per_byte, line.offset_ns + moved_ns) for line in lines.lines)
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
    """All of the step's all-reduces, as the lines have them: of any size and number, since a file may say any."""
    each_ns = lines([size for size, _ in step.sizes]).tolist()
    return sum(count * ns for (_, count), ns in zip(step.sizes, each_ns, strict=True))


def _ascend(sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether there is at least one size, and each once."""
    return bool(sizes) and all(left < right for (left, _), (right, _) in pairwise(sizes))
