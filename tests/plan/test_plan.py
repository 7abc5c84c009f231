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
        (b"[" * 100_000, "expected a plan as JSON: something in it is nested too deep"),
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
