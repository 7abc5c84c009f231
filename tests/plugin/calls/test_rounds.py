"""When the order is clear. Rounds are made up: each candidate a multiple of the default, with a small wave on it."""

from __future__ import annotations

import pytest

from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.calls.schedule import MOST_ROUNDS, Round, Verdict, verdict


def rounds(count: int, wave: int = 2, **multiples: float) -> list[Round]:
    """``count`` rounds in which the default takes 1000 ns."""
    found = []
    for number in range(count):
        off = (number * 7 % 5 - 2) * wave
        found.append({DEFAULT: 1000, **{name: round(1000 * by) + off for name, by in multiples.items()}})
    return found


def test_nothing_is_said_before_five_rounds() -> None:
    assert verdict([], ["a"], {}) == Verdict(("a",), None, 5)
    assert verdict(rounds(3, a=0.5, b=2), ["a", "b"], {}) == Verdict(("a", "b"), None, 2)


def test_the_only_one_that_is_faster_wins_at_once() -> None:
    assert verdict(rounds(5, a=0.8), ["a"], {}) == Verdict(("a",), "a")
    assert verdict(rounds(5, a=0.8, b=1.2, c=1.0), ["a", "b", "c"], {}) == Verdict(("a",), "a")


def test_the_default_stays_where_nothing_is_faster() -> None:
    assert verdict(rounds(5, a=1.3, b=1.0), ["a", "b"], {}) == Verdict((), DEFAULT)
    assert verdict(rounds(5), [], {}) == Verdict((), DEFAULT)


def test_one_that_another_beats_runs_no_more() -> None:
    found = verdict(rounds(5, a=0.9, b=0.7, c=0.7), ["a", "b", "c"], {})
    assert found == Verdict(("b", "c"), None, 5)


def test_what_the_clock_does_not_tell_apart_ends_with_the_better_prediction() -> None:
    level = rounds(MOST_ROUNDS, wave=20, a=0.8, b=0.8)
    assert verdict(level[:20], ["a", "b"], {}) == Verdict(("a", "b"), None, 20)
    assert verdict(level, ["a", "b"], {"a": 900, "b": 800}).winner == "b"
    assert verdict(level, ["a", "b"], {"a": 800, "b": 900}).winner == "a"


def test_what_may_be_faster_gets_more_rounds_and_then_the_default() -> None:
    noisy = rounds(MOST_ROUNDS, wave=60, a=0.985)
    assert verdict(noisy[:5], ["a"], {}).winner is None
    assert verdict(noisy[:5], ["a"], {}).rounds == 5
    assert verdict(noisy, ["a"], {}).winner == DEFAULT


def test_a_candidate_that_comes_later_is_compared_in_its_own_rounds() -> None:
    early, late = rounds(10, a=0.8), rounds(5, a=0.8, b=0.6)
    assert verdict(early, ["a", "b"], {}) == Verdict(("a", "b"), None, 5)
    assert verdict(early + late, ["a", "b"], {}) == Verdict(("b",), "b")


@pytest.mark.parametrize("spike", [10, 1000])
def test_a_disturbed_round_changes_nothing(spike: int) -> None:
    disturbed = rounds(10, a=0.8)
    disturbed[3] = {DEFAULT: 1000, "a": 800 * spike}
    assert verdict(disturbed, ["a"], {}).winner == "a"
