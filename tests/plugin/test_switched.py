"""Ranks that have the plugin know at once which others have not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from disco_hlo.plugin import switched
from disco_hlo.plugin.xla import jaxlink


class Client:
    """The key-value store of a job, as far as ranks announce themselves there."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.key_value_dir_get_bytes = lambda _: list(self.values.items())

    def key_value_set_bytes(self, key: str, value: bytes, _allow_overwrite: bool) -> None:
        self.values[key] = value


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    yield
    switched._having.cache_clear()
    switched._say.cache_clear()


def lacks(monkeypatch: pytest.MonkeyPatch, having: list[int], rank: int, processes: tuple[int, ...]) -> bool:
    """Whether a module on these processes lacks ranks, as ``rank`` sees it, where those ``having`` it say so."""
    client = Client()
    for one in (*having, rank):
        job = jaxlink.DistributedJob(client, "host:1234", 1, one)
        monkeypatch.setattr(jaxlink, "distributed_job", lambda job=job: job)
        if one in having:
            switched.announce()
    request: Any = SimpleNamespace(
        process_indices=processes, backend=SimpleNamespace(process_index=lambda: rank)
    )
    return switched.lacks_ranks(request)


@pytest.mark.parametrize(
    ("having", "rank", "processes", "expected"),
    [
        ([0, 1], 1, (0, 1), False),
        ([0], 0, (0, 1), True),
        ([0], 0, (0,), False),
        ([1, 2], 1, (1, 2), False),
        ([0], 1, (0, 1), False),
    ],
    ids=["all have it", "one lacks it", "its own module", "those it runs on have it", "it has not either"],
)
def test_a_module_lacks_ranks_where_one_that_runs_it_has_said_nothing(
    having: list[int],
    rank: int,
    processes: tuple[int, ...],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert lacks(monkeypatch, having, rank, processes) is expected
    assert switched.said() is expected


@pytest.mark.parametrize(("rank", "level"), [(1, logging.WARNING), (3, logging.DEBUG)])
def test_the_first_rank_that_has_it_speaks_once(
    rank: int, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "disco_hlo")
    for _ in range(2):
        assert lacks(monkeypatch, [1, 3], rank, (0, 1, 2, 3))
    [line] = caplog.records
    assert line.levelno == level
    assert "of 4 ranks, ranks 0, 2 do not have ENABLE_SEARCH" in line.getMessage()
