"""When the order of candidates is clear: XLA's default and they ran in turn, round after round.

By the rules of :mod:`disco_hlo.optimize.select`, asked after 5, 10, 20 and 40 rounds. What cannot win any more is not
run again, so that training loses little on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disco_hlo.optimize.select import LEAST_GAIN, beats, ratio_noise, ratio_to, winning
from disco_hlo.plan.plan import DEFAULT

FEWEST_ROUNDS = 5
MOST_ROUNDS = 40

Round = Mapping[str, int]
"""Device time in ns of each that ran in one round, by name; XLA's default ran in all of them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rounds so far say."""

    running: tuple[str, ...]
    """Candidates that may still win; without XLA's default."""
    winner: str | None = None
    """What to go on with; None while more rounds are needed."""

    rounds: int = 0
    """How many more rounds, where they are."""


def verdict(rounds: Sequence[Round], candidates: Sequence[str], predicted_ns: Mapping[str, int]) -> Verdict:
    """Which candidates stay, and which one won, if that is clear.

    Args:
        rounds: complete ones. A candidate that came later is not in the first ones.
        candidates: names, without XLA's default.
        predicted_ns: step times, which decide between candidates that the clock does not tell apart; 0 where unknown.
    """
    running = [name for name in candidates if not _cannot_win(rounds, name)]
    running = [name for name in running if not _loses_to_another(rounds, name, running)]
    if not running:
        return Verdict((), DEFAULT)
    had = min(len(_both(rounds, name, DEFAULT)[0]) for name in running)
    if had < FEWEST_ROUNDS:
        return Verdict(tuple(running), None, FEWEST_ROUNDS - had)
    if len(running) == 1 and beats(*_both(rounds, running[0], DEFAULT)):
        return Verdict(tuple(running), running[0])
    if had < MOST_ROUNDS:
        return Verdict(tuple(running), None, min(had, MOST_ROUNDS - had))
    complete = [one for one in rounds if all(name in one for name in running)]
    names = [DEFAULT, *running]
    best = winning(
        [[one[name] for one in complete] for name in names], [predicted_ns.get(name, 0) for name in names]
    )
    return Verdict(tuple(running), names[best])


def _cannot_win(rounds: Sequence[Round], name: str) -> bool:
    """Whether it is, beyond the noise, not faster than XLA's default by what counts as faster."""
    times, default = _both(rounds, name, DEFAULT)
    if len(times) < FEWEST_ROUNDS:
        return False
    return ratio_to(times, default) - ratio_noise(times, default) > 1 - LEAST_GAIN


def _loses_to_another(rounds: Sequence[Round], name: str, running: Sequence[str]) -> bool:
    """Whether it is slower, beyond the noise, than a candidate that beats XLA's default."""
    for other in running:
        times, others = _both(rounds, name, other)
        if name == other or len(times) < FEWEST_ROUNDS or not beats(*_both(rounds, other, DEFAULT)):
            continue
        if ratio_to(times, others) - ratio_noise(times, others) > 1:
            return True
    return False


def _both(rounds: Sequence[Round], name: str, other: str) -> tuple[list[int], list[int]]:
    """Times of two in the rounds that both were in."""
    common = [one for one in rounds if name in one and other in one]
    return [one[name] for one in common], [one[other] for one in common]
