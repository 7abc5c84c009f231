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
CELL = "model, link, devices"
WORTH_CLOSING = 0.05
"""Gaps to the bound below this share of the best baseline are no measure of anything."""

Cells = Sequence[Mapping[str, Any]]
Table = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]
"""Header and rows."""


def title(record: Mapping[str, Any]) -> str:
    """What a cell is called in a table."""
    cell = record["cell"]
    size = "" if cell["size"] == "full" else f" ({cell['size']})"
    return f"{cell['model']}{size}, {cell['link']}, {cell['devices']}"


def line(*values: str | int | float | None) -> tuple[str, ...]:
    """A row: numbers with three digits or so, counts whole, a dash for None."""
    return tuple(
        value if isinstance(value, str) else str(value) if isinstance(value, int) else number_text(value)
        for value in values
    )


def number_text(value: float | None) -> str:
    """A number with three digits or so; a dash for none."""
    if value is None:
        return "-"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def ratio_text(value: float | None) -> str:
    """A ratio of step times; a dash for none."""
    return "-" if value is None else f"{value:.3f}"


def percent_text(share: float | None) -> str:
    """A share as per cent; a dash for none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def markdown(table: Table) -> str:
    """A table in markdown; numbers to the right."""
    header, rows = table
    right = [any(_is_number(row[i]) for row in rows) for i in range(len(header))]
    lines = [_line(header), _line("---:" if one else "---" for one in right)]
    return "\n".join([*lines, *(_line(row) for row in rows)]) + "\n"


def _line(values: Iterable[str]) -> str:
    return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |"


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[:2].removeprefix("-").isdigit()


# --- what a cell says -----------------------------------------------------------------------------


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


def schemes(record: Mapping[str, Any]) -> dict[str, float]:
    """Step time in ms of every baseline that ran, of the plan that the tool chose, FO and the bound."""
    names = [name for name in record["rows"] if name.startswith("threshold ")]
    thresholds = [time for name in names if (time := step_ms(record, name)) is not None]
    times = {name: step_ms(record, name) for name in SCHEMES}
    times["best threshold"] = min(thresholds, default=None)
    times[PLAN] = step_ms(record, record["facts"].get("chosen", PLAN))
    # A link that changed since the profile changed the bound, too.
    bounds = {**record["facts"].get("bounds", {}), **record["facts"].get("bounds_in_rounds", {})}
    times |= {"FO": bounds.get("full_overlap_ms") or None, "bound": bounds.get("bound_ms") or None}
    return {name: float(time) for name, time in times.items() if time is not None}


def best_baseline(record: Mapping[str, Any]) -> tuple[str, float] | None:
    """The fastest of everything that a user has without us."""
    times = {name: time for name, time in schemes(record).items() if name in SCHEMES}
    return min(times.items(), key=lambda one: one[1]) if times else None


def gap_closed(record: Mapping[str, Any], limit: str = "bound") -> float | None:
    """The share of the gap from the best baseline to the bound that the tool's choice closes; None where there is no
    such gap worth closing."""
    best, found = best_baseline(record), schemes(record)
    if best is None or PLAN not in found or limit not in found:
        return None
    gap = best[1] - found[limit]
    return None if gap < WORTH_CLOSING * best[1] else (best[1] - found[PLAN]) / gap


# --- tables ---------------------------------------------------------------------------------------


def step_times(records: Cells) -> Table:
    """Figure 6 as a table: step time by scheme, ms."""
    columns = [*SCHEMES, PLAN, "FO", "bound"]
    columns = [name for name in columns if any(name in schemes(record) for record in records)]
    return (CELL, *columns), [line(title(record), *map(schemes(record).get, columns)) for record in records]


def speed_ups(records: Cells) -> Table:
    """Table 1: how much faster the plan and FO are than the best baseline, and what of the gap is closed."""
    header = (
        CELL, "best baseline", "ms", "plan, ms", "chosen", "of default", "speed-up", "FO", "bound",
        "gap to FO closed", "gap to bound closed",
    )  # fmt: skip
    rows = []
    for record in records:
        best, found = best_baseline(record), schemes(record)
        if best is None or PLAN not in found:
            continue
        name, least = best
        chosen, of_default = record["facts"].get("chosen", PLAN), ratio_text(found[PLAN] / found[DEFAULT])
        limits = ("FO", "bound")
        gains = [least / found[one] - 1 if one in found else None for one in (PLAN, *limits)]
        shares = [*gains, *(gap_closed(record, limit) for limit in limits)]
        rows.append(
            line(title(record), name, least, found[PLAN], chosen, of_default, *map(percent_text, shares))
        )
    return header, rows


def overlaps(records: Cells) -> Table:
    """Figure 7: compute, communication and what of it is hidden, from a trace and as predicted, ms."""
    header = (
        CELL, "row", "step", "compute", "communication", "hidden", "exposed", "overlap ratio",
        "predicted hidden", "predicted exposed", "peak memory, MiB",
    )  # fmt: skip
    rows = []
    for record in records:
        for name in dict.fromkeys((DEFAULT, PLAN, record["facts"].get("chosen", PLAN))):
            row = record["rows"].get(name, {})
            trace, predicted = row.get("trace") or {}, row.get("predicted") or {}
            if "hidden_ms" not in trace:
                continue
            parts = [trace[f"{part}_ms"] for part in ("compute", "communication", "hidden", "exposed")]
            ratio = f"{(trace['compute_ms'] + trace['communication_ms']) / trace['span_ms']:.2f}"
            said = predicted.get("hidden_ms"), predicted.get("exposed_ms")
            peak = f"{row['memory']['total_bytes'] / 2**20:.0f}"
            rows.append(line(title(record), name, step_ms(record, name), *parts, ratio, *said, peak))
    return header, rows


def parts(records: Cells) -> Table:
    """What op fusion, buckets and order each contribute: step time over the default's."""
    names = (
        "plan's op fusion only", "plan's buckets only", "plan's order only",
        "plan's buckets and order (XLA's op fusion)", PLAN,
    )  # fmt: skip
    return (CELL, *names), [
        (title(one), *(ratio_text(one["rows"].get(name, {}).get("of_default")) for name in names))
        for one in records
    ]


