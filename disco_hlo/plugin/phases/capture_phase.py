"""Capturing, ``DISCO_CAPTURE=folder``: save the training step and let the training go on as it would.

What is saved is what an offline search starts from (DisCo, section 3.1): the step as XLA compiled it,
the step without any fusion, and, where the step can be profiled here, its measured times.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from disco_hlo.plan.apply import apply
from disco_hlo.plan.files import replace_files
from disco_hlo.plan.read import read
from disco_hlo.plan.store import DEFAULT_NAME, PROFILE_NAME
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.measuring.inputs.arguments import fit_inputs
from disco_hlo.plugin.measuring.known_times import measured_times
from disco_hlo.plugin.measuring.profiling import profile_step
from disco_hlo.plugin.phases.capture_record import (
    FORMAT,
    RECORD_NAME,
    UNFUSED_NAME,
    VERSION,
    CaptureRecord,
    encode,
)
from disco_hlo.plugin.refusals import may_be_run, refuse_others, refuse_switched_on
from disco_hlo.plugin.session import Session, join, target, versions
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step, training_step
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.profiler.profile import Profile, to_json


def handle(request: CompileRequest, settings: Settings, folder: Path) -> None:
    """Save the request if it is the training step. Always leaves the compile to XLA.

    Raises:
        PlanError: the folder cannot be written.
        ActivationError: ranks are missing, or saving failed on rank 0.
    """
    if not may_be_run(request):
        return
    step = training_step(request, settings)
    if step is None or step.again:
        return
    session = join(request, settings)
    profile = _profile(session, step)
    with session.stage("capture"):
        if session.leads:
            _save(session, step, profile, folder)
    session.say("captured %s in %s", request.module_name, folder)


def _profile(session: Session, step: Step) -> Profile | None:
    """Measured times on rank 0, where they can be had."""
    try:
        refuse_others(session, step.source.graph.fingerprint)
        with session.stage("switches"):
            refuse_switched_on(session.request)
        fit_inputs(session.request, step.source)
        with measured_times(session) as store:
            profiled = profile_step(session, step.source, read(step.source), store)
    except Exception as error:  # also what jax raises: the other ranks go on to save the step
        session.say("the step is captured without measured times: %s", one_line(error))
        return None
    return None if profiled is None else profiled.profile


def _save(session: Session, step: Step, profile: Profile | None, folder: Path) -> None:
    graph, facts = step.source.graph, session.facts
    record = CaptureRecord(
        format=FORMAT,
        version=VERSION,
        target=target(graph, facts),
        versions=versions(facts),
    )
    folder.mkdir(parents=True, exist_ok=True)
    if profile is None:
        (folder / PROFILE_NAME).unlink(missing_ok=True)
    files = {
        DEFAULT_NAME: gzip.compress(step.module, 6, mtime=0),
        UNFUSED_NAME: gzip.compress(apply(unfused(graph), step.source), 6, mtime=0),
        **({PROFILE_NAME: to_json(profile).encode()} if profile else {}),
        RECORD_NAME: encode(record),
    }
    replace_files(folder, files)
