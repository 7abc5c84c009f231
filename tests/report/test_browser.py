"""The page in a real browser: headless Chromium, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.plan.read import read
from disco_hlo.plan.variants import unfused
from disco_hlo.report.page import render
from tests.captured import captured, stored
from tests.report import plans
from tests.report.hostile import NAMES, hostile_plan

pytestmark = pytest.mark.browser

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH (apt-get install chromium, or CHROMIUM=/path/to/it)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def h200_file(h200_page: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_bytes(h200_page)
    return path


class Opened:
    """A page with everything that it complained about or asked for."""

    def __init__(self, browser: Any, path: Path, viewport: dict[str, int], **context: Any) -> None:
        self.context = browser.new_context(viewport=viewport, **context)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-drawn=yes]")

    def zoom(self) -> tuple[float, float]:
        low, high = self.page.evaluate("[timeline.dataset.min, timeline.dataset.max]")
        return float(low), float(high)

    def over(self) -> dict[str, float]:
        box: dict[str, float] = self.page.locator("#timeline .u-over").bounding_box()
        return box

    def close(self) -> None:
        self.context.close()


@pytest.fixture(scope="module", params=["desktop", "phone"])
def opened(request: pytest.FixtureRequest, browser: Any, h200_file: Path) -> Iterator[Opened]:
    """One page for all tests of a size: each leaves it as it was, but for the last, which filters its tables."""
    size = DESKTOP if request.param == "desktop" else PHONE
    page = Opened(browser, h200_file, size, color_scheme="light", has_touch=size is PHONE)
    yield page
    page.close()


def found_by_a_click(opened: Opened, shares: Sequence[float]) -> Any:
    """The row that a click in the plan's communication leads to, at the first of these shares of the step where the
    link is busy."""
    opened.page.locator("#when").scroll_into_view_if_needed()
    over, found = opened.over(), opened.page.locator("details.found")
    for share in shares:
        opened.page.mouse.click(over["x"] + over["width"] * share, over["y"] + over["height"] * 0.875)
        if found.count():
            break
    assert found.count() == 1
    return found


def unfold(row: Any) -> None:
    """Open a row of a table; what is inside is made a moment later."""
    row.locator("summary").click()
    row.locator(".inside").wait_for()


def test_it_opens_without_complaint_and_without_the_network(opened: Opened) -> None:
    assert opened.page.title() == "jit_train_step: plan"
    assert "1.23× faster, measured" in opened.page.inner_text("#headline")
    for section in ("why", "measured", "when", "buckets", "groups", "curve", "fit", "settings"):
        assert opened.page.locator(f"#{section}").is_visible()
    assert opened.page.locator("canvas").count() == 3
    width, window = opened.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width <= window
    assert opened.complaints == []
    assert len(opened.requests) == 1


def test_hovering_says_what_a_span_is(opened: Opened) -> None:
    opened.page.locator("#when").scroll_into_view_if_needed()
    over, tip = opened.over(), opened.page.locator("#tip")
    assert not tip.is_visible()
    opened.page.mouse.move(over["x"] + over["width"] * 0.2, over["y"] + over["height"] * 0.125)
    assert " from " in tip.inner_text()
    assert " to " in tip.inner_text()
    opened.page.mouse.move(over["x"] + over["width"] * 0.9, over["y"] + over["height"] * 0.375)
    assert "all-reduce" in tip.inner_text()
    assert "exposed: " in tip.inner_text()
    opened.page.mouse.move(2, 2)
    assert not tip.is_visible()
    assert opened.complaints == []


def test_dragging_buttons_and_double_click_zoom(opened: Opened) -> None:
    opened.page.locator("#when").scroll_into_view_if_needed()
    whole = opened.zoom()
    over = opened.over()
    middle = over["y"] + over["height"] / 2
    opened.page.mouse.move(over["x"] + over["width"] * 0.4, middle)
    opened.page.mouse.down()
    opened.page.mouse.move(over["x"] + over["width"] * 0.6, middle, steps=4)
    opened.page.mouse.up()
    low, high = opened.zoom()
    assert whole[0] < low < high < whole[1]
    assert (high - low) / (whole[1] - whole[0]) == pytest.approx(0.2, abs=0.02)
    opened.page.click("#zoom-in")
    assert (opened.zoom()[1] - opened.zoom()[0]) == pytest.approx((high - low) / 2, rel=1e-6)
    opened.page.click("#zoom-out")
    assert opened.zoom() == pytest.approx((low, high), rel=1e-6)
    opened.page.mouse.dblclick(over["x"] + over["width"] * 0.5, middle)
    opened.page.click("#zoom-all")
    assert opened.zoom() == pytest.approx(whole)
    assert opened.complaints == []


def test_the_theme_switches_and_the_charts_with_it(opened: Opened) -> None:
    def seen() -> list[Any]:
        found: list[Any] = opened.page.evaluate(
            "[document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor,"
            " document.querySelector('#timeline canvas').toDataURL()]"
        )
        return found

    opened.page.mouse.move(2, 2)
    light = seen()
    opened.page.click("#theme")
    opened.page.wait_for_timeout(100)
    dark = seen()
    assert light[:2] == ["light", "rgb(255, 255, 255)"]
    assert dark[:2] == ["dark", "rgb(15, 19, 24)"]
    assert len(light[2]) > 1000
    assert light[2] != dark[2]
    opened.page.click("#theme")
    opened.page.wait_for_timeout(100)
    assert seen() == light
    assert opened.complaints == []


def test_a_dark_system_gets_a_dark_page(browser: Any, h200_file: Path) -> None:
    page = Opened(browser, h200_file, DESKTOP, color_scheme="dark")
    assert page.page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.close()


def test_buckets_and_groups_open_filter_and_sort(opened: Opened) -> None:
    page = opened.page
    bucket = page.locator("#bucket-rows details").nth(1)
    unfold(bucket)
    assert "ready at" in bucket.inner_text()
    assert bucket.locator("tbody tr").count() == 11
    page.fill("#group-filter", "rsqrt")
    shown = page.locator("#group-rows details")
    assert 0 < shown.count() < 40
    assert "rsqrt" in shown.first.inner_text()
    unfold(shown.first)
    assert "jit(train_step)" in shown.first.inner_text()
    page.fill("#group-filter", "")
    before = shown.count()
    page.click("#more-groups")
    assert shown.count() == 6 * before
    page.select_option("#group-order", "saved")
    assert "9.13 GiB" in shown.first.inner_text()
    assert opened.complaints == []


def test_a_click_in_the_timeline_opens_the_row_that_explains_it(browser: Any, h200_file: Path) -> None:
    opened = Opened(browser, h200_file, DESKTOP)
    found = found_by_a_click(opened, (0.9, 0.8, 0.7, 0.6, 0.5))
    assert found.get_attribute("open") is not None
    assert (found.get_attribute("id") or "").startswith("unit-b")
    opened.close()


def test_hostile_names_are_shown_as_text(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_bytes(render(plans.content(hostile_plan(tmp_path / "plan") / "plan.json")))
    opened = Opened(browser, path, PHONE)
    page = opened.page
    assert page.inner_text("#module") == f"jit_{NAMES[0]}"
    for row in page.locator("#group-rows details, #bucket-rows details").all():
        unfold(row)
    shown = page.inner_text("main")
    assert NAMES[0] in shown
    assert NAMES[1] in shown
    assert r"\x1b[2J" in shown
    assert "… (10" in shown
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 3
    over = opened.over()
    for part in range(1, 20):
        page.mouse.move(over["x"] + over["width"] * part / 20, over["y"] + over["height"] * 0.125)
    assert page.title() == f"jit_{NAMES[0]}: plan"
    width, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width <= window
    assert opened.complaints == []
    opened.close()


def test_hundreds_of_buckets_are_shown_by_pages(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "many.html"
    source = plans.h200()
    folder = plans.save_plan(tmp_path / "plan", source, plans.h200_module(), unfused(source.graph))
    data = plans.content(folder / "plan.json")
    path.write_bytes(render(data))
    opened = Opened(browser, path, DESKTOP)
    rows = opened.page.locator("#bucket-rows details")
    assert len(data["buckets"]) == 150
    assert rows.count() == 40
    assert opened.page.inner_text("#more-buckets") == "Show more (110 left)"
    first = {f"unit-{bucket['token']}" for bucket in data["buckets"][:40]}
    found = found_by_a_click(
        opened, [share / 100 for share in range(99, 50, -1)]
    )  # one of the last collectives
    assert found.get_attribute("id") not in first
    assert rows.count() == 150
    assert not opened.page.locator("#more-buckets").is_visible()
    assert opened.complaints == []
    opened.close()


def test_a_region_is_chosen_and_its_timeline_and_kernels_are_shown(browser: Any, tmp_path: Path) -> None:
    name = "h100_llama/fsdp_scan"
    source = captured(name)
    folder = plans.save_plan(tmp_path / "plan", source, stored(name), read(source), measured=None)
    (tmp_path / "page.html").write_bytes(render(plans.content(folder / "plan.json")))
    page = Opened(browser, tmp_path / "page.html", DESKTOP)
    entry = page.page.inner_text("#group-summary")
    page.page.select_option("#region", "loop2")
    assert page.page.inner_text("#when-head") == "Timeline of one execution of loop2, simulated"
    assert page.page.inner_text("#group-summary") != entry
    assert page.page.locator("#timeline canvas").count() == 1
    page.page.select_option("#region", "entry")
    assert page.page.inner_text("#group-summary") == entry
    assert page.complaints == []
    page.close()
