"""How good predicted times are: the figures of DisCo's section 6.5 and of its figure 9, a few more, and their plots.

An error is ``|predicted - measured| / measured``, as in the paper. What the network has to beat is a linear model
(:class:`Ridge`) of features without their graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

from disco_hlo.estimator import architecture as spec
from disco_hlo.estimator.features import Batch

Floats = NDArray[np.float64]
_DECADES_NS = (1e3, 1e4, 1e5, 1e6, 1e7)
_BINS = 40
_LARGEST_ERROR = 1.0
"""Right end of the error distributions; what lies beyond counts into the last bin."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 420, 60, 20, 180, 50
_COLOURS = ("#0b6e99", "#c2571a", "#3d7a36", "#8a3a8f", "#7a6a1c", "#a32638", "#3f4d99", "#5c5c5c")
Points = Sequence[tuple[float, float]]


def errors(predicted_log_ns: Floats, log_ns: Floats) -> Floats:
    """Relative errors of predicted times."""
    found: Floats = np.abs(np.expm1(predicted_log_ns - log_ns))
    return found


def summary(error: Floats) -> dict[str, float]:
    """Mean, quantiles, and shares within 5, 10, 14 (the paper's) and 25 per cent."""
    if not len(error):
        return {"samples": 0}
    shares = {f"within_{limit}": _rounded((error <= limit / 100).mean()) for limit in (5, 10, 14, 25)}
    return {
        "samples": len(error),
        "mean": _rounded(error.mean()),
        "median": _rounded(np.median(error)),
        "p90": _rounded(np.quantile(error, 0.9)),
        "p99": _rounded(np.quantile(error, 0.99)),
        **shares,
    }


def by_decade(error: Floats, log_ns: Floats) -> dict[str, dict[str, float]]:
    """Summaries by the measured time."""
    time_ns = np.exp(log_ns)
    found = {}
    for low, high in zip((0.0, *_DECADES_NS), (*_DECADES_NS, np.inf), strict=True):
        chosen = (time_ns >= low) & (time_ns < high)
        if chosen.any():
            found[f"{low / 1e3:g} us to {high / 1e3:g} us"] = summary(error[chosen])
    return found


def by_group(error: Floats, group: NDArray[np.str_]) -> dict[str, dict[str, float]]:
    """Summaries by the group that each sample is of."""
    return {str(name): summary(error[group == name]) for name in np.unique(group)}


def distribution(error: Floats) -> dict[str, list[float]]:
    """PDF and CDF of the errors, as in the paper's figure 9: share of samples per bin, and up to its right end."""
    edges = np.linspace(0, _LARGEST_ERROR, _BINS + 1)
    counts, _ = np.histogram(np.minimum(error, _LARGEST_ERROR), edges)
    pdf = counts / max(len(error), 1)
    return {
        "right_end": [_rounded(edge) for edge in edges[1:]],
        "pdf": [_rounded(share) for share in pdf],
        "cdf": [_rounded(share) for share in np.cumsum(pdf)],
    }


def kendall_tau(a: Floats, b: Floats) -> float:
    """Kendall's tau-b: 1 where both order the samples alike, -1 where in reverse, 0 where one does not order them."""
    tau = float(kendalltau(a, b).statistic)
    return 0.0 if np.isnan(tau) else _rounded(tau)


def _rounded(value: float) -> float:
    return round(float(value), 4)


def pooled(batch: Batch) -> Floats:
    """``[kernels, numbers]``: the features of each kernel without its graph."""
    starts, count = batch.node_start[:-1], batch.estimate_ns.size
    owner = np.repeat(np.arange(count), np.diff(batch.node_start))
    types = np.zeros((count, len(spec.VOCABULARY)))
    np.add.at(types, (owner, batch.op), 1)
    sums = np.add.reduceat(batch.node.astype(np.float64), starts, axis=0)
    largest = np.maximum.reduceat(batch.node, starts, axis=0)
    means = sums / np.diff(batch.node_start)[:, None]
    return np.concatenate([np.log2(types + 1), means, largest, batch.kernel], axis=1)


