"""Calls of a candidate that do not come back, seen from a thread beside; the job ends by the rule for runs of ours
(:func:`disco_hlo.plugin.hangs.ending_hangs`).

A call has returned long before the devices have computed it, so the script may be anywhere. The thread that times calls
knows what the devices are at (``watch.DeviceTimes``), and this one looks at that. A rank that is in a call may wait
there for one that has yet to make it. So each says that it has been in a call of a candidate for long, and those that
have been past it for as long say so, wherever they are by then: all have made it, and nobody is to come any more.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from disco_hlo.activation.channel import key_part
from disco_hlo.activation.kvstore import KvChannel
from disco_hlo.errors import ActivationError
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.calls.watch import UnderWay
from disco_hlo.plugin.hangs import ending_hangs, lasts_alike, long_s

if TYPE_CHECKING:
    from disco_hlo.plugin.calls.trial import Trial

LOOK_S = 0.5
"""Between two looks. A call that two of them find is followed."""


def look_after(trial: Trial) -> None:
    """From now on, until the trial is over and its last call has ended, or the process ends. Not where a call may take
    any time, whatever others took."""
    trial.watch.beside(functools.partial(_look_after, weakref.ref(trial)))


def _look_after(ref: weakref.ref[Trial], closing: threading.Event) -> None:
    followed: dict[int, contextlib.ExitStack] = {}
    threads: list[threading.Thread] = []
    before: UnderWay | None = None
    ended, past = deque[int](), 0
    if (trial := ref()) is None or not lasts_alike(trial.watch.module):
        return
    del trial
    try:
        while not closing.wait(LOOK_S) and (trial := ref()) is not None:
            now = trial.watch.under_way
            if now is None and trial.outcome is not None:
                return
            ended.append(trial.watch.ended)
            while len(ended) > math.ceil(long_s(trial.call_ns) / LOOK_S):
                past = ended.popleft()
            calls: dict[int, str | None] = dict.fromkeys(_asked(trial, past), "")
            if now is not None and now == before and now.name != DEFAULT:
                calls[now.number] = None
            threads = [one for one in threads if one.is_alive()]
            threads += _follow(trial, followed, calls if trial.call_ns else {})
            before = now
            del trial
    finally:
        for stack in followed.values():
            stack.close()
        for thread in threads:  # which must not be left to a dying interpreter
            thread.join()


def _follow(
    trial: Trial, followed: dict[int, contextlib.ExitStack], calls: Mapping[int, str | None]
) -> Iterator[threading.Thread]:
    """Follow these ``calls``, by their numbers, and no others, each with a thread; see ``went`` of
    :func:`ending_hangs`."""
    for index in followed.keys() - calls.keys():
        followed.pop(index).close()
    for index in calls.keys() - followed.keys():
        name, channel, went = trial.name_of(index), trial.channel, calls[index]
        wait = channel.wait(went, f"{_where(trial)}/{index}") if isinstance(channel, KvChannel) else None
        what = f"a call of {trial.watch.module_name} that {name} ran"
        guard = trial.marks.get(name, contextlib.nullcontext)
        followed[index] = contextlib.ExitStack()
        yield followed[index].enter_context(
            ending_hangs(what, trial.call_ns, wait, went, longest_s=math.inf, mark=guard)
        )


def _asked(trial: Trial, past: int) -> list[int]:
    """Calls before this one of which another rank says that it is in them."""
    if not isinstance(trial.channel, KvChannel):
        return []
    with contextlib.suppress(ActivationError):  # the job is over
        return [one for one in map(int, trial.channel.long_in(_where(trial))) if one < past]
    return []


def _where(trial: Trial) -> str:
    return f"calls/{key_part(trial.tag)}"
