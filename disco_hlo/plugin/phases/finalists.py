"""The candidates on all ranks: handed out, compiled, measured, one of them chosen and compared, and the plan saved.

XLA's default, the search's plans and other structures come first. Parts of the plan (ablations) win only where the
simulator is wrong, so they are left out unless one of them is predicted to beat what the winner took, or the user wants
to know what each part gains.

A step of thousands of instructions takes a minute to compile. So the likeliest winners are compiled first, as many at a
time as there are cores for it, and for as long as the search may take, or a minute: where the next ones would not be
done by then, what is left is not compiled. Rank 0's clock decides for all ranks. XLA's default and the plan are
compiled while other structures of the step are ranked.

What the clock puts first is compared with XLA's default, element by element. Where it computes something else, it is
out, and the next is chosen. So nothing is enacted or saved as measured that was not compared, and the others cost no
more than their timing.

Rank 0 saves the plan when something was measured, or the search was interrupted (:class:`Outcome`). The other ranks
wait for what comes next, so saving does not raise: what cannot be saved is a line in the log.
"""

from __future__ import annotations

import datetime
import hashlib
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from disco_hlo.errors import PlanError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.regions import not_simulated
from disco_hlo.optimize.ablations import (
    NO_FUSION,
    ONE_BUCKET,
    OUR_KERNELS,
    OUR_ORDER,
    PLAN_BUCKETS,
    Candidate,
)
from disco_hlo.optimize.select import LEAST_GAIN, Times, beats, ratio_noise, ratio_to, winning
from disco_hlo.plan import plan as plans
from disco_hlo.plan.apply import apply
from disco_hlo.plan.files import replace_files
from disco_hlo.plan.plan import DEFAULT, SEARCHED, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.store import PROFILE_NAME, PlanSlot
from disco_hlo.plugin.logs import LOGGER, compared, one_line
from disco_hlo.plugin.measuring.candidates import (
    Compiling,
    begin_to_compile,
    compare_with_default,
    compile_trials,
    finer_defaults,
    measure,
)
from disco_hlo.plugin.measuring.room import compiles_at_once
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.phases.finding import MEASURE_BUDGET_S, SHORTEST_COMPILING_S, FoundPlans
from disco_hlo.plugin.session import Interruption, Session, target, versions
from disco_hlo.plugin.step import Step
from disco_hlo.plugin.xla import executables, jaxlink
from disco_hlo.printable import counted
from disco_hlo.profiler.profile import Profile
from disco_hlo.profiler.profile import save as save_profile
from disco_hlo.profiler.timeline import FILE_NAME, MeasuredStep
from disco_hlo.profiler.timeline import encode as encode_timelines

_AT_LEAST = 3
"""Modules that are compiled however long that takes: XLA's default, the plan, and the next best."""
_FIRST = (DEFAULT, SEARCHED, OUR_ORDER, OUR_KERNELS, PLAN_BUCKETS)
_LAST = (ONE_BUCKET, NO_FUSION)
"""Other plans of the search are in between."""
_PARTS_TAKE_S = 300.0
"""How long rank 0 may make parts of the plan."""


def trials_of(session: Session, named: Sequence[Candidate] | None, slot: PlanSlot) -> list[Trial]:
    """The candidates by name, which are rank 0's; on the others their strategies arrive as JSON."""
    return [
        Trial(name, None if strategy is None else msgspec.convert(strategy, Strategy), ns, marks=slot)
        for name, strategy, ns in session.tell(msgspec.to_builtins(named), "finalists")
    ]


def likeliest(trials: Sequence[Trial], most: int) -> list[Trial]:
    """Those that may win first, without XLA's default, the likeliest winner first."""
    return sorted((trial for trial in trials if trial.strategy is not None), key=_rank)[:most]


def measured_winner(
    session: Session,
    source: CanonicalModule,
    trials: list[Trial],
    stop: Interruption,
    slot: PlanSlot,
    parts: Callable[[], Iterable[Candidate]],
) -> Trial | None:
    """As :func:`winner_of`, of trials that are compiled and timed here: first as they come, and then with those of
    the plan's ``parts``, which rank 0 makes, that may win. Those that were not tried are taken out of the list."""
    tried = session.settings.explain
    while compile_and_measure(session, source, trials, stop):
        winner = winner_of(session, trials, stop)
        if winner is None or tried or winner.name == session.settings.forced_structure:
            return winner
        try:
            with session.stage("parts of the plan", takes_s=_PARTS_TAKE_S):
                mine = _promising(trials, winner, parts) if session.leads else None
        except Exception as error:  # on all ranks alike; a winner is known
            session.say_failed("no part of the plan is measured: %s", one_line(error))
            return winner
        more = trials_of(session, mine, slot)
        if not more:
            return winner
        session.say("the plan gains less than predicted; measuring parts of it that may gain more")
        trials += more
        tried = True
    return None


