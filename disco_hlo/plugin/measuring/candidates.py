"""Compile strategies on every rank, time them in turn, and compare the numbers of what is to be used.

DisCo trusts its simulator to the end; here the finalists run on the devices, alternately with XLA's
default, and the fastest wins, if it computes what the default computes. To see that takes longer than to time
it, so only what would win is compared. Rank 0 writes each module and sends it, so that all ranks compile the
same bytes; a candidate that fails anywhere is out everywhere. One that ends the process, because XLA
crashes on it, leaves its mark in the plan's folder, and is not tried a second time; of several that were
being compiled at once, each is first tried alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

from disco_hlo.activation.agree import PlanBytes, broadcast_plan
from disco_hlo.backends import BACKENDS
from disco_hlo.elsewhere import here
from disco_hlo.errors import UnsupportedError, shared
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.optimize.regions import launched_singly, launching_ns
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import verify
from disco_hlo.plugin.calls.schedule import FEWEST_ROUNDS, Round, verdict
from disco_hlo.plugin.hangs import coming_back
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.measuring.comparing import (
    HeldPasses,
    compare,
    compile_comparison,
    make_runner,
    settle_inputs,
)
from disco_hlo.plugin.measuring.compiling import CompileBatch, compile_default
from disco_hlo.plugin.measuring.inputs.arguments import RealInputs, let_go
from disco_hlo.plugin.measuring.lockstep import (
    SLICE_NS,
    anywhere,
    repeated,
    run_on_all,
    training_ends,
)
from disco_hlo.plugin.measuring.room import (
    beyond_setting,
    compiles_at_once,
    interpreter,
    lack_of_memory,
)
from disco_hlo.plugin.measuring.runner import AT_ONCE_NS, LOOKS, Runner, at_once_of, time_once
from disco_hlo.plugin.measuring.trial import Trial, marked
from disco_hlo.plugin.session import Session, launch_options
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink.requests import CompileOptionValue
from disco_hlo.plugin.xla.job import free_device_bytes
from disco_hlo.printable import counted

FEWEST_TO_DROP = 2
_FAR_BEHIND = 1.02


@dataclass(frozen=True)
class Compiling:
    """Modules that this rank's threads compile."""

    wait: Callable[[], object]
    """Returns once nothing is compiled any more that has begun. On one rank alone."""
    finish: Callable[[], None]
    """Returns, on all ranks at once, when all are compiled; raises as :func:`compile_trials`."""


def compile_trials(
    session: Session,
    source: CanonicalModule,
    trials: Sequence[Trial],
    *,
    tag: str,
    then: Callable[[Trial], None] = lambda _: None,
) -> None:
    """Compile ``trials`` on every rank; what goes wrong anywhere is noted in them, not raised.

    Several are compiled at once where a rank has the cores: XLA uses one for each. Where XLA's autotuner has no room
    beside a step, a call is held for those of another structure for which it has to
    (:mod:`disco_hlo.plugin.measuring.compiling`): what it found for the step itself it knows.

    Args:
        then: done with each that is compiled, while others are compiled; what it raises counts as the compile's.

    Raises:
        jax.errors.JaxRuntimeError, ActivationError: XLA's default cannot be compiled.
        Exception: one cannot be compiled, as the training beside which this is done has ended.
    """
    begin_to_compile(session, source, trials, tag=tag, then=then).finish()


def begin_to_compile(
    session: Session,
    source: CanonicalModule,
    trials: Sequence[Trial],
    *,
    tag: str,
    then: Callable[[Trial], None] = lambda _: None,
) -> Compiling:
    """As :func:`compile_trials`, on all ranks at once, but go on meanwhile; ``finish`` must be called."""
    for number, trial in enumerate(trials):
        _hand_out(session, source, trial, trials[:number], tag=f"{tag} {number}")
    waiting = [trial for trial in trials if not trial.error]
    at_once = compiles_at_once(session)
    suspected = any(one.marks is not None and one.marks.bans.suspects(one.digest) for one in waiting)
    if anywhere(session, suspected, f"{tag}: suspects"):  # on all ranks, as they hold calls together
        at_once = 1
    verified = _Verified()
    pool = ThreadPoolExecutor(at_once, "disco-compile")

    one_by_one = [
        functools.partial(_compile, session, source, one, verified, at_once, then) for one in waiting
    ]
    own = [number for number, one in enumerate(waiting) if one.structure is None]
    new = [number for number, one in enumerate(waiting) if one.structure is not None]
    compiled = {number: pool.submit(one_by_one[number], {}) for number in own}
    others = CompileBatch(session, tag, [one_by_one[number] for number in new], pool, at_once)
    begun = [*compiled.values(), *others.begun]

    def finish() -> None:
        started = time.monotonic()
        with pool:
            wait(begun)
            compiled.update(zip(new, others.finish(), strict=True))
        waited_s = time.monotonic() - started
        LOGGER.debug("%s: compiled %s, waited for %.1f s", tag, counted(len(waiting), "module"), waited_s)
        for number, trial in enumerate(waiting):
            try:
                with session.stage(f"{tag} {number}: compile"):
                    compiled[number].result()
            except Exception as error:
                ends = session.between_steps is not None and training_ends(session)
                if ends or (trial.strategy is None and trial.structure is None):
                    raise
                trial.error = one_line(error)
                LOGGER.debug("%s: %s", trial.name, trial.error)

    return Compiling(functools.partial(wait, begun), finish)


