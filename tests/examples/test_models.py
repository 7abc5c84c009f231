"""The models: their sizes as published, their mathematics, and a data-parallel step of each."""

import dataclasses
import functools
import importlib
import re
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import parallel
import pytest
import train
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import reformer, resnet50, rnnlm, training

# Tensors exchanged by a tiny step of one layer, or two stages: one per trained tensor (two or three for an embedding
# that is used more than once), one per running statistic, and the means the loss is made of. The layers of bert are
# those of transformer, and vgg19's those of resnet50.
EXCHANGED: dict[str, tuple[dict[str, Any], int]] = {
    "gpt12": ({"layers": 1}, 16 + 1 + 1),
    "reformer": ({"layers": 1}, 18 + 1),
    "resnet50": ({"blocks": (1, 1)}, 29 + 18 + 1),
    "rnnlm": ({}, 9 + 1),
    "transformer": ({"layers": 1}, 31 + 2 + 1),
}


@pytest.fixture(autouse=True)
def quick_compiles() -> Iterator[None]:
    # The default random bits are a hundred instructions for every initial parameter.
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_default_prng_impl", "threefry2x32")


def built(model: str, size: str, **changes: Any) -> training.Training:
    """A model whose configuration is changed where it has what changes."""
    module = importlib.import_module(f"models.{model}")
    config = training.read_config(module.Config, train.CONFIGS / f"{model}.toml", size)
    own = {name: value for name, value in changes.items() if hasattr(config, name)}
    made: training.Training = module.build(dataclasses.replace(config, **own))
    return made


@functools.cache
def full_size(model: str, **fewer: int) -> tuple[training.Training, Any, Any]:
    """The model that computes in bfloat16, and the shapes of its state and batch."""
    made = built(model, "full", compute_dtype="bfloat16", **fewer)
    return made, *training.abstract_arguments(made, made.batch_per_device)


