"""Arguments and options that several subcommands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_PLAN_HELP = "A plan, its folder, or the start of its key."

PlanName = Annotated[str, typer.Argument(metavar="PLAN", help=_PLAN_HELP)]
ModulePath = Annotated[
    Path, typer.Argument(metavar="MODULE", help="A serialized HloModuleProto, or a captured folder.")
]
ProfilePath = Annotated[
    Path | None, typer.Option("--profile", help="Measured times; by default those beside the module.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RegionName = Annotated[
    str,
    typer.Option("--region", metavar="NAME", help="One region of the step: entry, loop1, branch2, call3."),
]