def _promising(
    trials: Sequence[Trial], winner: Trial, parts: Callable[[], Iterable[Candidate]]
) -> list[Candidate]:
    """The parts of the plan that would beat the winner if they took what is predicted; none are made where not even
    the plan would. Others hardly win: where a plan fell short and a part of it was faster, that was one of these
    (vgg19 over sockets in ``docs/benchmarks/h100``), and what gained more than predicted did so in the plan, too."""
    default = trials[0]
    taken = ratio_to(winner.times_ns, default.times_ns)

    def may_win(predicted_ns: int) -> bool:
        return predicted_ns / max(1, default.predicted_ns) <= taken - LEAST_GAIN

    plans_ns = [trial.predicted_ns for trial in trials[1:] if trial.restructured is None]
    return [one for one in parts() if may_win(one.predicted_ns)] if any(map(may_win, plans_ns)) else []


def compile_and_measure(
    session: Session, source: CanonicalModule, trials: list[Trial], stop: Interruption
) -> bool:
    """Compile and time the trials, less those that there is no time to compile; whether that was not interrupted."""
    if session.tell(bool(stop), "interrupted"):
        return False
    session.say("compiling and measuring XLA's default and %s", counted(len(trials) - 1, "candidate"))
    said = [trial.name for trial in trials if trial.error]
    if not compile_finalists(session, source, trials, stop):
        return False
    compiled = sum(not trial.error for trial in trials)
    session.say("timing the %d that are compiled in turn, for up to %.0f s", compiled, MEASURE_BUDGET_S)
    if not measure(session, trials, budget_s=MEASURE_BUDGET_S, stop=lambda: bool(stop)):
        return False
    for trial in trials:
        if not trial.error:
            of_default, reference = "", trials[0].times_ns
            if trial is not trials[0] and trial.times_ns and reference:
                ratio = ratio_to(trial.times_ns, reference)
                of_default = f", {ratio:.3f} of XLA's default in the same rounds"
            median_ms, predicted_ms = trial.median_ns / 1e6, trial.predicted_ns / 1e6
            session.say("%s: %.2f ms (predicted %.2f)%s", trial.name, median_ms, predicted_ms, of_default)
        elif trial.name not in said:
            session.say("%s: not measured: %s", trial.name, trial.error)
    return True


def winner_of(session: Session, trials: Sequence[Trial], stop: Interruption) -> Trial | None:
    """What to go on with, of trials that :func:`compile_and_measure` has timed: the fastest, once it is seen to compute
    what XLA's default computes, or the default; None where somebody interrupted before that was seen. The same on all
    ranks.

    Raises:
        DiscoError: XLA's default cannot be compared with.
    """
    forced = session.settings.forced_structure
    while not session.tell(bool(stop), "interrupted"):
        first = session.tell(chosen(trials, forced) if session.leads else None, "winner")
        winner: Trial = trials[first]
        if winner.strategy is None or winner.compared:
            return winner
        session.say(
            "%s is first; comparing its numbers with those of XLA's default, element by element, on two sets of inputs",
            winner.name,
        )
        started = time.monotonic()
        compare_with_default(session, trials[0], [winner])
        if winner.compared:
            session.say(
                "%s computes what XLA's default computes (%.1f s)", winner.name, time.monotonic() - started
            )
            return winner
        session.say("%s: timed, and then left out: %s", winner.name, winner.error)
    return None


def begin_with_likeliest(session: Session, source: CanonicalModule, trials: Sequence[Trial]) -> Compiling:
    """Begin to compile XLA's default and the likeliest winners, as many as there are cores for; on all ranks at
    once."""
    first = sorted(trials, key=_rank)[: compiles_at_once(session)]
    return begin_to_compile(session, source, first, tag="first candidates")


