"""``disco forgive``: lift a ban."""

from __future__ import annotations

import re
from pathlib import Path

from disco_hlo.cli.options import PlanName
from disco_hlo.cli.output import plan_directory, show
from disco_hlo.errors import PlanError
from disco_hlo.plan.bans import Bans
from disco_hlo.plan.store import PlanSlot, PlanStore
from disco_hlo.report.printable import printable


def forgive(plan: PlanName) -> None:
    """Lift the bans of a plan and of the candidates beside it, so that they are tried again.

    A module is banned when compiling or running it crashed its process, or ended three of them (disco list says so).
    """
    bans = _bans(plan)
    count = bans.forgive()
    where = printable(str(bans.folder))
    none = f"nothing in {where} was banned"
    show(f"lifted {count} ban{'s' * (count != 1)} in {where}" if count else none)


def _bans(name: str) -> Bans:
    """The bans of a plan; there need be none, since a search may end before it saves one.

    Raises:
        PlanError: there is no such folder, or a key fits several.
    """
    path = Path(name)
    if path.is_file():
        path = path.parent
    if path.is_dir():
        return PlanSlot(path.parent.parent, path.absolute()).bans
    if not re.fullmatch(r"[0-9a-f]{1,64}", name):
        raise PlanError(f"{name}: no such file or folder, and not the start of a key")
    directory = plan_directory()
    found = [
        one.path for one in PlanStore(directory).list_plans() if one.path.parent.name.startswith(name[:16])
    ]
    if not found:
        raise PlanError(f"nothing in {directory} has a key that starts with {name}; see: disco list")
    if len(found) > 1:
        listed = "".join(f"\n  {one}" for one in found[:8])
        raise PlanError(f"{name} fits {len(found)} plans; name one of these folders:{listed}")
    return PlanSlot(directory, found[0]).bans
