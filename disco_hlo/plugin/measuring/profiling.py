"""Measure what the cost model needs, on the step's own devices (DisCo, sections 4.2 and 5.2).

Two modules are traced: the unfused step, for the time of every op alone where any is unknown, and the step with XLA's
own kernels, for fused ones. On CPU the first has its collectives in as few buckets as can be: they block, and an op
behind one takes half as long again, with cold caches and threads that have to be woken; one by one they are in the
other. Each kind of collectives is swept over sizes between the very devices of the step. What
the store already knows of this platform is not measured again, so a second model is profiled faster,
and a search that is repeated sees the same numbers and so finds the same plan. All ranks run
everything; rank 0's clock counts.

On GPU each module is traced twice, in command buffers for the times and without for the names. Both modules run
their transfers alone, so that no kernel is slowed by one; a third run of XLA's kernels, transfers beside them, tells by
how much they slow each other. Every other of XLA's buckets is taken apart in both, since only transfers of different
sizes tell what each waits from what slows it. Both are timed untraced as well: five traced runs say little of chance.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import ProfileError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.store import PlanSlot
from disco_hlo.plan.variants import in_every_region, one_at_a_time, one_bucket, unfused, varied
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.measuring.candidates import compile_trials
from disco_hlo.plugin.measuring.known_times import KnownTimes
from disco_hlo.plugin.measuring.lockstep import FirstRuns, all_have, repeated, run_on_all
from disco_hlo.plugin.measuring.microbenchmarks import (
    AFTER_COMPUTE,
    REPEATS,
    Chains,
    Repeat,
    Sweep,
    TransferChains,
    link_label,
    measure_constants,
    traced_transfers,
)
from disco_hlo.plugin.measuring.room import interpreter, lack_of_memory
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.step_traces import ALONE, BESIDE, UNFUSED, op_times, step_profile, take_in
from disco_hlo.plugin.measuring.traced_modules import (
    Findings,
    NamedTrace,
    Traceable,
    as_all_have_it,
    findings,
    ranks_block,
    take,
    tell_of_uneven_devices,
    traceable,
    traced,
    traced_in_slices,
    untraced_ns,
)
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.structure import Restructured
from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.collectives import SweepPoint, point_of
from disco_hlo.profiler.keys import travelling
from disco_hlo.profiler.profile import Contention, Link, Platform, Profile, host_cpu_kind
from disco_hlo.profiler.store import ProfileStore
from disco_hlo.profiler.trace import Trace
from disco_hlo.simulator.orders import beside_transfers


@dataclass(frozen=True)
class Profiled:
    """What profiling found; on ranks other than 0 nothing."""

    profile: Profile
    measured: str
    """What was measured anew, for the log."""


@dataclass
class Kept:
    """What was compiled for the profiling of a step: ahead of it, or by an earlier one of the same step, to see how a
    machine changes."""

    modules: list[Traceable] = field(default_factory=list)
    chains: Chains = field(default_factory=dict)
    constants: DeviceConstants | None = None
    runner: Runner | None = None
    """The last that was traced: its inputs do for others."""
    traces: dict[str, Trace] = field(default_factory=dict)
    """Those of XLA's kernels, from which it is read what these and transfers cost each other."""


def platform_of(session: Session) -> Platform:
    """What times measured in this session are valid for."""
    facts = session.facts
    named = BACKENDS[facts.backend].names_devices
    return Platform(
        device_kind=facts.device_kind if named else host_cpu_kind(),
        backend=facts.backend,
        driver=facts.runtime_version.splitlines()[0][:200] if named else "",
        jax=facts.jax_version,
        jaxlib=facts.jaxlib_version,
    )


