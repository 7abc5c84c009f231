from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from disco_hlo.report.page import render
from tests.report import plans
from tests.report.hostile import NAMES, hostile_plan


class Page(HTMLParser):
    """Tags with their attributes, and the text of every script."""

    def __init__(self, page: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(page.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data


def test_the_page_asks_the_network_for_nothing_and_is_small(h200_page: bytes) -> None:
    assert 100_000 < len(h200_page) < 3_000_000
    assert b"The MIT License (MIT)" in h200_page
    assert b"Leon Sorokin" in h200_page
    page = Page(h200_page)
    assert all(not {"src", "href", "srcset", "action"} & attributes.keys() for _, attributes in page.tags)
    assert b"@import" not in h200_page
    assert b"url(" not in h200_page
    metas = [attributes for _, attributes in page.tags if "http-equiv" in attributes]
    policy = metas[0]["content"]
    assert policy is not None
    assert "default-src 'none'" in policy
    data, *scripts = page.scripts
    json.loads(data)
    digests = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == digests
    assert len(scripts) == 2


def test_the_content_has_what_the_page_shows(h200_content: dict[str, Any]) -> None:
    data = h200_content
    strings = data["strings"]
    assert data["head"]["measuredSpeedup"] == 1.23
    assert [strings[one["name"]] for one in data["head"]["candidates"]] == [
        "XLA default",
        "plan",
        "no fusion",
    ]
    assert len(data["groups"]) == 604
    assert sum(len(bucket["members"]) for bucket in data["buckets"]) == 150
    assert len(data["timelines"]) == 2
    assert data["difference"]["groupsInBoth"] == 604
    assert data["difference"]["unitsMoved"] > 0
    assert len(data["allReduce"]["points"]) == 20
    assert len(data["curve"]) == 59
    assert {strings[shape] for shape in data["ops"]["shape"]} > {"f32[1024]"}
    assert data["notes"][0] == "a note"


def test_a_plan_without_its_module_makes_a_page_too(h200_plan: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes((h200_plan / "plan.json").read_bytes())
    data = plans.content(tmp_path / "plan.json")
    assert data["timelines"] == []
    assert data["notes"][-1].startswith("default.hlo.pb.gz does not lie beside the plan")
    assert json.loads(Page(render(data)).scripts[0]) == data
    assert "of each search" not in data["head"]["search"]
    assert data["head"]["seconds"]["searches_s"] == []


def test_searches_made_again_are_listed(h200_plan: Path, tmp_path: Path) -> None:
    plan = json.loads((h200_plan / "plan.json").read_text())
    plan["search"]["searches"] = [12_000, 8_000]
    plan["measured"]["searches_s"] = [20.5, 9.5]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    head = plans.content(tmp_path / "plan.json")["head"]
    assert (head["search"]["evaluations"], head["search"]["of each search"]) == (20_000, "12000 + 8000")
    assert (head["seconds"]["search_s"], head["seconds"]["searches_s"]) == (30.0, [20.5, 9.5])


def test_hostile_names_stay_data(tmp_path: Path) -> None:
    data = plans.content(hostile_plan(tmp_path) / "plan.json")
    page = render(data)
    assert page == render(plans.content(tmp_path / "plan.json")), "equal plans make equal pages"
    read = Page(page)
    assert len(read.scripts) == 3
    assert [tag for tag, _ in read.tags if tag == "img"] == []
    assert json.loads(read.scripts[0]) == json.loads(json.dumps(data))
    assert not re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]", page)
    assert "\u202e" not in page.decode()
    shown = "\n".join(data["strings"])
    assert NAMES[0] in shown
    assert NAMES[1] in shown
    assert r"\x1b[2J\x1b]0;owned\x07 \u202egnp.exe\r\n\t\x00" in shown
    assert "z" * 500 + "… (10" in shown
    assert len(page) < 1_000_000
