"""The search phase, ``ENABLE_SEARCH=1`` (DisCo, section 3.1), run while the step's compile waits.

Capture the step, profile it, search on rank 0, measure the finalists beside XLA's default, save the
fastest as a plan, and hand its executable to JAX, so that the training goes on with it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from msgspec import UNSET

from disco_hlo.activation.agree import Proposal, agree
from disco_hlo.errors import ActivationError, IllegalStrategyError, PlanError
from disco_hlo.plan import plan as plans
from disco_hlo.plan.apply import apply
from disco_hlo.plan.baselines import one_bucket, unfused
from disco_hlo.plan.files import replace_files
from disco_hlo.plan.read import read
from disco_hlo.plan.store import PlanSlot, PlanStore
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plugin import jaxlink
from disco_hlo.plugin.candidates import DEFAULT, Trial, compile_trials, measure, ratio_to
from disco_hlo.plugin.costing import costs_of, machine_of, pieces_of
from disco_hlo.plugin.enact_phase import enact
from disco_hlo.plugin.jaxlink import CompileRequest, LoadedExecutable
from disco_hlo.plugin.logs import LOGGER, one_line, progress_wanted
from disco_hlo.plugin.measured_times import measured_times
from disco_hlo.plugin.profiling import profile_step
from disco_hlo.plugin.progress import search_progress
from disco_hlo.plugin.ranking import memory_limit_bytes, ranked, searchable
from disco_hlo.plugin.session import Interruption, Session, join, versions, warn_of_lost_donation
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step, training_step
from disco_hlo.plugin.structure_search import Best, restructured_trials
from disco_hlo.plugin.timelines import take_timelines
from disco_hlo.plugin.winner import winning
from disco_hlo.profiler.profile import Profile
from disco_hlo.profiler.profile import save as save_profile
from disco_hlo.profiler.timeline import FILE_NAME, MeasuredStep
from disco_hlo.profiler.timeline import encode as encode_timelines
from disco_hlo.search.api import SearchResult, SearchSettings
from disco_hlo.search.run import search
from disco_hlo.search.schedule import with_order
from disco_hlo.search.warm import warm_up
from disco_hlo.simulator.build import build
from disco_hlo.simulator.step_bound import bound_of_kernels
from disco_hlo.simulator.timeline import simulate

PROFILE_NAME = "profile.json"
MEASURE_BUDGET_S = 40.0
AROUND_SEARCH_S = 300.0
"""How long rank 0 may be busy beside the search's own time: compiling its code, ranking what it found."""
NO_FUSION = "no fusion"
ONE_BUCKET = "one bucket, XLA's op fusion"
PLAN_BUCKETS = "plan's buckets, XLA's op fusion"
OUR_ORDER = "our order, XLA's op fusion and buckets"
"""Where transfers run beside kernels their order alone gains, and nothing but it is changed."""
PLAN = plans.SEARCHED


@dataclass(frozen=True)
class Found:
    """What rank 0's search hands to the measurement."""

    result: SearchResult
    trials: tuple[tuple[str, Strategy | None, int], ...]
    """(name, strategy, predicted ns) of everything to measure; the strategy None is XLA's default."""
    prediction: plans.Prediction
    profile: Profile
    search_s: float


def handle(request: CompileRequest, settings: Settings) -> LoadedExecutable | None:
    """Search for the request if it is the training step, once; None leaves it to XLA."""
    step = training_step(request, settings)
    if step is None:
        return None
    if step.again:
        return enact(request, settings, step)
    session = join(request, settings)
    facts, fingerprint = session.facts, step.source.graph.fingerprint
    _refuse_other_steps(session, fingerprint)
    slot = PlanStore(settings.directory).slot(
        fingerprint, facts.backend, facts.device_kind, facts.device_count
    )
    with _only_search(session, slot):
        return _search_and_measure(session, step, slot)


def _refuse_other_steps(session: Session, fingerprint: str) -> None:
    """One search is for one step: ranks that compile different ones must not even start."""
    same = agree(session.channel, Proposal(fingerprint, fingerprint), session.timeout_s, tag="step")
    if not same.enact:
        raise ActivationError(same.reason)


