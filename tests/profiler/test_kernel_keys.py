"""Keys of many kernels at once are the keys of each."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.hlo.graph import Graph
from disco_hlo.profiler import kernel_keys as kernel_keys_module
from disco_hlo.profiler.kernel_keys import kernel_keys, key_texts
from disco_hlo.profiler.keys import GROUP_PREFIX, group_key
from tests.search.random_steps import random_step


def keys_of(graph: Graph, kernels: list[tuple[list[int], list[int]]]) -> list[str]:
    member_at = np.cumsum([0, *(len(members) for members, _ in kernels)])
    result_at = np.cumsum([0, *(len(results) for _, results in kernels)])
    members = np.array([x for members, _ in kernels for x in members], np.int64)
    results = np.array([x for _, results in kernels for x in results], np.int64)
    return [
        GROUP_PREFIX + key for key in kernel_keys(key_texts(graph), member_at, members, result_at, results)
    ]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(8, 300))
def test_many_keys_at_once_are_the_keys_of_each(seed: int, nodes: int) -> None:
    random = Random(seed)
    graph = random_step(random, nodes)
    kernels = []
    for _ in range(random.randrange(1, 20)):
        members = sorted(random.sample(range(len(graph)), random.randrange(1, len(graph))))
        kernels.append((members, sorted(random.sample(members, random.randrange(1, len(members) + 1)))))
    assert keys_of(graph, kernels) == [group_key(graph, *kernel) for kernel in kernels]


def test_texts_too_long_for_the_room_kept_get_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_keys_module, "_ROOM_WORDS", 1)
    graph = random_step(Random(2), 200)
    members = list(range(len(graph)))
    assert keys_of(graph, [(members, members[-1:])] * 9) == [group_key(graph, members, members[-1:])] * 9


def test_no_kernel_no_key() -> None:
    assert keys_of(random_step(Random(1), 10), []) == []
