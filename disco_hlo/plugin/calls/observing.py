"""All calls of a process, observed: which modules are watched, and which of them is the training step by its calls.

Off unless :meth:`Observation.start` is called, after :func:`disco_hlo.plugin.xla.jaxlink.install`. Which modules are
watched depends on the modules alone, so it is the same on all ranks: several devices, more than a few ops, and a state
that is returned (:func:`keeps_state`): a step returns the state that it takes, changed (or gradients of the same
shapes), an evaluation numbers or predictions. Among those, the step is the module on which the devices spend most of
their time. A script may have several: they come by their share (:func:`steps`).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from disco_hlo.activation.channel import Channel
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.calls.trial import Trial
from disco_hlo.plugin.calls.watch import LEAST_SHARE, DeviceTimes, Seen, Watch
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.settings import before_first_step
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable, Memory, memory
from disco_hlo.plugin.xla.jaxlink import CompileRequest, Execute, LoadedModule
from disco_hlo.plugin.xla.jaxlink.calls import ArrayType

_FEWEST_OPS = 8
"""An op on a sharded array, outside of any ``jit``, has fewer."""
_PLACING = "sdy."
CALLS_BEFORE_SEARCH = 24
"""A step that is called less often gains nothing by a search."""
_MOST_SEARCHES = 3
"""For one step, which a script may have JAX load again and again: each ends with what was loaded."""

Wanted = Callable[[CompileRequest], bool]
ChannelOf = Callable[[CompileRequest], Channel]
FEWEST_CALLS = 5
"""Before them a module is not taken for a step: a function is compiled once for the arrays that a script makes and
again for those that its step returns, and the first of the two is called once."""
_LEAST_RETURNED = 0.5
_LEAST_HANDED_ON = 0.1


class Observation:
    """The calls of this process."""

    def __init__(
        self,
        channel_of: ChannelOf,
        timeout_s: float,
        wanted: Wanted | None = None,
        search: Callable[[Trial], None] | None = None,
    ) -> None:
        """Nothing is observed yet.

        Args:
            channel_of: joins the processes that run a module; asked as JAX loads it. What it raises leaves the module
                alone.
            timeout_s: how long ranks wait for each other before a call.
            wanted: which modules to watch, the same on all ranks; by default those on several devices.
            search: begins a search for a step, on all ranks before the same call of it: one step after the other.
        """
        self._channel_of = channel_of
        self._timeout_s = timeout_s
        self._wanted = (lambda request: len(request.devices) > 1) if wanted is None else wanted
        self._search = search
        self._times = DeviceTimes()
        self._trials: list[weakref.ref[Trial]] = []
        self._decided: dict[str, LoadedExecutable | None] = {}
        self._loaded: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()
        self._left: set[str] = set()
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        """Of the modules that are or were watched, by name."""
        self.device_counts: dict[str, int] = {}
        """On how many devices these run, by name."""
        self.given_back: dict[str, str] = {}
        """Those that go on with XLA's default, or never were watched, by name, and why."""
        self.unjoined: set[str] = set()
        """Those of them whose ranks did not meet."""

    def start(self) -> None:
        """Observe what JAX loads from now on.

        Raises:
            UnsupportedError: as :func:`disco_hlo.plugin.xla.jaxlink.watch_calls`.
        """
        jaxlink.watch_calls(self._observe)

    def stop(self) -> None:
        """Give JAX its calls back; what is not settled goes on with XLA's default.

        On all ranks between the same calls, or after the last one.
        """
        jaxlink.unwatch_calls()
        for trial in self.trials:
            trial.watch.on_settled = None
            trial.watch.settle(DEFAULT)
        self._times.close()

    def drain(self) -> None:
        """Return when every call so far has ended and was timed."""
        self._times.drain()

    @property
    def trials(self) -> list[Trial]:
        """One for each module that is watched, in the order in which JAX loaded them.

        ``jax.clear_caches()`` makes JAX load a module again: its trial is another one then, without candidates, but
        what was decided stays.
        """
        with self._lock:
            found = [trial for one in self._trials if (trial := one()) is not None and trial.outcome is None]
            self._trials = [weakref.ref(trial) for trial in found]
        return found

    def steps(self) -> list[Trial]:
        """Of the steps so far, the one on which the devices spend most of their time first (:func:`steps`)."""
        trials = self.trials
        return [trials[index] for index in steps([trial.watch.seen for trial in trials])]

    @property
    def most_loads(self) -> int:
        """How often JAX loaded one and the same module, the one that it loaded most often."""
        return max(self._loaded.values(), default=0)

    @property
    def searched(self) -> bool:
        """Whether a search has begun for any step."""
        return bool(self._begun)

    def _observe(self, module: LoadedModule) -> Execute | None:
        request = module.request
        if not self._wanted(request) or _is_small(request):
            return None
        if not keeps_state(module.takes, module.returns) and not hands_on(memory(module.executable)):
            return None
        digest = request.digest
        if digest in self._decided:
            winner = self._decided[digest]
            if winner is not None:
                module.settle(winner)
            return None
        if self._begun[digest] >= _MOST_SEARCHES:
            if digest not in self._left and request.backend.process_index() == 0:
                self._left.add(digest)
                LOGGER.info(
                    "%s: JAX loaded it anew in each of %d searches, as it does for each new jit, and there is no "
                    "other: keep its jit, or let %s search before the first step",
                    request.module_name, _MOST_SEARCHES,
                    before_first_step(request.module_name, len(request.devices)),
                )  # fmt: skip
            return None
        with self._lock:
            number = self._loaded[digest]
            self._loaded[digest] += 1
        LOGGER.debug("calls of %s (%s, load %d) are watched", request.module_name, digest[:16], number)
        watch = Watch(module, self._times)
        try:
            channel = self._channel_of(request)
        except Exception as error:
            self.given_back[request.module_name] = one_line(error)
            self.unjoined.add(request.module_name)
            raise
        trial = Trial(watch, channel, self._timeout_s, f"calls {digest[:16]} {number}")
        watch.on_settled = lambda name, executable: self._decide(trial, name, executable)
        trial.due, trial.begin = self._due, self._begin
        with self._lock:
            self._trials.append(weakref.ref(trial))

        self.device_counts[request.module_name] = len(request.devices)

        def execute(arguments: Sequence[Any]) -> tuple[Any, Any]:
            self.calls[request.module_name] += 1
            return watch.execute(arguments)

        return execute

    def _due(self, trial: Trial) -> bool:
        """Whether it is the step, called often enough, and no other one that is still called is searched for."""
        if self._search is None or trial.watch.calls < CALLS_BEFORE_SEARCH:
            return False
        others_forgotten = all(one.watch.is_forgotten for one in self._searched_for())
        return others_forgotten and self.steps()[:1] == [trial]

    def _searched_for(self) -> list[Trial]:
        return [one for one in self.trials if one.begun and not one.is_over]

    def _begin(self, trial: Trial) -> None:
        self._begun[trial.watch.request.digest] += 1
        for one in self._searched_for():
            if one is not trial:
                one.give_up("the script goes on with another step")
        if self._search is not None:
            self._search(trial)

    def _decide(self, trial: Trial, name: str, executable: LoadedExecutable) -> None:
        """Remember it for the life of this process: JAX may load the module again, but nobody knows on which ranks it
        is the same where it holds addresses."""
        request = trial.watch.request
        if not request.holds_addresses:
            self._decided[request.digest] = None if name == DEFAULT else executable
        if name == DEFAULT:
            self.given_back[trial.watch.module_name] = trial.why


