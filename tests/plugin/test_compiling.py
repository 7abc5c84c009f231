"""Compiles beside a training: a call is held only for those that need the autotuner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import IllegalStrategyError, XlaRefusalError
from disco_hlo.plugin.measuring.compiling import CompileBatch
from tests.plugin.sessions import fake_session

KNOWN = BACKENDS["gpu"].by_known_picks


@pytest.mark.parametrize(
    ("elsewhere", "tuned"),
    [
        ([], ["hold", "new tuned", "invalid tuned"]),
        ([[0, False]], ["hold", "a tuned", "new tuned", "hold", "invalid tuned"]),
        ([[1, True]], ["hold", "invalid tuned"]),
        ([[1, True], [2, True]], []),
    ],
    ids=["known elsewhere", "one more is new elsewhere", "one is refused elsewhere", "all are"],
)
def test_a_call_is_held_for_what_a_rank_cannot_compile_by_known_picks(
    elsewhere: list[list[int | bool]], tuned: list[str]
) -> None:
    """A module that we refuse ourselves, as :func:`verify` does, was compiled anew while a call was held."""
    said, names = list[str](), ("a", "new", "invalid", "refused")

    def compiled(name: str, options: Mapping[str, Any]) -> str:
        said.append(f"{name} {'known' if options == KNOWN else 'tuned'}")
        if name == "refused":
            raise IllegalStrategyError(name)
        if name == "invalid" or (name == "new" and options):
            raise XlaRefusalError(name)
        return name

    @contextlib.contextmanager
    def compiling(what: str) -> Iterator[None]:
        assert what == "structures"
        said.append("hold")
        yield

    session = fake_session(
        compiles_between_steps=True, compiling=compiling, gathered=lambda mine, _: [mine, elsewhere]
    )
    with ThreadPoolExecutor(1) as pool:
        each = [lambda options, name=name: compiled(name, options) for name in names]
        found = CompileBatch(session, "structures", each, pool, at_once=2).finish()
    assert said == [f"{name} known" for name in names] + tuned
    assert found[0].result() == "a"
    assert (found[1].exception() is None) is ("new tuned" in tuned)
    assert [type(one.exception()) for one in found[2:]] == [XlaRefusalError, IllegalStrategyError]


@pytest.mark.parametrize(
    ("between_steps", "more", "expected"),
    [(True, {"are_tuned": [True, False]}, [KNOWN, {}]), (False, {}, [{}, {}])],
    ids=[
        "what is new to the autotuner is not tried by known picks",
        "where it has room all are compiled at once",
    ],
)
def test_which_of_two_compiles_go_by_known_picks(
    between_steps: bool, more: dict[str, Any], expected: list[Mapping[str, Any]]
) -> None:
    """XLA wrote an error for each kernel that it did not know, hundreds of them, between the lines of the training."""
    asked: list[Mapping[str, Any]] = []
    session = fake_session(compiles_between_steps=between_steps)
    with ThreadPoolExecutor(1) as pool:
        compiles = CompileBatch(session, "structures", [asked.append] * 2, pool, at_once=1, **more)
        assert [one.result() for one in compiles.finish()] == [None, None]
    assert asked == expected
