"""A trace of the step as training runs it, with a name for every kernel.

DisCo measures ops in the step itself (section 4.2). A GPU's step runs its kernels in command buffers (CUDA graphs),
and there a trace tells the buffer's name, not the instruction's. Started one by one, kernels have their names, but
short ones take about a microsecond longer, what lies between two is another time, and what they lose beside transfers,
too. So a module is compiled and traced twice, with command buffers for the times and without for the names: on each
device its kernels run in the same order in both, and so do its transfers, its copies and its memsets.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import Match, SequenceMatcher
from functools import lru_cache
from itertools import takewhile

from disco_hlo.profiler.intervals import length_ns
from disco_hlo.profiler.trace import Execution, Trace
from disco_hlo.profiler.transfers import by_place, is_transfer, span

from disco_hlo.errors import ProfileError

_LEAST_NAMED = 0.98
"""Of the time of each lane; a trace that leaves more without a name is of something else."""
_FEW_NS = 20_000
"""In a run: of copies and memsets there may be hardly any, and so much without a name does not matter."""
_NUMBER = re.compile(r"[._]\d+$")
"""What XLA may add to the name of a kernel that it generates, in one compile and not in the other."""
_MEMORY = re.compile(r"mem(set|cpy)", re.IGNORECASE)
"""Copies and memsets are kernels of CUDA's in a command buffer (``memcpy32_post``), and events of a kind of their own
outside (``MemcpyD2D``)."""


@dataclass(frozen=True)
class WithNames:
    """A trace in command buffers, in which every execution has a name."""

    trace: Trace
    unnamed_ns: int
    """What is left out of it for want of one, of a run on a device."""


def with_names(timed: Trace, timed_module: str, named: Trace, named_module: str) -> WithNames:
    """What ran in ``timed``, under the instruction names that ``named`` has for it, and as its module.

    Args:
        timed: a trace of a module that runs in command buffers.
        named: a trace of the same module, compiled without.

    Raises:
        ProfileError: too little of the one is found in the other, by the names of kernels and their order.
    """
    known = {
        (device, lane): ones
        for (_, device), items in by_place(named, named_module).items()
        for lane, ones in _lanes(items).items()
    }
    found: list[Execution] = []
    all_ns: Counter[str] = Counter()
    named_ns: Counter[str] = Counter()
    places = by_place(timed, timed_module)
    for (_, device), items in places.items():
        for lane, ones in _lanes(items).items():
            pairs = list(_aligned(ones, known.get((device, lane), [])))
            found += [replace(one, op=name.op, module=named_module) for one, name in pairs]
            all_ns[lane] += length_ns(map(span, ones))
            named_ns[lane] += length_ns(span(one) for one, _ in pairs)
    for lane, lane_ns in all_ns.items():
        if lane_ns - named_ns[lane] > max((1 - _LEAST_NAMED) * lane_ns, _FEW_NS * len(places)):
            raise ProfileError(
                f"{named_ns[lane] / 1e6:.2f} of {lane_ns / 1e6:.2f} ms of {timed_module}, {lane}s, have a name in the "
                f"trace of {named_module} without command buffers, need {_LEAST_NAMED:.0%}"
            )
    if not found:
        raise ProfileError(f"nothing of {timed_module} has a name in the trace of {named_module}")
    ordered = tuple(sorted(found, key=lambda one: (one.start_ns, -one.end_ns)))
    unnamed_ns = round((all_ns.total() - named_ns.total()) / len(places))
    return WithNames(Trace(ordered, timed.windows, timed.backend), unnamed_ns)


def _lanes(items: Iterable[Execution]) -> dict[str, list[Execution]]:
    """By what runs in one order with its like: kernels, transfers, copies, memsets. Outside of command buffers a loop's
    copies have streams of their own."""
    found: dict[str, list[Execution]] = defaultdict(list)
    for item in items:
        memory = _MEMORY.match(item.kernel)
        found["transfer" if is_transfer(item) else memory[0].lower() if memory else "kernel"].append(item)
    return found


def _aligned(timed: Sequence[Execution], named: Sequence[Execution]) -> Iterator[tuple[Execution, Execution]]:
    """Pairs of the same kernel, of one lane. Where one has more than the other: those from the beginning on and from
    the end back, as far as both are alike, and of what lies between the longest runs that both have.

    Copies, and memsets, are all alike: where there are more of them in one, nobody knows which it is.
    """
    if len(timed) != len(named) and timed and _MEMORY.match(timed[0].kernel):
        return
    ours, theirs = ([_sort_of(one.kernel) for one in side] for side in (timed, named))
    first = _alike(ours, theirs)
    last = _alike(ours[first:][::-1], theirs[first:][::-1])
    middle = _both_have(tuple(ours[first : len(ours) - last]), tuple(theirs[first : len(theirs) - last]))
    yield from zip(timed[:first], named[:first], strict=True)
    for block in middle:
        yield from zip(
            timed[first + block.a :][: block.size], named[first + block.b :][: block.size], strict=True
        )
    yield from zip(timed[len(ours) - last :], named[len(theirs) - last :], strict=True)


@lru_cache(maxsize=8)
def _both_have(ours: tuple[str, ...], theirs: tuple[str, ...]) -> list[Match]:
    """The longest runs of both. It is the same in every run of a device, and takes the square of their number."""
    return SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()


def _alike(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """How many are the same from the beginning on."""
    both = zip(ours, theirs, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _sort_of(kernel: str) -> str:
    """What the name of a kernel says of it in both traces alike."""
    return "" if _MEMORY.match(kernel) else _NUMBER.sub("", kernel)
