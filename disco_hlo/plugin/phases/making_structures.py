"""Structures of a step as threads make them, beside its profile and its search: named schedules of moves, and what XLA
makes of each.

XLA takes longest, so all that a step has the pattern for are begun early, as many at once as there are cores; where
calls of a training would be held for each, only drafts without its autotuner, by which the likeliest are chosen. What
several compiles have tuned at once is made anew by the picks that are kept (:meth:`Making.settle`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from disco_hlo.backends import BACKENDS
from disco_hlo.cores import own_cores
from disco_hlo.elsewhere import here
from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.kernels import times as kernel_times
from disco_hlo.kernels.fuse import KERNEL_SCHEDULES, Pays
from disco_hlo.kernels.pattern import Call
from disco_hlo.optimize.costs import costs_of
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.measuring.compiling import Compile, CompileBatch
from disco_hlo.plugin.measuring.lockstep import anywhere
from disco_hlo.plugin.measuring.room import (
    compiles_at_once,
    interpreter,
)
from disco_hlo.plugin.phases.finding import SHORTEST_COMPILING_S
from disco_hlo.plugin.phases.keeping import (
    Schedules,
)
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.structure import (
    GAIN_ALONE,
    KEEPS,
    Early,
    Restructured,
    early_module,
    early_of,
    gains_alone,
    lies_inside,
    moved,
    named_schedules,
    no_kernel_runs,
    of_module,
    restructured,
)
from disco_hlo.plugin.tuner_results import is_tuned, note_tuned
from disco_hlo.plugin.xla import compiles, jaxlink
from disco_hlo.plugin.xla.jaxlink.requests import CompileOptionValue
from disco_hlo.profiler.profile import Profile
from disco_hlo.structure.propose_loops import KEPT_IN_PART_NAMES

_PROFILE_SHARE = 1 / 3
"""Of what profiling the step took, what a structure takes: kernels alone are traced, in one module of three."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Structures:
    """The step by each schedule that it has the pattern for, as one rank makes them."""

    early: Early
    schedules: dict[str, Sequence[dict[str, Any]]]
    made: dict[str, Future[Restructured]]
    """Those of them that somebody has begun to make."""
    drafts: dict[str, Future[CanonicalModule]] = field(default_factory=dict)
    """Those that are made without XLA's autotuner first, on rank 0, and the step as it is under :data:`DEFAULT`."""


class LateError(DiscoError):
    """The time to make structures is up."""


def making_s(settings: Settings) -> float:
    """How long structures are made and begun to be profiled: beside the search, and then as long as the finalists are
    compiled."""
    return settings.budget_s + max(settings.budget_s, SHORTEST_COMPILING_S)


class Ahead:
    """The step's early module and its schedules, which are found while the step is profiled: on a host of GPUs, and in
    interpreters of their own, so that no clock is disturbed."""

    def __init__(self, session: Session, source: CanonicalModule) -> None:
        self._session, self._source = session, source
        self._pool = ThreadPoolExecutor(1, "disco-schedules")
        self.early: Future[Early] | None = None
        """None where nothing was begun."""

    @contextlib.contextmanager
    def beside_compiles(self) -> Iterator[None]:
        """Begin, around compiles, if structures may be tried; at the end nothing of this takes the devices any more.
        On all ranks at once or on none: XLA's autotuner may wait for the others."""
        session, run = self._session, interpreter(self._source)
        tried = BACKENDS[self._source.graph.backend].queues and any(_may_gain(session.settings, self._source))
        if not tried or anywhere(session, run is here, "schedules ahead"):
            yield
            return
        request = session.request

        def find() -> Early:
            early = early_of(request, captured.result(), run)
            LOGGER.debug("%d schedules found ahead", len(early.schedules))
            return early

        captured = self._pool.submit(_as_ours, compiles.capture_structure, request)
        self.early = self._pool.submit(_as_ours, find)
        try:
            yield
        finally:
            wait((captured,))
            self._pool.shutdown(wait=False)


def _as_ours(do: Callable[..., Result], *arguments: object) -> Result:
    with jaxlink.ours():
        return do(*arguments)


def _may_gain(settings: Settings, source: CanonicalModule) -> tuple[bool, bool]:
    """Whether structures may: any, as the step's communication lies inside the layer, as far as sizes tell, or one was
    asked for; and those that gain where nothing communicates."""
    if settings.structure == "off":
        return False, False
    sizes_bytes = [node.shape.size_bytes for node in source.graph.nodes]
    overlaps = BACKENDS[source.graph.backend].asynchronous
    any_may = settings.forced_structure is not None or (overlaps and lies_inside(source, sizes_bytes))
    return any_may, gains_alone(source)


