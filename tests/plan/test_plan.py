"""Plans as files: what goes out comes back, and nothing else gets in."""

from __future__ import annotations

import json

import pytest
from msgspec import UNSET

from disco_hlo.errors import PlanError
from disco_hlo.plan import plan as plans
from disco_hlo.plan.plan import Bucket, Candidate, Group, Measured, Plan, Strategy, decode, encode
from tests.made_plans import made_plan


def small_plan(median_ns: int = 90) -> Plan:
    return made_plan(
        plans.Target("a" * 64, "f" * 64, "jit_step", "cpu", "cpu", 2, 2),
        Strategy((Group((1, 2, 3), (4,)),), (Bucket((5, 6)),), ("g0", "b0", "n7")),
        b"module",
        measured=Measured(
            "2026-11-20T00:00:00", (Candidate("plan", 80, median_ns, 1, 5),), (), 1.0, 1.0, 1.0, 10.0
        ),
    )


def edited(**changes: object) -> bytes:
    document = json.loads(encode(small_plan()))
    document.update(changes)
    return json.dumps(document).encode()


def regions(*computations: str, **parts: object) -> dict[str, object]:
    return {"regions": [{"computation": one, **parts} for one in computations or ("entry",)]}


def test_a_plan_comes_back_as_it_went_out_and_says_nothing_of_what_it_lacks() -> None:
    data = encode(small_plan())
    assert decode(data, "plan.json") == small_plan()
    assert b'"nodes": [1, 2, 3]' in data, "lists of node numbers stand on one line"
    assert b"structure" not in data
    assert decode(data, "plan.json").structure is UNSET


def searched_twice() -> dict[str, dict[str, object]]:
    document = json.loads(encode(small_plan()))
    return {
        "search": {**document["search"], "evaluations": 30, "searches": [20, 10]},
        "measured": {**document["measured"], "search_s": 3.5, "searches_s": [2.25, 1.25]},
    }


def test_a_search_made_again_is_told_with_the_one_before() -> None:
    plan = decode(edited(**searched_twice()), "plan.json")
    assert plan.search.searches == (20, 10)
    assert plan.measured is not None
    assert plan.measured.searches_s == (2.25, 1.25)
    assert decode(encode(plan), "plan.json") == plan


def test_a_plan_of_one_search_lists_none() -> None:
    assert b"searches" not in encode(small_plan())
    plan = decode(encode(small_plan()), "plan.json")
    assert plan.measured is not None
    assert plan.search.searches is plan.measured.searches_s is UNSET


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("search", {"searches": [20, 11]}, "expected 30 in all"),
        ("search", {"searches": [30]}, "length >= 2"),
        ("search", {"searches": [31, -1]}, ">= 0"),
        ("search", {"evaluations": 60, "searches": [20, 10, 30]}, "3 searches that took 2 times"),
        ("measured", {"searches_s": [2.25, 1.5]}, "expected 3.5 s in all"),
    ],
)
def test_searches_that_do_not_add_up_are_refused(part: str, change: dict[str, object], message: str) -> None:
    document = searched_twice()
    document[part].update(change)
    with pytest.raises(PlanError, match=message):
        decode(edited(**document), "plan.json")


def restructured(**changes: object) -> bytes:
    structure = {
        "name": "chunk-2", "key": "c" * 64, "result": "d" * 64,
        "moves": [{"move": "chunk", "instructions": [4, 5], "parts": 2}], **changes,
    }  # fmt: skip
    return edited(structure=structure)


def test_moves_come_back_as_they_went_out() -> None:
    plan = decode(restructured(), "plan.json")
    assert plan.structure is not UNSET
    assert plan.structure.name == "chunk-2"
    assert plan.structure.moves == ({"move": "chunk", "instructions": [4, 5], "parts": 2},)
    assert decode(encode(plan), "plan.json") == plan
    assert encode(plan) == encode(decode(encode(plan), "plan.json"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (restructured(moves=[]), r"length >= 1.*structure\.moves"),
        (restructured(moves=["chunk"]), r"structure\.moves\[0\]"),
        (restructured(key="x"), r"structure\.key"),
        (restructured(surprise=1), "unknown field `surprise`"),
        (edited(structure=None), "structure"),
        (b"", "truncated"),
        (encode(small_plan())[:200], "expected a plan as JSON"),
        (b"\xff\xfe\x00", "expected a plan as JSON"),
        (b"[" * 100_000, "recursion|depth"),
        (b"[]", "expected a JSON object"),
        (b'{"format": "something else"}', '"format": "disco-hlo plan"'),
        (edited(version=99), "plan version 99; this disco-hlo reads version 2"),
        (edited(version=1), "plan version 1; this disco-hlo reads version 2; search again"),
        (
            edited(strategy=regions("entry", "loop2", "loop1")),
            "others in ascending order, .*; found entry, loop2, loop1",
        ),
        (edited(strategy=regions("body.3")), 'expected the region "entry", then others .*; found body.3'),
        (edited(strategy={"regions": []}), "array` of length >= 1"),
        (edited(strategy={"groups": []}), "strategy"),
        (edited(strategy=regions(kernels=[])), "unknown field `kernels`"),
        (edited(surprise=1), "unknown field `surprise`"),
        (edited(module_sha256="../../etc"), "module_sha256"),
        (edited(strategy=regions(groups=[{"nodes": ["x"]}])), r"groups\[0\]\.nodes\[0\]"),
        (edited(strategy=regions(groups=[{"nodes": [1], "kind": 7}])), "kind"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_place_and_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(PlanError, match=message) as refused:
        decode(data, "plan.json")
    assert str(refused.value).startswith("plan.json: ")


def test_a_plan_larger_than_any_step_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_BYTES", 100)
    with pytest.raises(PlanError, match="more than a plan may have"):
        decode(encode(small_plan()), "plan.json")
