"""One compiled module under the profiler, on all ranks, and what its trace tells (DisCo, sections 4.2 and 5.2).

A GPU computes for a second before it is traced: one that was idle is faster than in the middle of a training. Command
buffers hide which kernel belongs to which instruction; so a module is compiled and traced without them, too.

Traces of XLA's default and of the winner, taken once the winner is known, are for people to look at, and decide
nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median

from disco_hlo.backends import BACKENDS
from disco_hlo.elsewhere import Run
from disco_hlo.errors import DiscoError, ProfileError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plugin.hangs import Guard
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.measuring.candidates import compile_trials, steps_in_a_row
from disco_hlo.plugin.measuring.inputs.arguments import Together
from disco_hlo.plugin.measuring.lending import Slices
from disco_hlo.plugin.measuring.lockstep import FirstRuns, anywhere, in_a_slice, repeated, run_on_all
from disco_hlo.plugin.measuring.microbenchmarks import TransferChains
from disco_hlo.plugin.measuring.runner import Runner, time_once
from disco_hlo.plugin.measuring.trial import Trial, marked
from disco_hlo.plugin.session import OnCalls, Session
from disco_hlo.plugin.step import Step
from disco_hlo.plugin.xla import executables
from disco_hlo.plugin.xla.hook import module_name
from disco_hlo.plugin.xla.jaxlink import OwnTrace
from disco_hlo.profiler import trace as tracing
from disco_hlo.profiler.collectives import Issued, issued
from disco_hlo.profiler.command_buffers import WithNames, with_names
from disco_hlo.profiler.contention import Computed, computed_ns, gap_in_step_ns, undisturbed, uneven
from disco_hlo.profiler.costs import kernel_times
from disco_hlo.profiler.instructions import (
    MINIMUM_RUNS,
    BodyTimes,
    InstructionTimes,
    body_times,
    instruction_times,
    scaled,
    stretch,
)
from disco_hlo.profiler.keys import Body, bodies_of, in_region, keyed_times, owners_in
from disco_hlo.profiler.profile import Contention, LoopTime, OpTime, merged
from disco_hlo.profiler.timeline import MeasuredStep, measured_step
from disco_hlo.profiler.trace import Moved, least, moved_ns

_WARM_UPS = 2
_MOST_WARM_UPS = 30
_ATTEMPTS = 3
"""Traces of calls that are begun."""
_RUNS_TO_TIME = 16
"""About so many does timing a step take."""
_TIMES = 3
"""Measurements of a step, each of several in a row."""
_TIMELINE_RUNS = 5
"""Steps in a trace, of which one is kept."""


Collected = tuple[bytes, Sequence[int]]
"""A trace that is not read yet, and the wall ns of its runs."""


@dataclass
class Traceable:
    """A module to be traced."""

    trial: Trial
    by_name: Trial | None = None
    """The same module without command buffers, whose trace has the names of kernels; None where nothing hides them."""
    is_called: bool = False
    """Whether the training calls it: XLA's default, as it is."""
    by_itself: bool = True
    """Whether each kernel and transfer runs with nothing beside it; else (GPU) only what moved when is told of it."""
    written: CanonicalModule | None = None
    """What is executed under the names of the trace, where that was read ahead of it."""

    @property
    def trials(self) -> list[Trial]:
        """What is to be compiled."""
        own = [] if self.is_called else [self.trial]
        return own if self.by_name is None else [*own, self.by_name]

    def read(self, compiled: Trial, run: Run) -> None:
        """Read what one of :attr:`trials` executes, and whose names the trace will have as a canonical graph.

        Args:
            run: calls what takes Python long.
        """
        compiled.executed = executables.read_executable(compiled.executable)
        if self.by_itself and compiled is self.trials[-1]:
            with contextlib.suppress(DiscoError):  # said of the trace, which is left out; a search goes on
                self.written = run(canonicalize, compiled.executed)

    def let_go(self) -> None:
        """Free what was compiled and read."""
        self.written = None
        for one in self.trials:
            one.executable, one.executed = None, b""

    @property
    def error(self) -> str:
        """Why it cannot be traced."""
        return next((trial.error for trial in self.trials if trial.error), "")


