"""Which of the measured candidates becomes the plan (DisCo trusts its simulator here; we trust the clock first).

Candidates run in turn, so what disturbs a round disturbs all of it: two of them are compared by the ratio of
their times in the same round, and the median over the rounds has a standard error. XLA's default gives way to
what beats it by more than that, and by the medians too, which the user is shown. Among what does, the lowest
median ratio wins, except that of candidates within one standard error of it, between which the clock does not
decide, the one predicted fastest is taken: that is the same in a repeated search.
"""

from __future__ import annotations

from collections.abc import Sequence

from disco_hlo.plugin.logs import LEAST_GAIN
from disco_hlo.plugin.measuring.candidates import Trial, ratio_noise, ratio_to

_ERRORS_IN_NOISE = 2
"""``ratio_noise`` is two standard errors."""


def winning(trials: Sequence[Trial]) -> int:
    """Index of the trial to execute; 0, which is XLA's default, where nothing beats it beyond the noise."""
    default = trials[0]
    if not _was_measured(default):
        return 0
    faster = [i for i, trial in enumerate(trials) if i and _was_measured(trial) and beats(trial, default)]
    if not faster:
        return 0
    best = trials[min(faster, key=lambda i: ratio_to(trials[i], default))]
    level = [i for i in faster if trials[i] is best or _is_level(trials[i], best)]
    return min(level, key=lambda i: (trials[i].predicted_ns, i))


def _was_measured(trial: Trial) -> bool:
    return bool(trial.times_ns) and not trial.error


def beats(trial: Trial, default: Trial) -> bool:
    """Whether a trial that ran is faster than XLA's default, by :data:`LEAST_GAIN` and beyond the noise."""
    level = 1 - max(LEAST_GAIN, ratio_noise(trial, default))
    return trial.median_ns < default.median_ns and ratio_to(trial, default) <= level


def _is_level(trial: Trial, best: Trial) -> bool:
    return ratio_to(trial, best) <= 1 + ratio_noise(trial, best) / _ERRORS_IN_NOISE
