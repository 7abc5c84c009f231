"""From the records of cells to the paper's tables (DisCo, section 6), as rows of plain values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evaluation.record import OK

DEFAULT = "XLA default"
PLAN = "plan"
TORCH = ("PyTorch DDP", "PyTorch DDP, torch.compile")
SCHEMES = (DEFAULT, "no op fusion", "no all-reduce combining", "best threshold", "PGLE", "O1", *TORCH)
"""What a jax user has without us; a scheme that has not run is left out."""
_LOSS = "loss_relative_difference"
WORTH_CLOSING = 0.05
"""Gaps to the bound below this share of the best baseline are no measure of anything."""


def title(record: Mapping[str, Any]) -> str:
    """What a cell is called in a table."""
    cell = record["cell"]
    size = "" if cell["size"] == "full" else f" ({cell['size']})"
    return f"{cell['model']}{size}, {cell['link']}, {cell['devices']}"


def step_ms(record: Mapping[str, Any], name: str) -> float | None:
    """Step time of a row; None where it has none.

    Rows of several runs are brought together by their ratio to the default of their own run.
    """
    row, default = record["rows"].get(name, {}), record["rows"].get(DEFAULT, {})
    if row.get("status") != OK or default.get("status") != OK:
        return None
    if "of_default" not in row:  # timed before the record had a default: PyTorch's rows may come first
        return float(row["median_ms"])
    return float(row["of_default"] * default["median_ms"])


def best_threshold(record: Mapping[str, Any]) -> str | None:
    """Name of the fastest fixed combine threshold."""
    names = [name for name in record["rows"] if name.startswith("threshold ")]
    times = {name: time for name in names if (time := step_ms(record, name)) is not None}
    return min(times, key=lambda name: times[name]) if times else None


def schemes(record: Mapping[str, Any]) -> dict[str, float]:
    """Step time in ms of every baseline that ran, of the plan that the tool chose, FO and the bound."""
    found: dict[str, float] = {}
    for scheme in SCHEMES:
        name = best_threshold(record) if scheme == "best threshold" else scheme
        time = step_ms(record, name) if name else None
        if time is not None:
            found[scheme] = time
    plan = step_ms(record, record["facts"].get("chosen", PLAN))
    if plan is not None:
        found[PLAN] = plan
    # A link that changed since the profile changed the bound, too.
    bounds = {**record["facts"].get("bounds", {}), **record["facts"].get("bounds_in_rounds", {})}
    for label, key in (("FO", "full_overlap_ms"), ("bound", "bound_ms")):
        if bounds.get(key):
            found[label] = float(bounds[key])
    return found


def best_baseline(record: Mapping[str, Any]) -> tuple[str, float] | None:
    """The fastest of everything that a user has without us."""
    times = {name: time for name, time in schemes(record).items() if name in SCHEMES}
    if not times:
        return None
    best = min(times, key=lambda name: times[name])
    return best, times[best]


Cells = Sequence[Mapping[str, Any]]
Table = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]
"""Header and rows."""


def step_times(records: Cells) -> Table:
    """Figure 6 as a table: step time by scheme, ms."""
    columns = [*SCHEMES, PLAN, "FO", "bound"]
    columns = [name for name in columns if any(name in schemes(record) for record in records)]
    rows = []
    for record in records:
        found = schemes(record)
        rows.append((title(record), *(number_text(found.get(name)) for name in columns)))
    return ("model, link, devices", *columns), rows


def speed_ups(records: Cells) -> Table:
    """Table 1: how much faster the plan and FO are than the best baseline, and what of the gap is closed."""
    header = (
        "model, link, devices", "best baseline", "ms", "plan, ms", "chosen", "of default", "speed-up", "FO",
        "bound", "gap to FO closed", "gap to bound closed",
    )  # fmt: skip
    rows = []
    for record in records:
        best, found = best_baseline(record), schemes(record)
        if best is None or PLAN not in found:
            continue
        name, least = best
        limits = [found.get(limit) for limit in ("FO", "bound")]
        own = (
            number_text(found[PLAN]),
            record["facts"].get("chosen", PLAN),
            f"{found[PLAN] / found[DEFAULT]:.3f}",
        )
        gains = ["-" if limit is None else percent_text(least / limit - 1) for limit in limits]
        shares = [_closed(least, found[PLAN], limit) for limit in limits]
        closed = ["-" if share is None else percent_text(share) for share in shares]
        gain = percent_text(least / found[PLAN] - 1)
        rows.append((title(record), name, number_text(least), *own, gain, *gains, *closed))
    return header, rows


def gap_closed(record: Mapping[str, Any]) -> float | None:
    """The share of the gap from the best baseline to the bound that the tool's choice closes; None where there is no
    such gap worth closing."""
    best, found = best_baseline(record), schemes(record)
    return None if best is None or PLAN not in found else _closed(best[1], found[PLAN], found.get("bound"))


def _closed(least: float, plan: float, limit: float | None) -> float | None:
    if limit is None or least - limit < WORTH_CLOSING * least:
        return None
    return (least - plan) / (least - limit)


def overlaps(records: Cells) -> Table:
    """Figure 7: compute, communication and what of it is hidden, from a trace and as predicted, ms."""
    header = (
        "model, link, devices", "row", "step", "compute", "communication", "hidden", "exposed", "overlap ratio",
        "predicted hidden", "predicted exposed", "peak memory, MiB",
    )  # fmt: skip
    rows = []
    for record in records:
        chosen = record["facts"].get("chosen", PLAN)
        for name in dict.fromkeys((DEFAULT, PLAN, chosen)):
            row = record["rows"].get(name, {})
            trace, predicted = row.get("trace") or {}, row.get("predicted") or {}
            if "hidden_ms" not in trace:
                continue
            ratio = (trace["compute_ms"] + trace["communication_ms"]) / trace["span_ms"]
            parts = [
                number_text(trace[f"{part}_ms"]) for part in ("compute", "communication", "hidden", "exposed")
            ]
            said = (number_text(predicted.get("hidden_ms")), number_text(predicted.get("exposed_ms")))
            peak = f"{row['memory']['total_bytes'] / 2**20:.0f}"
            time = number_text(step_ms(record, name))
            rows.append((title(record), name, time, *parts, f"{ratio:.2f}", *said, peak))
    return header, rows


def parts(records: Cells) -> Table:
    """What op fusion, buckets and order each contribute: step time over the default's."""
    names = (
        "plan's op fusion only", "plan's buckets only", "plan's order only",
        "plan's buckets and order (XLA's op fusion)", PLAN,
    )  # fmt: skip
    rows = []
    for record in records:
        times = [record["rows"].get(name, {}).get("of_default") for name in names]
        rows.append((title(record), *("-" if t is None else f"{t:.3f}" for t in times)))
    return ("model, link, devices", *names), rows


