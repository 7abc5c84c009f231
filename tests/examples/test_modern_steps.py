"""Steps as people train them today: every form trains alike, and holds the collectives that its name says."""

import functools
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest

from tests.examples.test_scripts import EXAMPLES, run

TINY = llama.load("tiny")._replace(length=16, dtype="float32")
SPLIT = llama.Form("fsdp+tp", "scan")
COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter)(?:-start)?\(")


@functools.cache
def initial_state(layers: str, projections: str) -> Any:
    """On the host, as each training donates its own; the same wherever it will lie."""
    form = llama.Form(layers=layers, projections=projections)
    return jax.tree.map(np.asarray, jax.jit(functools.partial(llama.init, TINY, form))(jax.random.key(0)))


@functools.cache
def trained(form: llama.Form, rows: int) -> tuple[list[float], str]:
    """Losses on a batch of as many rows, in however many microbatches; and the compiled step as text."""
    config, where = TINY._replace(rows_per_device=rows), llama.layout(form)
    state = jax.device_put(initial_state(form.layers, form.projections), llama.state_shardings(config, where))
    arguments = llama.abstract_arguments(config, where)
    step, shape = llama.compile_step(config, where).lower(*arguments).compile(), arguments[1]
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (3, 16, shape.shape[-1]))
    losses = []
    for batch in tokens[:, : shape.shape[0] * shape.shape[1]]:
        state, loss = step(state, jnp.asarray(batch.reshape(shape.shape), jnp.int32))
        losses.append(float(loss))
    return losses, step.as_text()


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return trained(llama.Form("dp", "unroll", "none"), 2)[0]


@pytest.mark.parametrize(
    "form",
    [
        llama.Form("dp", "scan", "dots"),
        llama.Form("fsdp", "scan", "all"),
        llama.Form("fsdp", "unroll", "none", projections="together"),
    ],
    ids=str,
)
def test_every_form_trains_alike(form: llama.Form, expected: list[float]) -> None:
    np.testing.assert_allclose(trained(form, 2)[0], expected, rtol=2e-5)


def test_tensor_parallel_and_accumulated_steps_train_alike(expected: list[float]) -> None:
    """Half as many rows at once on as many devices, or twice as many a device on half of them: the same batch."""
    accumulated, _ = trained(llama.Form("fsdp", "scan", "dots", accumulate=2), 1)
    np.testing.assert_allclose(accumulated, expected, rtol=2e-5)
    # The vocabulary is split as well, so that its weights are drawn alike but summed in another order.
    np.testing.assert_allclose(trained(SPLIT, 4)[0], expected, rtol=2e-3)


@pytest.mark.parametrize(
    ("form", "rows"),
    [(llama.Form("dp", "scan", "dots"), 2), (llama.Form("fsdp", "scan", "all"), 2), (SPLIT, 4)],
)
def test_sharded_state_is_gathered_in_the_loop(form: llama.Form, rows: int) -> None:
    [bodies, entry] = trained(form, rows)[1].rsplit("ENTRY ", 1)
    inside = Counter(COLLECTIVE.findall(bodies))
    assert inside["all-reduce"] > 0
    assert (inside["all-gather"] >= 7) == (form.shard != "dp")
    assert "all-reduce" in COLLECTIVE.findall(entry)


def test_a_trainer_in_flax_nnx_learns(tmp_path: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "nnx_trainer.py"), "--steps", "6"]
    record = run(script, 2, tmp_path / "run.json")
    assert (record["model"], record["shard"], record["parameters"]) == ("nnx_trainer", "fsdp", 872320)
    assert record["losses"][-1] < record["losses"][0] - 0.5
