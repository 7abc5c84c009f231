"""The tests, files and sections that the documentation names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for path, name in NAMED.findall(page.read_text()):
        assert (ROOT / path).is_file(), path
        assert not name or f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))


def sections(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for file, section in LINK.findall(page.read_text()):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not section or section in sections(target), f"{file}#{section}"


def test_links_are_found_at_all() -> None:
    assert sum(len(LINK.findall(page.read_text())) for page in PAGES) > 50
