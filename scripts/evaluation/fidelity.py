"""Predicted against measured: every plan of a cell, how far off it was promised, and whether in the right order.

Steps of the forms of the Llama step are also awaited one by one, and their memory is predicted too.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from evaluation.commands import unrolled
from evaluation.record import ALONE_XLA, OK
from evaluation.tables import (
    CELL,
    DEFAULT,
    Cells,
    Table,
    gap_closed,
    line,
    percent_text,
    ratio_text,
    step_ms,
    title,
)


@dataclass(frozen=True, slots=True)
class Point:
    """A row that was measured and predicted."""

    name: str
    measured_ms: float
    """By its ratio to the default, as in all tables."""
    noise_ms: float
    predicted_ms: float
    """By the link as it was in the rounds, where that was seen."""
    promised_ms: float
    """By the profile that the search had."""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def broken(self) -> float:
        """Relative error of the promise, which a link that changed meanwhile breaks, too."""
        return self.promised_ms / self.measured_ms - 1


def points(record: Mapping[str, Any]) -> list[Point]:
    """The rows whose step time was both measured and predicted, less the one that tells what the link was like."""
    rows = record["rows"]
    link_seen = any("predicted_in_rounds" in row for row in rows.values())
    found = []
    for name, row in rows.items():
        promised = (row.get("predicted") or {}).get("step_ms")
        if not promised or row.get("status") != OK or (link_seen and name == ALONE_XLA):
            continue
        measured = step_ms(record, name)
        if measured is None:
            continue
        predicted = (row.get("predicted_in_rounds") or row["predicted"]).get("step_ms", promised)
        noise = row["of_default_noise"] * measured
        found.append(Point(name, measured, noise, float(predicted), float(promised)))
    return found


def kendall_tau(found: Sequence[Point]) -> float | None:
    """Agreement of predicted and measured order, -1 to 1; pairs closer than their noise do not count."""
    score = pairs = 0
    for a, b in combinations(found, 2):
        apart = a.measured_ms - b.measured_ms
        if abs(apart) <= a.noise_ms + b.noise_ms:
            continue
        pairs += 1
        predicted = a.predicted_ms - b.predicted_ms
        score += (apart * predicted > 0) - (apart * predicted < 0)
    return score / pairs if pairs else None


def errors(found: Sequence[Point]) -> tuple[float, float]:
    """Mean of the errors' sizes, and the largest error with its sign."""
    largest = max((point.error for point in found), key=abs)
    return statistics.fmean(abs(point.error) for point in found), largest


def errors_text(found: Sequence[Point]) -> tuple[str, str, str, str]:
    """How many plans, the mean of their errors, the largest, and whose it is."""
    mean, largest = errors(found)
    worst = next(point.name for point in found if point.error == largest)
    return str(len(found)), percent_text(mean), percent_text(largest), worst


def noise_text(found: Sequence[Point]) -> str:
    """The median noise of these plans."""
    return percent_text(statistics.median(point.noise_ms / point.measured_ms for point in found))


def tau_text(value: float | None) -> str:
    """Kendall's tau, a dash for none."""
    return "-" if value is None else f"{value:.2f}"


def fidelity(records: Cells) -> Table:
    """Predicted against measured: mean and largest error, rank agreement, beside the noise of measuring."""
    header = (
        CELL, "plans", "mean error", "largest error", "of", "Kendall's tau", "noise", "mean error of the promise"
    )  # fmt: skip

    def row(name: str, found: list[Point], tau: str) -> tuple[str, ...]:
        broken = percent_text(statistics.fmean(abs(point.broken) for point in found))
        return name, *errors_text(found), tau, noise_text(found), broken

    of_cells = [(title(record), found) for record in records if (found := points(record))]
    rows = [row(name, found, tau_text(kendall_tau(found))) for name, found in of_cells]
    everything = [point for _, found in of_cells for point in found]
    return header, [*rows, row("all", everything, "-")] if everything else []


def days(records: Cells) -> Table:
    """What was measured on one day with one number of devices, all together: errors, the order of each model's plans
    over all its links, and what was closed of the gaps to the bound."""
    header = (
        "date, devices", "cells", "plans", "mean error", "largest error", "of", "Kendall's tau by model",
        "gaps", "closed, mean", "each 100 % at most",
    )  # fmt: skip
    by_day: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for record in records:
        if points(record):
            day = str(record["facts"].get("date", "-")), int(record["cell"]["devices"])
            by_day.setdefault(day, []).append(record)
    rows = []
    for (date, devices), together in sorted(by_day.items()):
        by_model: dict[str, list[Point]] = {}
        for record in together:
            by_model.setdefault(record["cell"]["model"], []).extend(points(record))
        errors = errors_text([point for found in by_model.values() for point in found])
        taus = ", ".join(f"{model} {tau_text(kendall_tau(by_model[model]))}" for model in sorted(by_model))
        closed = [share for record in together if (share := gap_closed(record)) is not None]
        capped = [min(share, 1.0) for share in closed]
        means = [percent_text(statistics.fmean(shares) if shares else None) for shares in (closed, capped)]
        rows.append(line(f"{date}, {devices}", len(together), *errors, taus, len(closed), *means))
    return header, rows