def profile_step(
    session: Session,
    source: CanonicalModule,
    xla: Strategy,
    store: ProfileStore | None,
    marks: PlanSlot | None = None,
    kept: Kept | None = None,
    beside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Profiled | None:
    """Measure what ``store`` does not know yet; returns the profile on rank 0, None elsewhere.

    Args:
        marks: where rank 0 notes which module is being tried, so that one that kills the process is left
            out the next time.
        kept: what an earlier profiling of the same step compiled (CPU), to be run again; filled in.
        beside: around the compiles, if there are any; nothing is timed inside.

    Raises:
        UnsupportedError: the step cannot be run on made-up inputs.
        ProfileError: traces cannot be taken or make no sense.
    """
    known, wanted = _known_and_wanted(session, source, xla, store)
    if wanted["device"]:
        with session.compiling("device constants"), session.stage("device constants"):
            constants = kept.constants if kept is not None else None
            constants = constants or measure_constants(session)
            if known is not None and constants is not None:
                known.add_constants(constants)
        if kept is not None:
            kept.constants = constants
    modules = kept.modules if kept is not None else []
    if not modules:
        modules = _to_trace(session, source, xla, wanted, marks)
        with beside() if modules else contextlib.nullcontext():
            _compile(session, source, modules, tag="profile")
    if kept is not None:
        kept.modules = modules
    return _profiled(session, source, xla, known, wanted, modules, kept)


def profile_structures(
    session: Session,
    structures: Mapping[str, Restructured],
    step: CanonicalModule | None,
    store: ProfileStore | None,
    marks: PlanSlot | None = None,
) -> dict[str, Profile | Exception | None]:
    """As :func:`profile_step`, of other structures of a step that is profiled, by name; what went wrong in place of a
    profile.

    Only their kernels are traced, which are compiled together, and only of those structures that have some which no
    structure before them showed. Its ops are those of the step but for a few, and what
    kernels and transfers cost each other is taken over from it: read from each structure's own two traces, it differed
    so much that structures were predicted in another order than they ran.

    Args:
        step: with the structure that XLA gives it; None on ranks other than 0.
    """
    modules: dict[str, list[Traceable]] = {}
    found: dict[str, Profile | Exception | None] = {}
    for name, one in structures.items():
        try:
            xla = read(one.source)
            _, wanted = _known_and_wanted(session, one.source, xla, store, like=step)
            if wanted["device"]:
                raise ProfileError(
                    "what was measured of the step was not kept, so its structures have no profile"
                )
            modules[name] = _to_trace(session, one.source, xla, wanted, marks, one)
        except Exception as error:  # the same on every rank, by the stages it goes through
            found[name] = error
    together = [module for some in modules.values() for module in some]
    if together:
        _compile(session, next(iter(structures.values())).source, together, tag="profile of structures")
    for name, some in modules.items():
        try:
            source, xla = structures[name].source, read(structures[name].source)
            known, wanted = _known_and_wanted(session, source, xla, store, like=step)
            traced = some if wanted["ops"] or wanted["contention"] else []
            profiled = _profiled(session, source, xla, known, wanted, traced)
            found[name] = None if profiled is None else profiled.profile
        except Exception as error:
            found[name] = error
    return found


def _profiled(
    session: Session,
    source: CanonicalModule,
    xla: Strategy,
    known: KnownTimes | None,
    wanted: Mapping[str, Any],
    modules: Sequence[Traceable],
    kept: Kept | None = None,
) -> Profiled | None:
    """Trace what is compiled, sweep collectives, and put everything together on rank 0."""
    fingerprint = source.graph.fingerprint
    launch_ns, slowed = (
        (0, None) if known is None else (known.launch_ns(fingerprint), known.contention(fingerprint))
    )
    taken = _trace(session, source, modules, launch_ns, kept, slowed)
    # What rank 0 alone does is a stage, too: the others would wait for it in the next collective.
    slowed = None
    with session.stage("times of ops"):
        if known is not None:
            slowed = take_in(known, source, xla, taken, wanted)
    swept = _sweep_all(session, source, wanted["collectives"], kept) if wanted["collectives"] else {}
    with session.stage("the step's profile"):
        if known is None:
            return None
        for kind, points in swept.items():
            known.add_sweep(points, kind)
        measured = " and ".join(what for what, lacking in wanted.items() if lacking)
        found = step_profile(known, source, xla, slowed, taken[ALONE].step_ns, taken[BESIDE].step_ns)
        return Profiled(found, measured or "nothing: all known")


def compile_ahead(
    session: Session, source: CanonicalModule, xla: Strategy, store: ProfileStore | None
) -> Kept:
    """Compile what :func:`profile_step` will trace, which needs no devices to itself: of several steps at once."""
    _, wanted = _known_and_wanted(session, source, xla, store)
    modules = _to_trace(session, source, xla, wanted, None)
    _compile(session, source, modules, tag="profile")
    return Kept(modules)


def _compile(session: Session, source: CanonicalModule, modules: Sequence[Traceable], *, tag: str) -> None:
    """Compile modules, and read each while others are compiled."""
    of = {id(trial): module for module in modules for trial in module.trials}
    trials = [trial for module in modules for trial in module.trials]
    run = interpreter(source)
    compile_trials(session, source, trials, tag=tag, then=lambda trial: of[id(trial)].read(trial, run))


def _known_and_wanted(
    session: Session,
    source: CanonicalModule,
    xla: Strategy,
    store: ProfileStore | None,
    like: CanonicalModule | None = None,
) -> tuple[KnownTimes | None, Mapping[str, Any]]:
    """On rank 0 what is known, and on all what has to be measured. ``like`` is the step of which ``source`` is another
    structure."""
    label = AFTER_COMPUTE if ranks_block(session) else ""
    if BACKENDS[session.facts.backend].asynchronous:
        label = link_label()
    link = Link(session.facts.device_count, session.facts.process_count, label)
    known = KnownTimes(platform_of(session), link, store) if session.leads else None
    with session.stage("known times"):
        beside = session.on_calls is not None
        lacking = known.lacks(source, xla, like, beside_training=beside) if known is not None else None
    return known, session.tell(lacking, "to profile")


def _as_alone_was(
    session: Session, step_ns: int, trial: Trial, taken: NamedTrace, first_runs: FirstRuns
) -> int:
    """A step's time as it would have been when the step with transfers alone was timed, by timing that one once more.

    Between the two a GPU grows warm, and slower by more than is looked for (``step_traces``), unless a training keeps
    it as it is. 0 where nobody knows.
    """
    if session.on_calls is not None:
        return step_ns
    if not taken.untraced_ns or taken.runner is None:
        return 0
    again_ns = untraced_ns(session, trial, taken.runner, first_runs, taken.untraced_ns)
    return round(step_ns * taken.untraced_ns / again_ns) if again_ns else 0


def _to_trace(
    session: Session,
    source: CanonicalModule,
    xla: Strategy,
    wanted: Mapping[str, Any],
    marks: PlanSlot | None,
    restructured: Restructured | None = None,
) -> list[Traceable]:
    """The modules whose traces hold what is wanted; of a training that goes on its calls, where XLA's kernels are all
    that is wanted of them. On GPU transfers run alone in the first two, and XLA's kernels
    have buckets of many sizes: what transfers take beside kernels is a matter of number as well as of bytes."""
    apart = BACKENDS[session.facts.backend].asynchronous
    called = session.on_calls is not None and restructured is None and not (apart and wanted["contention"])
    xla = varied(source, xla) if apart else xla
    strategies: dict[str, Strategy] = {}
    if wanted["unfused ops"] and restructured is None:
        strategies[UNFUSED] = in_every_region(
            source, xla, lambda graph, _: unfused(graph) if apart else one_bucket(graph)
        )
    if not called and (wanted["ops"] or wanted["contention"]):
        strategies[ALONE] = xla
    if apart:  # XLA's kernels first: their step tells what lies between two kernels
        strategies = {
            name: in_every_region(source, one, one_at_a_time) for name, one in reversed(strategies.items())
        }
    if wanted["contention"]:
        strategies[BESIDE] = in_every_region(source, xla, beside_transfers)
    trials = [
        Trial(name, strategy, 0, marks=marks, restructured=restructured)
        for name, strategy in strategies.items()
    ]
    modules = [replace(traceable(session, trial), by_itself=trial.name != BESIDE) for trial in trials]
    return [called_module(session), *modules] if called and wanted["ops"] else modules


def called_module(session: Session) -> Traceable:
    """XLA's default as the training calls it."""
    module = traceable(session, Trial(ALONE, None, 0, executable=session.request.call_default()))
    return replace(module, is_called=True)


def _trace(
    session: Session,
    source: CanonicalModule,
    modules: Sequence[Traceable],
    launch_ns: int,
    kept: Kept | None,
    slowed: Contention | None = None,
) -> dict[str, Findings]:
    """Run each compiled module a few times under the profiler, on all ranks."""
    found = {name: Findings() for name in (UNFUSED, ALONE, BESIDE)}
    runner = None if kept is None else kept.runner
    first_runs = FirstRuns(session, "inputs for profiling")
    apart = BACKENDS[session.facts.backend].asynchronous
    names = {module.trial.name for module in modules}
    # Beside a training what lies between two kernels is not worth the runs that tell it.
    timed = {ALONE, BESIDE} if session.on_calls is None or BESIDE in names else set()
    alone: tuple[Trial, NamedTrace] | None = None
    no_room = False
    for module in _with_called(session, source, modules, found):
        trial = module.trial
        trial.error = trial.error or module.error
        if not trial.error:
            trial.error = _lack_of_memory(session, trial, runner)
            no_room = no_room or bool(trial.error)
        if not trial.error:
            try:
                taken = take(session, module, runner, first_runs, timed=trial.name in timed)
                with session.stage(f"what the {trial.name} shows"):
                    lost = slowed if apart and module.is_called else None
                    one = findings(source, module, taken, launch_ns, slowed=lost)
                one = as_all_have_it(session, one)
                if trial.name == ALONE:
                    tell_of_uneven_devices(session, one)
                    alone = trial, taken
                elif trial.name == BESIDE and alone is not None and taken.untraced_ns:  # as on all ranks
                    one = replace(one, step_ns=_as_alone_was(session, one.step_ns, *alone, first_runs))
                found[trial.name] = one
                runner = taken.runner
                launch_ns = launch_ns if one.gap_ns is None else one.gap_ns
                if kept is not None:
                    kept.runner = runner
                    if one.trace is not None and trial.name != UNFUSED:
                        kept.traces[trial.name] = one.trace
            except Exception as error:  # the same on every rank, by the stages it goes through
                trial.error = one_line(error)
        if trial.error:
            session.say_failed("%s: not profiled: %s", trial.name, trial.error)
        if kept is None:
            module.let_go()
    wanted_times = any(module.trial.name == UNFUSED for module in modules)
    with session.stage("profile"):
        if wanted_times and not op_times(found):
            reasons = "; ".join(dict.fromkeys(module.trial.error for module in modules if module.trial.error))
            advice = "; DISCO_WHEN=training profiles it on the training's own arrays" if no_room else ""
            raise ProfileError(f"neither the unfused step nor XLA's own could be profiled: {reasons}{advice}")
    return found


def _lack_of_memory(session: Session, trial: Trial, runner: Runner | None) -> str:
    """As of ``room``; beside a training the call that lends its arguments says so."""
    if session.on_calls is not None:
        return ""
    return lack_of_memory(session, trial.name, trial.executable, runner)


def _with_called(
    session: Session, source: CanonicalModule, modules: Sequence[Traceable], found: Mapping[str, Findings]
) -> Iterator[Traceable]:
    """The modules; then XLA's default as it is called, where its kernels were to be traced and had no room: beside
    collectives, which take part of their speed, as they do in every call."""
    yield from modules
    of_step = {module.trial.name for module in modules if module.trial.restructured is None}
    if session.on_calls is not None and ALONE in of_step and found[ALONE].trace is None:
        module = called_module(session)
        try:
            _compile(session, source, [module], tag="calls")
        except Exception as error:  # on all ranks alike
            module.trial.error = one_line(error)
        yield module


def _sweep_all(
    session: Session, source: CanonicalModule, wanted: Mapping[str, Sequence[int]], kept: Kept | None
) -> dict[CollectiveKind, tuple[SweepPoint, ...]]:
    """Sweep each kind of collectives, named as in :meth:`KnownTimes.lacks`. One other than the all-reduce that cannot
    be swept is left to what a ring makes of that."""
    found: dict[CollectiveKind, tuple[SweepPoint, ...]] = {}
    for kind in sorted({ALL_REDUCE, *travelling(source)}, key=str):
        if not wanted.get(str(kind)):
            continue
        try:
            found[kind] = _sweep(session, kind, wanted[str(kind)], kept)
        except Exception as error:  # the same on every rank, by the stages it goes through
            if kind == ALL_REDUCE:
                raise
            session.say_failed(
                "%s: not timed by itself, but taken from all-reduces: %s", kind, one_line(error)
            )
    return found


def _sweep(
    session: Session, kind: CollectiveKind, sizes_bytes: Sequence[int], kept: Kept | None
) -> tuple[SweepPoint, ...]:
    together = functools.partial(all_have, session, f"{kind} to time")
    repeat: Repeat = functools.partial(repeated, session, f"timing {kind}")
    sweep = Sweep(session.request, kind, session.settings.seed, together, repeat)
    if ranks_block(session):
        chains = None if kept is None else kept.chains
        with session.stage(f"{kind} of {sizes_bytes[0]} to {sizes_bytes[-1]} bytes"):
            found = sweep.times_in_steps(sizes_bytes, chains)
            return tuple(point_of(size, times) for size, times in found.items())
    queues = BACKENDS[session.facts.backend].queues
    try:
        if queues:
            with session.stage(f"{kind}, traced"):
                transfers = TransferChains(sweep, sizes_bytes)
                trace, runs = _traced(session, f"traced {kind}", transfers)
                times = traced_transfers(trace, transfers.sizes_bytes, runs)
                return tuple(point_of(size, taken) for size, taken in times.items())
    except Exception as error:
        session.say_failed(
            "%s: timed by the host's clock, which is inexact for small ones: %s", kind, one_line(error)
        )
    points = []
    for size in sizes_bytes:
        with session.stage(f"{kind} of {size} bytes"):
            points.append(point_of(size, sweep.times(size, without_call=queues)))
    return tuple(points)


def _traced(session: Session, what: str, transfers: TransferChains) -> tuple[Trace, int]:
    """A trace of transfers, and how many runs of them it has."""
    if session.between_steps is None:
        trace, _ = run_on_all(session, what, lambda: traced(transfers, REPEATS))
        return trace, REPEATS
    first_ns = min(repeated(session, what, transfers.run, 2))
    trace, walls_ns = traced_in_slices(session, what, transfers, REPEATS, first_ns)
    return trace, len(walls_ns)
