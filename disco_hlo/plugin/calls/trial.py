"""A trial of candidates on the calls of one step, the same on all ranks; rank 0's clock decides.

Until there are candidates, XLA's default runs all calls and ranks meet about once a second of training. Then default
and candidates take turns, in stretches that end when there may be something to decide (:mod:`.schedule`). The calls are
given back to JAX once nothing more is to come, or the module turns out to be no step.

Where rank 0 finds the step worth a search, it begins at a meeting. Work of this search that needs the devices is done
before the first call of a stretch: another thread asks for it (:class:`Hold`), and once the threads of all ranks have,
each rank holds the same call until its own is done.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import median

from disco_hlo.activation.channel import Channel
from disco_hlo.errors import ActivationError, UnsupportedError
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.calls import schedule
from disco_hlo.plugin.calls.hanging import look_after
from disco_hlo.plugin.calls.schedule import Answer, Round, Stretch, meet, settled
from disco_hlo.plugin.calls.watch import LEAST_SHARE, FromScript, Sample, Watch
from disco_hlo.plugin.hangs import Guard
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable

FIRST_MEETING = 8
"""Before this call ranks meet for the first time."""
_BEGUN_PAUSE_NS = 300_000_000
"""Less often ranks do not meet while a search waits to have the devices."""
_SEARCH = "the search"
"""No candidate has this name."""
_PAUSE_NS = 1_000_000_000
_LONGEST_PAUSE = 256
"""Calls."""
LOOK_S = 0.5
"""Between two looks whether a call may still come, or a signal came."""
_LATEST = 64
"""Calls whose median is what a call takes."""
Over = Callable[[], bool]
"""Whether no call will come any more."""
_AFTER_S = 0.05
"""After a call that outlasted a signal, until that is sent again: the script has its results by then."""


class Trial:
    """On each rank one, for the watch of the same module."""

    def __init__(self, watch: Watch, channel: Channel, timeout_s: float, tag: str) -> None:
        """Begin with XLA's default.

        Args:
            channel: joins the processes that run this module.
            timeout_s: how long a rank waits for the others before all go on with XLA's default.
        """
        self.watch = watch
        self.channel = channel
        self._timeout_s = timeout_s
        self.tag = tag
        """Names this module among those that the ranks meet about; equal on all."""
        self._stretch = Stretch(0, FIRST_MEETING, (DEFAULT,))
        self._tried: list[Stretch] = []
        """In which candidates ran."""
        self._times_ns: dict[int, int] = {}
        self._latest_ns: deque[int] = deque(maxlen=_LATEST)
        self._went_on = 0, time.perf_counter_ns()
        """The call that ranks last met before, and when it went on."""
        self._apart_ns = 0
        """From one call to the next, since then."""
        self._under_way: Hold | None = None
        """Calls that are traced."""
        self._refused: dict[str, str] = {}
        self._predicted_ns: dict[str, int] = {}
        self.marks: dict[str, Guard] = {}
        """By candidate, what stands around the end of the process where a call of it hangs."""
        self._complete = False
        self.begun = False
        """Whether a search for this step has begun."""
        self.due: Callable[[Trial], bool] = lambda _: False
        """Asked on rank 0 whether one shall begin."""
        self.begin: Callable[[Trial], None] = lambda _: None
        """Begins it on each rank, in a call."""
        self.hold: Hold | None = None
        """What this rank would do while all hold their calls."""
        self.share = 1.0
        """Part of the training's time since the search began that calls may be held: what was not used adds up."""
        self._next_hold_ns = 0
        self.least_share = LEAST_SHARE
        """Of the devices' time: of a module that takes less no candidate is tried."""
        self.asked_for = ""
        """Name of a candidate that wins whatever the clock says, where all ranks can run it; on rank 0."""
        self.on_outcome: Callable[[str, list[Round]], None] = lambda *_: None
        """Told of the outcome and what was measured until then."""
        watch.on_sample = self._note
        watch.swap(self.choose)

    @property
    def outcome(self) -> str | None:
        """Name of what runs all calls from now on; None while that is open."""
        return self.watch.settled

    @property
    def why(self) -> str:
        """Of what runs the calls now; empty where nothing is to be said."""
        return self._stretch.why

    @property
    def rounds(self) -> list[Round]:
        """What was measured so far, on this rank."""
        times_ns = dict(self._times_ns)
        return [one for stretch in self._tried for one in stretch.rounds(times_ns)]

    @property
    def call_ns(self) -> int:
        """What a call takes the devices, outside of traces; 0 as long as nobody knows."""
        latest = list(self._latest_ns)
        return int(median(latest)) if len(latest) >= FIRST_MEETING else 0

    def time_anew(self) -> None:
        """Forget what a call takes: what ran beside the calls so far runs no more."""
        self._latest_ns.clear()

    def name_of(self, index: int) -> str:
        """What ran this call, or runs it."""
        return next((one.name_at(index) for one in reversed(self._tried) if one.holds(index)), DEFAULT)

    def offer(
        self,
        name: str,
        executable: LoadedExecutable,
        predicted_ns: int = 0,
        mark: Guard = contextlib.nullcontext,
    ) -> None:
        """Bring a candidate on this rank, from any thread; it runs once all ranks have brought one of this name.

        Args:
            name: equal only for equal modules: ranks that run different ones wait for each other forever.
            executable: computes what XLA's default does.
            predicted_ns: its step time, which decides where the clock does not; 0 where nobody knows.
            mark: around the end of this process, where a call of it hangs.
        """
        self.marks[name] = mark
        try:
            self.watch.offer(name, executable)
            self._predicted_ns[name] = predicted_ns
        except UnsupportedError as error:
            self.refuse(name, one_line(error))

    def refuse(self, name: str, reason: str) -> None:
        """Say that this rank cannot run the candidate of this name, so that none does."""
        self._refused[name] = reason

    def give_up(self, reason: str) -> None:
        """Say that the search on this rank has failed, so that all go on with XLA's default."""
        self.refuse(_SEARCH, reason)

    @property
    def is_over(self) -> bool:
        """Whether nobody searches for it any more on this rank: it runs what won, or the search was given up."""
        return self.outcome is not None or _SEARCH in self._refused

    def complete(self) -> None:
        """No more candidates will come; on rank 0. When the order is clear, the calls are given back."""
        self._complete = True

    def choose(self, index: int) -> str:
        """What runs call ``index``. Before some calls ranks meet, and wait for each other here."""
        if self._under_way is not None:
            self._after_traced(self._under_way)
        if self._stretch.end is not None and index >= self._stretch.end:
            before, then_ns = self._went_on
            self._apart_ns = (time.perf_counter_ns() - then_ns) // max(1, index - before)
            hold = self.hold
            # Rank 0's clock decides whether it would stay within its share, as nobody holds without it.
            may = self.channel.rank != 0 or time.perf_counter_ns() >= self._next_hold_ns
            if hold is not None and not (may and hold.ready()):
                hold = None
            self._begin(self._meet(index, hold))
            if hold is not None and self._stretch.hold == hold.what:
                self._hold_for(hold, index)
            self._went_on = index, time.perf_counter_ns()
        name = self._stretch.name_at(index)
        if self._stretch.end is None:
            self.on_outcome(name, self.rounds)
            self.watch.settle(name)
        elif name in self.watch.failures and self.channel.size == 1:
            return DEFAULT
        return name

    def _hold_for(self, hold: Hold, index: int) -> None:
        self.watch.drain_queue()
        began_ns = time.perf_counter_ns()
        hold.wait()
        self._held_since(began_ns)
        if hold.calls:
            self._under_way = hold
            self._stretch = replace(self._stretch, end=index + hold.calls)
            self.watch.drain_before_next()

    def _after_traced(self, hold: Hold) -> None:
        self.watch.drain()
        began_ns = time.perf_counter_ns()
        if hold.after_call():
            self._under_way = None
            if self.hold is hold:  # the other thread may have the next one ready
                self.hold = None
            self._held_since(began_ns)
        else:
            self.watch.drain_before_next()

    def _held_since(self, began_ns: int) -> None:
        """Note when calls may be held again."""
        self._next_hold_ns += round((time.perf_counter_ns() - began_ns) / self.share)

    def _meet(self, index: int, hold: Hold | None) -> Stretch:
        failed = {**self._refused, **self.watch.failures}
        ready = tuple(name for name in self.watch.names if name != DEFAULT and name not in failed)
        answer = Answer(ready, failed, "" if hold is None else hold.what)

        def plan(common: frozenset[str], failures: Mapping[str, str]) -> Stretch:
            stretch = self._plan(index, common, failures)
            begins = stretch.end is not None and not self.begun and self.due(self)
            return replace(stretch, begins=begins)

        try:
            return meet(self.channel, index, answer, plan, tag=self.tag, timeout_s=self._timeout_s)
        except ActivationError as error:
            return settled(index, DEFAULT, one_line(error))

    def _begin(self, stretch: Stretch) -> None:
        before, self._stretch = self._stretch, stretch
        if stretch.begins:
            self.begun = True
            self._next_hold_ns = time.perf_counter_ns()
            self.begin(self)
        if stretch.turns != (DEFAULT,):
            if not self._tried:
                look_after(self)
            self._tried.append(stretch)
        if (stretch.turns, stretch.end is None, stretch.why) == (before.turns, False, ""):
            return
        level = 20 if stretch.end is None and stretch.turns != (DEFAULT,) and self.channel.rank == 0 else 10
        LOGGER.log(level, "%s: %s from call %d on%s", self.watch.module_name, " and ".join(stretch.turns),
                   stretch.first, f": {stretch.why}" if stretch.why else "")  # fmt: skip

    def _note(self, sample: Sample) -> None:
        """In the thread that times. The calls of a stretch end when the next one has begun."""
        if (traced := self._under_way) is not None:
            traced.call_ended()
            traced.device_ns.append(sample.device_ns)
        elif sample.name == DEFAULT:
            self._latest_ns.append(sample.device_ns)
        for stretch in reversed(self._tried):
            if stretch.holds(sample.index):
                if stretch.name_at(sample.index) == sample.name:
                    self._times_ns[sample.index] = sample.device_ns
                return

    def _plan(self, index: int, candidates: frozenset[str], failed: Mapping[str, str]) -> Stretch:
        """What comes next; see :data:`.schedule.Plan`."""
        share = self.watch.seen.share
        if self.watch.timed and share < self.least_share:  # many may be dispatched before one has ended
            return settled(index, DEFAULT, f"it takes {share:.0%} of the devices' time")
        if _SEARCH in failed:
            return settled(index, DEFAULT, f"its search failed: {failed[_SEARCH]}")
        why = "; ".join(f"{name} failed: {reason}" for name, reason in failed.items())
        if not candidates:
            if self._complete:
                return settled(index, DEFAULT, why or "no candidate is left")
            return Stretch(index, index + self._pause(), (DEFAULT,), why)
        is_asked_for = self.asked_for in candidates
        if is_asked_for:
            found = schedule.asked_for(self.rounds, self.asked_for)
        else:
            found = schedule.verdict(self.rounds, sorted(candidates), self._predicted_ns)
        if found.winner is None:
            turns = (DEFAULT, *found.running)
            warm_up = int(not set(turns) <= {name for one in self._tried for name in one.turns})
            end = index + len(turns) * (warm_up + found.rounds)
            return Stretch(index, end, turns, why, warm_up)
        if self._complete:
            best = "it was asked for" if is_asked_for else "it is the fastest"
            return settled(index, found.winner, why or best)
        return Stretch(index, index + self._pause(), (found.winner,), why)

    def _pause(self) -> int:
        """Calls until ranks meet again, where nothing is to be decided."""
        watch = self.watch
        each_ns = max(1, watch.device_ns // max(1, watch.timed), self._apart_ns)
        if not watch.timed:
            return FIRST_MEETING
        if not self.begun:
            return min(max(FIRST_MEETING, _PAUSE_NS // each_ns), _LONGEST_PAUSE)
        wait_ns = _BEGUN_PAUSE_NS
        if self.hold is not None:
            wait_ns = max(min(wait_ns, FIRST_MEETING * each_ns), self._next_hold_ns - time.perf_counter_ns())
        return min(max(1, wait_ns // each_ns), _LONGEST_PAUSE)


class Hold:
    """One piece of work, and the call that waits for it."""

    def __init__(
        self, what: str, while_held: Callable[[], contextlib.AbstractContextManager[object]]
    ) -> None:
        """Nothing is held yet.

        Args:
            what: the work, in words; equal on all ranks.
            while_held: around the waiting of the call, in its thread.
        """
        self.what = what
        self._while_held = while_held
        self._begun = threading.Event()
        self._ended = threading.Event()
        self.outlasts = False
        """Whether the call must not be left by a signal: what it takes is elsewhere."""
        self.calls = 0
        """How many calls go on under it once it has begun."""
        self.device_ns: list[int] = []
        """Of each of these."""

    def ready(self) -> bool:
        """Whether this rank can begin: not once it has ended, which the next call may see before it is taken away, nor
        while its script has the profiler."""
        return not self._ended.is_set() and not jaxlink.profiler_runs()

    def call_ended(self) -> None:
        """Once a call that goes on under it has ended on the devices; in the thread that times."""

    def after_call(self) -> bool:
        """Before the call that follows one that went on under it; whether that was the last one."""
        return True

    def wait(self) -> None:
        """In the call: let the work begin, and return when it has ended. Raises FromScript: a signal came."""
        late: BaseException | None = None
        with self._while_held():
            self._begun.set()
            # Time and again: a signal that comes as a thread begins to wait is heard when that ends.
            while not self._ended.is_set():
                try:
                    self._ended.wait(LOOK_S)
                except BaseException as error:  # of a handler of the script's, for whichever signal
                    if not self.outlasts:
                        raise FromScript(error) from None
                    late = error
        if late is not None and not isinstance(late, KeyboardInterrupt):
            raise FromScript(late)
        if late is not None:
            again = threading.get_ident(), signal.SIGINT
            threading.Timer(_AFTER_S, signal.pthread_kill, again).start()

    @contextlib.contextmanager
    def held(self, over: Over) -> Iterator[None]:
        """In the other thread: do the body while the call waits.

        Args:
            over: whether no call will come any more.

        Raises:
            ActivationError: none came.
        """
        try:
            while not self._begun.wait(LOOK_S):
                if over():
                    raise ActivationError(f"{self.what}: the step is not called any more")
            yield
        finally:
            self._ended.set()
