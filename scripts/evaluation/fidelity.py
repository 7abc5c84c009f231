"""Predicted against measured: every plan of a cell, how far off it was promised, and whether in the right order."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from evaluation.record import ALONE_XLA, OK
from evaluation.tables import Cells, Table, gap_closed, number_text, percent_text, step_ms, title


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


def fidelity(records: Cells) -> Table:
    """Predicted against measured: mean and largest error, rank agreement, beside the noise of measuring."""
    header = (
        "model, link, devices", "plans", "mean error", "largest error", "of", "Kendall's tau", "noise",
        "mean error of the promise",
    )  # fmt: skip
    rows, everything = [], []
    for record in records:
        found = points(record)
        if not found:
            continue
        everything += found
        rows.append(
            (
                title(record),
                *errors_text(found),
                tau_text(kendall_tau(found)),
                noise_text(found),
                _broken(found),
            )
        )
    if everything:
        rows.append(("all", *errors_text(everything), "-", noise_text(everything), _broken(everything)))
    return header, rows


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
        means = [percent_text(statistics.fmean(shares)) if shares else "-" for shares in (closed, capped)]
        rows.append((f"{date}, {devices}", str(len(together)), *errors, taus, str(len(closed)), *means))
    return header, rows


def cpu_plans(records: Cells) -> Table:
    """Every plan of the CPU's records, predicted against measured, ms."""
    header = ("model, link, devices", "plan", "measured", "noise", "predicted", "error")
    rows = [
        (
            title(record), point.name, number_text(point.measured_ms), number_text(point.noise_ms),
            number_text(point.predicted_ms), percent_text(point.error),
        )
        for record in records
        if record["facts"].get("backend") == "cpu"
        for point in points(record)
    ]  # fmt: skip
    return header, rows


def errors(found: Sequence[Point]) -> tuple[float, float]:
    """Mean of the errors' sizes, and the largest error with its sign."""
    largest = max((point.error for point in found), key=abs)
    return statistics.fmean(abs(point.error) for point in found), largest


def errors_text(found: Sequence[Point]) -> tuple[str, str, str, str]:
    """How many plans, the mean of their errors, the largest, and whose it is."""
    mean, largest = errors(found)
    worst = next(point.name for point in found if point.error == largest)
    return str(len(found)), percent_text(mean), percent_text(largest), worst


def _broken(found: Sequence[Point]) -> str:
    return percent_text(statistics.fmean(abs(point.broken) for point in found))


def noise_text(found: Sequence[Point]) -> str:
    """The median noise of these plans."""
    return percent_text(statistics.median(point.noise_ms / point.measured_ms for point in found))


def tau_text(value: float | None) -> str:
    """Kendall's tau, a dash for none."""
    return "-" if value is None else f"{value:.2f}"
