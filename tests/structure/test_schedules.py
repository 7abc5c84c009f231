"""Whole schedules on real steps: the same numbers, and the collectives that the schedule says."""

from __future__ import annotations

from functools import cache, lru_cache

import jax.numpy as jnp
import pytest

from disco_hlo.structure.moves import Chunk, Move
from disco_hlo.structure.propose import UNCHANGED, schedules
from tests.structure import steps
from tests.structure.enact import Run, assert_same, count_ops, moved, run

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather")


def collectives(found: Run) -> tuple[int, ...]:
    return tuple(count_ops(found.text, opcode) for opcode in COLLECTIVES)


@cache
def proposed(module: bytes) -> dict[str, tuple[Move, ...]]:
    return schedules(module)


@lru_cache(maxsize=2)
def forward_pass(layers: int) -> Run:
    return run(steps.forward, steps.transformer(2, layers, jnp.float32)[:2])


@lru_cache(maxsize=1)
def training_step() -> Run:
    return run(steps.train, steps.transformer(2, 1, jnp.float32))


FORWARD = {
    "chunk-2": (4, 0, 0),
    "chunk-4": (8, 0, 0),
    "chunk-2-matmul": (4, 0, 0),
    "split": (0, 2, 2),
    "overlap": (4, 0, 0),
    "split-overlap": (0, 4, 4),
}
"""All-reduces, reduce-scatters and all-gathers of a layer; XLA's own: two all-reduces."""


@pytest.mark.parametrize("name", FORWARD)
def test_forward_pass_of_a_tensor_parallel_transformer(name: str) -> None:
    layers = 1 + (name == "split")
    expected = forward_pass(layers)
    assert collectives(expected) == (2 * layers, 0, 0)
    found = moved(expected, proposed(expected.module)[name])
    assert collectives(found) == tuple(layers * count for count in FORWARD[name])
    assert_same(found, expected, TOLERANCE["float32"])


@pytest.mark.parametrize("name", ["chunk-2", "chunk-2-whole-gradients", "split"])
def test_training_step_of_a_tensor_parallel_transformer(name: str) -> None:
    expected = training_step()
    found = moved(expected, proposed(expected.module)[name])
    before, after = collectives(expected), collectives(found)
    if name == "split":
        assert after[1] == before[0]
        assert after[2] > 0
    else:
        assert after == (2 * before[0], 0, 0)
    assert_same(found, expected, 1e-5)


def test_the_stretch_spans_forward_and_backward_pass() -> None:
    expected = training_step()
    (move,) = proposed(expected.module)["chunk-2"]
    assert isinstance(move, Chunk)
    assert move.opcodes.count("all-reduce") == count_ops(expected.text, "all-reduce")
    assert move.opcodes.count("dot") == count_ops(expected.text, "dot")
    assert min(move.dimensions) < 0, "weight gradients close the stretch as partial sums"


EXAMPLE = {
    UNCHANGED: (1, 0, 0),
    "chunk-2-matmul": (2, 0, 0),
    "split": (0, 1, 1),
    "overlap": (2, 0, 0),
    "split-overlap": (0, 2, 2),
}


@pytest.mark.parametrize(("dtype", "devices"), [("float32", 2), ("bfloat16", 4)])
def test_every_schedule_of_coconets_running_example(dtype: str, devices: int) -> None:
    expected = run(steps.example, steps.example_arguments(devices, jnp.dtype(dtype)))
    by_name = proposed(expected.module)
    assert set(EXAMPLE) <= set(by_name)
    assert by_name[UNCHANGED] == ()
    for name, counts in list(EXAMPLE.items())[1:]:
        found = moved(expected, by_name[name])
        assert collectives(found) == counts, name
        assert_same(found, expected, TOLERANCE[dtype])
        if name == "split":
            gather = next(line for line in found.text.splitlines() if " all-gather(" in line)
            assert gather.lstrip().startswith("ROOT"), "the pointwise work is all on shards"


@pytest.mark.parametrize("devices", [2, 4])
def test_adam_with_sharded_state_scatters_the_gradient(devices: int) -> None:
    arguments, shardings = steps.adam_arguments(devices)
    expected = run(steps.adam, arguments, out_shardings=shardings)
    assert collectives(expected) == (1, 0, 1)
    found = moved(expected, proposed(expected.module)["sharded-update"])
    assert collectives(found) == (0, 1, 1)
    assert_same(found, expected, 1e-5)


def test_adam_with_replicated_state_has_no_sharded_update() -> None:
    arguments, _ = steps.adam_arguments(2)
    whole = steps.place(steps.mesh(2, "data"), arguments, (steps.P(),) * 3 + (steps.P("data"),) * 2)
    expected = run(steps.adam, whole)
    assert "sharded-update" not in proposed(expected.module)


def test_a_module_without_collectives_has_no_schedule() -> None:
    expected = run(lambda x: x @ x, (jnp.ones((4, 4)),))
    assert proposed(expected.module) == {}
