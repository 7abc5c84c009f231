"""How many steps one measurement takes."""

from __future__ import annotations

import pytest

from disco_hlo.plugin.measuring.runner import steps_at_once

GIB = 1 << 30


@pytest.mark.parametrize(
    ("step_ns", "donated_bytes", "free_bytes", "count"),
    [
        (50_000, 0, None, 20),
        (10_000_000, 0, None, 20),
        (50_000_000, 0, None, 6),
        (150_000_000, 0, None, 2),
        (400_000_000, 0, None, 1),
        (10_000_000, 3 * GIB, None, 4),
        (10_000_000, 17 * GIB, None, 1),
        (10_000_000, GIB, 48 * GIB, 5),
        (10_000_000, GIB, 0, 1),
    ],
)
def test_short_steps_are_measured_several_at_once(
    step_ns: int, donated_bytes: int, free_bytes: int | None, count: int
) -> None:
    assert steps_at_once(step_ns, donated_bytes, free_bytes) == count