def _is_small(request: CompileRequest) -> bool:
    return len(list(islice(_leaves(request.mlir_module.operation), _FEWEST_OPS))) < _FEWEST_OPS


def _leaves(op: Any) -> Iterator[Any]:
    """Ops that hold no others, of functions and of what is mapped over devices, without those that only say where
    arrays lie: by explicit shardings a multiplication has four of these."""
    inner = [one for region in op.regions for block in region.blocks for one in block.operations]
    if not inner and not op.name.startswith(_PLACING):
        yield op
    for one in inner:
        yield from _leaves(one.operation)


def keeps_state(takes: Sequence[ArrayType], returns: Sequence[ArrayType]) -> bool:
    """Whether half of what a module returns, by bytes, has the types of what it takes; single numbers aside."""
    free = Counter(one for one in takes if not one.is_number)
    total = returned = 0
    for one in returns:
        if one.is_number:
            continue
        total += one.bytes
        if free[one]:
            free[one] -= 1
            returned += one.bytes
    return returned > 0 and returned >= _LEAST_RETURNED * total


def hands_on(needed: Memory) -> bool:
    """Whether a tenth of what a module takes and returns, by bytes, is donated arguments whose storage results take:
    a state, beside which a step may return activations or gradients for the script to look at."""
    return needed.aliased_bytes > _LEAST_HANDED_ON * (needed.arguments_bytes + needed.outputs_bytes)


def steps(seen: Sequence[Seen]) -> list[int]:
    """Indices of those that are steps, the one that takes most of the devices' time first."""
    found = [
        index for index, one in enumerate(seen) if one.calls >= FEWEST_CALLS and one.share >= LEAST_SHARE
    ]
    return sorted(found, key=lambda index: (-seen[index].share, index))
