"""Steps with collectives inside the layer: what the devices compute together is what one would alone."""

from typing import Any

import jax
import jax.numpy as jnp
import mixture_of_experts
import numpy as np
import parallel
import pytest
import self_attention
import sharded_adam
import tensor_parallel


def random_arguments(shapes: Any) -> Any:
    random = np.random.default_rng(0)

    def value(shape: jax.ShapeDtypeStruct) -> np.ndarray[Any, Any]:
        if shape.dtype.kind == "u":
            return np.array([3, 4], np.uint32)
        return np.asarray(random.uniform(0.1, 1.0, shape.shape), shape.dtype)

    return jax.tree.map(value, shapes)


def all_reduces(made: parallel.Compilable) -> int:
    return made.function.lower(*made.arguments).compile().as_text().count(" all-reduce(")


def assert_same(made: parallel.Compilable, alone: Any) -> None:
    arguments = random_arguments(made.arguments)
    expected = jax.tree.leaves(jax.jit(alone)(*arguments))
    found = jax.tree.leaves(made.function(*arguments))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


def test_tensor_parallel_layers_forward() -> None:
    made = tensor_parallel.compilable(tensor_parallel.load("tiny"), training=False)
    assert_same(made, tensor_parallel.forward)
    assert all_reduces(made) == 4  # two a layer


def test_tensor_parallel_training() -> None:
    made = tensor_parallel.compilable(tensor_parallel.load("tiny"), training=True)
    assert_same(made, tensor_parallel.train_step)


def test_the_end_of_self_attention() -> None:
    made = self_attention.compilable(self_attention.load("tiny"))
    assert_same(made, self_attention.self_attention)
    assert all_reduces(made) == 1


def test_adam_with_sharded_moments() -> None:
    made = sharded_adam.compilable(8)
    assert_same(made, sharded_adam.adam)
    p, m, _ = made.function(*random_arguments(made.arguments))
    assert p.sharding.is_fully_replicated
    assert m.addressable_shards[0].data.shape == (256 // jax.device_count(),)


def test_adam_with_whole_moments_on_every_device() -> None:
    made = sharded_adam.compilable(8, replicated=True)
    assert_same(made, sharded_adam.adam)
    assert all_reduces(made) == 1
    _, m, v = made.function(*random_arguments(made.arguments))
    assert m.sharding.is_fully_replicated
    assert v.sharding.is_fully_replicated


def test_adams_first_step_is_the_sign_of_the_gradient() -> None:
    zeros, gradient = jnp.zeros(2), jnp.array([[3.0, -2.0]])
    p, _, _ = sharded_adam.adam(zeros, zeros, zeros, gradient, jnp.float32(1))
    np.testing.assert_allclose(p, [-sharded_adam.LEARNING_RATE, sharded_adam.LEARNING_RATE], rtol=1e-5)


def by_experts(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Each token with what its expert makes of it, all experts computed for all."""
    chances = jax.nn.softmax(x @ params["router"])
    inside = jax.nn.gelu(jnp.einsum("td,edh->teh", x, params["up"]))
    made = jnp.einsum("teh,ehd->ted", inside, params["down"])
    token = jnp.argmax(chances, -1)
    return x + jnp.max(chances, -1)[:, None] * jnp.take_along_axis(made, token[:, None, None], 1)[:, 0]


def test_experts_get_their_tokens_and_send_them_back() -> None:
    room = mixture_of_experts.load("tiny")._replace(spare=float(jax.device_count()))
    made = mixture_of_experts.compilable(room, training=False)
    assert_same(made, by_experts)
    assert made.function.lower(*made.arguments).as_text().count("stablehlo.all_to_all") == 2


def test_a_token_whose_expert_is_full_passes_by() -> None:
    devices, small = jax.device_count(), mixture_of_experts.load("tiny")._replace(spare=1.0)
    made = mixture_of_experts.compilable(small, training=False)
    params, x = random_arguments(made.arguments)
    params["router"] = np.tile(np.eye(1, devices, dtype=np.float32), (small.width, 1))  # all for the first
    out = np.asarray(made.function(params, x))
    share, taken = small.tokens // devices, mixture_of_experts.slots(small, devices)
    moved = (out != x).any(-1).reshape(devices, share)
    np.testing.assert_array_equal(moved, np.tile(np.arange(share) < taken, (devices, 1)))


def test_training_of_experts_lowers_the_loss() -> None:
    made = mixture_of_experts.compilable(mixture_of_experts.load("tiny"), training=True)
    params, x, y = random_arguments(made.arguments)
    params = {name: 0.05 * one for name, one in params.items()}
    losses = []
    for _ in range(3):
        params, loss = made.function(params, x, y)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (tensor_parallel, ("full", "tiny")),
        (self_attention, ("attention-8", "attention-16", "mlp-8", "mlp-16")),
    ],
)
def test_every_size_can_be_loaded_and_no_other(module: Any, sizes: tuple[str, ...]) -> None:
    for size in sizes:
        assert module.load(size).length in (16, 1024)
    assert mixture_of_experts.slots(mixture_of_experts.load("full"), 2) == 5120
    with pytest.raises(ValueError, match=r"has no table \[huge\]"):
        module.load("huge")