@contextlib.contextmanager
def _only_search(session: Session, slot: PlanSlot) -> Iterator[None]:
    """Hold the slot's lock on rank 0; all ranks give up together where another search has it."""
    held = None
    try:
        with session.stage("plan directory"):
            if session.leads:
                held = slot.search_lock().acquire()
        yield
    finally:
        if held is not None:
            held.remove()


def _search_and_measure(session: Session, step: Step, slot: PlanSlot) -> LoadedExecutable | None:
    source = step.source
    xla = read(source)
    started = time.monotonic()
    with measured_times(session) as store:
        profiled = profile_step(session, source, xla, store, slot)
    profile_s = time.monotonic() - started
    interruption = Interruption()
    with interruption.watched():
        if profiled is not None:
            session.say("profiled %s in %.1f s", profiled.measured, profile_s)
        with session.stage("search", takes_s=session.settings.budget_s + AROUND_SEARCH_S):
            found = find(session, step, xla, profiled.profile, interruption) if profiled is not None else None
        trials = _trials(session, found, slot)
        if not session.tell(bool(interruption), "interrupted"):
            with measured_times(session) as store:
                trials += restructured_trials(session, step, slot, store, _best(found))
        started = time.monotonic()
        complete = _measure(session, step, trials, interruption)
    seconds = (profile_s, time.monotonic() - started)
    forced = session.settings.forced_structure
    winner = trials[session.tell(_chosen(trials, forced) if session.leads and complete else 0, "winner")]
    saved = False
    if found is not None and complete:
        saved = _save(session, step, slot, found, trials, winner, seconds)
    elif found is not None:
        _save_interrupted(session, step, slot, found, trials, seconds)
    if winner.strategy is None:
        return None
    timelines = take_timelines(session, step, (trials[0], winner))
    if saved and timelines:
        _save_timelines(slot, winner, timelines)
    with session.stage("taking the winner"):
        executable = winner.executable
    for trial in trials:  # their code lies on the devices as long as they live
        trial.executable = None
    digest = hashlib.sha256(winner.module).hexdigest()
    LOGGER.debug("rank %d executes module %s", session.channel.rank, digest)
    warn_of_lost_donation(session, step)
    return executable


# --- search, on rank 0 ----------------------------------------------------------------------------


def find(session: Session, step: Step, xla: Strategy, profile: Profile, stop: Interruption) -> Found:
    """Search and name what to measure; of ``session`` only the settings and the voice are used."""
    graph, settings = step.source.graph, session.settings
    costs, machine = costs_of(profile, [graph]), machine_of(profile)
    started = time.monotonic()
    chosen = replace(
        _search_settings(settings), memory_limit_bytes=memory_limit_bytes(graph, xla, costs, machine)
    )
    warm_up(graph, costs, machine, chosen)
    with search_progress(progress_wanted()) as on_progress:
        result = search(
            graph, costs, machine, start=searchable(graph, xla), settings=chosen,
            on_progress=on_progress, stop=lambda: bool(stop),
        )  # fmt: skip
    plans_found = ranked(step.source, xla, result, costs, machine)
    search_s = time.monotonic() - started
    best = plans_found[0]
    default = simulate(build(graph, xla, costs, machine).problem)
    session.say(
        "searched %d candidates in %.1f s: %.2f ms predicted, XLA's default %.2f ms",
        result.evaluations, search_s, best.predicted_ns / 1e6, default.makespan_ns / 1e6,
    )  # fmt: skip
    plain = unfused(graph)
    lonely = with_order(graph, plain, costs, machine)
    trials: list[tuple[str, Strategy | None, int]] = [(DEFAULT, None, default.makespan_ns)]
    for name, strategy in (
        (OUR_ORDER, replace(xla, order=())) if machine.asynchronous else (NO_FUSION, plain),
        (ONE_BUCKET, one_bucket(graph, xla.groups)),
        (PLAN_BUCKETS, Strategy(xla.groups, best.strategy.buckets)),
    ):
        with contextlib.suppress(IllegalStrategyError):
            baseline = with_order(graph, strategy, costs, machine)
            trials.append((name, baseline.strategy, baseline.predicted_ns))
    for number, one in enumerate(plans_found[: settings.finalists]):
        trials.append((PLAN if number == 0 else f"{PLAN} {number + 1}", one.strategy, one.predicted_ns))
    kernels = (xla.groups, best.strategy.groups)
    limits = [bound_of_kernels(graph, groups, costs, machine, pieces_of(profile)) for groups in kernels]
    limit = min(limits, key=lambda one: one.makespan_ns)
    prediction = plans.Prediction(
        plan_ns=best.predicted_ns,
        default_ns=default.makespan_ns,
        unfused_ns=lonely.predicted_ns,
        full_overlap_ns=limit.full_overlap_ns,
        bound_ns=limit.makespan_ns,
        peak_memory_bytes=best.peak_bytes,
    )
    return Found(result, tuple(trials), prediction, profile, search_s)


