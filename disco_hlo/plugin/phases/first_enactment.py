"""A module that never ran on these devices is compared with XLA's default while its step compiles, once.

``disco search`` finds plans without a device, an interrupted search saves one unmeasured, and a plan may be of an older
jax, or found under other constants. Whether what comes of it computes what XLA's default computes is seen on made-up
inputs before the training runs it. Where that cannot be seen it is not enacted.
"""

from __future__ import annotations

import time

from disco_hlo.errors import PlanError, UnsupportedError
from disco_hlo.plan.plan import DEFAULT, Plan
from disco_hlo.plan.store import PlanSlot, note_compared, was_compared, was_measured
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring.comparing import compare
from disco_hlo.plugin.measuring.inputs.indices import index_bounds
from disco_hlo.plugin.measuring.inputs.signs import positive_parameters
from disco_hlo.plugin.measuring.lockstep import Guard
from disco_hlo.plugin.measuring.reference import Program
from disco_hlo.plugin.phases.one_step import may_be_run, refuse_others
from disco_hlo.plugin.session import Session, versions
from disco_hlo.plugin.step import Step
from disco_hlo.plugin.xla.executables import LoadedExecutable

_compared: set[str] = set()
"""Digests of modules that this process compared, where the plan directory cannot say so."""


def never_compared(session: Session, slot: PlanSlot, plan: Plan, digest: str) -> str:
    """Why a plan must be compared first, as a part of a sentence; nothing where it was. The same on all ranks.

    Args:
        digest: of the module that is to be enacted.
    """
    why = ""
    if session.leads and digest not in _compared:
        now = versions(session.facts)
        if not was_measured(plan, digest, now) and not was_compared(slot, digest, now):
            why = _why(plan, digest, now)
    return str(session.tell(why, "compared before"))


def _why(plan: Plan, digest: str, now: dict[str, str]) -> str:
    if plan.measured is None:
        return "was found offline"
    others = [
        f"{name} {plan.versions.get(name, '?')}" for name in now if plan.versions.get(name) != now[name]
    ]
    if others:
        return f"was measured under {', '.join(others)}"
    return "was saved unmeasured" if digest == plan.module_sha256 else "was found under other constants"


def compare_first(
    session: Session, step: Step, plan: Plan, executable: LoadedExecutable, guard: Guard
) -> None:
    """Compare a plan with XLA's default on all ranks.

    Args:
        executable: the plan's.
        guard: around whatever runs it.

    Raises:
        DiscoError, jax.errors.JaxRuntimeError: it does not, or that cannot be seen here.
    """
    request, started = session.request, time.monotonic()
    with session.stage("may be run"):
        if not may_be_run(request):
            raise UnsupportedError("the ranks were about to run different steps before")
    refuse_others(session, step.source.graph.fingerprint)
    with session.stage("XLA's default"):
        default = request.call_default()
        request.positive, request.index_bounds = positive_parameters(step.source), index_bounds(step.source)
    programs = [Program(DEFAULT, default), Program(plan.chosen, executable, guard)]
    compare(session, programs)
    if programs[1].error:
        raise PlanError(programs[1].error)
    session.say(
        "the plan computes what XLA's default computes, as far as made-up inputs tell (%.1f s)",
        time.monotonic() - started,
    )


def remember(session: Session, slot: PlanSlot, digest: str) -> None:
    """Note on rank 0 that a module was compared; where the plan directory is read-only, this process knows it."""
    _compared.add(digest)
    if not session.leads:
        return
    try:
        note_compared(slot, digest, versions(session.facts))
    except PlanError as error:
        LOGGER.info("every run will compare the plan again: %s", error)


def advice_after(error: Exception) -> str:
    """What a user can do about a plan that could not be compared, as a part of a sentence."""
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return (
            "there is no memory for made-up inputs beside the training's arrays: compile the step once before they are "
            "made (jit(step).lower(shapes).compile()), and the plan directory remembers it"
        )
    return "ENABLE_SEARCH=1 searches one here"
