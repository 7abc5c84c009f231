"""Where the sharded update overtakes the replicated one, and whether the advice knows (CoCoNet, figure 10).

Pairs of records: ``adam-replicated-N`` (AR-Opt: all-reduce, then all of the update on every device) and ``adam-N``
(RS-Opt-AG: reduce-scatter, a share of the update, all-gather), of one link and as many devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from evaluation.tables import DEFAULT, Cells, Table, step_ms

_SCATTERED = "sharded-update, XLA's order"
"""XLA:GPU's default has the reduce-scatter too; XLA:CPU's leaves the all-reduce whole, but fuses, which it does not
after moves. The faster of both counts."""
_REPLICATED = re.compile(r"adam-replicated-(\d+)")
HEADER = (
    "elements",
    "link, devices",
    "replicated update, ms",
    "sharded update, ms",
    "saved, ms",
    "the advice, ms",
    "advises the faster",
)


def sharded_updates(records: Cells) -> Table:
    """One row per size for which both were measured, by what the replicated step's own profile had promised."""
    by_cell = {_key(record, record["cell"]["model"]): record for record in records}
    rows = []
    for record in records:
        found = _REPLICATED.fullmatch(record["cell"]["model"])
        other = by_cell.get(_key(record, f"adam-{found[1]}")) if found else None
        advice = record["facts"].get("sharding_advice")
        if found is None or other is None or advice is None:
            continue
        whole_ms = step_ms(record, DEFAULT)
        made = [ms for name in (DEFAULT, _SCATTERED) if (ms := step_ms(other, name)) is not None]
        if whole_ms is None or not made:
            continue
        split_ms = min(made)
        saved_ms, advised_ms = whole_ms - split_ms, float(advice["saved_ms"])
        cell = record["cell"]
        times = (f"{ms:.3f}" for ms in (whole_ms, split_ms, saved_ms, advised_ms))
        agrees = "yes" if (saved_ms > 0) == (advised_ms > 0) else "no"
        if abs(saved_ms) <= _spread_ms(record) + _spread_ms(other):
            agrees = "too close"
        row = (f"2^{found[1]}", f"{cell['link']}, {cell['devices']}", *times, agrees)
        rows.append((cell["link"], cell["devices"], int(found[1]), row))
    return HEADER, [row for *_, row in sorted(rows, key=lambda one: one[:3])]


def _spread_ms(record: Mapping[str, Any]) -> float:
    return float(record["rows"][DEFAULT]["spread_ms"])


def _key(record: Mapping[str, Any], model: str) -> tuple[str, str, str, int]:
    cell = record["cell"]
    return model, cell["size"], cell["link"], cell["devices"]