def compile_finalists(
    session: Session, source: CanonicalModule, trials: list[Trial], stop: Interruption
) -> bool:
    """Compile ``trials`` on every rank; those that there is no time for are taken out of the list, and one line
    says which. What else goes wrong is noted in them.

    Returns:
        Whether it was not interrupted.

    Raises:
        As :func:`~disco_hlo.plugin.measuring.candidates.compile_trials`.
    """
    started = time.monotonic()
    waiting = sorted((trial for trial in trials if trial.executable is None and not trial.error), key=_rank)
    at_once = compiles_at_once(session)
    budget_s = max(session.settings.budget_s, SHORTEST_COMPILING_S)
    done = 0
    while waiting:
        began_s = time.monotonic() - started
        some, waiting = waiting[:at_once], waiting[at_once:]
        # What they will be compared with, where cores are idle.
        beside = finer_defaults(session, some) if len(some) < at_once else []
        new = [one for one in beside if one.executable is None and not one.error]
        compile_trials(session, source, [*some, *new], tag=f"candidates from {done}")
        done += len(some)
        spent_s = time.monotonic() - started
        late = done >= _AT_LEAST and 2 * spent_s - began_s > budget_s
        interrupted, late = session.tell([bool(stop), late], "candidates compiled")
        if interrupted:
            return False
        if waiting and late:
            _leave_out(session, trials, waiting, spent_s / done * at_once)
            break
    return True


def chosen(trials: Sequence[Trial], forced: str | None) -> int:
    """Index of the trial that is ``forced`` by its name, if it ran; else of the winner."""
    times = [() if trial.error else trial.times_ns for trial in trials]
    for i, trial in enumerate(trials):
        if forced is not None and trial.name == forced and times[i]:
            return i
    return winning(times, [trial.predicted_ns for trial in trials])


def _leave_out(session: Session, trials: list[Trial], late: list[Trial], each_s: float) -> None:
    session.say(
        "not compiled, as there is no time left for it (DISCO_BUDGET_S; one takes %.0f s): %s",
        each_s,
        "; ".join(trial.name for trial in late),
    )
    names = {trial.name for trial in late}
    trials[:] = [trial for trial in trials if trial.name not in names]


def _rank(trial: Trial) -> int:
    """Place in the order of compiling: what may win first, what only explains a gain last."""
    if trial.restructured is not None:  # it is here because it is predicted to beat the plan
        return _FIRST.index(SEARCHED)
    if trial.name in _LAST:
        return len(_FIRST) + 1 + _LAST.index(trial.name)
    return _FIRST.index(trial.name) if trial.name in _FIRST else len(_FIRST)


@dataclass(frozen=True)
class Outcome:
    """What a search came to, as far as rank 0 knows it."""

    session: Session
    step: Step
    slot: PlanSlot
    found: FoundPlans
    profile: Profile
    trials: Sequence[Trial]
    """XLA's default first."""
    profile_s: float
    measure_s: float


def save_interrupted(
    outcome: Outcome, why: str = "interrupted", then: str = "this run goes on with XLA's default"
) -> None:
    """Save the search's best so far, unless no gain is predicted for it or it would replace a measured plan; one line
    says ``why`` no more is known, what is saved, and what comes ``then``."""
    session, slot, found = outcome.session, outcome.slot, outcome.found
    if _is_measured(slot):
        session.say("%s: the measured plan in %s is kept; %s", why, shown(slot.path), then)
    elif found.prediction.plan_ns >= found.prediction.default_ns:
        session.say("%s: nothing better than XLA's default was found so far; %s", why, then)
    elif error := _searched(outcome.trials).error:
        session.say("%s: the best plan so far is of no use (%s); %s", why, error, then)
    elif save(outcome, _searched(outcome.trials)):
        session.say("%s: the best plan so far is in %s, unmeasured; %s", why, shown(slot.path), then)


def _is_measured(slot: PlanSlot) -> bool:
    try:
        stored = slot.load()
        plan = None if stored is None else plans.decode(stored.plan_json, str(slot.path))
    except PlanError:
        return False
    return plan is not None and plan.measured is not None and plan.chosen in plan.measured.results


def _searched(trials: Sequence[Trial]) -> Trial:
    """The plan that the search itself puts first."""
    return next(trial for trial in trials if trial.name == plans.SEARCHED)


def save(outcome: Outcome, winner: Trial) -> bool:
    """Save on rank 0; whether that worked. The other ranks count on this one: it does not raise."""
    session, slot = outcome.session, outcome.slot
    try:
        _write(outcome, winner)
    except Exception as error:
        LOGGER.warning("the plan cannot be saved: %s", one_line(error))
        if winner.strategy is not None and winner.compared and winner.times_ns:
            session.say("%s; this training alone goes on with it", _victory(winner, outcome.trials[0]))
        return False
    if winner.strategy is None:
        session.say(
            "nothing beats XLA's default beyond noise, so this training goes on with that; %s says so",
            shown(slot.path),
        )
    elif winner.compared and winner.times_ns:
        session.say(
            "%s; why: disco report %s -o plan.html",
            _victory(winner, outcome.trials[0]),
            shlex.quote(str(slot.path)),
        )
    return True