def _search_settings(settings: Settings) -> SearchSettings:
    return SearchSettings(
        alpha=settings.alpha,
        beta=settings.beta,
        seed=settings.seed,
        unchanged=settings.patience,
        seconds=settings.budget_s,
        finalists=settings.finalists,
    )


# --- finalists, on all ranks ----------------------------------------------------------------------


def _best(found: Found | None) -> Best | None:
    """The search's first, and XLA's default in the same prediction."""
    if found is None:
        return None
    plan = next(strategy for name, strategy, _ in found.trials if name == PLAN)
    assert plan is not None
    return Best(plan, found.prediction.plan_ns, found.profile)


def _trials(session: Session, found: Found | None, slot: PlanSlot) -> list[Trial]:
    """The candidates by name; on ranks other than 0 their strategies arrive as JSON."""
    raw = None
    if found is not None:
        raw = [[name, msgspec.to_builtins(strategy), ns] for name, strategy, ns in found.trials]
    told = session.tell(raw, "finalists")
    return [
        Trial(name, None if strategy is None else msgspec.convert(strategy, Strategy), ns, marks=slot)
        for name, strategy, ns in told
    ]


def _measure(session: Session, step: Step, trials: Sequence[Trial], interruption: Interruption) -> bool:
    """Compile and time the trials; whether that was not interrupted."""
    if session.tell(bool(interruption), "interrupted"):
        return False
    session.say("compiling and measuring XLA's default and %d candidates", len(trials) - 1)
    compile_trials(session, step.source, trials, tag="candidate")
    if not measure(session, trials, budget_s=MEASURE_BUDGET_S, stop=lambda: bool(interruption)):
        return False
    for trial in trials:
        if trial.error:
            session.say("%s: not measured: %s", trial.name, trial.error)
        else:
            session.say(
                "%s: %.2f ms (predicted %.2f)", trial.name, trial.median_ns / 1e6, trial.predicted_ns / 1e6
            )
    return True


def _chosen(trials: Sequence[Trial], forced: str | None) -> int:
    """Index of the trial that is ``forced`` by its name, if it ran; else of the winner."""
    for i, trial in enumerate(trials):
        if forced is not None and trial.name == forced and trial.times_ns and not trial.error:
            return i
    return winning(trials)


# --- saving ---------------------------------------------------------------------------------------


def _save_interrupted(
    session: Session,
    step: Step,
    slot: PlanSlot,
    found: Found,
    trials: Sequence[Trial],
    seconds: tuple[float, float],
) -> None:
    """Save the search's best so far, unless it promises nothing or would replace a measured plan."""
    goes_on = "this run goes on with XLA's default"
    if found.prediction.plan_ns >= found.prediction.default_ns:
        session.say("interrupted before anything better than XLA's default was found; %s", goes_on)
    elif _is_measured(slot):
        session.say("interrupted: the measured plan in %s is kept; %s", _shown(slot.path), goes_on)
    elif _save(session, step, slot, found, trials, _searched(trials), seconds):
        session.say("interrupted: the best plan so far is in %s, unmeasured; %s", _shown(slot.path), goes_on)


def _is_measured(slot: PlanSlot) -> bool:
    try:
        stored = slot.load()
        plan = None if stored is None else plans.decode(stored.plan_json, str(slot.path))
    except PlanError:
        return False
    return plan is not None and plan.measured is not None and any(c.samples for c in plan.measured.candidates)


def _searched(trials: Sequence[Trial]) -> Trial:
    """The plan that the search itself puts first."""
    return next(trial for trial in trials if trial.name == PLAN)


