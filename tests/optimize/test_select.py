"""Which candidate is taken, from times of rounds in turn."""

from __future__ import annotations

from random import Random
from statistics import mean, pstdev
from typing import NamedTuple

import pytest

from disco_hlo.optimize.select import ratio_noise, ratio_to
from disco_hlo.optimize.select import winning as index_of_winner


class Trial(NamedTuple):
    predicted_ns: int
    times_ns: list[int]


def trial(predicted_ms: int, *times_ms: float) -> Trial:
    return Trial(1_000_000 * predicted_ms, [round(1e6 * ms) for ms in times_ms])


def winning(trials: list[Trial]) -> int:
    return index_of_winner([one.times_ns for one in trials], [one.predicted_ns for one in trials])


NOISY = (100, 150, 120, 90, 140, 110, 130, 95, 105)


def of_noisy(predicted_ms: int, *ratios: float) -> Trial:
    return trial(predicted_ms, *(ms * ratio for ms, ratio in zip(NOISY, ratios, strict=True)))


STEADY = trial(120, 100, 100, 100, 100)
WINNERS = {
    "the lowest median ratio, whatever was predicted": (
        [trial(120, 100, 110, 90, 100), trial(70, 83, 91, 75, 83), trial(80, 77, 85, 70, 77)], 2,
    ),
    # Sockets: 0.83 of default was taken where another had 0.775. Rounds differ by half, their ratios less.
    "on a noisy link a better ratio, not a better prediction": (
        [
            trial(120, *NOISY),
            of_noisy(60, 0.83, 0.80, 0.86, 0.83, 0.78, 0.88, 0.83, 0.81, 0.85),
            of_noisy(70, 0.775, 0.74, 0.81, 0.775, 0.80, 0.75, 0.775, 0.82, 0.77),
        ], 2,
    ),
    "the default where a gain is small": ([STEADY, trial(60, 99.5, 99.4, 99.5, 99.6)], 0),
    "the default where a gain is noise": ([STEADY, trial(60, 80, 120, 70, 118)], 0),
    "the default where nothing is faster": ([STEADY, trial(60, 101, 102, 101, 102)], 0),
    "a sure gain beside a wild one": (
        [trial(120, 100, 100, 100, 100, 100), trial(50, 60, 160, 70, 130, 85), trial(90, 92, 93, 92, 91, 92)], 2,
    ),
    # Two H100s, resnet50: 7 % in four rounds of five were called noise.
    "a gain though one round of the default was disturbed": (
        [trial(120, 73.3, 50.0, 50.0, 50.5, 49.9), trial(110, 46.6, 46.6, 46.7, 46.6, 46.6)], 1,
    ),
    "not what never ran": ([trial(120, 100, 100, 100), trial(60)], 0),
    "nothing where the default never ran": ([trial(120), trial(60, 50, 50, 50)], 0),
    # Four rounds of five were 0.8 of the default's; on a busy machine the log said "0.95x faster".
    "not what is slower by the medians": ([trial(120, 10, 20, 30, 40, 50), trial(60, 8, 16, 33, 32, 40)], 0),
    # The first five rounds of the default were disturbed; "plan 4 wins: 1.51x slower" said the log.
    "not what left disturbed rounds early, slower than the default's median": (
        [trial(120, 900, 850, 950, 870, 930, *[49] * 20), trial(60, 75, 74, 76, 75, 75)], 0,
    ),
    "not what left disturbed rounds early, slower than another": (
        [trial(120, 900, 850, 950, 870, 930, *[100] * 20), trial(60, 75, 74, 76, 75, 75),
         trial(70, 65, 64, 66, 65, 65, *[70] * 20)], 2,
    ),
    "what left the rounds early, where the one that was faster is out": (
        [trial(120, *[100] * 25), trial(60, 75, 74, 76, 75, 75), trial(70)], 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WINNERS)
def test_what_wins(name: str) -> None:
    trials, winner = WINNERS[name]
    assert winning(trials) == winner


def test_of_two_within_a_standard_error_the_one_predicted_faster_is_taken() -> None:
    default = trial(120, 100, 100, 100, 100, 100, 100)
    one, other = trial(70, 80, 82, 78, 81, 79, 80), trial(60, 81, 79, 80, 80, 80, 79)
    assert winning([default, one, other]) == 2
    one, other = one._replace(predicted_ns=other.predicted_ns), other._replace(predicted_ns=one.predicted_ns)
    assert winning([default, one, other]) == 1


def test_of_few_rounds_two_alike_do_not_hide_the_third() -> None:
    """The median absolute deviation of these is 0, and so was the noise."""
    assert ratio_noise([95, 95, 105], [100, 100, 100]) == pytest.approx(0.083, abs=0.002)
    assert winning([trial(120, 100, 100, 100), trial(60, 95, 95, 105)]) == 0
    assert ratio_noise([95], [100]) == 1.0


@pytest.mark.parametrize("rounds", [2, 3, 4, 5, 8, 13, 25])
def test_the_noise_is_two_standard_errors_of_the_median(rounds: int) -> None:
    random, noises, medians = Random(0), [], []
    default = trial(120, *[1000] * rounds)
    for _ in range(4000):
        other = trial(60, *(random.gauss(1000, 10) for _ in range(rounds)))
        noises.append(ratio_noise(other.times_ns, default.times_ns))
        medians.append(ratio_to(other.times_ns, default.times_ns))
    assert 0.95 <= mean(noises) / (2 * pstdev(medians)) <= 1.25
