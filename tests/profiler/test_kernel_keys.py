"""Cost keys: equal structure, equal key."""

from __future__ import annotations

from hashlib import blake2b
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.hlo.cost_model import Kernels
from disco_hlo.profiler.kernel_keys import GROUP_PREFIX, group_key, kernel_keys
from tests.profiler.test_keys import F32, TWO_LAYERS
from tests.search.steps import random_step


def test_layers_share_their_key() -> None:
    key = group_key(TWO_LAYERS, {1, 2}, (2,))
    assert key.startswith("g:")
    assert len(key) == 26
    assert group_key(TWO_LAYERS, {4, 5}, (5,)) == key


def test_results_reads_and_emitter_make_another_key() -> None:
    keys = {
        group_key(TWO_LAYERS, {4, 5}, (5,)),
        group_key(TWO_LAYERS, {4, 5}, (4, 5)),
        group_key(TWO_LAYERS, {4, 6}, (6,)),  # reads two different arrays
        group_key(TWO_LAYERS, {4, 5}, (5,), "triton:{}"),
    }
    assert len(keys) == 4


def test_the_key_is_a_digest_of_this_text() -> None:
    """Profiles and stores of earlier versions hold such keys."""
    lines = ["triton {}", f"read {F32} (1, 0)", "key of tanh 0", "key of add 1 0", "1 2"]
    text = "\n".join(lines)
    found = group_key(TWO_LAYERS, (4, 5), (4, 5), "triton {}")
    assert found == GROUP_PREFIX + blake2b(text.encode(), digest_size=12).hexdigest()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(8, 300))
def test_many_keys_at_once_are_the_keys_of_each(seed: int, nodes: int) -> None:
    random = Random(seed)
    graph = random_step(random, nodes)
    kernels = []
    for _ in range(random.randrange(1, 20)):
        members = sorted(random.sample(range(len(graph)), random.randrange(1, len(graph))))
        kernels.append((members, sorted(random.sample(members, random.randrange(1, len(members) + 1)))))
    found = kernel_keys(graph, Kernels.of_lists(*zip(*kernels, strict=True)))
    assert found == [group_key(graph, *kernel) for kernel in kernels]


def test_no_kernel_no_key() -> None:
    assert kernel_keys(TWO_LAYERS, Kernels.of_lists([], [])) == []
