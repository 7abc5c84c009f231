"""The enactment phase, ``ENABLE_SEARCH=0`` (DisCo, sections 4.1 and 5.1).

Rank 0 reads plan and optimized module, every rank receives them, checks that they are its own step,
and says what it would enact. All enact the same module, or all use XLA's default. Where the plan was found
under other constants its module is another step's: every rank applies the strategy to its own.

A module that never ran on these devices is compared with XLA's default first, once, while the step compiles.
``disco search`` finds plans without a device, an interrupted search saves one unmeasured, and a plan may be of an older
jax, or found under other constants. Whether what comes of it computes what XLA's default computes is seen on made-up
inputs before the training runs it. Where that cannot be seen it is not enacted.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import UNSET

from disco_hlo.activation.agree import PlanBytes, Proposal, agree, broadcast_plan
from disco_hlo.backends import BACKENDS
from disco_hlo.errors import ActivationError, DiscoError, PlanError, UnsupportedError, is_shared
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.plan import plan as plans
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import DEFAULT, Plan
from disco_hlo.plan.read import verify
from disco_hlo.plan.store import PlanSlot, note_compared, was_compared, was_measured
from disco_hlo.plugin.logs import LOGGER, compared, one_line
from disco_hlo.plugin.measuring.candidates import compare_with_default
from disco_hlo.plugin.measuring.inputs.indices import index_bounds
from disco_hlo.plugin.measuring.inputs.signs import positive_parameters
from disco_hlo.plugin.measuring.lockstep import anywhere
from disco_hlo.plugin.measuring.trial import Trial, marked
from disco_hlo.plugin.phases.second_trial import doubt, other_versions, takes_turns
from disco_hlo.plugin.refusals import may_be_run, refuse_others, switched_on, waits_for_python
from disco_hlo.plugin.session import Session, join, launch_options, versions, warn_of_lost_donation
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step, training_step
from disco_hlo.plugin.structure import Restructured, enacted
from disco_hlo.plugin.xla import compiles, jaxlink
from disco_hlo.plugin.xla.compiles import Halted
from disco_hlo.plugin.xla.executables import LoadedExecutable, read_executable
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.printable import counted

_NO_PLAN = "there is no plan for it in"
_enacted: dict[tuple[object, ...], tuple[int, bytes]] = {}
"""Where the executable is that runs the plan that was enacted last, and the digest of what it executes."""
_compared: set[str] = set()
"""Digests of modules that this process compared, where the plan directory cannot say so."""
_told: set[str] = set()
"""Names of modules of which it was said that they have no plan."""


@dataclass(frozen=True)
class Proposed:
    """What this rank would enact, or why nothing."""

    plan: Plan | None
    module: bytes
    """Empty where the plan is XLA's default."""
    reason: str
    waiting: Halted | None = None
    """The compile that waits for the module; None compiles anew."""
    other: bool = False
    """Whether the plan was found under other constants."""
    restructured: Restructured | None = None
    """The step that the plan is for, where it changes its structure."""


def handle(request: CompileRequest, settings: Settings) -> LoadedExecutable | None:
    """Enact the plan of the request's step if there is one; None leaves it to XLA."""
    may_be_run(request)  # it notes who compiles
    with compiles.halted(request) as waiting:
        step = training_step(request, settings, or_planned=True, capture=lambda _: waiting.module())
        executable = None if step is None else enact(request, settings, step, waiting)
        if executable is None and jaxlink.only_compiles(request):
            return waiting.go_on()
        return executable


def enact(
    request: CompileRequest, settings: Settings, step: Step, waiting: Halted | None = None
) -> LoadedExecutable | None:
    """Enact the plan of ``step`` if there is one and all ranks have it; None leaves it to XLA.

    Args:
        waiting: the compile that gave the step's module, and waits for another one; None compiles anew.
    """
    session = join(request, settings)
    slot = session.slot(step.source.graph.key)
    with contextlib.ExitStack() as compiling:
        proposed = _propose(session, step, slot, waiting, compiling)
        digest = ""
        if (
            proposed.plan is not None
        ):  # equal on all ranks must be the module, or the plan where there is none to write
            digest = hashlib.sha256(proposed.module or plans.encode(proposed.plan)).hexdigest()
        proposal = Proposal(step.source.graph.fingerprint, digest, proposed.reason)
        agreement = agree(session.channel, proposal, session.timeout_s)
        if agreement.enact and proposed.plan is not None:
            return _enact(session, step, slot, proposed.plan, proposed)
    reason = (proposed.reason if session.channel.size == 1 else "") or agreement.reason
    # The reason is the same on all ranks. Of a step compiled again it was said, or why the search made no plan.
    # On one device what shares its name with a plan is a step that the user may miss its plan for: it is told once.
    first = session.facts.device_count == 1 and request.module_name not in _told
    _told.add(request.module_name)
    known = step.again or not (step.chosen or first)
    quiet = not session.leads or (known and _NO_PLAN in reason)
    level = logging.DEBUG if quiet else logging.WARNING
    LOGGER.log(level, "%s runs as XLA compiles it: %s", request.module_name, reason)
    return None


