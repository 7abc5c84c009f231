"""Which executable runs which call, and when the order of the candidates is clear."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from disco_hlo.activation.kvstore import KvChannel
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.calls.schedule import (
    MOST_ROUNDS,
    Answer,
    Round,
    Stretch,
    Verdict,
    agreed,
    meet,
    settled,
    verdict,
)
from tests.activation.stores import on_ranks


def turns(common: frozenset[str], failed: Mapping[str, str]) -> Stretch:
    return Stretch(10, 20, (DEFAULT, *sorted(common)), "; ".join(f"{a}: {b}" for a, b in failed.items()))


def test_executables_take_turns_from_the_first_call_of_a_stretch() -> None:
    stretch = Stretch(5, 11, (DEFAULT, "a", "b"))
    assert [stretch.name_at(index) for index in range(5, 11)] == [DEFAULT, "a", "b"] * 2
    assert [stretch.holds(index) for index in (4, 5, 10, 11)] == [False, True, True, False]
    assert settled(7, "a", "").holds(10**6)


def test_rounds_are_those_whose_calls_were_all_timed() -> None:
    times_ns = {index: 100 + index for index in range(5, 13)}
    assert Stretch(5, 13, (DEFAULT, "a")).rounds(times_ns) == [
        {DEFAULT: 100 + index, "a": 101 + index} for index in (5, 7, 9, 11)
    ]
    del times_ns[8]
    kept = Stretch(5, 13, (DEFAULT, "a"), warm_up=1).rounds(times_ns)
    assert kept == [{DEFAULT: 109, "a": 110}, {DEFAULT: 111, "a": 112}]
    assert Stretch(5, 13, ("a",)).rounds(times_ns) == []
    # The last round is cut off where a stretch ends within it.
    assert len(Stretch(0, 5, (DEFAULT, "a")).rounds(dict.fromkeys(range(5), 1))) == 2


def test_only_what_all_ranks_can_run_is_planned() -> None:
    answers = {0: Answer(("a", "b", "c")), 1: Answer(("b", "c"), {"c": "too large"})}
    assert agreed(10, answers, 2, turns, "") == Stretch(10, 20, (DEFAULT, "b"), "c: rank 1: too large")


def test_all_go_on_with_the_default_where_one_is_missing_or_a_plan_asks_too_much() -> None:
    found = agreed(10, {0: Answer(("a",))}, 2, turns, "did not answer within 3 s")
    assert found == settled(10, DEFAULT, "rank 1 of 2 did not answer within 3 s")

    def too_much(*_: object) -> Stretch:
        return Stretch(10, 20, ("a", "b"))

    assert agreed(10, {0: Answer(("a",))}, 1, too_much, "") == settled(
        10, DEFAULT, "not every rank can run b"
    )


def test_a_call_is_held_where_all_ranks_have_the_same_work_ready() -> None:
    profiling, other = Answer(hold="profiling"), Answer(hold="comparing")
    assert agreed(10, {0: profiling, 1: profiling}, 2, turns, "").hold == "profiling"
    assert agreed(10, {0: profiling, 1: other}, 2, turns, "").hold == ""
    assert agreed(10, {0: profiling, 1: Answer()}, 2, turns, "").hold == ""

    def last(*_: object) -> Stretch:
        return settled(10, DEFAULT, "no candidate is left")

    assert agreed(10, {0: profiling, 1: profiling}, 2, last, "").hold == ""


def test_ranks_agree_by_what_rank_0_plans() -> None:
    def rank(channel: KvChannel) -> Stretch:
        def mine(common: frozenset[str], failed: Mapping[str, str]) -> Stretch:
            assert channel.rank == 0
            return turns(common, failed)

        return meet(channel, 10, Answer(("a", f"only {channel.rank}")), mine, tag="t", timeout_s=60)

    assert on_ranks(3, rank) == [Stretch(10, 20, (DEFAULT, "a"))] * 3


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
