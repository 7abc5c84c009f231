"""Which candidate becomes the plan (DisCo trusts its simulator here; we trust the clock first).

Candidates run in turn, so what disturbs a round disturbs all of it: two of them are compared by the ratio of
their times in the same round, and the median over the rounds has a standard error. XLA's default gives way to
what beats it by more than that, and by the medians too, which the user is shown. Among what does, the lowest
median ratio wins, except that of candidates within one standard error of it, between which the clock does not
decide, the one predicted fastest is taken: that is the same in a repeated search. One that left the rounds early,
slower than another, does not win by what disturbed the default in the first ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LEAST_GAIN = 0.01
"""What is faster by less, as a part of the time, is not called faster: machines do not repeat themselves so well."""
_ERRORS_IN_NOISE = 2
"""``ratio_noise`` is two standard errors."""
_OF_MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of the median over that of the mean, of many from a normal distribution."""

Times = Sequence[int]
"""Step times of a candidate in ns, one a round; none where it was not measured, or failed. One that could not win any
more was not run in the last rounds: of two candidates the rounds count that both ran in."""


def winning(times: Sequence[Times], predicted_ns: Sequence[int]) -> int:
    """Index of the candidate to execute; 0, which is XLA's default, where nothing beats it beyond the noise.

    Args:
        times: of each candidate.
        predicted_ns: of each candidate.
    """
    default = times[0]
    faster = [
        i
        for i, own in enumerate(times)
        if i and own and default and beats(own, default) and not _is_outlasted(own, times[1:])
    ]
    if not faster:
        return 0
    best = min(faster, key=lambda i: ratio_to(times[i], default))
    level = [i for i in faster if i == best or _is_level(times[i], times[best])]
    return min(level, key=lambda i: (predicted_ns[i], i))


def beats(times: Times, default: Times) -> bool:
    """Whether a candidate that ran is faster than XLA's default, by :data:`LEAST_GAIN` and beyond the noise."""
    level = 1 - max(LEAST_GAIN, ratio_noise(times, default))
    by_medians = int(statistics.median(times)) < int(statistics.median(default))
    return by_medians and ratio_to(times, default) <= level


def _is_outlasted(times: Times, others: Sequence[Times]) -> bool:
    """Whether a candidate that ran in more rounds was faster, beyond the noise, in those that both ran in."""
    longer = [other for other in others if len(other) > len(times)]
    return any(is_slower(times, other) for other in longer)


def is_slower(times: Times, other: Times) -> bool:
    """Whether a candidate is slower than another, beyond the noise."""
    return ratio_to(times, other) - ratio_noise(times, other) > 1


def _is_level(times: Times, best: Times) -> bool:
    return ratio_to(times, best) <= 1 + ratio_noise(times, best) / _ERRORS_IN_NOISE


def ratio_to(times: Times, reference: Times) -> float:
    """Median over the rounds of a candidate's step time over the reference's in the same round."""
    return statistics.median(_ratios(times, reference))


def ratio_noise(times: Times, reference: Times) -> float:
    """How uncertain :func:`ratio_to` is: two standard errors of a median, from the rounds' own spread.

    That is the distance of their quartiles, over what it is among so many from a normal distribution (Blom, Statistical
    Estimates and Transformed Beta-Variables, 1958): from five on, one that was disturbed does not matter to it. Fewer
    do not tell which was; there it is the distance of the ends.
    """
    ratios = sorted(_ratios(times, reference))
    count = len(ratios)
    if count < 2:
        return 1.0
    cut = (count - 1) // 4
    apart = -2 * statistics.NormalDist().inv_cdf((cut + 1 - 3 / 8) / (count + 1 / 4))
    deviation = (ratios[-1 - cut] - ratios[cut]) / apart
    return float(2 * _OF_MEDIAN * deviation / count**0.5)


def _ratios(times: Times, reference: Times) -> list[float]:
    return [a / b for a, b in zip(times, reference, strict=False)]