def _victory(winner: Trial, default: Trial) -> str:
    """What the clock says of the winner. One that was taken whatever the clock says may be no faster."""
    gain = compared(ratio_to(winner.times_ns, default.times_ns))
    if beats(winner.times_ns, default.times_ns):
        return f"{winner.name} wins: {gain} than XLA's default"
    noise = ratio_noise(winner.times_ns, default.times_ns)
    return f"{winner.name} is taken: {gain} than XLA's default, where {noise:.1%} is noise"


def _write(outcome: Outcome, winner: Trial) -> None:
    step, found, trials = outcome.step, outcome.found, outcome.trials
    source, facts = step.source, outcome.session.facts
    strategy = winner.strategy if winner.strategy is not None else read(source)
    module = winner.module or apply(strategy, winner.source(source))
    plan = plans.Plan(
        format=plans.FORMAT,
        version=plans.VERSION,
        target=target(source.graph, facts),
        versions=versions(facts),
        strategies=plans.by_region(strategy),
        chosen=winner.name,
        prediction=found.prediction,
        search=found.record,
        module_sha256=hashlib.sha256(module).hexdigest(),
        notes=_notes(step, winner, trials),
        measured=_measured(outcome),
        searched=_searched_instead(trials, winner),
        structure=UNSET if winner.restructured is None else winner.restructured.record,
        launched_singly=winner.launched_singly or UNSET,
    )
    outcome.slot.save(plans.encode(plan), module, executables.module_text(module), step.module)
    save_profile(outcome.profile, outcome.slot.path / PROFILE_NAME)


def save_timelines(slot: PlanSlot, winner: Trial, timelines: Sequence[MeasuredStep]) -> None:
    """Put the measured steps beside the plan. They name its module, so those of another are known as such."""
    try:
        digest = hashlib.sha256(winner.module).hexdigest()
        replace_files(slot.path, {FILE_NAME: encode_timelines(digest, timelines)})
    except Exception as error:  # as in :func:`save`
        LOGGER.info("the measured timelines are not kept: %s", one_line(error))


def _searched_instead(trials: Sequence[Trial], winner: Trial) -> plans.Searched | None:
    """What the search put first, where the measurement chose something else."""
    own = _searched(trials)
    if own is winner or own.strategy is None or not own.module:
        return None
    return plans.Searched(plans.by_region(own.strategy), hashlib.sha256(own.module).hexdigest())


def _measured(outcome: Outcome) -> plans.Measured:
    search_s = outcome.found.search_s
    fitted = outcome.profile.transfers
    default = outcome.trials[0]
    return plans.Measured(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        candidates=tuple(
            plans.Candidate(
                name=trial.name,
                predicted_ns=trial.predicted_ns,
                median_ns=trial.median_ns,
                spread_ns=trial.spread_ns,
                samples=len(trial.times_ns),
                error=trial.error[:4000],
                only_timed=True if trial.times_ns and trial.strategy and not trial.compared else UNSET,
                ratio=_of_rounds(ratio_to, trial, default),
                ratio_noise=_of_rounds(ratio_noise, trial, default),
            )
            for trial in outcome.trials
        ),
        all_reduce=() if fitted is None else fitted.lines,
        profile_s=round(outcome.profile_s, 3),
        search_s=round(search_s, 3),
        measure_s=round(outcome.measure_s, 3),
        evaluations_per_s=round(outcome.found.record.evaluations / max(search_s, 1e-9), 1),
    )


def _of_rounds(rule: Callable[[Times, Times], float], trial: Trial, default: Trial) -> float | UnsetType:
    if not (trial.times_ns and default.times_ns):
        return UNSET
    return round(rule(trial.times_ns, default.times_ns), 6)


def _notes(step: Step, winner: Trial, trials: Sequence[Trial]) -> tuple[str, ...]:
    notes = []
    if winner.strategy is None:
        notes.append(
            "Nothing found beats XLA's default beyond the measurement's noise; this plan is XLA's default."
        )
    if winner.restructured is not None:
        notes.append(f"The plan changes the step's structure: {winner.restructured.record.name}.")
    if not jaxlink.keeps_donation():
        notes.append("This version of jax loses buffer donation in a rewritten step.")
    notes += [f"{line}." for line in not_simulated(step.source)]
    notes += [f"{trial.name} could not be measured: {trial.error}"[:4000] for trial in trials if trial.error]
    return tuple(notes)


def shown(path: Path) -> str:
    """A path as a user writes it."""
    home = str(Path.home())
    text = str(path)
    return "~" + text[len(home) :] if text.startswith(home + "/") else text
