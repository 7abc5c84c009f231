"""A training step as plain functions, and what all the models' steps share."""

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any
Example = dict[str, np.ndarray]
LossOf = Callable[[Tree, Tree, dict[str, jax.Array], jax.Array], tuple[jax.Array, Tree]]

Config = TypeVar("Config")

DROPOUT_SEED = 1


class State(NamedTuple):
    """What a step reads and replaces.

    `step` counts from 0 ([] int32; dropout masks follow from it), `params` are trained by gradients,
    `model_state` is what else the model keeps (running statistics; often empty).
    """

    step: jax.Array
    params: Tree
    model_state: Tree
    opt_state: optax.OptState


class Training(NamedTuple):
    """One model at one size, nothing allocated yet.

    `init(key)` makes the first state, `step(state, batch)` returns the next state and the loss,
    `example(rng)` makes one row of a batch on the host, to be stacked along a new first axis.
    """

    init: Callable[[jax.Array], State]
    step: Callable[[State, dict[str, jax.Array]], tuple[State, jax.Array]]
    example: Callable[[np.random.Generator], Example]
    batch_per_device: int


def training(
    variables: Callable[[jax.Array], tuple[Tree, Tree]],
    loss_of: LossOf,
    optimizer: optax.GradientTransformation,
    example: Callable[[np.random.Generator], Example],
    batch_per_device: int,
) -> Training:
    """The usual step: `loss_of(params, model_state, batch, dropout_key) -> (loss, model_state)`, its
    gradients, one update by `optimizer`. `variables(key)` makes (params, model_state)."""

    def init(key: jax.Array) -> State:
        params, model_state = variables(key)
        return State(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params))

    def train_step(state: State, batch: dict[str, jax.Array]) -> tuple[State, jax.Array]:
        key = jax.random.fold_in(jax.random.key(DROPOUT_SEED), state.step)
        (loss, model_state), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            state.params, state.model_state, batch, key
        )
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return State(state.step + 1, optax.apply_updates(state.params, updates), model_state, opt_state), loss

    return Training(init, train_step, example, batch_per_device)


def make_rows(
    example: Callable[[np.random.Generator], Example], seed: int, index: int, rows: range
) -> Example:
    """Rows `rows` of batch `index`, stacked: each row depends on (seed, index, row) alone."""
    examples = [example(np.random.default_rng((seed, index, row))) for row in rows]
    return {name: np.stack([row[name] for row in examples]) for name in examples[0]}


def abstract_arguments(made: Training, rows: int) -> tuple[State, dict[str, jax.ShapeDtypeStruct]]:
    """Shapes and dtypes of the step's (state, batch) for a batch of `rows`: enough to lower it."""
    row = made.example(np.random.default_rng(0))
    batch = {name: jax.ShapeDtypeStruct((rows, *value.shape), value.dtype) for name, value in row.items()}
    return jax.eval_shape(made.init, jax.random.key(0)), batch


def parameter_count(state: State) -> int:
    """Trained numbers in the model; works on an abstract state too."""
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))


def mean_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all positions, in nats; logits [..., classes] of any float type, labels [...] int."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def matrices_only(params: Tree) -> Tree:
    """The usual weight-decay mask: matrices yes, biases and norms no."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def read_config(kind: type[Config], path: Path, size: str) -> Config:
    """Table `[size]` of a TOML file as a `kind`; ValueError where a key is missing or unknown."""
    table = tomllib.loads(path.read_text()).get(size)
    if table is None:
        raise ValueError(f"{path} has no table [{size}]")
    expected = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if table.keys() != expected:
        missing, unknown = sorted(expected - table.keys()), sorted(table.keys() - expected)
        raise ValueError(f"{path} [{size}]: missing keys {missing}, unknown keys {unknown}")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()})