def _save(
    session: Session,
    step: Step,
    slot: PlanSlot,
    found: Found,
    trials: Sequence[Trial],
    winner: Trial,
    seconds: tuple[float, float],
) -> bool:
    """Save on rank 0; whether that worked. The other ranks count on this one: it does not raise."""
    try:
        _write(session, step, slot, found, trials, winner, seconds)
    except Exception as error:
        LOGGER.warning("the plan cannot be saved: %s", one_line(error))
        return False
    default = trials[0]
    if winner.strategy is None:
        session.say("nothing beats XLA's default beyond noise; %s says so", _shown(slot.path))
    elif winner.times_ns:
        session.say(
            "%.2fx faster than XLA's default; why: disco report %s -o plan.html",
            1 / ratio_to(winner, default),
            shlex.quote(str(slot.path)),
        )
    return True


def _write(
    session: Session,
    step: Step,
    slot: PlanSlot,
    found: Found,
    trials: Sequence[Trial],
    winner: Trial,
    seconds: tuple[float, float],
) -> None:
    source, facts = step.source, session.facts
    strategy = winner.strategy if winner.strategy is not None else read(source)
    module = winner.module or apply(strategy, winner.source(source))
    plan = plans.Plan(
        format=plans.FORMAT,
        version=plans.VERSION,
        target=plans.Target(
            fingerprint=source.graph.fingerprint,
            module_name=source.graph.module_name,
            backend=facts.backend,
            device_kind=facts.device_kind,
            device_count=facts.device_count,
            process_count=facts.process_count,
        ),
        versions=versions(facts),
        strategy=strategy,
        chosen=winner.name,
        prediction=found.prediction,
        search=_search_record(session, found),
        module_sha256=hashlib.sha256(module).hexdigest(),
        notes=_notes(step, winner, trials),
        measured=_measured(found, trials, seconds),
        searched=_searched_instead(trials, winner),
        structure=UNSET if winner.restructured is None else winner.restructured.record,
    )
    slot.save(plans.encode(plan), module, jaxlink.module_text(module), step.module)
    save_profile(found.profile, slot.path / PROFILE_NAME)


def _save_timelines(slot: PlanSlot, winner: Trial, timelines: Sequence[MeasuredStep]) -> None:
    """Put the measured steps beside the plan. They name its module, so those of another are known as such."""
    try:
        digest = hashlib.sha256(winner.module).hexdigest()
        replace_files(slot.path, {FILE_NAME: encode_timelines(digest, timelines)})
    except Exception as error:  # as in :func:`_save`
        LOGGER.info("the measured timelines are not kept: %s", one_line(error))


def _searched_instead(trials: Sequence[Trial], winner: Trial) -> plans.Searched | None:
    """What the search put first, where the measurement chose something else."""
    own = _searched(trials)
    if own is winner or own.strategy is None or not own.module:
        return None
    return plans.Searched(own.strategy, hashlib.sha256(own.module).hexdigest())


def _search_record(session: Session, found: Found) -> plans.SearchRecord:
    settings = _search_settings(session.settings)
    return plans.SearchRecord(
        method=settings.method,
        settings={
            "alpha": settings.alpha, "beta": settings.beta, "seed": settings.seed,
            "unchanged": settings.unchanged, "seconds": settings.seconds, "finalists": settings.finalists,
        },
        evaluations=found.result.evaluations,
        improvements=tuple((one.evaluation, one.cost_ns) for one in found.result.trace),
    )  # fmt: skip


def _measured(found: Found, trials: Sequence[Trial], seconds: tuple[float, float]) -> plans.Measured:
    fitted = found.profile.all_reduce
    pieces = fitted.pieces if fitted is not None else ()
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
            )
            for trial in trials
        ),
        all_reduce=tuple(plans.Line(p.from_bytes, p.ns_per_byte, p.base_ns) for p in pieces),
        profile_s=round(seconds[0], 3),
        search_s=round(found.search_s, 3),
        measure_s=round(seconds[1], 3),
        evaluations_per_s=round(found.result.evaluations / max(found.search_s, 1e-9), 1),
    )


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
    loops = sum(node.opcode == "while" for node in step.source.graph.nodes)
    if loops:
        notes.append(f"{loops} loops stay as XLA compiled them; what runs inside is not part of the plan.")
    notes += [f"{trial.name} could not be measured: {trial.error}"[:4000] for trial in trials if trial.error]
    return tuple(notes)


def _shown(path: Path) -> str:
    home = str(Path.home())
    text = str(path)
    return "~" + text[len(home) :] if text.startswith(home + "/") else text