@dataclass
class _Verified:
    """Verifies modules of a batch: what is compiled twice, with other options, once. Large ones in interpreters of
    their own, others in turn: so XLA compiles the first while the next is verified."""

    seen: dict[tuple[int, int, str], Future[None]] = field(default_factory=dict)
    turn: threading.Lock = field(default_factory=threading.Lock)

    def verify(self, source: CanonicalModule, module: bytes, strategy: Strategy) -> None:
        key, mine = (id(source), id(strategy), hashlib.sha256(module).hexdigest()), Future[None]()
        first = self.seen.setdefault(key, mine)
        if first is mine:
            run = interpreter(source)
            try:
                with self.turn if run is here else contextlib.nullcontext():
                    mine.set_result(run(verify, source, module, strategy))
            except Exception as error:
                mine.set_exception(error)
        first.result()


def _hand_out(
    session: Session, source: CanonicalModule, trial: Trial, earlier: Sequence[Trial], *, tag: str
) -> None:
    """Write a trial's module on rank 0, or take that of an ``earlier`` one that differs in its options alone, and send
    it to the others."""
    if trial.strategy is None:
        return
    mine, why = None, ""
    if session.leads:
        try:
            same = (one for one in earlier if one.strategy is trial.strategy)
            written = (one.module for one in same if one.restructured is trial.restructured)
            mine = PlanBytes(b"{}", next(written, b"") or apply(trial.strategy, trial.source(source)))
            banned = trial.marks.bans.reason(mine.module_sha256) if trial.marks is not None else ""
            mine, why = (None, f"it is banned: {banned}") if banned else (mine, why)
        except Exception as error:  # the others wait for what is sent here
            why = one_line(error)
    timeout_s = session.timeout_s
    sent, trial.error = broadcast_plan(session.channel, mine, reason=why, timeout_s=timeout_s, tag=tag)
    if sent is not None:
        trial.module, trial.error = sent.module, ""
        own = trial.source(source)
        if not trial.launched_singly and launched_singly(own, trial.strategy, trial.predicted_ns):
            trial.launched_singly = True
            trial.predicted_ns += launching_ns(own, trial.strategy)


def _compile(
    session: Session,
    source: CanonicalModule,
    trial: Trial,
    verified: _Verified,
    at_once: int,
    then: Callable[[Trial], None],
    options: Mapping[str, CompileOptionValue],
) -> None:
    """Compile a trial's module on this rank, and what is done ``then``."""
    started = time.monotonic()
    if trial.strategy is None and trial.structure is not None:
        with marked(session, trial, "compile"):
            trial.executable = compiles.compile_module(session.request, None, options, trial.structure)
    elif trial.strategy is None:
        trial.executable = compiles.compile_module(session.request, None, trial.options)
        try:
            devices = session.request.local_devices
            compile_comparison(devices, trial.executable, at_once, real_inputs=False)
        except Exception as error:  # it fails again, on all ranks, where something is compared
            LOGGER.debug("comparing is not prepared: %s", one_line(error))
    else:
        own = trial.source(source)
        verified.verify(own, trial.module, trial.strategy)
        launches = launch_options(session, trial.launched_singly)
        with marked(session, trial, "compile"):
            trial.executable = compiles.compile_module(
                session.request, trial.module, {**launches, **trial.options, **options}, trial.structure
            )
    LOGGER.debug("%s: compiled in %.1f s", trial.name, time.monotonic() - started)
    then(trial)