@dataclass(frozen=True)
class Findings:
    """What a trace of one module shows; nothing where it could not be taken."""

    trace: tracing.Trace | None = None
    module_name: str = ""
    """Modules that are compiled at once go by different names."""
    by_name: tracing.Trace | None = None
    """The trace that the names are from, where it is another one (GPU)."""
    walls_ns: Sequence[int] = ()
    times: Mapping[str, OpTime] = field(default_factory=dict)
    issued: Sequence[Issued] = ()
    """The module's collectives, those of bodies included."""
    loops: Mapping[str, LoopTime] = field(default_factory=dict)
    """By the key of a loop's body."""
    gap_ns: int | None = None
    """Launch cost in the step (GPU); None where it was not timed, or does not tell."""
    moved: Moved = field(default_factory=dict)
    """How long collectives move data: on the device that comes last, but where they block a rank (CPU) with its
    waiting."""
    moved_by_name: Moved = field(default_factory=dict)
    """And in the trace that the names are from."""
    step_ns: int = 0
    """What it took untraced, as of :class:`NamedTrace` (GPU); 0 where that is not known."""
    computed: Computed = field(default_factory=dict)
    """How long the kernels of each of this rank's devices ran, where nothing ran beside them (GPU)."""

    @property
    def as_run(self) -> bool:
        """Whether the times are of the module as training runs it."""
        return self.by_name is None or self.trace is not self.by_name


def traceable(session: Session, trial: Trial) -> Traceable:
    """A trial, and on a GPU the same without command buffers."""
    options = BACKENDS[session.facts.backend].singly_options
    if not options:
        return Traceable(trial)
    return Traceable(trial, replace(trial, name=f"{trial.name}, by name", options=options))


def runner_with(session: Session, trial: Trial, inputs_of: Runner | None, together: Together) -> Runner:
    """A trial's runner, with the inputs of another one where there is one."""
    return Runner(
        session.request, trial.executable, session.settings.seed,
        inputs_of=inputs_of, together=together, module=trial.executed,
    )  # fmt: skip


