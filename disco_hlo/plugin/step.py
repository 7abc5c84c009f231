"""Recognising the training step: capture a compile's module, decide by rule, say why."""

from __future__ import annotations

from dataclasses import dataclass, replace

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plugin import jaxlink
from disco_hlo.plugin.jaxlink import CompileRequest
from disco_hlo.plugin.job import device_facts
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.select import ModuleFacts, choose, facts_of, qualifies
from disco_hlo.plugin.settings import Settings

_seen: list[ModuleFacts] = []
_chosen: set[str] = set()
"""Fingerprints of the training steps so far."""


@dataclass(frozen=True)
class Step:
    """A compile whose module is at hand."""

    module: bytes
    """XLA's own, scheduled."""
    source: CanonicalModule
    again: bool = False
    """This very step was compiled before in this process: JAX compiles anew when arrays come in other
    shardings, as they do when the first call takes fresh parameters and the second a step's output."""


def captured(request: CompileRequest) -> Step | None:
    """The request's module in canonical form; None, with a log line, where it cannot be read."""
    try:
        module = jaxlink.capture(request)
        return Step(module, canonicalize(module))
    except DiscoError as error:
        LOGGER.warning("%s runs as XLA compiles it: %s", request.module_name, one_line(error))
        return None


def training_step(request: CompileRequest, settings: Settings) -> Step | None:
    """The request's module if it is the training step (see ``select``), else None."""
    if settings.module is not None and not settings.names(request.module_name):
        return None
    step = captured(request)
    if step is None:
        return None
    if step.source.graph.fingerprint in _chosen:
        LOGGER.debug("%s is the training step, compiled again", request.module_name)
        return replace(step, again=True)
    facts = facts_of(step.source.graph, len(request.devices))
    choice = choose(facts, _seen, named=None if settings.module is None else True)
    _seen.append(facts)
    leads = device_facts(request).process_index == 0
    level = 20 if leads and (choice.chosen or facts.computed_all_reduce_count) else 10
    LOGGER.log(
        level,
        "%s %s: %s",
        request.module_name,
        "is the training step" if choice.chosen else "is left alone",
        choice.reason,
    )
    if not choice.chosen:
        return None
    _chosen.add(step.source.graph.fingerprint)
    return step


def why_none() -> str:
    """Why no module so far was the training step; empty where one was."""
    if not _seen or any(map(qualifies, _seen)):
        return ""
    largest = max(_seen, key=lambda facts: facts.instruction_count)
    return (
        f"none of {len(_seen)} modules on several devices has an all-reduce of a computed value (the largest "
        f"is {largest.name}, {largest.instruction_count} instructions); DISCO_MODULE=name names one"
    )
