"""A plan that may not pay any more is tried against XLA's default again, call by call (``docs/calls.md``).

What was measured to be faster under one XLA may be slower than the default of the next, and what was measured to be
faster by little may have been noise. With such a plan the training begins with XLA's default, and the two take turns as
real calls on all ranks (:mod:`disco_hlo.plugin.calls`). What does not pay is not run. ``compared.json`` beside the plan
keeps the outcome, so that the next job under the same versions does not try again.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import threading
from collections import Counter
from dataclasses import dataclass, field

from msgspec import UNSET

from disco_hlo.errors import PlanError
from disco_hlo.plan.plan import DEFAULT, Plan
from disco_hlo.plan.store import PlanSlot, note_compared, was_compared
from disco_hlo.plugin.calls import schedule
from disco_hlo.plugin.calls.loading import refuse_unwatched
from disco_hlo.plugin.calls.schedule import Round
from disco_hlo.plugin.calls.trial import Trial
from disco_hlo.plugin.calls.watch import DeviceTimes, Watch, check_same_signature
from disco_hlo.plugin.logs import LOGGER, compared, one_line
from disco_hlo.plugin.refusals import refuse_other_threads
from disco_hlo.plugin.session import Session, versions
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import Execute, LoadedModule

_CLEAR_GAIN = 2.0
"""A gain of less than so many times its noise is doubtful."""
_outcomes: dict[str, bool] = {}
"""By module, whether it paid when this process tried it, where the plan directory cannot say so; on rank 0."""
_begun: Counter[str] = Counter()
"""Trials so far by module, equal on all ranks: JAX may load a step again before its first trial is over."""
_times = DeviceTimes()


@dataclass(frozen=True)
class Doubt:
    """What speaks against running a plan as it was measured; the same on all ranks."""

    why: str = ""
    """Why it must be tried again, as a part of a sentence; empty where it need not."""
    lost: bool = False
    """Whether it was, under these versions, and did not pay."""


def doubt(session: Session, slot: PlanSlot, plan: Plan, digest: str) -> Doubt:
    """Whether a plan may not pay any more.

    Args:
        digest: of the module that is to be enacted.
    """
    if plan.measured is None or session.settings.search:  # a search has measured it just now
        return Doubt()
    mine = Doubt()
    if session.leads:
        pays = _outcomes.get(digest, known_outcome(slot, plan, digest, versions(session.facts)))
        mine = Doubt(_why(session, plan) if pays is None else "", pays is False)
    why, lost = session.tell([mine.why, mine.lost], "doubt")
    return Doubt(why, lost)


def known_outcome(slot: PlanSlot, plan: Plan, digest: str, now: dict[str, str]) -> bool | None:
    """Whether a plan paid when it was tried under these versions, since it was measured; None where nobody tried."""
    for pays in (True, False):
        if was_compared(slot, digest, _outcome(plan, now, pays)):
            return pays
    return None


def _outcome(plan: Plan, now: dict[str, str], pays: bool) -> dict[str, str]:
    """What ``compared.json`` names a module with that took turns. A search that measures the plan anew begins anew."""
    assert plan.measured is not None
    return {**now, "measured": plan.measured.created, "pays": "yes" if pays else "no"}


def _why(session: Session, plan: Plan) -> str:
    forced = session.settings.forced_structure
    if forced is not None and plan.structure is not UNSET and plan.structure.name == forced:
        return ""
    now = versions(session.facts)
    del now["disco_hlo"]  # another one enacts the same module
    if others := other_versions(plan, now):
        return f"was measured under {others}"
    results = {} if plan.measured is None else plan.measured.results
    own = results.get(plan.chosen)
    if own is None or DEFAULT not in results:
        return ""
    if own.ratio is UNSET or own.ratio_noise is UNSET:
        return "was saved without the noise of its gain"
    if 1 - own.ratio < _CLEAR_GAIN * own.ratio_noise:
        gain, than = abs(1 - own.ratio), "faster" if own.ratio <= 1 else "slower"
        return f"was measured {gain:.1%} {than}, where {own.ratio_noise:.1%} is noise"
    return ""


def other_versions(plan: Plan, now: dict[str, str]) -> str:
    """The versions that a plan was made with, of those that are others now."""
    return ", ".join(
        f"{name} {plan.versions.get(name, '?')}" for name in now if plan.versions.get(name) != now[name]
    )


def takes_turns(
    session: Session, slot: PlanSlot, plan: Plan, digest: str, executable: LoadedExecutable, why: str
) -> bool:
    """Let a plan take turns with XLA's default in the calls of this compile, which goes on with the default; whether
    all ranks can. The same on all ranks.

    Args:
        executable: the plan's.
        why: of :class:`Doubt`.
    """
    request = session.request
    try:
        with session.stage("watching calls"):
            refuse_unwatched(request)
            refuse_other_threads(request, threading.current_thread())
            check_same_signature(request.call_default(), executable)
    except Exception as error:
        LOGGER.debug("the plan of %s is not tried again: %s", plan.target.module_name, one_line(error))
        return False
    request.on_load = _Again(session, slot, plan, digest, executable, why).begin
    return True


@dataclass
class _Again:
    """The trial of a plan that was measured before, begun again for each time that JAX loads the step."""

    session: Session
    slot: PlanSlot
    plan: Plan
    digest: str
    executable: LoadedExecutable
    why: str
    winner: LoadedExecutable | None = field(default=None, init=False)
    """The same on all ranks; None before it is clear."""

    def begin(self, module: LoadedModule) -> Execute | None:
        """What runs its calls; None: JAX itself, what won before."""
        if self.winner is not None:
            module.settle(self.winner)
            return None
        _begun[self.digest] += 1
        tag = f"again {self.digest[:16]} {_begun[self.digest]}"
        watch = Watch(module, _times)
        watch.on_settled = self._settled
        trial = Trial(watch, self.session.channel, self.session.timeout_s, tag)
        trial.least_share = 0.0
        trial.on_outcome = self.note
        processes = jaxlink.process_count()
        mark = functools.partial(self.slot.bans.trying, self.digest, "run", processes)
        leads = self.session.leads
        trial.offer(self.plan.chosen, self.executable, mark=mark if leads else contextlib.nullcontext)
        trial.complete()
        return watch.execute

    def _settled(self, _: str, executable: LoadedExecutable) -> None:
        self.winner = executable

    def note(self, name: str, rounds: list[Round]) -> None:
        """In the call from which on ``name`` runs all. What ended before the clock had decided is no outcome."""
        own = self.plan.chosen
        if not self.session.leads or not rounds or schedule.verdict(rounds, [own], {}).winner != name:
            return
        pays = name == own
        if not pays:
            ratios = [one[own] / one[DEFAULT] for one in rounds if own in one]
            gain = compared(statistics.median(ratios))
            noise = ", which may be noise" if gain.endswith("x faster") else ""
            LOGGER.info(
                "the plan of %s is not run: it %s, and in %d rounds of this training it was %s than XLA's default%s; "
                "ENABLE_SEARCH=1 searches another",
                self.plan.target.module_name, self.why, len(ratios), gain, noise,
            )  # fmt: skip
        _outcomes[self.digest] = pays
        try:
            note_compared(self.slot, self.digest, _outcome(self.plan, versions(self.session.facts), pays))
        except PlanError as error:
            LOGGER.info("every run will try the plan again: %s", error)
