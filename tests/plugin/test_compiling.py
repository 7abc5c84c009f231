"""Compiles beside a training: a call is held only for those that need the autotuner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.plugin.measuring.compiling import CompileBatch

KNOWN = BACKENDS["gpu"].by_known_picks


@pytest.mark.parametrize(
    ("other_rank_lacks", "tried"),
    [
        ([], ["a known", "new known", "refused known", "hold", "new tuned", "refused tuned"]),
        (
            [0],
            [
                "a known",
                "new known",
                "refused known",
                "hold",
                "a tuned",
                "new tuned",
                "hold",
                "refused tuned",
            ],
        ),
    ],
)
def test_a_call_is_held_for_what_a_rank_cannot_compile_by_known_picks(
    other_rank_lacks: list[int], tried: list[str]
) -> None:
    said: list[str] = []

    def compiled(name: str, options: Mapping[str, Any]) -> str:
        said.append(f"{name} {'known' if options == KNOWN else 'tuned'}")
        if name == "refused" or (name == "new" and options):
            raise IllegalStrategyError(name)
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
        gathered=lambda lacking, _: [lacking, other_rank_lacks],
    )
    with ThreadPoolExecutor(1) as pool:
        each = [lambda options, name=name: compiled(name, options) for name in ("a", "new", "refused")]
        found = CompileBatch(session, "structures", each, pool, at_once=2).finish()
    assert said == tried
    assert [one.result() for one in found[:2]] == ["a", "new"]
    with pytest.raises(IllegalStrategyError):
        found[2].result()


def test_where_the_autotuner_has_room_all_are_compiled_at_once() -> None:
    session: Any = SimpleNamespace(compiles_between_steps=False)
    asked: list[Mapping[str, Any]] = []
    with ThreadPoolExecutor(1) as pool:
        compiles = CompileBatch(session, "structures", [asked.append, asked.append], pool, at_once=1)
        assert [one.result() for one in compiles.finish()] == [None, None]
    assert asked == [{}, {}]