def _propose(
    session: Session,
    step: Step,
    slot: PlanSlot,
    waiting: Halted | None,
    compiling: contextlib.ExitStack,
) -> Proposed:
    """``compiling`` ends a compile that is begun for it."""
    try:
        received, reason = _receive(session, step, slot)
        if received is None:
            return Proposed(None, b"", reason)
        plan = plans.decode(
            received.plan_json, f"the plan in {slot.path}" if session.leads else "the plan of rank 0"
        )
        source, restructured = step.source, None
        options = launch_options(session, plan.launched_singly)
        if waiting is not None and (options or plan.structure is not UNSET) and plan.chosen != DEFAULT:
            waiting.end()  # XLA's default, which the plan may be compared with, waits for its name
            waiting = None
        if plan.chosen == DEFAULT or plan.structure is UNSET:
            _check_target(session, source, plan)
        else:
            waiting = compiling.enter_context(compiles.halted(session.request, options, early=True))
            together = _all_fit(session, source, plan)
            restructured = enacted(session.request, plan.structure, waiting, together)
            source = restructured.source
        if plan.chosen == DEFAULT:
            return Proposed(plan, b"", "")
        other = plan.target.fingerprint != step.source.graph.fingerprint
        module = _own_module(source, plan, received, other)
        _refuse_banned(session, slot, module)
        return Proposed(plan, module, "", waiting, other, restructured)
    except Exception as error:
        return Proposed(None, b"", one_line(error))


def _receive(session: Session, step: Step, slot: PlanSlot) -> tuple[PlanBytes | None, str]:
    """Rank 0's plan and module on every rank, or None and the reason."""
    mine, reason = None, ""
    advice = switched_on(session.request) or "search first (ENABLE_SEARCH=1)"
    advice = "a step that waits for Python is not searched" if waits_for_python(step.module) else advice
    if session.leads:
        try:
            stored = slot.load()
            mine = None if stored is None else PlanBytes(stored.plan_json, stored.module)
            reason = (
                f"{_NO_PLAN} {slot.path}; {advice}{_others(session, step, slot)}" if stored is None else ""
            )
            if stored is not None:
                _refuse_banned(session, slot, stored.module)
        except Exception as error:  # whatever it is, the other ranks wait for an answer
            mine, reason = None, one_line(error)
    return broadcast_plan(session.channel, mine, reason=reason, timeout_s=session.timeout_s)


def _others(session: Session, step: Step, slot: PlanSlot) -> str:
    """What to say of plans beside, for what the user may take for this very step."""
    name = step.source.graph.module_name
    count = slot.beside(name) if step.chosen or session.facts.device_count == 1 else 0
    if not count:
        return ""
    plans_lie = "a plan lies" if count == 1 else f"{count} plans lie"
    own = (
        "another batch size, type of numbers, number of processes, version or flag of XLA, or number that decides a "
        "loop, a branch or a slice or equals another of the step's"
    )
    tuned = ", or another pick of XLA's autotuner" if BACKENDS[step.source.graph.backend].autotunes else ""
    return f"; for {name} {plans_lie} beside (disco list), but {own}{tuned} takes a plan of its own"


@contextlib.contextmanager
def _all_fit(session: Session, source: CanonicalModule, plan: Plan) -> Iterator[None]:
    """Whether a plan is for the step, and the body goes well, on all ranks: one that went on alone would wait for the
    others in XLA's autotuner, where nobody tells it that they do not come."""
    with session.stage("the plan's moves"):
        _check_target(session, source, plan)
        yield