def random(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.mark.parametrize(
    ("model", "published", "exact", "tolerance"),
    [
        ("bert", 110e6, 110_106_428, 0.01),
        ("gpt12", 160e6, 160_069_632, 0.01),
        ("resnet50", 25.6e6, 25_557_032, 0.01),
        ("rnnlm", 66e6, 66_022_000, 0.01),
        # 65 M is the paper's rounding: with its 37000 shared word pieces its equations give this number.
        ("transformer", 65e6, 63_045_632, 0.031),
        ("vgg19", 143.7e6, 143_667_240, 0.01),
    ],
)
def test_full_size_has_the_published_number_of_parameters(
    model: str, published: float, exact: int, tolerance: float
) -> None:
    assert training.parameter_count(full_size(model)[1]) == exact
    assert exact == pytest.approx(published, rel=tolerance)


def test_gpt12_exchanges_610_mib_of_gradients_in_148_tensors() -> None:
    leaves = jax.tree.leaves(full_size("gpt12")[1].params)
    assert len(leaves) == 148
    assert sum(leaf.size * 4 for leaf in leaves) // 2**20 == 610


@pytest.mark.parametrize("model", train.MODELS)
def test_full_size_step_in_bfloat16_keeps_the_state_as_it_was(model: str) -> None:
    made, state, batch = full_size(model, layers=2)
    after, loss = jax.eval_shape(made.step, state, batch)
    assert after == state
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


@pytest.mark.parametrize("model", EXCHANGED)
def test_tiny_model_trains_on_two_devices_and_exchanges_gradients_alone(model: str) -> None:
    fewer, expected = EXCHANGED[model]
    made = built(model, "tiny", **fewer)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    shardings = parallel.Shardings(
        NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    )
    state = parallel.initial_state(made.init, 0, shardings)
    rows = training.make_rows(made.example, 0, 0, range(2 * made.batch_per_device))
    batch = jax.device_put(rows, shardings.batch)
    step = parallel.compile_step(made.step, shardings).lower(state, batch).compile()

    text = step.as_text()
    collectives = re.findall(r" (all-gather|all-to-all|collective-permute|reduce-scatter)\(", text)
    exchanged = [re.sub(r"[^%]", "", operands) for operands in re.findall(r" all-reduce\(([^)]*)\)", text)]
    assert collectives == []
    assert sum(map(len, exchanged)) == expected

    losses = []
    for _ in range(3):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert np.isfinite(losses).all()
    assert losses[2] < losses[0]


def test_rows_of_a_batch_do_not_depend_on_who_makes_them() -> None:
    example = train.load("gpt12", "tiny").example
    whole = training.make_rows(example, 3, 5, range(4))["tokens"]
    part = training.make_rows(example, 3, 5, range(2, 4))["tokens"]
    np.testing.assert_array_equal(whole[2:], part)
    assert not np.array_equal(whole[0], whole[1])


def test_batch_norm_normalises_each_group_by_itself() -> None:
    norm = resnet50.GroupBatchNorm(group_rows=2, decay=0.9, dtype=jnp.float32)
    x = random((4, 3, 3, 5), 0) * jnp.array([1.0, 1, 7, 7])[:, None, None, None]
    variables = norm.init(jax.random.key(0), x)
    y, updated = norm.apply(variables, x, mutable=["batch_stats"])
    halves = [norm.apply(variables, half, mutable=["batch_stats"])[0] for half in (x[:2], x[2:])]
    np.testing.assert_allclose(y, jnp.concatenate(halves), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y[2:].mean((0, 1, 2)), np.zeros(5), atol=1e-5)
    np.testing.assert_allclose(y[2:].var((0, 1, 2)), np.ones(5), rtol=1e-3)
    expected = 0.1 * (x[:2].mean((0, 1, 2)) + x[2:].mean((0, 1, 2))) / 2
    np.testing.assert_allclose(updated["batch_stats"]["mean"], expected, rtol=1e-5, atol=1e-6)


def test_lstm_gradients_are_those_of_autodiff() -> None:
    recurrent, gates_x = 0.3 * random((4, 16), 0), random((5, 3, 16), 1)

    def plain(recurrent: jax.Array, gates_x: jax.Array) -> jax.Array:
        hidden = cell = jnp.zeros((3, 4))
        outputs = []
        for gate_x in gates_x:
            hidden, cell = rnnlm.advance(cell, gate_x + hidden @ recurrent)
            outputs.append(hidden)
        return jnp.stack(outputs)

    def loss(lstm: Any) -> Any:
        return lambda *arguments: (jnp.sin(jnp.arange(60.0)).reshape(5, 3, 4) * lstm(*arguments)).sum()

    found = jax.jit(jax.value_and_grad(loss(rnnlm.lstm), (0, 1)))(recurrent, gates_x)
    expected = jax.jit(jax.value_and_grad(loss(plain), (0, 1)))(recurrent, gates_x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)


attend = jax.jit(reformer.attend, static_argnames="chunk")


def test_lsh_attention_in_one_bucket_is_full_causal_attention_with_shared_queries_and_keys() -> None:
    query, value = random((2, 3, 8, 4), 0), random((2, 3, 8, 4), 1)
    found = attend(query, value, jnp.zeros((2, 3, 2, 8), jnp.int32), chunk=4)
    key = query / jnp.linalg.norm(query, axis=-1, keepdims=True)
    scores = query @ key.swapaxes(-1, -2) / 2
    scores = jnp.where(
        jnp.eye(8, dtype=bool), -1e5, jnp.where(jnp.tril(jnp.ones((8, 8), bool)), scores, -1e9)
    )
    np.testing.assert_allclose(found, nn.softmax(scores) @ value, rtol=1e-4, atol=1e-5)


def test_lsh_attention_does_not_look_into_other_buckets() -> None:
    query, value = random((1, 1, 8, 4), 0), random((1, 1, 8, 4), 1)
    buckets = jnp.array([0, 1, 0, 1, 0, 1, 0, 1], jnp.int32).reshape(1, 1, 1, 8)
    before = attend(query, value, buckets, chunk=4)
    after = attend(query, value.at[:, :, 1::2].add(5.0), buckets, chunk=4)
    np.testing.assert_array_equal(before[:, :, ::2], after[:, :, ::2])
    assert not np.allclose(before[:, :, 3::2], after[:, :, 3::2])


def test_reversible_gradients_are_those_of_autodiff() -> None:
    config = training.read_config(reformer.Config, train.CONFIGS / "reformer.toml", "tiny")
    attention, feed_forward = reformer.LSHAttention(config), reformer.FeedForward(config)
    shapes = jax.eval_shape(lambda: reformer.make_variables(config, jax.random.key(0)))["layers"]
    layers = jax.tree.map(lambda leaf: 0.3 * random(leaf.shape, leaf.size), shapes)
    left, right = random((2, config.length, config.width), 0), random((2, config.length, config.width), 1)
    rotations = random((2, config.width // config.heads, config.hashes, config.buckets // 2), 2)

    def plain(layers: Any, rotations: jax.Array, left: jax.Array, right: jax.Array) -> Any:
        for params, rotation in zip(layers, rotations, strict=True):
            variables = {"params": params["attention"]}
            buckets = attention.apply(variables, right, rotation, method="hash")
            left = left + attention.apply(variables, right, buckets)
            right = right + feed_forward.apply({"params": params["feed_forward"]}, left)
        return left, right

    def loss(stack: Any) -> Any:
        return lambda *arguments: sum(jnp.square(half).mean() for half in stack(*arguments))

    def gradients(stack: Any) -> Any:
        return jax.jit(jax.value_and_grad(loss(stack), (0, 2, 3)))(layers, rotations, left, right)

    found, expected = gradients(reformer.reversible_stack(attention, feed_forward)), gradients(plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, expected)


def test_a_wrong_key_in_a_configuration_is_named(tmp_path: Any) -> None:
    path = tmp_path / "gpt12.toml"
    path.write_text("[tiny]\nlayers = 1\nwidht = 2\n")
    with pytest.raises(
        ValueError, match=r"gpt12.toml \[tiny\]: missing keys \[.*'width'\], unknown keys \['widht'\]"
    ):
        train.load("gpt12", "tiny", path)
    with pytest.raises(ValueError, match=r"has no table \[huge\]"):
        train.load("gpt12", "huge", path)
