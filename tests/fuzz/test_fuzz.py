"""A short run of the fuzzer with fixed seeds, and what the fuzzer itself must do."""

from __future__ import annotations

import importlib
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plan.apply import apply
from disco_hlo.plan.legal import check_order
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.xla import compiles
from tests.fuzz import interpret, pairs
from tests.fuzz.findings import Finding, load, outcomes, save
from tests.fuzz.grammar import Builder
from tests.fuzz.interpret import make_inputs, moved_by_a_bit
from tests.fuzz.pairs import Case, Reference, SkippedError
from tests.fuzz.program import Program
from tests.fuzz.run import Run, Settings
from tests.fuzz.strategies import KINDS, Wanted, wanted
from tests.fuzz.tally import Tally
from tests.fuzz.worker import Worker
from tests.steps.strategies import random_order

SEED = 70_000


@pytest.mark.slow
def test_nothing_is_found_in_a_short_run() -> None:
    # The search is compiled on the product's leg alone; the other has less time.
    programs, strategies, searched = (3, 9, True) if sys.version_info >= (3, 12) else (4, 6, False)
    settings = Settings(
        seed=SEED, pairs=programs * strategies, strategies=strategies, searched=searched, keep=0, jobs=1,
        pair_limit_s=900.0,
    )  # fmt: skip
    run = Run(settings, say=lambda _: None)
    assert run.go().pairs >= 0.74 * settings.pairs
    assert not run.lines, "\n".join(run.lines)


# One pair ----------------------------------------------------------------------------------------


def _difference(swapped: bool = False) -> Program:
    b = Builder()
    x, y = b.argument("f32", 4, 3), b.argument("f32", 4, 3)
    return b.program(b.op("tanh", b.op("sub", *((y, x) if swapped else (x, y)))))


