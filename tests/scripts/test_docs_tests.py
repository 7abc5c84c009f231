"""The tests that the documentation names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for path, name in NAMED.findall(page.read_text()):
        assert (ROOT / path).is_file(), path
        assert not name or f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_the_page_on_clusters_names_tests() -> None:
    assert len(NAMED.findall((ROOT / "docs/cluster.md").read_text())) > 20