def measure(
    session: Session, trials: Sequence[Trial], *, budget_s: float, stop: Callable[[], bool] = lambda: False
) -> bool:
    """Run the compiled trials alternately and note their times. What they compute is seen by
    :func:`compare_with_default` alone. On GPU several steps are run in a row, as a training loop does.

    What cannot win any more is not run again, by the rule for calls of a training
    (:func:`~disco_hlo.plugin.calls.schedule.verdict`), and what is far behind not after the second round.

    Args:
        budget_s: when to end where the order is not clear, after the fewest rounds that tell anything.
        stop: asked on rank 0 between rounds; the measurement ends on all ranks once it answers True.

    Returns:
        Whether it went to its end.

    Raises:
        UnsupportedError: the step cannot be run on made-up inputs, or XLA's default failed on the way.
    """
    alive = [trial for trial in trials if trial.executable is not None and not trial.error]
    if reason := lack_of_memory(session, alive[0].name, alive[0].executable):
        raise shared(UnsupportedError(f"{alive[0].name} has no room on made-up inputs: {reason}"))
    for trial in alive[1:]:
        trial.error = beyond_setting(session, trial.name, trial.executable)
        trial.error = trial.error or lack_of_memory(session, trial.name, trial.executable)
    _first_runs(session, _still_alive(alive))
    alive = _still_alive(alive)
    at_once = steps_in_a_row(session, alive[0].runner)
    if at_once == 1:  # several in a row begin with one that does not count
        _round(session, alive, at_once)
    for trial in alive:
        trial.times_ns.clear()
    rounds: list[Round] = []
    end_s = time.monotonic() + budget_s
    complete = True
    while len(alive) > 1 or not rounds:
        if session.tell(stop(), "interrupted"):
            complete = False
            break
        alive = _still_alive(alive)
        _round(session, alive, at_once)
        rounds.append({trial.name: trial.times_ns[-1] for trial in alive if trial.times_ns})
        running = _running(session, alive, rounds, over=time.monotonic() > end_s)
        alive = [alive[0], *(trial for trial in alive[1:] if trial.name in running)]
    _still_alive(alive)
    for trial in trials:
        trial.runner = None
    return complete


def finer_defaults(session: Session, trials: Sequence[Trial]) -> list[Trial]:
    """XLA's defaults that :func:`compare_with_default` compares trials with which add up in float32: one for all that
    do so in the same places. Each of these trials is told its own. On all ranks at once, and none on any where one
    rank cannot make them."""
    found: dict[bytes, Trial] = {}
    try:
        with session.stage("sums in float32"):
            for trial in trials:
                if finer := trial.finer or _finer_default(trial):
                    trial.finer = found.setdefault(finer.module, finer)
    except Exception as error:
        LOGGER.debug("XLA's default with sums in float32 is not made: %s", one_line(error))
        for trial in trials:
            trial.finer = None
        return []
    return list(found.values())


def _finer_default(trial: Trial) -> Trial | None:
    early = None if trial.restructured is None else trial.restructured.with_finer_sums()
    # It has marks: one that ends the process is not tried by every search anew.
    return None if early is None else Trial("XLA's default with sums in float32", None, 0, early, trial.marks)


def compare_with_default(
    session: Session,
    default: Trial,
    others: Sequence[Trial],
    inputs: RealInputs | None = None,
    held: HeldPasses | None = None,
) -> None:
    """See which trials compute what XLA's default computes; one that does not on any rank is out on all, and its times
    with it. What adds up in float32 may be nearer to the truth than the default: it is compared with the default of the
    step that adds up so, too, where that can be run. ``inputs``, ``held`` and errors are those of
    :func:`~disco_hlo.plugin.measuring.comparing.compare`."""
    try:
        for finer in finer_defaults(session, others):
            if _can_be_run(session, finer, held):
                alike = [trial for trial in others if trial.finer is finer]
                session.say(
                    "%s: adds up in float32, and is compared with XLA's default that does so, too",
                    ", ".join(trial.name for trial in alike),
                )
                _compare_with_finer(session, finer, alike, inputs, held)
        left = [one for one in others if not one.error and (one.finer is None or one.finer.error)]
        if left:
            compare(session, (default, *left), inputs, held)
        for trial in others:
            trial.compared = not trial.error
    finally:  # of some it may be known that they are wrong when a training ends
        for trial in others:
            if trial.error:
                trial.times_ns.clear()


def _compare_with_finer(
    session: Session,
    finer: Trial,
    alike: Sequence[Trial],
    inputs: RealInputs | None,
    held: HeldPasses | None,
) -> None:
    """Compare trials with XLA's default with sums in float32. Where that fails itself, its error says so, and nothing
    is known of those trials that have none."""
    try:
        compare(session, (finer, *alike), inputs, held)
    except Exception as error:
        if session.between_steps is not None and training_ends(session):
            raise
        finer.error = one_line(error)
        session.say("%s: nothing can be compared with it: %s", finer.name, finer.error)
        let_go(error)


