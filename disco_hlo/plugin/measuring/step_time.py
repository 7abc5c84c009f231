"""How a step is timed: on GPU as a training loop runs it, several one after the other without waiting.

A loop that looks at its loss now and then dispatches the next step while the last one runs, and the way from the
host to the devices (0.3 to 2.9 ms on an H200, 4 ms on two GPUs, more the more arrays a step takes) is hidden. A single
run that is waited for shows it whole: of a step of 17 ms it was a tenth. Several show it once, unless the clock starts
when the devices are at work: steps of gpt12, three at once on two H100s, were 1.3 % too long by it.
"""

from __future__ import annotations

from disco_hlo.plugin.measuring.runner import Runner

AT_ONCE_NS = 300_000_000
"""About what one measurement should take: a hundred times what the host adds to it, and more."""
MOST_AT_ONCE = 20
COPIES_BYTES = 16 << 30
"""The most that copies of donated inputs may take on each device."""
_COPIES_SHARE = 8
"""And the part of the free memory, at most: one in so many."""
LOOKS = 3
"""Runs that are waited for, of which the shortest counts."""


def steps_at_once(
    step_ns: int, donated_bytes: int, free_bytes: int | None = None, within_ns: int = AT_ONCE_NS
) -> int:
    """How many runs of a step one measurement takes.

    Args:
        step_ns: of one run that is waited for.
        donated_bytes: what the copies for one more run take on each device.
        free_bytes: what is free there; None where nobody says.
        within_ns: about what one measurement should take.
    """
    count = min(MOST_AT_ONCE, round(within_ns / max(1, step_ns)))
    if donated_bytes:
        room = COPIES_BYTES if free_bytes is None else min(COPIES_BYTES, free_bytes // _COPIES_SHARE)
        count = min(count, room // donated_bytes - 1)  # and one ahead of them
    return max(1, count)


def waited_for_ns(runner: Runner) -> int:
    """The least that a run takes which is waited for, of a few."""
    return min(runner.run() for _ in range(LOOKS))


def at_once_of(
    runner: Runner, step_ns: int, free_bytes: int | None = None, within_ns: int = AT_ONCE_NS
) -> int:
    """How many runs of a step one measurement takes, of a runner that has run; runs it a few times more.

    Args:
        step_ns: of one run that is waited for: the same on all ranks, which run it as often as each other.
        free_bytes: what is free on each device; None where nobody says.
        within_ns: about what one measurement should take.
    """
    count = steps_at_once(step_ns, 0, None, within_ns)
    if count > 1:
        runner.learn_handing_on(count + 1)
    return steps_at_once(step_ns, runner.donated_bytes(), free_bytes, within_ns)


def time_once(runner: Runner, at_once: int) -> int:
    """Nanoseconds of a step by one measurement: dispatched and waited for, or several in a row."""
    return runner.run() if at_once == 1 else runner.run_in_a_row(at_once)