SIMPLE = {
    "random plans": ("random plan 1", "random plan 2", "random plan 3"),
    "serial": ("transfers alone (XLA's kernels)",),
    "order alone": ("plan's order only",),
    "op fusion alone": ("plan's op fusion only",),
}
"""What takes no search, or a part of it."""


def simple_ways(records: Cells) -> Table:
    """Step time over the default's of the tool's choice and of simpler ways, and which are as good within noise."""
    rows = []
    for record in records:
        timed = {name: row for name, row in record["rows"].items() if "of_default" in row}
        chosen = timed.get(record["facts"].get("chosen", PLAN))
        ways = {way: [timed[name] for name in names if name in timed] for way, names in SIMPLE.items()}
        if chosen is None or not any(ways.values()):
            continue
        as_good = [way for way, found in ways.items() if any(_as_good(row, chosen) for row in found)]
        texts = [", ".join(f"{row['of_default']:.3f}" for row in found) or "-" for found in ways.values()]
        own = f"{chosen['of_default']:.3f}", f"{chosen['of_default_noise']:.3f}"
        rows.append((title(record), *own, *texts, ", ".join(as_good) or "-"))
    return ("model, link, devices", "tool's choice", "noise", *SIMPLE, "as good"), rows


def _as_good(row: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    noise = math.hypot(row["of_default_noise"], chosen["of_default_noise"])
    return bool(row is not chosen and row["of_default"] <= chosen["of_default"] + noise)


def looks(records: Cells) -> Table:
    """What measuring the plan's kernels and searching again was worth: step time over the default's."""
    header = (
        "model, link, devices", "kernels measured", "took of their estimate", "plan before", "noise", "plan after",
        "after / before",
    )  # fmt: skip
    rows = []
    for record in records:
        before, after = (record["rows"].get(name, {}) for name in ("plan before a look", PLAN))
        facts = record["facts"]
        if "look_1_kernels" not in facts or OK not in (before.get("status"), after.get("status")):
            continue
        both = [row["of_default"] if row.get("status") == OK else None for row in (before, after)]
        ratios = ["-" if one is None else f"{one:.3f}" for one in both]
        gain = "-" if None in both else f"{both[1] / both[0]:.3f}"
        noise = f"{before['of_default_noise']:.3f}" if "of_default_noise" in before else "-"
        promises = f"{facts['look_1_promises']:.2f}"
        rows.append(
            (title(record), str(facts["look_1_kernels"]), promises, ratios[0], noise, ratios[1], gain)
        )
    return header, rows


def costs(records: Cells) -> Table:
    """What this evaluation took, and after how many steps the plan has paid for all of it."""
    header = (
        "model, link, devices", "profile, s", "search, s", "candidates", "compile, s", "measure, s",
        "paid back after, steps",
    )  # fmt: skip
    rows = []
    for record in records:
        facts, found = record["facts"], schemes(record)
        spent = [facts.get(f"{stage}_s") for stage in ("profile", "search", "compile_all", "measure")]
        gained_ms = found[DEFAULT] - found[PLAN] if DEFAULT in found and PLAN in found else 0.0
        total_s = sum(value or 0.0 for value in spent)
        steps = f"{1e3 * total_s / gained_ms:.0f}" if gained_ms > 0 else "-"
        candidates = str(facts.get("evaluations", "-"))
        seconds = [number_text(value) for value in spent]
        rows.append((title(record), *seconds[:2], candidates, *seconds[2:], steps))
    return header, rows


def numbers(records: Cells) -> Table:
    """How far losses and outputs of one step lie from the default's, the worst of all rows."""
    rows = []
    for record in records:
        found = {name: row["numbers"] for name, row in record["rows"].items() if "numbers" in row}
        if not found:
            continue
        worst = max(found, key=lambda name: found[name]["max_relative_difference"])
        # Steps with collectives inside the layer return no loss.
        losses = [one[_LOSS] for one in found.values() if _LOSS in one]
        apart = found[worst]["max_relative_difference"]
        rows.append((title(record), f"{max(losses):.1e}" if losses else "-", f"{apart:.1e}", worst))
    return ("model, link, devices", "loss", "any output, of its largest value", "of"), rows


def missing(records: Cells) -> Table:
    """Rows that have no step time, and why."""
    rows = [
        (title(record), name, row.get("status", "-"), _short(row.get("reason", "")))
        for record in records
        for name, row in record["rows"].items()
        if row.get("status") != OK
    ]
    return ("model, link, devices", "row", "status", "reason"), rows


def markdown(table: Table) -> str:
    """A table in markdown; numbers to the right."""
    header, rows = table
    right = [any(_isnumber_text(row[i]) for row in rows) for i in range(len(header))]
    lines = [_line(header), _line("---:" if one else "---" for one in right)]
    return "\n".join([*lines, *(_line(row) for row in rows)]) + "\n"


def _line(values: Iterable[str]) -> str:
    return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |"


def _isnumber_text(text: str) -> bool:
    return text[:1].isdigit() or text[:2].removeprefix("-").isdigit()


def number_text(value: float | None) -> str:
    """A number with three digits or so; a dash for none."""
    if value is None:
        return "-"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percent_text(share: float) -> str:
    """A share as per cent."""
    return f"{100 * share:.1f} %"


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:157] + "..."
