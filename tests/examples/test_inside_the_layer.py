"""Steps with collectives inside the layer: what the devices compute together is what one would alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


def all_reduces(made: tensor_parallel.Compilable) -> int:
    return made.function.lower(*made.arguments).compile().as_text().count(" all-reduce(")


def assert_same(made: tensor_parallel.Compilable, alone: Any) -> None:
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
    with pytest.raises(ValueError, match=r"has no table \[huge\]"):
        module.load("huge")
