"""The device's constants, from a few measurements that are handed in as callables.

The analytical cost of an op (its bytes over the memory bandwidth, its flops over the arithmetic
rate, its launch) needs three numbers of the device. How to run a copy, a matmul or a chain of tiny
ops is the caller's business; here their times become rates. Each callable takes a size and returns
repeated times in ns of work that has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from disco_hlo.errors import ProfileError
from disco_hlo.profiler.fields import Nanoseconds, Spread

Measure = Callable[[int], Sequence[int]]

COPY_BYTES = (1 << 24, 1 << 25, 1 << 26)
"""Bytes moved by the copies: beyond any cache, small enough for any device."""
MATMUL_WIDTHS = (512, 1024, 2048)
CHAIN_LENGTHS = (16, 64, 256)


@dataclass(frozen=True, slots=True)
class DeviceConstants:
    """What one device does per second, and what starting one more op costs."""

    launch_ns: Nanoseconds
    memory_bandwidth: Annotated[float, Meta(gt=0)]
    """Bytes read plus bytes written per second."""
    flops_per_s: Annotated[float, Meta(gt=0)]
    noise: Spread
    """Largest relative spread seen while measuring these."""


def device_constants(
    copy: Measure,
    matmul: Measure,
    chain: Measure,
    copy_bytes: Sequence[int] = COPY_BYTES,
    matmul_widths: Sequence[int] = MATMUL_WIDTHS,
    chain_lengths: Sequence[int] = CHAIN_LENGTHS,
) -> DeviceConstants:
    """Measure the device.

    ``copy(n)``: an elementwise op that moves n bytes in all, reads and writes counted.
    ``matmul(n)``: the product of two n x n matrices in the step's precision.
    ``chain(n)``: n ops of one element each, every one reading the one before.
    The bandwidth is the increase of time with size, so that launching does not count; the flop rate
    the best seen; the launch cost the time of one more link of the chain.
    Raises :class:`ProfileError` when times are not times or do not grow with the work.
    """
    copies, matmuls, chains = (
        [median_and_spread(measure(size), f"size {size}") for size in sizes]
        for measure, sizes in ((copy, copy_bytes), (matmul, matmul_widths), (chain, chain_lengths))
    )
    rates = [2 * width**3 / middle for width, (middle, _) in zip(matmul_widths, matmuls, strict=True)]
    return DeviceConstants(
        launch_ns=round(_slope(chain_lengths, [middle for middle, _ in chains], "a chain of ops")),
        memory_bandwidth=1e9 / _slope(copy_bytes, [middle for middle, _ in copies], "a copy"),
        flops_per_s=1e9 * max(rates),
        noise=max(spread / middle for middle, spread in (*copies, *matmuls, *chains)),
    )


def median_and_spread(times_ns: Sequence[float], what: str) -> tuple[float, float]:
    """The median, and the median absolute deviation from it; :class:`ProfileError` for what are no times."""
    times = np.asarray(times_ns, dtype=np.float64)
    if not (times.size and np.all(np.isfinite(times) & (times > 0))):
        raise ProfileError(f"expected positive times in ns for {what}, got {times.tolist()!r:.200}")
    middle = float(np.median(times))
    return middle, float(np.median(np.abs(times - middle)))


def _slope(sizes: Sequence[int], times: Sequence[float], what: str) -> float:
    """Median slope over all pairs of sizes (Theil-Sen), which one disturbed size cannot move."""
    slopes = [
        (times[j] - times[i]) / (sizes[j] - sizes[i])
        for i in range(len(sizes))
        for j in range(i + 1, len(sizes))
    ]
    slope = float(np.median(slopes)) if slopes else 0.0
    if slope <= 0:
        raise ProfileError(
            f"the time of {what} does not grow with its size: {dict(zip(sizes, times, strict=True))}"
        )
    return slope
