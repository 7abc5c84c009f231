"""``disco list`` and ``disco forgive``: the plans in the plan directory, and the bans among them."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from disco_hlo.cli.inputs import AsJson, PlanName
from disco_hlo.cli.output import add_row, plan_directory, print_json, show, table
from disco_hlo.errors import PlanError
from disco_hlo.plan.bans import Bans
from disco_hlo.plan.plan import decode
from disco_hlo.plan.store import NO_PLAN, PLAN_NAME, Listed, PlanSlot, PlanStore
from disco_hlo.printable import counted, printable, time_text
from disco_hlo.report.bundle import only
from disco_hlo.report.facts import step_times


def list_plans(as_json: AsJson = False) -> None:
    """List the plans in the plan directory (DISCO_DIR), with what they gain; damaged or banned ones with the reason."""
    directory = plan_directory()
    rows = [_row(listed) for listed in PlanStore(directory).list_plans()]
    if as_json:
        print_json({"directory": str(directory), "plans": rows})
        return
    if not rows:
        show(f"No plans in {printable(str(directory))}. ENABLE_SEARCH=1 before a training command finds one.")
        return
    usable = [row for row in rows if not row["problem"]]
    made = table("key", "step", "devices", "before", "after", "gain", "by", "regions", right=(3, 4, 5))
    for row in usable:
        devices = f"{row['device_count']} x {row['device_kind']}"
        devices += f", {row['process_count']} processes" if row["process_count"] > 1 else ""
        gain = f"{row['speedup']:.2f}x" if row["speedup"] else ""
        times = time_text(row["default_ns"]), time_text(row["plan_ns"])
        by = "banned" if row["banned"] else "measured" if row["measured"] else "prediction"
        add_row(made, row["key"], row["module_name"], devices, *times, gain, by, ", ".join(row["regions"]))
    lines = [_cannot_be_used(row) for row in rows if row["problem"] not in ("", NO_PLAN)]
    lines += [line for row in rows for line in _banned(row)]
    show(*([made] if usable else []), *(printable(line, 1000) for line in lines))


def _banned(row: dict[str, Any]) -> list[str]:
    """Of a plan that is not enacted, and of candidates that a search does not try."""
    own = [f"banned: the plan {row['key']} is not enacted: {row['banned']}"] if row["banned"] else []
    others = [ban["reason"] for ban in row["bans"] if ban["reason"] != row["banned"]]
    return own + [f"banned: a candidate in {row['path']} is not tried: {reason}" for reason in others]


def _cannot_be_used(row: dict[str, Any]) -> str:
    """Which plan and why; most reasons begin with the folder already."""
    path, problem = row["path"], row["problem"]
    return f"cannot be used: {problem if problem.startswith(path) else f'{path}: {problem}'}"


def _row(listed: Listed) -> dict[str, Any]:
    row: dict[str, Any] = {
        "path": str(listed.path), "key": listed.path.parent.name, "problem": listed.problem,
        "banned": next((ban.reason for ban in listed.bans if ban.module == listed.module_sha256), ""),
        "bans": [asdict(ban) for ban in listed.bans],
    }  # fmt: skip
    if listed.problem:
        return row
    try:
        plan = decode(listed.plan_json, str(listed.path))
    except PlanError as error:
        return {**row, "problem": str(error)}
    times = step_times(plan)
    measured = times.measured_speedup is not None
    before, after = times.measured_default, times.measured_plan
    return {
        **row,
        "module_name": plan.target.module_name,
        "device_kind": plan.target.device_kind,
        "device_count": plan.target.device_count,
        "process_count": plan.target.process_count,
        "measured": measured,
        "regions": [name for name, _ in plan.strategy.regions],
        "default_ns": before.median_ns if measured and before else times.predicted_default,
        "plan_ns": after.median_ns if measured and after else times.predicted_plan,
        "speedup": times.measured_speedup or times.predicted_speedup,
        "created": plan.measured.created if plan.measured else "",
    }


def forgive(plan: PlanName) -> None:
    """Lift the bans of a plan and of the candidates beside it, so that they are tried again.

    A module is banned when compiling or running it crashed its process, or ended three of them (disco list says so).
    """
    bans = _bans(plan)
    count = bans.forgive()
    where = printable(str(bans.folder))
    none = f"nothing in {where} was banned"
    show(f"lifted {counted(count, 'ban')} in {where}" if count else none)


def _bans(name: str) -> Bans:
    """The bans of a plan; there need be none, since a search may end before it saves one.

    Raises:
        PlanError: there is no such folder, it is no plan's, or a key fits several.
    """
    path = Path(name)
    if path.exists():
        folder = (path if path.is_dir() else path.parent).absolute()
        bans = PlanSlot(folder.parent.parent, folder).bans
        if not (folder / PLAN_NAME).exists() and not bans.all():
            raise PlanError(
                f"{folder} has no {PLAN_NAME}, and nothing in it is banned; name a plan or its folder"
            )
        return bans
    if not re.fullmatch(r"[0-9a-f]{1,64}", name):
        raise PlanError(f"{name}: no such file or folder, and not the start of a key")
    directory = plan_directory()
    found = [
        one.path for one in PlanStore(directory).list_plans() if one.path.parent.name.startswith(name[:16])
    ]
    return PlanSlot(directory, only(found, name, directory)).bans