def _can_be_run(session: Session, finer: Trial, held: HeldPasses | None) -> bool:
    """Whether XLA's default with sums in float32 is compiled, now or before, and has room to run, on all ranks."""
    banned = "" if finer.marks is None or not session.leads else finer.marks.bans.reason(finer.digest)
    if banned := session.tell(banned, f"{finer.name}: ban"):
        finer.error = f"it is banned: {banned}"
    if finer.executable is None and not finer.error:
        try:
            with marked(session, finer, "compile"):
                finer.executable = compile_default(session, finer.name, finer.module)
        except Exception as error:
            if session.between_steps is not None and training_ends(session):
                raise
            finer.error = one_line(error)
    if not finer.error:
        room = replace(session, on_calls=None)  # as for what a call of the training may run
        given_back = 0 if held is None else held.given_back_bytes
        with session.alone(finer.name):  # a rank that lacks room in a run leaves the others in a collective
            lack = lack_of_memory(room, finer.name, finer.executable, given_back_bytes=given_back)
        finer.error = lack
    if finer.error:
        LOGGER.debug("%s: %s", finer.name, finer.error)
    return not finer.error


def _first_runs(session: Session, alive: Sequence[Trial]) -> None:
    """Make the inputs, and run each once, which leaves a mark of a candidate that ends the process."""
    default = alive[0]
    settle_inputs(session, default)
    for trial in alive[1:]:
        try:
            trial.runner = make_runner(session, trial, inputs_of=default.runner)
            with marked(session, trial, "run"):
                run_on_all(session, f"first run of {trial.name}", trial.runner.run)
        except Exception as error:
            trial.error = one_line(error)


def _round(session: Session, alive: Sequence[Trial], at_once: int) -> None:
    """Time each once. One that fails on any rank is out on all of them."""
    for trial in alive:
        timed = functools.partial(_time_once, session, trial, at_once)
        first = not trial.times_ns  # what reads memory that nobody wrote may end otherwise than its first run
        guard = marked(session, trial, "run") if first else contextlib.nullcontext()
        try:
            with guard:
                trial.times_ns.append(run_on_all(session, f"a run of {trial.name}", timed))
        except Exception as error:
            trial.error = one_line(error)
            trial.times_ns.clear()


def _time_once(session: Session, trial: Trial, at_once: int) -> int:
    with coming_back(session.request):
        return time_once(trial.running, at_once)


def _still_alive(trials: Sequence[Trial]) -> list[Trial]:
    """Those that have not failed; nothing can be said of them without the first, XLA's default."""
    if trials[0].error:
        raise UnsupportedError(f"{trials[0].name}: {trials[0].error}")
    return [trial for trial in trials if not trial.error]


def steps_in_a_row(session: Session, default: Runner | None, run_ns: int = 0) -> int:
    """How many steps each measurement takes, by what XLA's default takes, which is looked at where no ``run_ns`` is
    known: on every rank the same, by rank 0's clock, and no more than all have memory for."""
    if default is None or not BACKENDS[session.facts.backend].queues:
        return 1
    run_ns = run_ns or min(repeated(session, "first runs", default.run, LOOKS))
    step_ns = session.tell(run_ns, "a step's time")
    # Between two steps of a training two in a row are the least of which one can be told without the way to it.
    within_ns = AT_ONCE_NS if session.between_steps is None else max(SLICE_NS, 2 * step_ns)
    free_bytes = free_device_bytes(session.request)
    mine = run_on_all(session, "steps in a row", lambda: at_once_of(default, step_ns, free_bytes, within_ns))
    return int(min(session.gathered(mine, "steps at once")))


def _running(session: Session, alive: Sequence[Trial], rounds: Sequence[Round], *, over: bool) -> list[str]:
    """Names of what runs in the next round, by rank 0's clock; none where it is clear what wins."""
    predicted_ns = {trial.name: trial.predicted_ns for trial in alive}
    names = [trial.name for trial in alive[1:] if not trial.error and not _is_far_behind(rounds, trial.name)]
    found = verdict(rounds, names, predicted_ns)
    ends = found.winner is not None or (over and len(rounds) >= FEWEST_ROUNDS)
    running: list[str] = session.tell([] if ends else list(found.running), "rounds")
    return running


def _is_far_behind(rounds: Sequence[Round], name: str) -> bool:
    """Whether another was faster in every round, of two or more, by more than anything varied from round to round."""
    names = set.intersection(*(set(one) for one in rounds))
    if len(rounds) < FEWEST_TO_DROP or name not in names:
        return False
    times = {other: [one[other] for one in rounds] for other in names}
    margin = max(_FAR_BEHIND, *(max(own) / min(own) for own in times.values()))
    return any(
        all(mine > margin * its for mine, its in zip(times[name], own, strict=True)) for own in times.values()
    )