def traced_on_all(
    session: Session,
    name: str,
    runner: Runner,
    runs: int,
    first_runs: FirstRuns,
    *,
    warm: bool = True,
    guard: Guard = contextlib.nullcontext,
) -> Collected:
    """:func:`collected` on all ranks, with a GPU ``warm`` or as it is; where one fails, all do, or the job ends if they
    cannot. ``first_runs`` is what ``runner`` makes its inputs with."""
    first_runs.begin(_WARM_UPS)
    step_ns = min(repeated(session, f"a first run of {name}", runner.run, _WARM_UPS, guard))
    more = 0
    warm_up_ns = BACKENDS[session.facts.backend].warm_up_ns
    if warm and warm_up_ns:
        more = session.tell(min(_MOST_WARM_UPS, warm_up_ns // max(1, step_ns)), "warm-ups")
    return run_on_all(session, f"a profiled run of {name}", lambda: collected(runner, runs, more), guard)


def traced_in_slices(
    session: Session, what: str, runner: TransferChains, runs: int, run_ns: int
) -> tuple[tracing.Trace, Sequence[int]]:
    """As :func:`traced`, between the steps of a training, a few runs, of about ``run_ns`` each, in each trace: at least
    so many in all."""
    at_once = min(runs, in_a_slice(session, run_ns))
    taken = [
        run_on_all(session, what, lambda: collected(runner, at_once, 0)) for _ in range(-(-runs // at_once))
    ]
    return _joined(taken)


def _joined(taken: Sequence[Collected]) -> tuple[tracing.Trace, Sequence[int]]:
    return tracing.joined([tracing.read(one) for one, _ in taken]), [ns for _, walls in taken for ns in walls]


@dataclass(frozen=True)
class NamedTrace:
    """A module's trace, in which every kernel has a name."""

    trace: tracing.Trace
    walls_ns: Sequence[int]
    executed: bytes
    """The module in whose names, as XLA runs it."""
    runner: Runner | None
    """Whose inputs do for other modules of the step, where they are made up."""
    by_name: tracing.Trace | None = None
    """As of :class:`Findings`; ``trace`` itself where the other one did not find its names in it."""
    untraced_ns: int = 0
    """What it took untraced, several in a row; 0 where that was not asked for, or failed."""
    step_ns: int = 0
    """The same less what has no name."""


def take(
    session: Session,
    module: Traceable,
    inputs_of: Runner | None,
    first_runs: FirstRuns,
    *,
    timed: bool = False,
) -> NamedTrace:
    """Trace a compiled module, on all ranks; beside a training from its calls, or on their arguments.

    Where the kernels of a step in command buffers do not find their names in the trace without, that one counts, with a
    line in the log.

    Args:
        timed: whether to time it untraced, too (GPU).

    Raises:
        ActivationError, ProfileError: on all ranks alike, where it cannot be run or traced.
    """
    if session.on_calls is not None:
        return _beside_training(session, module, session.on_calls, first_runs, timed)
    trial, by_name = module.trial, module.by_name
    with session.stage(f"memory for the {trial.name}"):
        runner = runner_with(session, trial, inputs_of, first_runs)
    with session.stage(f"profile {trial.name}"):
        runs, guard = (
            BACKENDS[session.facts.backend].traced_steps,
            functools.partial(marked, session, trial, "run"),
        )
        own, walls_ns = traced_on_all(session, trial.name, runner, runs, first_runs, guard=guard)
    if by_name is None:
        with session.stage(f"trace of {trial.name}"):
            return NamedTrace(tracing.read(own), walls_ns, runner.module, runner)
    # Before any trace is read, as devices that wait grow cool.
    untraced = untraced_ns(session, trial, runner, first_runs, min(walls_ns)) if timed else 0
    with session.stage(f"memory for the {by_name.name}"):
        other = runner_with(session, by_name, runner, first_runs)
    # The other trace is about names: no clock that counts is disturbed.
    with ThreadPoolExecutor(1, "disco-trace") as beside:
        reading = beside.submit(tracing.read, own)
        with session.stage(f"profile {by_name.name}"):
            guard = functools.partial(marked, session, by_name, "run")
            names, _ = traced_on_all(
                session, by_name.name, other, MINIMUM_RUNS, first_runs, warm=False, guard=guard
            )
        with session.stage(f"traces of {trial.name}"):
            trace, named = reading.result(), tracing.read(names)
    both = runner.module, other.module
    return _named(session, trial, trace, walls_ns, named, both, untraced, runner)


def _beside_training(
    session: Session, module: Traceable, calls: OnCalls, first_runs: FirstRuns, timed: bool
) -> NamedTrace:
    """As :func:`take`. What is read of the traces is read while the training goes on."""
    trial, by_name = module.trial, module.by_name
    runs = max(MINIMUM_RUNS, BACKENDS[session.facts.backend].traced_steps // 2)
    untraced, call_ns, names = 0, 0, list[Collected]()
    if module.is_called:
        own, call_ns = _of_calls(session, calls, trial.name, runs)
        executed = executables.read_executable(trial.executable)
    with Slices(session, calls, module.trials) as slices:
        if not module.is_called:
            own, runner = _on_arguments(session, slices, trial, runs)
            executed = runner.module
            if timed and by_name is not None:
                runner, _ = slices.runner(trial, _RUNS_TO_TIME * min(own[-1][1]))
                untraced = untraced_ns(session, trial, runner, first_runs, min(own[-1][1]))
        if by_name is not None:
            names, other = _on_arguments(session, slices, by_name, MINIMUM_RUNS)
            both = executed, other.module
    with session.stage(f"traces of {trial.name}"):
        trace, walls_ns = _joined(own)
        named = _joined(names)[0] if names else None
    if named is None:
        walls_ns = [call_ns or ns for ns in walls_ns]
        return NamedTrace(trace, walls_ns, executed, None)
    return _named(session, trial, trace, walls_ns, named, both, untraced, None)


def _of_calls(session: Session, calls: OnCalls, name: str, runs: int) -> tuple[list[Collected], int]:
    """A trace of calls of the training, and what one takes outside of it, ns."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            with session.stage(f"calls of {name}"):
                trace, walls_ns, call_ns = calls.trace(runs)
                return [(trace, walls_ns)], call_ns
        except DiscoError:  # on all ranks: the script of one has begun a trace of its own
            if not left:
                raise
    raise AssertionError


def _on_arguments(
    session: Session, slices: Slices, trial: Trial, runs: int
) -> tuple[list[Collected], Runner]:
    """Traces of so many runs, after one that warms up."""
    guard, taken, left = functools.partial(marked, session, trial, "run"), list[Collected](), runs
    with session.stage(f"profile {trial.name}"):
        runner, _ = slices.runner(trial)
        run_ns = run_on_all(session, f"a first run of {trial.name}", runner.run, guard)
        while left:
            runner, count = slices.runner(trial, run_ns)
            count = min(left, count)
            _warm_up(session, slices, runner, run_ns, guard)
            what = f"a profiled run of {trial.name}"
            taken.append(run_on_all(session, what, functools.partial(collected, runner, count, 0), guard))
            run_ns, left = min(taken[-1][1]), left - count
    return taken, runner


def _warm_up(session: Session, slices: Slices, runner: Runner, run_ns: int, guard: Guard) -> None:
    """Have a GPU that has only copied compute for as long, as in the midst of a training."""
    idle_ns, slices.idle_ns = min(slices.idle_ns, BACKENDS[session.facts.backend].warm_up_ns), 0
    if runs := int(session.tell(min(_MOST_WARM_UPS, idle_ns // max(1, run_ns)), "warm-ups")):
        run_on_all(session, "warm-ups", lambda: [runner.run() for _ in range(runs)], guard)


def _named(
    session: Session,
    trial: Trial,
    trace: tracing.Trace,
    walls_ns: Sequence[int],
    named: tracing.Trace,
    both: tuple[bytes, bytes],
    untraced: int,
    runner: Runner | None,
) -> NamedTrace:
    """A trace in command buffers with the names of another one, or that one. ``both`` are the modules that they are
    of."""
    with session.stage(f"names of {trial.name}"):
        whole, why = _with_names(trace, named, both)
    if anywhere(session, whole is None, "names"):
        session.say(
            "%s: its kernels are timed without command buffers, and these times are not stored%s",
            trial.name,
            why and f": {why}",
        )
        return NamedTrace(named, walls_ns, both[1], runner, named)
    assert whole is not None
    step_ns = max(0, untraced - whole.unnamed_ns)
    return NamedTrace(whole.trace, walls_ns, both[1], runner, named, untraced, step_ns)


def _with_names(
    timed: tracing.Trace, named: tracing.Trace, both: tuple[bytes, bytes]
) -> tuple[WithNames | None, str]:
    """The one trace with the names of the other, or why it cannot have them."""
    names = list(map(module_name, both))
    try:
        return with_names(timed, names[0], named, names[1]), ""
    except ProfileError as error:
        return None, one_line(error)


def untraced_ns(session: Session, trial: Trial, runner: Runner, first_runs: FirstRuns, run_ns: int) -> int:
    """A step's time among several in a row; 0 where it has to be waited for, since the way from the host is in that.
    ``run_ns`` is about what a run took, which says how many."""
    first_runs.begin()
    try:
        with session.stage(f"time {trial.name}"):
            at_once = steps_in_a_row(session, runner, run_ns)
            if at_once == 1:
                return 0
            timed = functools.partial(time_once, runner, at_once)
            guard = functools.partial(marked, session, trial, "run")
            return round(median(repeated(session, f"steps of {trial.name}", timed, _TIMES, guard)))
    except Exception as error:  # it can be profiled without; what fails alone while it runs ends the job
        session.say_failed("%s: not timed: %s", trial.name, one_line(error))
        return 0


def traced(
    runner: Runner | TransferChains, runs: int, warm_ups: int = _WARM_UPS
) -> tuple[tracing.Trace, Sequence[int]]:
    """A trace of ``runs`` runs, after some that warm up, and their wall nanoseconds; on every rank. Raises
    ProfileError: this rank has no trace; it has run as often as the others nevertheless."""
    trace, walls = collected(runner, runs, warm_ups)
    return tracing.read(trace), walls


def collected(runner: Runner | TransferChains, runs: int, warm_ups: int) -> Collected:
    """As :func:`traced`, not read yet."""
    walls: list[int] = []
    try:
        trace = tracing.collect(OwnTrace(), lambda: walls.append(runner.run()), runs, warmup=warm_ups)
    except Exception:  # raised again: the other ranks run the step nevertheless, and wait for this one in it
        while len(walls) < warm_ups + runs:
            walls.append(runner.run())
        raise
    return trace, walls[-runs:]


def findings(
    source: CanonicalModule,
    module: Traceable,
    taken: NamedTrace,
    launch_ns: int,
    *,
    slowed: Contention | None = None,
) -> Findings:
    """What a trace of a module shows.

    Args:
        source: whose nodes the trial's strategy speaks of.
        launch_ns: launch cost, as far as it is known, where the step was not timed untraced.
        slowed: by what kernels lost to transfers beside them, where they were called so by a training (GPU).
    """
    trial, name, backend = module.trial, module_name(taken.executed), BACKENDS[source.graph.backend]
    shown = Findings(taken.trace, name, taken.by_name, taken.walls_ns, step_ns=taken.step_ns)
    if not module.by_itself:
        return _with_moved(shown, frozenset())
    written = module.written or canonicalize(taken.executed)
    bodies, inside = bodies_of(written), owners_in(written.index, written.computation)
    talks: frozenset[str] = frozenset()
    if not backend.asynchronous:
        talks = _talks(written)
    all_talks = talks.union(*(_talks(body.canonical) for body in bodies if not backend.asynchronous))
    shown = _with_moved(shown, all_talks)
    trace, walls_ns = taken.trace, taken.walls_ns
    if slowed is not None:
        trace = undisturbed(trace, name, shown.moved, slowed)
    found_issued = issued(written, inside)
    for body in bodies:
        found_issued += issued(body.canonical, body.owner)
    gap_ns = gap_in_step_ns(trace, name, taken.step_ns, inside) if taken.step_ns and shown.as_run else None
    launch_ns = launch_ns if gap_ns is None else gap_ns
    times = instruction_times(
        trace, name, inside, blocking=talks, launch_ns=launch_ns if backend.queues else None
    )
    factor = 1.0
    if not backend.queues:
        factor = stretch(trace, name, talks, launch_ns, walls_ns, inside)
        LOGGER.debug("%s: compute takes %.2f times what its parts do alone", trial.name, factor)
        times = scaled(times, factor)
    in_bodies = _in_bodies(trace, name, bodies, all_talks, launch_ns)
    found = _keyed_in_bodies(bodies, in_bodies, factor)
    found |= keyed_times(written.graph, written.origins, times)
    # A plan's nodes are the source's: what is written may hold some of them twice.
    if trial.strategy is not None:
        found |= _kernel_times(source, trial.strategy, times, in_bodies, factor)
    loops = {
        _key_of(body, source): _loop_time(one)
        for body, one in zip(bodies, in_bodies, strict=True)
        if body.repeats and one is not None
    }
    computed = computed_ns(trace, name) if backend.queues else {}
    return replace(
        shown, trace=trace, issued=found_issued, times=found, loops=loops, gap_ns=gap_ns, computed=computed
    )


def _with_moved(shown: Findings, talks: frozenset[str]) -> Findings:
    """With how long its collectives move data, in both traces."""
    moved, moved_by_name = (
        {} if one is None else moved_ns(one, shown.module_name, talks) for one in (shown.trace, shown.by_name)
    )
    return replace(shown, moved=moved, moved_by_name=moved_by_name)


def _in_bodies(
    trace: tracing.Trace,
    name: str,
    bodies: Sequence[Body],
    talks: frozenset[str],
    launch_ns: int,
) -> list[BodyTimes | None]:
    found: list[BodyTimes | None] = []
    for body in bodies:
        around = 1
        if body.around is not None:
            outer = found[body.around]
            around = 0 if outer is None else outer.executions
        told = body_times(trace, name, body.owner, body.turns, around, talks, launch_ns) if around else None
        found.append(told)
    return found


def _keyed_in_bodies(
    bodies: Sequence[Body], told: Sequence[BodyTimes | None], factor: float
) -> dict[str, OpTime]:
    """By cost key; of what several bodies run, the merged times."""
    found: dict[str, list[OpTime]] = {}
    for body, one in zip(bodies, told, strict=True):
        times = {} if one is None else scaled(one.times, factor)
        for key, time in keyed_times(body.canonical.graph, body.canonical.origins, times).items():
            found.setdefault(key, []).append(time)
    return {key: merged(times) for key, times in found.items()}


def _kernel_times(
    source: CanonicalModule,
    strategy: Strategy,
    times: Mapping[str, InstructionTimes],
    in_bodies: Sequence[BodyTimes | None],
    factor: float,
) -> dict[str, OpTime]:
    """Times of a strategy's kernels, in the entry and in regions, by their keys."""
    found: dict[str, list[OpTime]] = {}
    shown = [(source.graph, strategy, times)]
    for name, one in strategy.regions:
        shown += [
            (source.computations[name].graph, one, scaled(in_region(name, told.times), factor))
            for told in in_bodies
            if told is not None
        ]
    for graph, one, by_name in shown:
        for key, time in kernel_times(graph, unit_graph(graph, one).kernels(graph), by_name).items():
            found.setdefault(key, []).append(time)
    return {key: merged(times) for key, times in found.items()}


def _key_of(body: Body, source: CanonicalModule) -> str:
    """The key of the region of ``source`` that a body executes, by the names that the rewriter gave; of a body that it
    left alone its own."""
    written = (region.source.graph.key for region in source.regions if in_region(region.name, body.owner))
    return next(written, body.canonical.graph.key)


def _loop_time(told: BodyTimes) -> LoopTime:
    more_ns = sum(ns - told.times[op].median_ns for op, ns in told.first_ns.items())
    return LoopTime(told.executions, told.own_ns, more_ns)


def as_all_have_it(session: Session, mine: Findings) -> Findings:
    """How long transfers move data, by the traces of all ranks: each sees its own devices, which wait for others'."""
    if not BACKENDS[session.facts.backend].asynchronous or session.facts.process_count < 2:
        return mine
    return replace(mine, moved=_least(session, mine.moved), moved_by_name=_least(session, mine.moved_by_name))


def _least(session: Session, mine: Moved) -> Moved:
    every = session.gathered([(*key, ns) for key, ns in sorted(mine.items())], "transfers")
    return least([{(run, unit, k): ns for run, unit, k, ns in one} for one in every])


def tell_of_uneven_devices(session: Session, shown: Findings) -> None:
    """One line where one of all ranks' devices holds up the step (GPU); the search and its measurements go on."""
    if not BACKENDS[session.facts.backend].queues:
        return
    computed = shown.computed
    if session.facts.process_count > 1:
        every = session.gathered(computed, "devices")
        computed = {
            f"{device} of rank {rank}": times_ns
            for rank, own in enumerate(every)
            for device, times_ns in own.items()
        }
    found = uneven(computed)
    if found is not None:
        session.say(
            "%s: this device is hot, short of power, or shared with another job; the times measured now are right only "
            "while that lasts",
            found,
        )


def _talks(module: CanonicalModule) -> frozenset[str]:
    """Instructions that communicate."""
    talking = {place for place, node in enumerate(module.graph.nodes) if node.opcode in COLLECTIVES}
    return frozenset(one.name for one in module.origins if not talking.isdisjoint(one.nodes))


def ranks_block(session: Session) -> bool:
    """Whether a collective blocks a rank until the others come: CPU processes, not the devices of one."""
    return not BACKENDS[session.facts.backend].asynchronous and session.facts.process_count > 1


# --- for people to look at ------------------------------------------------------------------------


def take_timelines(session: Session, step: Step, trials: Sequence[Trial]) -> tuple[MeasuredStep, ...]:
    """One measured step of each trial, in their order, on rank 0; all ranks run them. Empty if one fails."""
    try:
        taken = []
        inputs_of: Runner | None = None
        first_runs = FirstRuns(session, "inputs for the timelines")
        for trial in _trials_with_names(session, step, trials):
            with session.stage(f"inputs for the timeline of {trial.name}"):
                inputs_of = runner_with(session, trial, inputs_of, first_runs)
            with session.stage(f"timeline of {trial.name}"):
                trace, _ = traced_on_all(session, trial.name, inputs_of, _TIMELINE_RUNS, first_runs)
                taken.append(measured_step(trial.name, tracing.read(trace), inputs_of.module))
    except (
        Exception
    ) as error:  # what jax raises, too: the others go on with the winner, and so must this rank
        session.say_failed("no measured timelines: %s", one_line(error))
        return ()
    return tuple(taken)


def _trials_with_names(session: Session, step: Step, trials: Sequence[Trial]) -> Sequence[Trial]:
    """The trials, on a GPU compiled again without command buffers, inside which no kernel has a name."""
    options = BACKENDS[session.facts.backend].singly_options
    if not options:
        return trials
    again = [
        Trial(
            one.name, one.strategy, one.predicted_ns,
            marks=one.marks, restructured=one.restructured, options=options,
        )
        for one in trials
    ]  # fmt: skip
    compile_trials(session, step.source, again, tag="timelines")
    for trial in again:
        if trial.error:
            raise ProfileError(f"{trial.name}: {trial.error}")
    return again
