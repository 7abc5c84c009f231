"""The advice to split the optimizer's state, on steps as XLA compiles them for two devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plan.plan import Sharding
from disco_hlo.plan.read import read
from disco_hlo.plugin.phases.sharding import advice_for, worth_saying
from disco_hlo.plugin.xla import compiles
from disco_hlo.simulator.costs import CPU, GPU
from tests.report import plans
from tests.search.cost_models import TrafficCosts
from tests.steps import models
from tests.steps.intercept import intercept
from tests.structure import steps

ROW, WHOLE = PartitionSpec("data"), PartitionSpec()
Step = tuple[Callable[..., Any], tuple[Any, ...]]


def captured(step: Step) -> CanonicalModule:
    return canonicalize(intercept(*step, compiles.capture))


def advised(step: Step) -> Sharding | None:
    source = captured(step)
    return advice_for(source, read(source), TrafficCosts(), CPU)


def regression(optimizer: Any, *, donate: bool = True) -> Step:
    """Weights of 64 x 32 and 31, of which the latter cannot be split in two."""
    parameters = {"bias": np.zeros(31, np.float32), "w": models.random(1, 64, 32)}

    def loss(p: Any, x: Any) -> Any:
        return ((x @ p["w"])[:, :31] + p["bias"]).std()

    return models.trained(
        "regression_step", loss, parameters, (models.random(2, 8, 64),), optimizer, donate=donate
    )


@pytest.mark.parametrize("donate", [True, False])
def test_adams_moments_are_to_be_split_where_every_device_has_them_whole(donate: bool) -> None:
    found = advised(regression(optax.adam(1e-3), donate=donate))
    assert found is not None
    # Parameters: bias, w; then the count, mu and nu of both; then the batch.
    assert found.state == (4, 6)
    assert (found.devices, found.state_bytes, found.saved_bytes) == (2, 2 * 64 * 32 * 4, 64 * 32 * 4)


def test_clipping_and_weight_decay_change_nothing() -> None:
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    found = advised(regression(clipped))
    assert found is not None
    assert (len(found.state), found.saved_bytes) == (2, 64 * 32 * 4)


def test_momentum_is_state_too() -> None:
    found = advised(regression(optax.sgd(0.1, momentum=0.9)))
    assert found is not None
    assert (found.state, found.saved_bytes) == ((3,), 64 * 32 * 4 // 2)


def test_the_moments_of_a_transformer_on_two_h200s() -> None:
    """As XLA:GPU compiled it, its transfers in flight: all but two of 150 all-reduces are gradients."""
    source = plans.h200()
    found = advice_for(source, read(source), TrafficCosts(), GPU)
    assert found is not None
    assert (found.devices, len(found.state), found.saved_bytes) == (2, 2 * 148, 640_278_528)


def adam_step(spec: PartitionSpec) -> Step:
    arguments, _ = steps.adam_arguments(2)
    on = steps.mesh(2, "data")
    moments = [jax.device_put(value, NamedSharding(on, spec)) for value in arguments[1:3]]
    shardings = [NamedSharding(on, one) for one in (WHOLE, spec, spec)]
    return jax.jit(steps.adam, out_shardings=tuple(shardings)), (arguments[0], *moments, *arguments[3:])


def test_state_that_is_split_already_is_left_alone() -> None:
    whole = advised(adam_step(WHOLE))
    assert whole is not None
    assert (whole.state, whole.state_bytes, whole.saved_bytes) == ((1, 2), 2 * 64, 64)
    assert advised(adam_step(ROW)) is None


def test_a_step_without_state_has_none_to_split() -> None:
    assert advised(regression(optax.sgd(0.1))) is None


def test_a_tensor_parallel_step_is_none_of_this() -> None:
    arguments = steps.transformer(2, 1, np.float32)
    assert advised((jax.jit(steps.train), arguments)) is None


def test_what_goes_wrong_is_no_advice() -> None:
    source = captured(regression(optax.adam(1e-3)))
    assert advice_for(source, read(captured(regression(optax.sgd(0.1)))), TrafficCosts(), CPU) is None


def test_advice_is_said_where_it_saves_time_or_a_mebibyte() -> None:
    def worth(saved_bytes: int, sharded_ns: int) -> bool:
        return worth_saying(
            Sharding(2, (3,), 2 * saved_bytes, saved_bytes, step_ns=1000, sharded_ns=sharded_ns)
        )

    assert [worth(64, 989), worth(64, 999), worth(1 << 20, 2000)] == [True, False, True]
