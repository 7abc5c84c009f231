"""What the papers say, as ``configs/papers/*.toml`` has it, and how near a figure of ours comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Literal

import msgspec

from disco_hlo.whatif import coconet

ROOT = Path(__file__).resolve().parents[2]
FOUND_BITS = 14


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """A figure of a paper's."""

    figure: str
    what: str
    key: str
    paper: float
    is_fitted: bool = False


class Training(msgspec.Struct, forbid_unknown_fields=True):
    """A row of CoCoNet's table 1."""

    optimizer: coconet.Optimizer
    model: str
    micro_batches: tuple[int, int, int, int]
    speed_ups: tuple[float, float, float]


class Paper(msgspec.Struct, forbid_unknown_fields=True):
    """What a paper says."""

    title: str
    machine: str
    by: Literal["points", "factor"]
    tolerance: float
    row: list[Row]
    training: list[Training] = []


@dataclass(frozen=True)
class Open:
    """A parameter that a paper leaves open."""

    key: str
    parameter: str
    taken: float
    low: float
    high: float
    of: Callable[[float], float]
    """The figure for a value."""


def geometric_mean(values: list[float]) -> float:
    """Of speed-ups."""
    return exp(sum(map(log, values)) / len(values))


def is_within(paper: Paper, said: float, have: float) -> bool:
    """Whether a figure is reached."""
    off = abs(have - said) if paper.by == "points" else abs(have / said - 1)
    return off <= paper.tolerance + 1e-9


def solve(one: Open, target: float) -> float | None:
    """The value at which a figure becomes ``target``; None where it does not between the ends."""
    low, high = one.low, one.high
    at_low, at_high = one.of(low), one.of(high)
    if not min(at_low, at_high) <= target <= max(at_low, at_high):
        return None
    for _ in range(FOUND_BITS):
        middle = (low + high) / 2
        if (one.of(middle) < target) == (at_low < target):
            low = middle
        else:
            high = middle
    return low


def read(name: str) -> Paper:
    """What a paper says."""
    return msgspec.toml.decode((ROOT / "configs" / "papers" / f"{name}.toml").read_bytes(), type=Paper)