class Making:
    """Structures that threads make on every rank, beside the search for the step as it is."""

    def __init__(
        self,
        session: Session,
        source: CanonicalModule,
        profile: Profile | None = None,
        profiling_s: float = 0.0,
        early: Future[Early] | None = None,
    ) -> None:
        """Begin at once where a structure may gain.

        Args:
            profile: of the step, on rank 0; by it fused kernels are chosen, which need one process.
            profiling_s: what taking it took.
            early: the step's early module, where that is found ahead.
        """
        settings, self._session = session.settings, session
        self._source, self._profile, self._early = source, profile, early
        # There each process waits inside a compile for all others: none may leave out what another has begun.
        self._tuned_together = BACKENDS[source.graph.backend].autotunes and session.channel.size > 1
        # One that was asked for, or beside a training, is made as long as that takes.
        waits = settings.forced_structure is None and settings.when != "training"
        self._ends = time.monotonic() + making_s(settings) if waits else math.inf
        self._longest_s, self._profiling_s = 0.0, profiling_s * _PROFILE_SHARE
        self._at_once = compiles_at_once(session)
        # Drafts take no device, and some cores of a host that has many.
        at_once = max(self._at_once, len(own_cores()) // 4 if session.compiles_between_steps else 1)
        self._pool = ThreadPoolExecutor(at_once, "disco-structure")
        self._structures: Future[Structures] | None = None
        any_may, alone = _may_gain(settings, source)
        self._only_alone = not any_may
        if any_may or alone:
            self._structures = self._pool.submit(_as_ours, self._begin)

    def structures(self) -> Structures:
        """All of them, some still being made."""
        self._structures = self._structures or self._pool.submit(_as_ours, self._begin)
        return self._structures.result()

    def in_time(self, ranked: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
        """Of structures, the most promising first, those that no profile is wanted of or that there is time to
        profile. Where it is the first that is left out, it goes on by estimates: the clock will tell."""
        left_s, kept = self._ends - time.monotonic(), []
        for number, (name, lacking) in enumerate(ranked):
            if not lacking:
                kept.append((name, False))
            elif left_s >= self._profiling_s:
                left_s -= self._profiling_s
                kept.append((name, True))
            elif number:
                self._session.say("%s is not tried: no time is left to profile it", name)
            else:
                self._session.say("%s is tried by estimates: no time is left to profile it", name)
                kept.append((name, False))
        return kept

    def end(self) -> None:
        """Return once nothing is made any more, as XLA's autotuning takes the devices; what is unmade stays so,
        unless the processes share the autotuning."""
        self._pool.shutdown(cancel_futures=not self._tuned_together)

    def _begin(self) -> Structures:
        if self._early is None:
            early = early_module(self._session.request, interpreter(self._source))
        else:
            early = self._early.result()
        found = Structures(early, {}, {})
        if self._session.settings.forced_structure is None:  # to choose fused kernels takes longer
            self._take(found, named_schedules(early, (), None))
        self._take(found, _wanted(self._session, early, None if self._profile is None else self._pays))
        return found

    def _take(self, found: Structures, schedules: Mapping[str, Sequence[dict[str, Any]]]) -> None:
        """Begin to make those that are new, unless a call of the training is to be held for it."""
        new = [
            name
            for name in schedules
            if name not in found.schedules and (not self._only_alone or name.startswith(GAIN_ALONE))
        ]
        found.schedules.update((name, schedules[name]) for name in new)
        if not self._session.compiles_between_steps:
            begun = CompileBatch(
                self._session, "structures", self._each(found, new), self._pool, self._at_once
            )
            found.made.update(zip(new, begun.begun, strict=True))
        elif self._session.leads and self._session.settings.forced_structure is None:
            if not found.drafts:
                found.drafts[DEFAULT] = self._pool.submit(_as_ours, self._drafted, found.early, DEFAULT, None)
            found.drafts.update(self.drafts(found.early, {name: schedules[name] for name in new}))

    def drafts(self, early: Early, schedules: Schedules) -> dict[str, Future[CanonicalModule]]:
        """The step by each of these, made without XLA's autotuner."""
        return {
            name: self._pool.submit(_as_ours, self._drafted, early, name, moves)
            for name, moves in schedules.items()
        }

    def make(self, structures: Structures, names: Iterable[str]) -> None:
        """Make those of them that nobody has begun to make, as the session compiles between steps; on all ranks at
        once."""
        waiting = [name for name in names if name not in structures.made]
        folder = self._session.request.tuner_results
        modules = [self._digest(name, structures.schedules[name]) for name in waiting]
        known = [is_tuned(folder, module) for module in modules]
        early, schedules = structures.early, structures.schedules
        # A call that is held shall wait for XLA alone.
        changed = {name: self._pool.submit(_as_ours, moved, early, name, schedules[name]) for name in waiting}
        wait(changed.values())

        def compiled(name: str, options: Mapping[str, CompileOptionValue]) -> bytes:
            capture, request = compiles.capture, self._session.request
            return self._in_time(
                name, lambda: capture(request, changed[name].result(), extra_options=options)
            )

        def read(name: str, module: Future[bytes]) -> Restructured:
            return of_module(early, name, schedules[name], changed[name].result(), module.result())

        each = [functools.partial(_as_ours, compiled, name) for name in waiting]
        batch = CompileBatch(self._session, "structures", each, self._pool, self._at_once, known)
        captured = zip(waiting, batch.finish(), strict=True)
        made = {name: self._pool.submit(read, name, module) for name, module in captured}
        structures.made.update(made)
        for module, one in zip(modules, made.values(), strict=True):
            if one.exception() is None:
                note_tuned(folder, module)

    def _digest(self, name: str, moves: Sequence[dict[str, Any]]) -> str:
        """Of the structure on devices of this kind, for which picks are."""
        kind = self._session.facts.device_kind
        told = json.dumps([kind, self._source.graph.key, name, list(moves)], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:32]

    def settle(self, structures: Structures, names: Iterable[str]) -> None:
        """Make what the autotuner picked for these hold. Where several compiles try a kernel at once, each goes on with
        its own pick and one is kept; a later process finds that one, and so makes what is made here."""
        for name in names if BACKENDS[self._source.graph.backend].by_known_picks else ():
            first = structures.made[name]
            structures.made[name] = self._pool.submit(_as_ours, self._settled, structures.early, name, first)

    def _settled(self, early: Early, name: str, first: Future[Restructured]) -> Restructured:
        made, options = first.result(), BACKENDS[self._source.graph.backend].by_known_picks
        try:
            module = compiles.capture(self._session.request, made.early, options)
            settled = of_module(early, name, made.record.moves, made.early, module)
        except Exception as error:
            LOGGER.debug("%s stays as it was made first: %s", name, one_line(error))
            return made
        if settled.record != made.record:
            LOGGER.debug("%s: another kernel than the pick that is kept was in the first compile", name)
        return settled

    def _each(self, structures: Structures, names: Sequence[str]) -> list[Compile[Restructured]]:
        early, schedules = structures.early, structures.schedules
        return [functools.partial(_as_ours, self._made, early, name, schedules[name]) for name in names]

    def _drafted(self, early: Early, name: str, moves: Sequence[dict[str, Any]] | None) -> CanonicalModule:
        untuned = BACKENDS[self._source.graph.backend].untuned
        if moves is None:
            return early.run(canonicalize, compiles.capture(self._session.request, None, untuned))
        compiled = functools.partial(compiles.capture, self._session.request, extra_options=untuned)
        return restructured(early, name, moves, compiled).source

    def _pays(self, call: Call, opcode: str, in_loop: bool) -> bool:
        return self._payer(call, opcode, in_loop)

    @functools.cached_property
    def _payer(self) -> Pays:
        """Only where a pair is found: it takes code that may have to be compiled."""
        assert self._profile is not None
        return kernel_times.payer(costs_of(self._profile, self._source), self._source)

    def _made(
        self,
        early: Early,
        name: str,
        moves: Sequence[dict[str, Any]],
        options: Mapping[str, CompileOptionValue],
    ) -> Restructured:
        compiled = functools.partial(compiles.capture, self._session.request, extra_options=options)
        return self._in_time(name, lambda: restructured(early, name, moves, compiled))

    def _in_time(self, name: str, compiled: Callable[[], Result]) -> Result:
        began = time.monotonic()
        if began + self._longest_s > self._ends and not self._tuned_together:
            raise LateError(f"{name} would not be compiled in time")
        made = compiled()
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        return made


def _wanted(session: Session, early: Early, pays: Pays | None) -> dict[str, list[dict[str, Any]]]:
    forced = session.settings.forced_structure
    schedules = named_schedules(early, [forced] if forced else [], pays)
    if forced is None:
        return schedules
    if forced in KEPT_IN_PART_NAMES and any(name.startswith(KEEPS) for name in schedules):
        return {}  # it is made once the room is known
    if forced not in schedules:
        listed = ", ".join(schedules) or "none"
        reason = no_kernel_runs(early) if forced in KERNEL_SCHEDULES else ""
        LOGGER.log(
            logging.WARNING if session.leads else logging.DEBUG,
            "DISCO_STRUCTURE is %s; this step has the pattern for %s%s",
            forced,
            listed,
            reason and f" ({reason})",
        )
        return {}
    return {forced: schedules[forced]}