def _check_target(session: Session, source: CanonicalModule, plan: Plan) -> None:
    target, facts = plan.target, session.facts
    for what, wanted, found in (
        ("another step: key", target.key[:16], source.graph.key[:16]),
        ("another backend:", target.backend, facts.backend),
        ("other devices:", target.device_kind, facts.device_kind),
        ("another job: devices", target.device_count, facts.device_count),
        ("another job: processes", target.process_count, facts.process_count),
    ):
        if wanted != found:
            raise PlanError(f"the plan was made for {what} {wanted}, this is {found}; search again")


def _own_module(source: CanonicalModule, plan: Plan, received: PlanBytes, other: bool) -> bytes:
    """The bytes this rank hands to XLA: the master's where they are this rank's step executed by the
    plan, and its own rewrite where they are of a step with other constants."""
    if received.module_sha256 != plan.module_sha256:
        raise PlanError("the optimized module is not the one the plan was saved with; search again")
    if not other:
        verify(source, received.module, plan.strategy)
        return received.module
    try:
        module = apply(plan.strategy, source)
        verify(source, module, plan.strategy)
    except DiscoError as error:
        raise PlanError(
            f"the plan was found under other constants and does not fit this step: {error}; search again"
        ) from error
    return module


def _refuse_banned(session: Session, slot: PlanSlot, module: bytes) -> None:
    """The plan directory is rank 0's; others may have none."""
    banned = slot.bans.reason(hashlib.sha256(module).hexdigest()) if session.leads else ""
    if banned:
        raise PlanError(f"its plan is banned: {banned}")


def _enact(
    session: Session, step: Step, slot: PlanSlot, plan: Plan, proposed: Proposed
) -> LoadedExecutable | None:
    say = LOGGER.debug if step.again else session.say
    if plan.chosen == DEFAULT:
        say("the plan of %s is XLA's default: nothing beat it", plan.target.module_name)
        return None
    digest = hashlib.sha256(proposed.module).hexdigest()
    again = doubt(session, slot, plan, digest)
    if again.lost:
        say(
            "the plan of %s is not run: under these versions it was not faster when it took turns with XLA's default; "
            "ENABLE_SEARCH=1 searches another",
            plan.target.module_name,
        )
        return None
    trial = Trial(plan.chosen, plan.strategy, 0, proposed.module, slot, restructured=proposed.restructured)
    singly = plan.launched_singly is True
    try:
        made = None if again.why else _already_compiled(session, digest, singly)
        with session.stage("enact"), marked(session, trial, "compile"):
            if made is not None:
                trial.executable = made
            elif proposed.waiting is None:
                options = launch_options(session, plan.launched_singly)
                trial.executable = compiles.compile_module(session.request, proposed.module, options)
            else:
                trial.executable = proposed.waiting.finish(proposed.module)
    except ActivationError as error:
        level = logging.WARNING if session.leads or not is_shared(error) else logging.DEBUG
        LOGGER.log(level, "%s runs as XLA compiles it: %s", plan.target.module_name, one_line(error))
        return None
    why = _why_compare(session, slot, plan, digest)
    if why and not _compares_well(session, step, plan, trial, why):
        return None
    turns = ""
    if again.why and takes_turns(session, slot, plan, digest, trial.executable, again.why):
        turns = f"; it {again.why}: at first it takes turns with XLA's default, and goes on if it pays"
    else:
        LOGGER.debug("rank %d executes module %s", session.channel.rank, digest)
        note_enacted(session.request, digest, singly, trial.executable)
    warn_of_lost_donation(session, step)
    found = ", found under other constants and applied to this step" if proposed.other else ""
    say("enacts the plan of %s%s: %s%s", plan.target.module_name, found, _describe(plan), turns)
    return None if turns else trial.executable


def note_enacted(request: CompileRequest, digest: str, singly: bool, executable: LoadedExecutable) -> None:
    """Note what runs a plan, by the digest of its module: where JAX compiles the step anew, since its arrays came in
    other shardings, XLA need not. What calls Python functions by their numbers is none that another compile may run.
    """
    _enacted.clear()
    if not request.holds_addresses:
        with contextlib.suppress(DiscoError):  # one that cannot be read is compiled again
            _enacted[_made_from(request, digest, singly)] = id(executable), _executed(executable)