def cpu_plans(records: Cells) -> Table:
    """Every plan of the CPU's records, predicted against measured, ms."""
    rows = [
        (title(record), *_point_text(point))
        for record in records
        if record["facts"].get("backend") == "cpu"
        for point in points(record)
    ]
    return (CELL, *_POINT), rows


_POINT = ("plan", "measured", "noise", "predicted", "error")


def _point_text(one: Point) -> tuple[str, ...]:
    return line(one.name, one.measured_ms, one.noise_ms, one.predicted_ms, percent_text(one.error))


# --- forms of the Llama step ----------------------------------------------------------------------

FORM = "form, link, devices"
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
            found.append(replace(one, measured_ms=ms, noise_ms=awaited["of_default_noise"] * ms))
    return found


def ranked(record: Mapping[str, Any], records: Cells) -> list[Point]:
    """The plans whose order Kendall's tau is about: the cell's, and the unrolled form where that was measured over the
    same link."""
    other = {**record["cell"], "model": unrolled(record["cell"]["model"])}
    others = [one for one in records if one["cell"] == other != record["cell"]]
    defaults = [point for one in others for point in points(one) if point.name == DEFAULT]
    return points(record) + [replace(point, name=UNROLLED) for point in defaults]


def form_fidelity(records: Cells) -> Table:
    """Predicted against measured, for steps in a row and for steps that are awaited."""
    header = (
        FORM, "plans", "mean error", "largest", "of", "Kendall's tau", "over", "noise", "awaited: mean error",
        "largest", "longer than in a row, ms",
    )  # fmt: skip
    rows, everything, all_awaited = [], [], []
    for record in records:
        found, awaited = points(record), awaited_points(record)
        if not found:
            continue
        everything += found
        all_awaited += awaited
        plans = ranked(record, records)
        over = f"{len(plans)}{' with the unrolled form' * any(one.name == UNROLLED for one in plans)}"
        measured = {one.name: one.measured_ms for one in found}
        longer = [one.measured_ms - measured[one.name] for one in awaited]
        rows.append(
            line(
                title(record), *errors_text(found), tau_text(kendall_tau(plans)), over, noise_text(found),
                *errors_text(awaited)[1:3], statistics.median(longer) if longer else None,
            )
        )  # fmt: skip
    if everything:
        awaited_errors = errors_text(all_awaited)[1:3]
        rows.append(("all", *errors_text(everything), "-", "-", noise_text(everything), *awaited_errors, "-"))
    return header, rows


def every_plan(records: Cells) -> Table:
    """Every plan, ms."""
    rows = []
    for record in records:
        found = points(record)
        awaited = {one.name: one.measured_ms for one in awaited_points(record)}
        default = next((one for one in found if one.name == DEFAULT), None)
        for one in found:
            of_default, predicted = (None, None) if default is None else (
                one.measured_ms / default.measured_ms, one.predicted_ms / default.predicted_ms
            )  # fmt: skip
            ratios = ratio_text(of_default), awaited.get(one.name), ratio_text(predicted)
            rows.append(line(title(record), *_point_text(one), *ratios))
    return (FORM, *_POINT, "of default", "awaited", "predicted of default"), rows


def memory(records: Cells) -> Table:
    """Peak memory of an execution on a device, MiB: as simulated, as XLA assigned buffers, as the device says, and how
    much of that was never asked for. The error is of what was asked for."""
    rows = []
    for record in records:
        for name, row in record["rows"].items():
            said = (row.get("predicted") or {}).get("peak_bytes")
            if row.get("status") != OK or not said:
                continue
            peak = row.get("device_peak") or {}
            device, unasked = peak.get("bytes"), peak.get("unasked_bytes")
            sizes = (said, row["memory"]["total_bytes"], device, unasked)
            mebibytes = ["-" if size is None else f"{size / 2**20:.0f}" for size in sizes]
            error = percent_text(None if device is None else said / (device - (unasked or 0)) - 1)
            rows.append((title(record), name, *mebibytes, error))
    return (FORM, "plan", "predicted", "XLA", "device", "of that unasked", "error"), rows
