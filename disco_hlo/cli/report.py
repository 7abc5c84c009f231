"""``disco report``: a plan as one HTML page, to be looked at without anything else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from msgspec import UNSET

from disco_hlo.cli.inputs import AsJson, PlanName, ProfilePath
from disco_hlo.cli.output import (
    as_argument,
    check_places,
    is_stdout,
    plan_directory,
    print_json,
    show,
    warn_all,
    write_file,
)
from disco_hlo.errors import DiscoError
from disco_hlo.hlo.regions import not_simulated
from disco_hlo.optimize.costs import Costs, costs_for
from disco_hlo.plan.read import read
from disco_hlo.plan.store import MODULE_NAME
from disco_hlo.printable import printable, size_text
from disco_hlo.profiler.profile import load
from disco_hlo.report.bundle import Bundle, beside, locate, open_bundle
from disco_hlo.report.data import page_data
from disco_hlo.report.page import render
from disco_hlo.report.timelines import report_trace


def report(
    plan: PlanName,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write the page; - is stdout."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the timelines as a Chrome trace (ui.perfetto.dev); - is stdout."
        ),
    ] = None,
    profile: ProfilePath = None,
    as_json: AsJson = False,
) -> None:
    """Write a plan as one HTML page: times, timelines, buckets, op groups, how it was found."""
    if output is None and trace is None and not as_json:
        raise DiscoError("expected -o FILE for the page, --trace FILE for a trace, or --json for the content")
    aside = check_places({"-o": output, "--trace": trace}, as_json=as_json)
    began = time.perf_counter()
    bundle = open_bundle(locate(plan, plan_directory()))
    costs: Costs | None = None
    if bundle.source is not None:
        known = bundle.profile if profile is None else load(profile)
        strategies = read(bundle.source), bundle.plan.strategy
        costs = costs_for(bundle.source, known, bundle.plan.target.device_kind, strategies)
    inner = () if bundle.source is None else not_simulated(bundle.source)
    said = () if costs is None else (*costs.lines, *inner)
    data = page_data(bundle, costs, said)
    if trace is not None and not data["timelines"]:
        raise DiscoError(f"{bundle.path} has no timelines: {_why_no_timelines(bundle)}")
    if output is not None:
        page = render(data)
        write_file(output, page)
    if trace is not None:
        body = json.dumps(report_trace(data), separators=(",", ":"), allow_nan=False)
        write_file(trace, body.encode())
    warn_all((*bundle.missing, *said))
    if as_json:
        print_json(data)
        return
    spent = time.perf_counter() - began
    if output is not None and not is_stdout(output):
        made = f"{size_text(len(page))}, made in {spent:.1f} s"
        show(f"{printable(str(output))}: {made}; open it in a browser", aside=aside)
    if trace is not None and not is_stdout(trace):
        show(f"{printable(str(trace))}: open it in ui.perfetto.dev", aside=aside)


def _why_no_timelines(bundle: Bundle) -> str:
    """Why neither XLA's default nor the plan can be drawn, as a sentence's end."""
    structure = bundle.plan.structure
    if bundle.source is None or structure is UNSET:
        return "the module is not beside it"
    module = beside(bundle.path, MODULE_NAME)
    return (
        f"it changes the step's structure ({structure.name}), so that its ops are not those of XLA's default; "
        f"disco simulate {as_argument(module)} --trace FILE writes its own"
    )
