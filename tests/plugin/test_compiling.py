"""Compiles beside a training: a call is held only for those that need the autotuner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import IllegalStrategyError, XlaRefusalError
from disco_hlo.plugin.measuring.compiling import CompileBatch

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

    session: Any = SimpleNamespace(
        compiles_between_steps=True,
        compiling=compiling,
        facts=SimpleNamespace(backend="gpu"),
        gathered=lambda mine, _: [mine, elsewhere],
    )
    with ThreadPoolExecutor(1) as pool:
        each = [lambda options, name=name: compiled(name, options) for name in names]
        found = CompileBatch(session, "structures", each, pool, at_once=2).finish()
    assert said == [f"{name} known" for name in names] + tuned
    assert found[0].result() == "a"
    assert (found[1].exception() is None) is ("new tuned" in tuned)
    assert [type(one.exception()) for one in found[2:]] == [XlaRefusalError, IllegalStrategyError]


def test_what_is_new_to_the_autotuner_is_not_tried_by_known_picks() -> None:
    """XLA wrote an error for each kernel that it did not know, hundreds of them, between the lines of the training."""
    session: Any = SimpleNamespace(
        compiles_between_steps=True,
        compiling=lambda _: contextlib.nullcontext(),
        facts=SimpleNamespace(backend="gpu"),
        gathered=lambda mine, _: [mine],
    )
    asked: list[Mapping[str, Any]] = []
    with ThreadPoolExecutor(1) as pool:
        each = [asked.append, asked.append]
        compiles = CompileBatch(session, "structures", each, pool, at_once=1, are_tuned=[True, False])
        assert [one.result() for one in compiles.finish()] == [None, None]
    assert asked == [KNOWN, {}]


def test_where_the_autotuner_has_room_all_are_compiled_at_once() -> None:
    session: Any = SimpleNamespace(compiles_between_steps=False)
    asked: list[Mapping[str, Any]] = []
    with ThreadPoolExecutor(1) as pool:
        compiles = CompileBatch(session, "structures", [asked.append, asked.append], pool, at_once=1)
        assert [one.result() for one in compiles.finish()] == [None, None]
    assert asked == [{}, {}]
