"""Whether the devices of a step compute alike, and each alike from run to run.

DisCo's simulator plays one worker for all (section 4.2), and so does ours; but a step waits for the slowest. A GPU that
is hot or short of power lowers its clock, and another program may use it, too: on two H100s the kernels of one step
took 45.4 ms on one device in every run, and 47 to 80 on the other. What is measured meanwhile is true of that state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from disco_hlo.profiler.intervals import length_ns
from disco_hlo.profiler.trace import Trace
from disco_hlo.profiler.transfers import by_place, is_transfer, span

_SLOWER = 1.05
"""Of the fastest device's time. Two that are well differ by up to 1 %."""
_UNSTEADY = 1.2
"""The longest over the shortest of a device's runs."""
_LEAST_NS = 100_000
"""A difference that a step's own noise does not make: some kernels of a few us, more or less."""

Computed = Mapping[str, Sequence[int]]
"""By device, how long its kernels ran in each run, ns; collectives, in which it waits for others, left out."""


@dataclass(frozen=True, slots=True)
class Uneven:
    """A device that holds up the step, and the one that is fastest, with the times of their runs, ns."""

    slow: str
    slow_ns: tuple[int, ...]
    fast: str
    fast_ns: tuple[int, ...]

    def __str__(self) -> str:
        if self.slow == self.fast:
            return f"the step's kernels take {_range(self.slow_ns)} on {self.slow}"
        return f"the step's kernels take {_range(self.slow_ns)} on {self.slow}, {_range(self.fast_ns)} on {self.fast}"


def computed_ns(trace: Trace, module_name: str) -> dict[str, list[int]]:
    """As :data:`Computed`, by the devices that a trace shows."""
    found: dict[str, list[int]] = defaultdict(list)
    for (_, device), items in sorted(by_place(trace, module_name).items()):
        kernels = [span(item) for item in items if not is_transfer(item)]
        found[f"device {device}"].append(length_ns(kernels))
    return dict(found)


def uneven(computed: Computed) -> Uneven | None:
    """The device that is much slower than another, or than itself in another run; None where all are alike."""
    if not computed:
        return None
    slow = max(computed, key=lambda device: (median(computed[device]), max(computed[device])))
    fast = min(computed, key=lambda device: median(computed[device]))
    if _alike(median(computed[slow]), median(computed[fast]), _SLOWER):
        slow = max(computed, key=lambda device: max(computed[device]) / max(1, min(computed[device])))
        if _alike(max(computed[slow]), min(computed[slow]), _UNSTEADY):
            return None
    return Uneven(slow, tuple(computed[slow]), fast, tuple(computed[fast]))


def _alike(longer_ns: float, shorter_ns: float, limit: float) -> bool:
    return longer_ns <= max(limit * shorter_ns, shorter_ns + _LEAST_NS)


def _range(times_ns: Sequence[int]) -> str:
    return f"{min(times_ns) / 1e6:.2f} to {max(times_ns) / 1e6:.2f} ms"