def _already_compiled(session: Session, digest: str, singly: bool) -> LoadedExecutable | None:
    """What was noted of this plan, where it is alive on all ranks: they compile together or not at all.

    It is kept by JAX alone: what we kept would keep its client, and the devices' memory with that, when a script makes
    JAX forget both.
    """
    request, found = session.request, None
    number, executed = _enacted.get(_made_from(request, digest, singly), (0, b""))
    if number and not request.holds_addresses:
        with contextlib.suppress(DiscoError):
            same = (one for one in request.backend.live_executables() if id(one) == number)
            found = next((one for one in same if _executed(one) == executed), None)  # or another in its place
    return None if anywhere(session, found is None, "compiled before") else found


def _executed(executable: LoadedExecutable) -> bytes:
    return hashlib.sha256(read_executable(executable)).digest()


def _made_from(request: CompileRequest, digest: str, singly: bool) -> tuple[object, ...]:
    """What makes an executable what it is. Options of JAX's own differ between two compiles of a step, and matter
    before the hook alone."""
    job = jaxlink.job_number()
    return digest, singly, job, tuple(device.id for device in request.devices), request.script_options


def _compares_well(session: Session, step: Step, plan: Plan, trial: Trial, why: str) -> bool:
    """Compare a plan that never was; whether it may be enacted. The same on all ranks."""
    name = plan.target.module_name
    session.say("the plan of %s %s: it is compared with XLA's default first, once", name, why)
    try:
        _compare(session, step, trial)
    except Exception as error:
        LOGGER.log(
            logging.WARNING if session.leads else logging.DEBUG,
            "%s runs as XLA compiles it: its plan %s, and is not enacted before it is compared with XLA's default: %s; "
            "%s", name, why, one_line(error), _advice_after(error),
        )  # fmt: skip
        return False
    _compared.add(trial.digest)
    try:
        if session.leads and trial.marks is not None:
            note_compared(trial.marks, trial.digest, versions(session.facts))
    except PlanError as error:
        LOGGER.info("every run will compare the plan again: %s", error)
    return True


def _describe(plan: Plan) -> str:
    """What is predicted of a plan, in half a line."""
    strategy = plan.strategy
    shape = f"{counted(len(strategy.groups), 'op group')}, {counted(len(strategy.buckets), 'bucket')}"
    if plan.structure is not UNSET:
        shape = f"{plan.structure.name}, {shape}"
    chosen = plan.measured.results.get(plan.chosen) if plan.measured else None
    if chosen is None or chosen.ratio is UNSET:
        return f"{shape}, {plan.prediction.default_ns / max(plan.prediction.plan_ns, 1):.2f}x predicted"
    return f"{shape}, {compared(chosen.ratio)} when measured"


def _why_compare(session: Session, slot: PlanSlot, plan: Plan, digest: str) -> str:
    """Why a plan must be compared first, as a part of a sentence; nothing where it was. The same on all ranks."""
    why, now = "", versions(session.facts)
    known = not session.leads or digest in _compared
    if not known and not was_measured(plan, digest, now) and not was_compared(slot, digest, now):
        if plan.measured is None:
            why = "was found offline"
        elif others := other_versions(plan, now):
            why = f"was measured under {others}"
        else:
            why = (
                "was saved unmeasured" if digest == plan.module_sha256 else "was found under other constants"
            )
    return str(session.tell(why, "compared before"))


def _compare(session: Session, step: Step, trial: Trial) -> None:
    """Compare a plan with XLA's default on all ranks; raises where it computes something else, or nobody can see."""
    request, started = session.request, time.monotonic()
    with session.stage("may be run"):
        if not may_be_run(request):
            raise UnsupportedError("the ranks were about to run different steps before")
    refuse_others(session, step.source.graph.fingerprint)
    with session.stage("XLA's default"):
        default = request.call_default()
        request.positive, request.index_bounds = positive_parameters(step.source), index_bounds(step.source)
    compare_with_default(session, Trial(DEFAULT, None, 0, executable=default), [trial])
    if trial.error:
        raise PlanError(trial.error)
    session.say(
        "the plan computes what XLA's default computes, as far as made-up inputs tell (%.1f s)",
        time.monotonic() - started,
    )


def _advice_after(error: Exception) -> str:
    """What a user can do about a plan that could not be compared, as a part of a sentence."""
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return (
            "there is no memory for made-up inputs beside the training's arrays: compile the step once before they are "
            "made (jit(step).lower(shapes).compile()), and the plan directory remembers it"
        )
    return "ENABLE_SEARCH=1 searches one here"
