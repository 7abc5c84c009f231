"""The reports of two plans that real searches left, in a real browser: of the demo, and of two H200s."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.report.page import render
from tests.captured import DATA
from tests.report import plans
from tests.report.test_browser import DESKTOP, PHONE, Opened, browser

__all__ = ["browser"]
pytestmark = pytest.mark.browser

HEADLINES = {"demo_plan": "1.50× faster, measured", "h200_plan": "1.27× faster, measured"}


@functools.cache
def content_of(plan: str) -> dict[str, Any]:
    return plans.content(DATA / plan / "plan.json")


@functools.cache
def page_of(plan: str) -> bytes:
    return render(content_of(plan))


@pytest.fixture(params=[(plan, size) for plan in HEADLINES for size in ("desktop", "phone")], ids="-".join)
def opened(request: pytest.FixtureRequest, browser: Any, tmp_path: Path) -> Iterator[tuple[str, Opened]]:
    plan, size = request.param
    path = tmp_path / "plan.html"
    path.write_bytes(page_of(plan))
    viewport = DESKTOP if size == "desktop" else PHONE
    page = Opened(browser, path, viewport, color_scheme="light", has_touch=viewport is PHONE)
    yield plan, page
    page.close()


def test_a_real_plan_is_hovered_without_complaint(opened: tuple[str, Opened]) -> None:
    plan, seen = opened
    page = seen.page
    assert HEADLINES[plan] in page.inner_text("#headline")
    assert page.inner_text("#when-head") == "Timeline of one step, simulated and measured"
    assert "one step as it ran" in page.inner_text("#breakdown")
    width, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width <= window
    page.locator("#when").scroll_into_view_if_needed()
    over = seen.over()
    found = set()
    for row in range(8):
        for part in range(1, 12):
            page.mouse.move(
                over["x"] + over["width"] * part / 12, over["y"] + over["height"] * (row + 0.5) / 8
            )
            if page.locator("#tip").is_visible():
                found.add(page.inner_text("#tip").split("\n")[0])
    assert any("all-reduce" in line for line in found)
    assert any("fused kernel" in line for line in found)
    assert seen.complaints == []
    assert len(seen.requests) == 1


def test_on_two_h200s_the_kernels_of_the_trace_are_joined_to_the_ops_of_the_plan() -> None:
    default, plan = content_of("h200_plan")["measuredTimelines"]
    for step in (default, plan):
        spans = [row["spans"][at : at + 5] for row in step["rows"] for at in range(0, len(row["spans"]), 5)]
        unknown = len(step["units"]) - 1
        joined_ns = sum(length for _, length, unit, _, _ in spans if unit != unknown)
        assert joined_ns > 0.95 * sum(length for _, length, *_ in spans)
    # What the simulator says of this plan is what happened: gradients travel while others are computed.
    assert plan["overlap"] > 4 * default["overlap"]
    assert plan["exposed"] < default["exposed"]


@pytest.mark.parametrize("plan", HEADLINES)
def test_a_real_plans_page_is_small_and_names_no_folder_of_the_machine_it_came_from(plan: str) -> None:
    assert 100_000 < len(page_of(plan)) < 3_000_000
    for place in (b"/work/", b"/tmp/", b"/root/", b"/home/"):
        assert place not in page_of(plan)
