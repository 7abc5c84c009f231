"""From instruction times to cost keys: equal structure, equal key."""

from __future__ import annotations

from hashlib import blake2b
from random import Random
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.hlo.canonical import Origin
from disco_hlo.hlo.cost_model import Kernels
from disco_hlo.hlo.proto import Instruction, Module, serialize
from disco_hlo.profiler.instructions import InstructionTimes
from disco_hlo.profiler.keys import GROUP_PREFIX, group_key, kernel_keys, keyed_times, owners
from disco_hlo.profiler.profile import OpTime
from tests.graphs import graph_of
from tests.search.steps import random_step

TWO_LAYERS = graph_of("param; tanh 0; add 1 0; dot 2 2; tanh 3; add 4 3; add 4 2; tuple 5 6")


def test_instructions_of_called_computations_belong_to_their_caller():
    module = Module(name="step", entry_computation_id=1)
    calls = {
        1: [("while.1", [2]), ("start.1", [4])],
        2: [("dot.1", []), ("while.2", [3])],
        3: [("add.1", [])],
        4: [("all-reduce.1", [])],
    }
    for number, instructions in calls.items():
        computation = module.computations.add(id=number)
        for name, called in instructions:
            computation.instructions.add(name=name, called_computation_ids=called)
    assert owners(serialize(module)) == {
        "dot.1": "while.1",
        "while.2": "while.1",
        "add.1": "while.1",
        "all-reduce.1": "start.1",
    }


def origin(name, role, nodes, results, fusion_kind="kLoop"):
    return Origin(name, role, SimpleNamespace(fusion_kind=fusion_kind), nodes, results, ())


def test_times_are_found_under_keys_of_single_ops_and_of_kernels():
    def times(median):
        return InstructionTimes(median, 1, 6, median // 2)

    graph = graph_of("param; tanh 0; add 1 0; dot 2 2; all-reduce 3; tuple 4")
    tiles = b'{"fusion_backend_config":{"kind":"__triton","block_level_fusion_config":{"num_warps":"2"}}}'
    triton = Instruction(opcode="fusion", fusion_kind="kCustom", backend_config=tiles)
    settings = '{"block_level_fusion_config":{"num_warps":"2"},"kind":"__triton"}'
    origins = [
        origin("fusion.1", "fusion", (1, 2), (2,)),
        origin("dot.1", "op", (3,), (3,)),
        origin("dot.2", "op", (3,), (3,)),
        origin("all-reduce.1", "op", (4,), (4,)),
        Origin("triton.1", "fusion", triton, (1, 2), (2,), ()),
        origin("never ran", "op", (2,), (2,)),
    ]
    measured = {
        "fusion.1": times(30),
        "dot.1": times(100),
        "dot.2": times(120),
        "all-reduce.1": times(9),
        "triton.1": times(5),
    }
    assert keyed_times(graph, origins, measured) == {
        graph.nodes[3].key: OpTime(110, 10, 12),
        group_key(graph, (1, 2), (2,)): OpTime(30, 1, 6),
        group_key(graph, (1, 2), (2,), f"triton {settings}"): OpTime(5, 1, 6),
    }


def test_other_collectives_are_timed_from_their_last_arrival():
    graph = graph_of("param; all-gather 0; tuple 1")
    measured = {"all-gather.1": InstructionTimes(80, 1, 6, 25)}
    assert keyed_times(graph, [origin("all-gather.1", "op", (1,), (1,))], measured) == {
        graph.nodes[1].key: OpTime(25, 1, 6)
    }


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
    tanh, add = (TWO_LAYERS.nodes[x].key for x in (4, 5))
    lines = ["triton {}", "read f32[8] (0,)", f"{tanh} 0", f"{add} 1 0", "1 2"]
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
