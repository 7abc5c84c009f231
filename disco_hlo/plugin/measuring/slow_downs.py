"""Slow-downs that add up to the step they were read from (GPU).

What kernels and transfers cost each other is read from a few traced runs. Which of two that could begin at once comes
first is chance, and a profiler that writes between kernels loads the dice. So both steps that were traced, one with
transfers alone and one with transfers beside kernels, are timed untraced, too, many runs of each. How much longer the
second takes is what hiding transfers costs; where the simulator says less, by more than a hundredth of the step, all
slow-downs are taken larger alike until it does not. Where that takes more than can be believed, or the simulator says
more than the step takes, they stay: it is wrong about something else there, and with too small ones a search would hide
transfers under whatever they cost most.
"""

from __future__ import annotations

from dataclasses import replace

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.regions import step_times
from disco_hlo.plan.baselines import in_every_region, one_at_a_time, varied
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.profiler.contention import MUCH_MOVED
from disco_hlo.profiler.losses import MOST
from disco_hlo.profiler.profile import Contention, Profile
from disco_hlo.simulator.orders import beside_transfers

_RIGHT = 0.01
"""Of a step: as far off the simulator may be for other reasons."""
_MOST_TIMES = 3.0
"""What slow-downs cost is believed to be up to so many times what traces say."""
_HALVINGS = 10


def adding_up(
    profile: Profile, source: CanonicalModule, xla: Strategy, alone_ns: int, beside_ns: int
) -> Contention:
    """The profile's slow-downs, or larger ones that explain what a step took.

    Args:
        profile: what is known of the step, with slow-downs as traces show them.
        xla: XLA's own plan.
        alone_ns: what XLA's kernels took in the order in which transfers run alone; buckets of varied sizes in both.
        beside_ns: and in the order in which they run beside.
    """
    found = profile.contention or Contention(1.0, 1.0)
    one_by_one = in_every_region(source, varied(source, xla), one_at_a_time)
    overlapping = in_every_region(source, varied(source, xla), beside_transfers)
    costs = costs_of(profile, source, [xla])
    by_itself = step_times(source, one_by_one, costs)
    if by_itself.communication_ns > MUCH_MOVED * alone_ns:
        return found
    # What is wrong about the step with collectives alone is nothing that slow-downs could mend.
    taken_ns = beside_ns - alone_ns + by_itself.makespan_ns

    def simulated_ns(slowed: Contention) -> int:
        return step_times(source, overlapping, costs.slowed(slowed)).makespan_ns

    off = (simulated_ns(found) - taken_ns) / beside_ns
    LOGGER.debug("transfers beside XLA's kernels: simulated %+.1f %% of what the step took", 100 * off)
    if off >= -_RIGHT:
        return found
    if simulated_ns(larger(found, _MOST_TIMES)) < taken_ns - _RIGHT * beside_ns:
        LOGGER.info(
            "where collectives overlap kernels the step takes %.1f %% longer than simulated, more than contention "
            "explains",
            -100 * off,
        )
        return found
    least, most = 1.0, _MOST_TIMES
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (middle, most) if simulated_ns(larger(found, middle)) < taken_ns else (least, middle)
    LOGGER.info(
        "a step loses %.1f %% more to overlapping collectives than its trace shows: the simulator multiplies the "
        "measured contention by %.2f",
        -100 * off, most,
    )  # fmt: skip
    return larger(found, most)


def larger(slowed: Contention, times: float) -> Contention:
    """Slow-downs that cost so many times as much beyond 1, within what is believed of any.

    Products may lose more than :data:`~disco_hlo.profiler.losses.MOST_OF_PRODUCTS`: that is what one loses beside a
    transfer as long as itself, and beside a short one its last thread blocks wait for the whole of it.
    """

    def more(factor: float) -> float:
        return min(1 + times * (factor - 1), MOST)

    return replace(
        slowed,
        compute=more(slowed.compute),
        communication=more(slowed.communication),
        transfer_wait_ns=round(times * slowed.transfer_wait_ns),
        products=None if slowed.products is None else more(slowed.products),
        others=None if slowed.others is None else more(slowed.others),
    )
