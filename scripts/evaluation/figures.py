"""The paper's figures from the records of cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.fidelity import points
from evaluation.tables import DEFAULT, PLAN, SCHEMES, TORCH, schemes

_BARS = (*SCHEMES, PLAN)
_COLOURS = {
    DEFAULT: "#4d4d4d", "no op fusion": "#bdbdbd", "no all-reduce combining": "#969696",
    "best threshold": "#6baed6", "PGLE": "#9e9ac8", "O1": "#c7a76c",
    TORCH[0]: "#a1d99b", TORCH[1]: "#41ab5d", PLAN: "#d94801",
}  # fmt: skip
_HIGHEST = 1.5
"""Where bars are cut off, their value above them: without op fusion a step can take ten times as long."""
Cells = Sequence[Mapping[str, Any]]


def step_times(records: Cells, folder: Path) -> list[Path]:
    """Figure 6, one picture per link and number of devices: step time over XLA default's, by scheme."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for record in records:
        if DEFAULT in schemes(record):
            groups.setdefault((record["cell"]["link"], record["cell"]["devices"]), []).append(record)
    written = []
    for (link, devices), group in groups.items():
        written += _bars(group, _place(link, devices), folder / f"step_time_{link}_{devices}")
    return written


def _place(link: str, devices: int) -> str:
    return "one device" if devices == 1 else f"{link}, {devices} devices"


def _bars(records: Cells, title: str, path: Path) -> list[Path]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.8 * len(records) + 1.5), 4.2), layout="constrained")
    axes = figure.subplots()
    bars = [bar for bar in _BARS if any(bar in schemes(record) for record in records)]
    width = 0.8 / len(bars)
    for number, bar in enumerate(bars):
        at = [
            (place, schemes(record)[bar] / schemes(record)[DEFAULT])
            for place, record in enumerate(records)
            if bar in schemes(record)
        ]
        left = [place - 0.4 + (number + 0.5) * width for place, _ in at]
        heights = [min(value, _HIGHEST) for _, value in at]
        axes.bar(left, heights, 0.92 * width, label=bar, color=_COLOURS[bar])
        for middle, (_, value) in zip(left, at, strict=True):
            if value > _HIGHEST:
                axes.text(middle, _HIGHEST, f"{value:.1f}", ha="center", va="bottom", fontsize=7)
    for limit, style in (("FO", ":"), ("bound", "-")):
        for place, record in enumerate(records):
            found = schemes(record)
            if limit in found:
                value = found[limit] / found[DEFAULT]
                label = limit if place == 0 else None
                axes.plot([place - 0.42, place + 0.42], [value, value], style, color="black", label=label)
    names = [f"{r['cell']['model']}\n{schemes(r)[DEFAULT]:.1f} ms" for r in records]
    axes.set_xticks(range(len(records)), names)
    axes.set_ylabel("step time / XLA default's")
    axes.set_title(title, pad=16)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return _save(figure, path)


def overlaps(records: Cells, folder: Path) -> list[Path]:
    """Figure 7: compute, communication and whole step of default and plan, from traces, over the default's step."""
    from matplotlib.figure import Figure

    several = [record for record in records if record["cell"]["devices"] > 1]
    shown = [
        (record, name)
        for record in several
        if _traced(record, DEFAULT)
        for name in dict.fromkeys((DEFAULT, record["facts"].get("chosen", PLAN)))
        if _traced(record, name)
    ]
    if not shown:
        return []
    figure = Figure(figsize=(9.0, 0.3 * len(shown) + 1.4), layout="constrained")
    axes = figure.subplots()
    spans = [record["rows"][name]["trace"] for record, name in shown]
    wholes = [record["rows"][DEFAULT]["trace"]["span_ms"] for record, _ in shown]
    # The plan stands close under its default, the next default farther off.
    places = [1.0 * number - (0.2 if name != DEFAULT else 0.0) for number, (_, name) in enumerate(shown)]
    pieces = (
        ("compute alone", lambda t: t["compute_ms"] - t["hidden_ms"], "#9ecae1"),
        ("both at once", lambda t: t["hidden_ms"], "#756bb1"),
        ("communication exposed", lambda t: t["exposed_ms"], "#d94801"),
        ("nothing", lambda t: t["idle_ms"], "#d9d9d9"),
    )
    left = [0.0] * len(spans)
    for label, part, colour in pieces:
        widths = [max(0.0, part(trace)) / whole for trace, whole in zip(spans, wholes, strict=True)]
        axes.barh(places, widths, left=left, label=label, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, end, trace in zip(places, left, spans, strict=True):
        axes.text(end + 0.01, place, f"{trace['span_ms']:.1f} ms", va="center", fontsize=7)
    axes.set_yticks(places, [_bar_name(record, name) for record, name in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel("of XLA default's step, from a trace of one step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=4, frameon=False)
    return _save(figure, folder / "overlap")


def _traced(record: Mapping[str, Any], name: str) -> bool:
    return "span_ms" in (record["rows"].get(name, {}).get("trace") or {})


def _bar_name(record: Mapping[str, Any], name: str) -> str:
    if name != DEFAULT:
        return name.partition(" (")[0]
    return f"{record['cell']['model']}, {_place(record['cell']['link'], record['cell']['devices'])}: {name}"


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
