"""A picture of how well the plans of cells were predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.fidelity import points

Cells = Sequence[Mapping[str, Any]]


def fidelity(records: Cells, folder: Path) -> list[Path]:
    """Predicted against measured step time of every plan of every cell."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    cells = [(record, found) for record in records if (found := points(record))]
    if not cells:
        return []
    figure = Figure(figsize=(7.6, 5.0), layout="constrained")
    axes = figure.subplots()
    values = [value for _, found in cells for p in found for value in (p.measured_ms, p.predicted_ms)]
    low, high = 0.8 * min(values), 1.25 * max(values)
    axes.fill_between([low, high], [0.88 * low, 0.88 * high], [1.12 * low, 1.12 * high], color="#eeeeee")
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    markers = {
        "one device": "D",
        "nvlink": "o",
        "staged": "s",
        "sockets": "^",
        "gloo": "o",
        "shared": "P",
        "shared-sockets": "v",
    }
    models = list(dict.fromkeys(record["cell"]["model"] for record, _ in cells))
    for record, found in cells:
        axes.errorbar(
            [p.measured_ms for p in found], [p.predicted_ms for p in found],
            xerr=[p.noise_ms for p in found], fmt=markers[_kind(record)], markersize=5, linewidth=0.8,
            color=f"C{models.index(record['cell']['model'])}", alpha=0.8,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set_xlabel("measured step, ms (grey: predicted within 12 %)")
    axes.set_ylabel("predicted step, ms")
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [kind for kind in markers if any(_kind(record) == kind for record, _ in cells)]
    for number, model in enumerate(models):
        axes.plot([], [], "o", color=f"C{number}", label=model)
    for kind in kinds:
        axes.plot([], [], markers[kind], color="#4d4d4d", label=kind)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return _save(figure, folder / "fidelity")


def _kind(record: Mapping[str, Any]) -> str:
    cell = record["cell"]
    return "one device" if cell["devices"] == 1 else str(cell["link"])


def _save(figure: Any, path: Path) -> list[Path]:
    target = path.with_name(f"{path.name}.svg")
    figure.savefig(target, format="svg", metadata={"Date": None})
    return [target]
