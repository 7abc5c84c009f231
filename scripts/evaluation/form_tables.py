"""Tables of the forms of the Llama step: predicted against measured, and memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from evaluation.fidelity import Point, errors_text, kendall_tau, noise_text, points, tau_text
from evaluation.forms import is_form, unrolled
from evaluation.record import OK
from evaluation.tables import DEFAULT, Cells, Table, number_text, percent_text, title

UNROLLED = "unrolled"
"""XLA's default of the same form without a loop over the layers, among the plans of a form with one."""


def awaited_points(record: Mapping[str, Any]) -> list[Point]:
    """The rows as :func:`points`, each step awaited before the next."""
    default = (record["rows"].get(DEFAULT, {}).get("awaited") or {}).get("median_ms")
    found = []
    for one in points(record):
        awaited = record["rows"][one.name].get("awaited")
        if default and awaited:
            ms = awaited["of_default"] * default
            noise_ms = awaited["of_default_noise"] * ms
            found.append(Point(one.name, ms, noise_ms, one.predicted_ms, one.promised_ms))
    return found


def ranked(record: Mapping[str, Any], records: Cells) -> list[Point]:
    """The plans whose order Kendall's tau is about: the cell's, and the unrolled form where that was measured over the
    same link."""
    cell, found = record["cell"], points(record)
    other = {**cell, "model": unrolled(cell["model"])}
    if other != cell:
        for one in records:
            if one["cell"] == other:
                found += [
                    Point(UNROLLED, p.measured_ms, p.noise_ms, p.predicted_ms, p.promised_ms)
                    for p in points(one)
                    if p.name == DEFAULT
                ]
    return found


def fidelity(records: Cells) -> Table:
    """Predicted against measured, for steps in a row and for steps that are awaited."""
    header = (
        "form, link, devices", "plans", "mean error", "largest", "of", "Kendall's tau", "over", "noise",
        "awaited: mean error", "largest", "longer than in a row, ms",
    )  # fmt: skip
    rows, everything, all_awaited = [], [], []
    for record in records:
        found, awaited = points(record), awaited_points(record)
        if not found:
            continue
        everything += found
        all_awaited += awaited
        plans = ranked(record, records)
        tau = (tau_text(kendall_tau(plans)), f"{len(plans)}{_with_unrolled(plans)}")
        measured = {one.name: one.measured_ms for one in found}
        longer = [one.measured_ms - measured[one.name] for one in awaited]
        rows.append(
            (
                title(record), *errors_text(found), *tau, noise_text(found), *errors_text(awaited)[1:3],
                number_text(statistics.median(longer)) if longer else "-",
            )
        )  # fmt: skip
    if everything:
        rows.append(
            (
                "all",
                *errors_text(everything),
                "-",
                "-",
                noise_text(everything),
                *errors_text(all_awaited)[1:3],
                "-",
            )
        )
    return header, rows


def every_plan(records: Cells) -> Table:
    """Every plan, ms."""
    header = (
        "form, link, devices", "plan", "measured", "noise", "predicted", "error", "of default", "awaited",
        "predicted of default",
    )  # fmt: skip
    rows = []
    for record in records:
        found = points(record)
        awaited = {one.name: one.measured_ms for one in awaited_points(record)}
        default = next((one for one in found if one.name == DEFAULT), None)
        for one in found:
            of_default = ("-", "-") if default is None else (
                f"{one.measured_ms / default.measured_ms:.3f}", f"{one.predicted_ms / default.predicted_ms:.3f}",
            )  # fmt: skip
            rows.append(
                (
                    title(record), one.name, number_text(one.measured_ms), number_text(one.noise_ms),
                    number_text(one.predicted_ms), percent_text(one.error), of_default[0],
                    number_text(awaited.get(one.name)), of_default[1],
                )
            )  # fmt: skip
    return header, rows


def memory(records: Cells) -> Table:
    """Peak memory of an execution on a device, MiB: as simulated, as XLA assigned buffers, as the device says."""
    header = ("form, link, devices", "plan", "predicted", "XLA", "device", "error")
    rows = []
    for record in records:
        if not is_form(record["cell"]["model"]):
            continue
        for name, row in record["rows"].items():
            said = (row.get("predicted") or {}).get("peak_bytes")
            if row.get("status") != OK or not said:
                continue
            device = (row.get("device_peak") or {}).get("bytes")
            error = "-" if device is None else percent_text(said / device - 1)
            mebibytes = [_mebibytes(value) for value in (said, row["memory"]["total_bytes"], device)]
            rows.append((title(record), name, *mebibytes, error))
    return header, rows


def _mebibytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**20:.0f}"


def _with_unrolled(plans: list[Point]) -> str:
    return " with the unrolled form" if any(one.name == UNROLLED for one in plans) else ""
