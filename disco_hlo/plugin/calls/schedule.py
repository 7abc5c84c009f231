"""Which executable runs which call, the same on all ranks, and when the order of the candidates is clear.

Calls of a step are counted from 0. They are divided into stretches; within one, executables take turns call by call.
Before the first call of a stretch all ranks meet and agree on it, so each knows every call's executable before the
call. A rank that cannot run a candidate says so there; where one does not come, all go on with XLA's default.

XLA's default and the candidates run in turn, round after round. :func:`verdict` decides by the rules of
:mod:`disco_hlo.optimize.select`, asked after 5, 10, 20 and 40 rounds. What cannot win any more is not run again, so
that training loses little on it, and nothing is once no candidate may be called faster than the one that wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from disco_hlo.activation.channel import Channel, name_ranks, silence
from disco_hlo.errors import ActivationError
from disco_hlo.optimize.select import LEAST_GAIN, Times, beats, is_slower, ratio_noise, ratio_to, winning
from disco_hlo.plan.plan import DEFAULT

FEWEST_ROUNDS = 5
MOST_ROUNDS = 40
Round = Mapping[str, int]
"""Device time in ns of each that ran in one round, by name; XLA's default ran in all of them."""


@dataclass(frozen=True)
class Stretch:
    """Calls in a row, and what runs them."""

    first: int
    """Its first call."""
    end: int | None
    """The call after its last one, before which ranks meet; None: it does not end, and nobody meets again."""
    turns: tuple[str, ...]
    """Names of the executables, in the order in which they take turns."""
    why: str = ""
    """For the log."""
    warm_up: int = 0
    """So many of its first rounds do not count: an executable runs for the first time."""
    begins: bool = False
    """Whether a search for this step begins, on all ranks."""
    hold: str = ""
    """What all ranks have ready to be done before its first call, which waits for that (``trial.Hold``)."""

    def holds(self, index: int) -> bool:
        """Whether this call is one of its own."""
        return self.first <= index and (self.end is None or index < self.end)

    def name_at(self, index: int) -> str:
        """What runs this call."""
        return self.turns[(index - self.first) % len(self.turns)]

    def rounds(self, times_ns: Mapping[int, int]) -> list[Round]:
        """The rounds that count, of which all calls were timed.

        Args:
            times_ns: device times by call.
        """
        count = len(self.turns)
        if count < 2 or self.end is None:
            return []
        starts = range(self.first + self.warm_up * count, self.end - count + 1, count)
        return [
            {self.name_at(index): times_ns[index] for index in range(start, start + count)}
            for start in starts
            if all(index in times_ns for index in range(start, start + count))
        ]


def settled(first: int, name: str, why: str) -> Stretch:
    """All calls from ``first`` on by one executable."""
    return Stretch(first, None, (name,), why)


@dataclass(frozen=True)
class Answer:
    """What one rank says before a stretch."""

    ready: tuple[str, ...] = ()
    """Names of the candidates that it can run."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Candidates that it cannot, with the reason."""
    hold: str = ""
    """What it would do while all ranks hold their calls."""


Plan = Callable[[frozenset[str], Mapping[str, str]], Stretch]
"""Rank 0's: from the candidates that all ranks can run, and those that some cannot, to the next stretch."""


def agreed(first: int, answers: Mapping[int, Answer], size: int, plan: Plan, missed: str) -> Stretch:
    """The stretch that begins with call ``first``, by the answers of the ranks.

    Args:
        answers: by rank.
        size: how many ranks there are.
        plan: applied only where all have answered, so only on rank 0.
        missed: what to say of ranks that have not, as the rest of a sentence.
    """
    missing = set(range(size)) - set(answers)
    if missing:
        return settled(first, DEFAULT, f"{name_ranks(missing)} of {size} {missed}")
    failed = {
        name: f"rank {rank}: {why}" for rank in sorted(answers) for name, why in answers[rank].failed.items()
    }
    common = frozenset.intersection(*(frozenset(one.ready) for one in answers.values())) - set(failed)
    stretch = plan(common, failed)
    unknown = set(stretch.turns) - common - {DEFAULT}
    if unknown:
        return settled(first, DEFAULT, f"not every rank can run {', '.join(sorted(unknown))}")
    holds = {one.hold for one in answers.values()}
    return replace(stretch, hold=holds.pop()) if len(holds) == 1 and stretch.end is not None else stretch


def meet(channel: Channel, first: int, answer: Answer, plan: Plan, *, tag: str, timeout_s: float) -> Stretch:
    """The next stretch, the same on all ranks; each calls this before it runs call ``first``.

    Raises:
        ActivationError: this rank cannot read what the ranks agreed on.
    """

    def rule(items: Mapping[int, bytes]) -> bytes:
        answers = {rank: msgspec.json.decode(item, type=Answer) for rank, item in items.items()}
        missed = silence(timeout_s, channel.gone())
        return msgspec.json.encode(agreed(first, answers, channel.size, plan, missed))

    outcome = channel.decide(
        msgspec.json.encode(answer), rule, tag=f"{tag} from call {first}", timeout_s=timeout_s
    )
    try:
        return msgspec.json.decode(outcome, type=Stretch)
    except msgspec.MsgspecError as error:
        raise ActivationError(
            f"what the ranks agreed on before call {first} is not readable: {error}"
        ) from error


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
    complete = [one for one in rounds if all(name in one for name in running)]
    names = [DEFAULT, *running]
    times = [[one[name] for one in complete] for name in names]
    best = winning(times, [predicted_ns.get(name, 0) for name in names])
    is_clear = best and not any(_may_be_faster(times[i], times[best]) for i in range(1, len(names)))
    if had < MOST_ROUNDS and not is_clear:
        return Verdict(tuple(running), None, min(had, MOST_ROUNDS - had))
    return Verdict(tuple(running), names[best])


def asked_for(rounds: Sequence[Round], name: str) -> Verdict:
    """As :func:`verdict` of a candidate that wins whatever the clock says, which is told what it takes."""
    had = len(_both(rounds, name, DEFAULT)[0])
    return Verdict((name,), name if had >= FEWEST_ROUNDS else None, max(0, FEWEST_ROUNDS - had))


def _may_be_faster(times: Times, reference: Times) -> bool:
    """Whether so few rounds leave it open that it is faster, by what counts as faster."""
    return ratio_to(times, reference) - ratio_noise(times, reference) <= 1 - LEAST_GAIN


def _cannot_win(rounds: Sequence[Round], name: str) -> bool:
    """Whether it is, beyond the noise, not faster than XLA's default by what counts as faster."""
    times, default = _both(rounds, name, DEFAULT)
    return len(times) >= FEWEST_ROUNDS and not _may_be_faster(times, default)


def _loses_to_another(rounds: Sequence[Round], name: str, running: Sequence[str]) -> bool:
    """Whether it is slower, beyond the noise, than a candidate that beats XLA's default."""
    for other in running:
        times, others = _both(rounds, name, other)
        if name == other or len(times) < FEWEST_ROUNDS or not beats(*_both(rounds, other, DEFAULT)):
            continue
        if is_slower(times, others):
            return True
    return False


def _both(rounds: Sequence[Round], name: str, other: str) -> tuple[list[int], list[int]]:
    """Times of two in the rounds that both were in."""
    common = [one for one in rounds if name in one and other in one]
    return [one[name] for one in common], [one[other] for one in common]
