"""In the place of the clock that tells which executable of a step wins."""

from __future__ import annotations

from collections.abc import Callable

from disco_hlo.plugin.calls.schedule import FEWEST_ROUNDS, Round, Verdict


def once_it_ran_often(candidate: str, winner: str | None = None) -> Callable[..., Verdict]:
    """A verdict by which the candidate wins, or another one, after as many rounds as are timed at least."""

    def verdict(had: list[Round], candidates: list[str], _: object) -> Verdict:
        assert candidate in candidates
        lacking = FEWEST_ROUNDS - len(had)
        return Verdict((candidate,), None if lacking > 0 else winner or candidate, max(0, lacking))

    return verdict
