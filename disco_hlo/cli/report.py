"""``disco report``: a plan as one HTML page, to be looked at without anything else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from disco_hlo.cli.costs import Costs, costs_for, find_profile
from disco_hlo.cli.options import AsJson, PlanName, ProfilePath
from disco_hlo.cli.output import plan_directory, print_json, show, warn_all, write_file
from disco_hlo.errors import DiscoError
from disco_hlo.report.bundle import locate, open_bundle
from disco_hlo.report.data import page_data
from disco_hlo.report.page import render
from disco_hlo.report.printable import printable, size_text


def report(
    plan: PlanName,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write the page.")
    ] = None,
    profile: ProfilePath = None,
    as_json: AsJson = False,
) -> None:
    """Write a plan as one HTML page: times, timelines, buckets, op groups, how it was found."""
    if output is None and not as_json:
        raise DiscoError("expected -o FILE for the page, or --json for its content")
    began = time.perf_counter()
    bundle = open_bundle(locate(plan, plan_directory()))
    costs: Costs | None = None
    if bundle.source is not None:
        known = find_profile(profile, bundle.profile)
        costs = costs_for(bundle.source.graph, known, bundle.plan.target.device_kind)
    said = () if costs is None else costs.lines
    data = page_data(bundle, costs, said)
    if output is not None:
        page = render(data)
        write_file(output, page)
    warn_all((*bundle.missing, *said))
    if as_json:
        print_json(data)
        return
    assert output is not None
    spent = time.perf_counter() - began
    show(f"{printable(str(output))}: {size_text(len(page))}, made in {spent:.1f} s; open it in a browser")