class Ridge:
    """Linear least squares with a penalty of ``strength`` on squared coefficients of standardised inputs."""

    def __init__(self, inputs: Floats, targets: Floats, strength: float = 10.0) -> None:
        self.mean = inputs.mean(axis=0)
        scale = inputs.std(axis=0)
        self.scale = np.where(scale < 1e-6, 1.0, scale)
        standard = (inputs - self.mean) / self.scale
        gram = standard.T @ standard + strength * np.eye(standard.shape[1])
        self.offset = float(targets.mean())
        self.coefficients = np.linalg.solve(gram, standard.T @ (targets - self.offset))

    def predict(self, inputs: Floats) -> Floats:
        """Targets of ``inputs``."""
        found: Floats = (inputs - self.mean) / self.scale @ self.coefficients + self.offset
        return found


class _Axes:
    """Maps data to pixels; both axes begin at 0."""

    def __init__(self, right: float, top: float) -> None:
        self.right = right or 1.0
        self.top = top or 1.0

    def x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self.right

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(value / self.top, 1.0)

    def drawn(self, x_name: str, y_name: str) -> list[str]:
        bottom, left = self.y(0), self.x(0)
        parts = [
            f'<path d="M{left} {_TOP}V{bottom}H{self.x(self.right)}" fill="none" stroke="#333"/>',
            f'<text x="{self.x(self.right / 2)}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_name)}</text>',
            f'<text x="14" y="{self.y(self.top / 2)}" text-anchor="middle" '
            f'transform="rotate(-90 14 {self.y(self.top / 2)})">{escape(y_name)}</text>',
        ]
        for share in (0.25, 0.5, 0.75, 1.0):
            x, y = share * self.right, share * self.top
            parts.append(f'<text x="{self.x(x):.1f}" y="{bottom + 18}" text-anchor="middle">{x:.3g}</text>')
            parts.append(f'<text x="{left - 6}" y="{self.y(y) + 4:.1f}" text-anchor="end">{y:.3g}</text>')
        return parts


def _document(parts: Sequence[str]) -> str:
    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _curve(axes: _Axes, points: Points, name: str, number: int) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in points)
    x, y = _WIDTH - _RIGHT + 10, _TOP + 14 + 16 * number
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
        f'<text x="{x}" y="{y}" fill="{colour}">{escape(name)}</text>',
    ]


def lines(curves: Mapping[str, Points], x_name: str, y_name: str) -> str:
    """Curves over common axes. The y axis ends at three times the lowest point, where the interest is."""
    points = [point for curve in curves.values() for point in curve]
    lowest = min((y for _, y in points), default=1.0)
    axes = _Axes(max((x for x, _ in points), default=1.0), 3 * lowest)
    parts = axes.drawn(x_name, y_name)
    for number, (name, curve) in enumerate(curves.items()):
        parts += _curve(axes, curve, name, number)
    return _document(parts)


def bars_and_curves(
    right_ends: Sequence[float], bars: Sequence[float], curves: Mapping[str, Sequence[float]]
) -> str:
    """A distribution of errors: its PDF as bars (to their own scale), CDFs as curves from 0 to 1."""
    axes = _Axes(right_ends[-1], 1.0)
    tallest = max(bars) or 1.0
    width = axes.x(right_ends[0]) - axes.x(0) - 1
    parts = axes.drawn("relative error", f"CDF (bars: PDF, tallest {tallest:.2f})")
    for end, share in zip(right_ends, bars, strict=True):
        top = axes.y(share / tallest)
        parts.append(f'<rect x="{axes.x(end) - width:.1f}" y="{top:.1f}" width="{width:.1f}" '
                     f'height="{axes.y(0) - top:.1f}" fill="#cfe3ec"/>')  # fmt: skip
    for number, (name, values) in enumerate(curves.items()):
        parts += _curve(axes, [(0.0, 0.0), *zip(right_ends, values, strict=True)], name, number)
    return _document(parts)
