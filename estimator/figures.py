"""Plots of a training as SVG text, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 420, 60, 20, 180, 50
_COLOURS = ("#0b6e99", "#c2571a", "#3d7a36", "#8a3a8f", "#7a6a1c", "#a32638", "#3f4d99", "#5c5c5c")

Points = Sequence[tuple[float, float]]


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