def searches(records: Cells) -> Table:
    """The paper's search, and ours by analytical estimates, beside ours: candidates, seconds, what each expects of its
    plan, and step time over the default's."""
    header = (
        CELL, "search", "candidates", "search, s", "predicted by it, ms", "step, ms", "of default", "noise"
    )  # fmt: skip
    rows = []
    for record in records:
        facts = record["facts"]
        if not (others := facts.get("other_searches")):
            continue
        own = {**facts, "predicted_ms": facts["bounds"]["predicted_plan_ms"]}
        for name, one in {PLAN: own, **others}.items():
            row = record["rows"].get(name, {})
            ratios = ratio_text(row.get("of_default")), ratio_text(row.get("of_default_noise"))
            said = one["evaluations"], one["search_s"], one["predicted_ms"]
            rows.append(line(title(record), name, *said, step_ms(record, name), *ratios))
    return header, rows


SIMPLE = {
    "random plans": "random plan ",
    "serial": "transfers alone (XLA's kernels)",
    "order alone": "plan's order only",
    "op fusion alone": "plan's op fusion only",
}
"""What takes no search, or a part of it, with the beginning of its rows' names."""
_FEW = 3


def simple_ways(records: Cells) -> Table:
    """Step time over the default's of the tool's choice and of simpler ways, and which are as good within noise."""
    rows = []
    for record in records:
        timed = {name: row for name, row in record["rows"].items() if "of_default" in row}
        chosen = timed.get(record["facts"].get("chosen", PLAN))
        ways = {
            way: [row for name, row in timed.items() if name.startswith(begin)]
            for way, begin in SIMPLE.items()
        }
        if chosen is None or not any(ways.values()):
            continue
        as_good = [way for way, found in ways.items() if any(_as_good(row, chosen) for row in found)]
        texts = [_ratios([row["of_default"] for row in found]) for found in ways.values()]
        own = ratio_text(chosen["of_default"]), ratio_text(chosen["of_default_noise"])
        rows.append((title(record), *own, *texts, ", ".join(as_good) or "-"))
    return (CELL, "tool's choice", "noise", *SIMPLE, "as good"), rows


def _ratios(ratios: Sequence[float]) -> str:
    """All of a few; of many the least."""
    if len(ratios) > _FEW:
        return f"{ratio_text(min(ratios))}, the best of {len(ratios)}"
    return ", ".join(map(ratio_text, ratios)) or "-"


def _as_good(row: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    noise = math.hypot(row["of_default_noise"], chosen["of_default_noise"])
    return bool(row is not chosen and row["of_default"] <= chosen["of_default"] + noise)


def looks(records: Cells) -> Table:
    """What measuring the plan's kernels and searching again was worth: step time over the default's."""
    header = (
        CELL, "kernels measured", "took of their estimate", "plan before", "noise", "plan after", "after / before"
    )  # fmt: skip
    rows = []
    for record in records:
        facts = record["facts"]
        found = [record["rows"].get(name, {}) for name in ("plan before a look", PLAN)]
        before, after = (row["of_default"] if row.get("status") == OK else None for row in found)
        if "look_1_kernels" not in facts or before is after is None:
            continue
        gain = None if before is None or after is None else after / before
        ratios = map(ratio_text, (before, found[0].get("of_default_noise"), after, gain))
        promises = f"{facts['look_1_promises']:.2f}"
        rows.append((title(record), str(facts["look_1_kernels"]), promises, *ratios))
    return header, rows


def costs(records: Cells) -> Table:
    """What this evaluation took, and after how many steps the plan has paid for all of it."""
    header = (
        CELL, "profile, s", "search, s", "candidates", "compile, s", "measure, s", "paid back after, steps"
    )  # fmt: skip
    rows = []
    for record in records:
        facts, found = record["facts"], schemes(record)
        spent = [facts.get(f"{stage}_s") for stage in ("profile", "search", "compile_all", "measure")]
        gained_ms = found[DEFAULT] - found[PLAN] if DEFAULT in found and PLAN in found else 0.0
        steps = f"{1e3 * sum(value or 0.0 for value in spent) / gained_ms:.0f}" if gained_ms > 0 else "-"
        seconds = [number_text(value) for value in spent]
        candidates = str(facts.get("evaluations", "-"))
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
        apart = f"{found[worst]['max_relative_difference']:.1e}"
        rows.append((title(record), f"{max(losses):.1e}" if losses else "-", apart, worst))
    return (CELL, "loss", "any output, of its largest value", "of"), rows


_LOSS = "loss_relative_difference"


def missing(records: Cells) -> Table:
    """Rows that have no step time, and why."""
    rows = [
        (title(record), name, row.get("status", "-"), _short(row.get("reason", "")))
        for record in records
        for name, row in record["rows"].items()
        if row.get("status") != OK
    ]
    return (CELL, "row", "status", "reason"), rows


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:157] + "..."