def _applied_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every strategy be applied to ``y - x`` in the place of ``x - y``."""
    other: CanonicalModule = canonicalize(compiles.capture(Case(_difference(swapped=True)).request))
    monkeypatch.setattr(pairs, "apply", lambda *_: apply(unfused(other.graph), other))


def test_a_right_strategy_is_the_same_and_then_repeated() -> None:
    case = Case(_difference())
    found = [case.attempt(Wanted(kind)).kind for kind in ("unfused", "xla", "unfused")]
    assert found == ["same", "same", "repeated"]


def test_a_module_that_computes_something_else_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    _applied_to_another(monkeypatch)
    assert Case(_difference()).attempt(Wanted("unfused")).kind == "unverified"


def test_wrong_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _applied_to_another(monkeypatch)
    monkeypatch.setattr(pairs, "verify", lambda *_: None)
    outcome = Case(_difference()).attempt(Wanted("unfused"))
    assert outcome.kind == "different"
    assert "12 of 12 elements" in outcome.detail


def test_a_right_default_that_the_gate_refuses_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Case(_difference()).attempt(Wanted("default")).kind == "accepted"
    monkeypatch.setattr(pairs, "faults", lambda *_: ["n3 reads n2", "n4 reads n2"])
    outcome = Case(_difference(), by_hand_too=False).attempt(Wanted("default"))
    assert (outcome.kind, outcome.detail) == ("default-gated", "n3 reads n2; n4 reads n2")


@pytest.mark.parametrize("kind", ["known", "earlier", "missed"])
def test_a_wrong_default_is_known_or_wrong_earlier_or_missed(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    evaluate = interpret.evaluate
    monkeypatch.setattr(interpret, "evaluate", lambda _: evaluate(_difference(swapped=True)))
    if kind == "known":
        monkeypatch.setattr(pairs, "faults", lambda *_: ["n3 reads n2"])
    if kind == "missed":
        other = compiles.compile_module(pairs._request_of(_difference(swapped=True)), None)
        monkeypatch.setattr(compiles, "compile_module", lambda *_: other)
    with pytest.raises(SkippedError, match=f"default-{kind}: op by op it is another"):
        Case(_difference())


def test_an_exception_of_ours_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bytes:
        raise KeyError("n7")

    monkeypatch.setattr(pairs, "apply", broken)
    outcome = Case(_difference()).attempt(Wanted("unfused"))
    assert outcome.kind == "broken"
    assert "KeyError: 'n7'" in outcome.detail


def test_what_the_gate_refuses_is_told_from_what_verify_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = tmp_path / "check_module.py"
    gate.write_text(
        "from disco_hlo.errors import PlanError\n"
        "def check_module(data, backend):\n"
        "    raise PlanError('n3 reads what n2 has overwritten')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        pairs, "verify", lambda *_: importlib.import_module("check_module").check_module(b"", "cpu")
    )
    case = Case(_difference())
    assert [case.attempt(Wanted(kind)).kind for kind in ("unfused", "xla")] == ["gated", "own-gated"]
    assert "n3 reads" in Case(_difference()).attempt(Wanted("unfused")).detail


# Comparing ---------------------------------------------------------------------------------------


def _reference(value: np.ndarray[Any, Any], *moved: np.ndarray[Any, Any]) -> Reference:
    return Reference([[value]], tuple([[one]] for one in moved), 2.0**-24, float(np.abs(value).max()))


def test_rounding_is_no_difference_and_two_elements_that_change_places_are_one() -> None:
    value = np.linspace(1, 2, 8, dtype=np.float32)
    rounded = value * np.float32(1 + 2.0**-22)
    assert not _reference(value).difference([[rounded]])
    changed = value[[1, 0, *range(2, 8)]]
    assert _reference(value).difference([[changed]]).startswith("result 0 on device 0: 2 of 8 elements")


def test_what_a_last_bit_moves_far_may_lie_as_far_away() -> None:
    value = np.array([1.0, 2.0], np.float32)
    moved = np.array([1.01, 2.0], np.float32)
    assert not _reference(value, moved).difference([[np.array([1.03, 2.0], np.float32)]])
    assert _reference(value, moved).difference([[np.array([1.0, 2.03], np.float32)]])


def test_integers_are_compared_bit_by_bit() -> None:
    value = np.array([1 << 30, 2], np.int32)
    reference = Reference([[value]], (), 2.0**-24, 1e9)
    assert reference.difference([[value + np.array([1, 0], np.int32)]])


def test_a_number_that_is_none_is_a_difference() -> None:
    value = np.array([1.0, 2.0], np.float32)
    assert _reference(value).difference([[np.array([1.0, np.nan], np.float32)]])


def test_inputs_are_all_different_and_a_bit_moves_each() -> None:
    b = Builder()
    x, y, i = b.argument("f32", 8, 8), b.argument("bf16", 16, 8), b.index(3, limit=3)
    program = b.program(b.op("gather", x, i, axis=0, mode="clip"), y)
    values = make_inputs(program)
    assert [len({*one.reshape(-1).tolist()}) for one in values] == [64, 128, 3]
    moved = moved_by_a_bit(values, 1)
    assert all((moved[k] != values[k]).all() for k in (0, 1))
    assert (moved[2] == values[2]).all()


# Strategies --------------------------------------------------------------------------------------


def test_a_random_order_is_legal_and_not_always_one() -> None:
    b = Builder()
    x = b.argument("f32", 4, 4)
    dots = [b.op("dot", x, x, contract=[[i], [j]], batch=[[], []]) for i, j in ((0, 0), (0, 1), (1, 0))]
    source = Case(b.program(*dots)).source
    strategy: Strategy = read(source)
    units = unit_graph(source.graph, strategy)
    orders = set()
    for seed in range(12):
        order = random_order(units, False, random.Random(seed))
        check_order(units, order, False)
        orders.add(order)
    assert len(orders) > 2


def test_what_is_tried_follows_from_the_seed() -> None:
    assert wanted(3, 12, True) == wanted(3, 12, True) != wanted(4, 12, True)
    assert not {one.kind for one in wanted(3, 12, False)} & {"moves", "search"}
    counts = Counter(one.kind for one in wanted(3, 12, True))
    assert counts == Counter([*KINDS, "random", "random", "order", "moves"])


# Workers -----------------------------------------------------------------------------------------

_ANSWERS = """
import json, sys
say = lambda message: print(json.dumps(message), flush=True)
say({"ready": 1})
sys.stdin.readline()
"""


def _worker(then: str, pair_limit_s: float = 60.0) -> Worker:
    return Worker(
        "cpu", devices=1, pair_limit_s=pair_limit_s, command=(sys.executable, "-c", _ANSWERS + then)
    )


def test_an_abort_is_laid_to_what_was_being_tried() -> None:
    worker = _worker(
        'say({"trying": "unfused:0"})\nimport os\nprint("F1 Check failed", file=sys.stderr)\nos.abort()'
    )
    end = worker.ask({"do": "pairs"}, lambda _: None)
    assert (end.how, end.trying, end.said) == ("aborted", "unfused:0", "F1 Check failed")
    assert worker.process is None


def test_a_worker_that_says_nothing_more_hangs() -> None:
    worker = _worker("sys.stdin.read()", pair_limit_s=0.0)
    assert worker.ask({"do": "pairs"}, lambda _: None).how == "hung"
    assert worker.process is None


def test_behind_a_pair_that_aborts_the_others_are_tried(tmp_path: Path) -> None:
    marker = tmp_path / "aborted"
    then = f"""
import os
if os.path.exists({str(marker)!r}):
    say({{"trying": "xla:0"}})
    say({{"pair": "xla:0", "kind": "same", "detail": ""}})
    say({{"done": True}})
else:
    open({str(marker)!r}, "w").close()
    say({{"trying": "unfused:0"}})
    os.abort()
"""
    with _worker(then) as worker:
        found, skipped = outcomes(worker, _difference(), [Wanted("unfused"), Wanted("xla")])
    assert [(str(one), kind) for one, kind, _ in found] == [("unfused:0", "aborted"), ("xla:0", "same")]
    assert not skipped


def test_an_abort_of_the_default_is_no_finding() -> None:
    worker = _worker('say({"trying": "XLA\'s default"})\nimport os\nos.abort()')
    found, skipped = outcomes(worker, _difference(), [Wanted("unfused")])
    assert not found
    assert skipped.startswith("default: aborted")


# Files -------------------------------------------------------------------------------------------


def test_a_finding_is_saved_under_a_name_that_says_what_it_is(tmp_path: Path) -> None:
    finding = Finding(_difference(), Wanted("random", 7), "different", "result 0", 11)
    path = save(finding, tmp_path)
    assert path.name.startswith("different-sub-tanh-")
    assert load(path) == finding


def test_a_default_before_the_gate_is_no_pair() -> None:
    counts = Tally(Counter({"accepted": 3, "default-gated": 1, "same": 2}))
    assert (counts.pairs, counts.found) == (2, 1)


def test_a_run_of_defaults_ends_after_so_many_programs() -> None:
    run = Run(Settings(seed=5, programs=2, defaults=True))
    assert [run._take_seed() for _ in range(3)] == [5, 6, None]
