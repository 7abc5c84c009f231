"""A jitted function whose one compile a test has in its hands: answered, looked at, or in a session of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from msgspec import UnsetType

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plan import plan as plans
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.store import PlanSlot
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.session import Session, join, target
from disco_hlo.plugin.session import versions as versions_of
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import captured
from disco_hlo.plugin.xla import compiles, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest, Handler
from tests.made_plans import made_plan
from tests.steps import models
from tests.steps.intercept import intercept


def handled(handler: Handler, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What ``function`` returns where ``handler`` answers its compile; ``options`` are those of ``jax.jit``.

    What ``handler`` raises is raised here.
    """
    failure: list[BaseException] = []

    def noting(request: CompileRequest) -> LoadedExecutable | None:
        try:
            return handler(request)
        except BaseException as error:
            failure.append(error)
            raise

    @functools.wraps(function)
    def anew(*given: Any) -> Any:  # jax compiles a function that it knows no second time
        return function(*given)

    lowered = jax.jit(anew, **options).lower(*arguments)
    jaxlink.install(noting)
    try:
        compiled = lowered.compile()
    finally:
        jaxlink.uninstall()
    if failure:
        raise failure[0]
    return compiled(*arguments)


def seen(
    look: Callable[[CompileRequest], Any], function: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """What ``look`` returns of the compile request of ``function``, which then runs as XLA compiles it."""
    found: list[Any] = []
    handled(lambda request: found.append(look(request)), function, *arguments, **options)
    [one] = found
    return one


def named_parameters(step: models.Step) -> tuple[CanonicalModule, dict[int, str]]:
    """A step as XLA compiles it, and the names of its arguments by the numbers of its parameters."""
    source = canonicalize(intercept(*step, compiles.capture))
    pairs = zip(source.graph.nodes, source.protos, strict=True)
    names = {proto.parameter_number: node.op_name for node, proto in pairs if node.opcode == "parameter"}
    return source, names


def in_session(
    folder: Path,
    look: Callable[[Session, CanonicalModule], Any],
    make: Callable[[], models.Step] = models.mlp,
) -> Any:
    """What ``look`` returns of a step that is searched, its plans in ``folder``."""

    def body(request: CompileRequest) -> Any:
        session = join(request, Settings(search=True, directory=folder))
        return look(session, canonicalize(compiles.capture(request)))

    return intercept(*make(), body)


def save_plan(
    request: CompileRequest, settings: Settings, *, noise: float | UnsetType = 0.0, **versions: str
) -> tuple[PlanSlot, str]:
    """Save a plan of the request's step, without fusion, that was measured to take 90 ns where XLA's default took 100;
    where it lies and the digest of its module.

    Args:
        noise: of its time over XLA's default's; left out by older plans.
        versions: what it was measured under, where that is not what runs now.
    """
    session, step = join(request, settings), captured(request)
    assert step is not None
    strategy = unfused(step.source.graph)
    module = apply(strategy, step.source)
    times = ((DEFAULT, 100), ("no fusion", 90))
    candidates = tuple(
        plans.Candidate(name, ns, ns, 0, 25, ratio=ns / 100, ratio_noise=noise) for name, ns in times
    )
    plan = made_plan(
        target(step.source.graph, session.facts), strategy, module, chosen="no fusion",
        versions={**versions_of(session.facts), **versions},
        measured=plans.Measured("now", candidates, (), 0.0, 0.0, 0.0, 0.0),
    )  # fmt: skip
    slot = session.slot(step.source.graph.key)
    if session.leads:
        slot.save(plans.encode(plan), module, "", step.module)
    return slot, plan.module_sha256
