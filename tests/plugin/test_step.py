"""Which compile is the training step, where the name does not tell."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from disco_hlo.plugin import step as steps
from disco_hlo.plugin.phases import enact_phase, search_phase
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step, training_step, why_none
from disco_hlo.plugin.xla.jaxlink import CompileRequest, Handler

Install = Callable[[Handler], None]


@pytest.fixture(autouse=True)
def forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was compiled so far, and what the plugin says is kept."""
    steps._histories.clear()
    caplog.set_level(logging.INFO, "disco_hlo")


@pytest.fixture
def offered(install: Install) -> Callable[..., list[Step | None]]:
    """``offered(**settings)``: what ``training_step`` makes of the modules on two devices, in their order."""

    def offered(*, or_planned: bool = False, module: str | None = None) -> list[Step | None]:
        found: list[Step | None] = []
        settings = Settings(search=True, directory=Path("/plans"), module=module)

        def handle(request: CompileRequest) -> None:
            if len(request.devices) == 2:
                found.append(training_step(request, settings, or_planned=or_planned))

        install(handle)
        return found

    return offered


def mapped(layers: int) -> Callable[[Any], Any]:
    """A step under pmap, whose module is called as that of any other."""

    def step(x: Any) -> Any:
        for _ in range(layers):
            x = jax.lax.pmean(jnp.tanh(x * x), "data")
        return x

    return jax.pmap(step, axis_name="data", devices=jax.devices()[:2])


def run(layers: int, width: int = 4) -> None:
    mapped(layers)(np.ones((2, width), np.float32))


def test_of_two_steps_of_one_name_the_key_chooses(offered: Callable[..., list[Step | None]]) -> None:
    seen = offered(or_planned=True)
    run(2), run(1)
    large, small = [one.source.graph for one in seen if one is not None]
    assert large.module_name == small.module_name
    steps._histories.clear()
    chosen = offered(module=small.key[:16])
    run(2), run(1)
    assert [one and one.source.graph.fingerprint for one in chosen] == [None, small.fingerprint]


def test_a_key_that_no_step_has_is_said_with_what_was_compiled(
    offered: Callable[..., list[Step | None]],
) -> None:
    settings = Settings(search=True, directory=Path("/plans"), module="0" * 16)
    assert offered(module=settings.module) == []
    run(1)
    assert why_none(settings).startswith(
        "no module is called 0000000000000000 or has a key that begins so (DISCO_MODULE); on several "
        "devices were compiled "
    )


def test_only_eight_hex_digits_or_more_may_be_a_key() -> None:
    def may_be(module: str | None) -> bool:
        return Settings(search=True, directory=Path("/plans"), module=module).may_be_key

    assert [may_be(text) for text in ("3f9a0c12", "3f9a0c1", "3F9A0C12", "decoder_", "f" * 65, None)] == [
        True, False, False, False, False, False,
    ]  # fmt: skip


def test_a_step_of_other_shapes_is_offered_to_enactment_though_not_chosen(
    offered: Callable[..., list[Step | None]],
) -> None:
    seen = offered(or_planned=True)
    run(2, width=8), run(2, width=4)
    first, second = seen
    assert first is not None
    assert second is not None
    assert (first.chosen, second.chosen) == (True, False)
    assert first.source.graph.fingerprint != second.source.graph.fingerprint


def test_what_a_process_compiles_for_itself_does_not_count_among_what_all_compile(
    offered: Callable[..., list[Step | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = offered()
    for layers, processes in ((3, (0,)), (2, (0, 1)), (1, (0, 1))):
        monkeypatch.setattr(CompileRequest, "process_indices", processes)
        run(layers)
    assert [one is not None for one in seen] == [True, True, False]


def test_a_search_leaves_a_second_step_that_is_not_larger_alone(
    offered: Callable[..., list[Step | None]],
) -> None:
    seen = offered()
    run(2, width=8), run(2, width=4)
    assert [one is not None for one in seen] == [True, False]


def test_a_step_whose_all_reduces_all_lie_in_a_loop_is_a_step(
    offered: Callable[..., list[Step | None]],
) -> None:
    def accumulate(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, y: jax.lax.pmean(jnp.tanh(y), "data"), x)

    seen = offered()
    jax.pmap(accumulate, axis_name="data", devices=jax.devices()[:2])(np.ones((2, 4), np.float32))
    assert [one is not None for one in seen] == [True]


def test_a_search_says_how_to_search_the_step_that_it_leaves_alone(
    offered: Callable[..., list[Step | None]], caplog: pytest.LogCaptureFixture
) -> None:
    offered()
    run(2, width=8), run(2, width=4)
    [line] = [line for line in caplog.messages if "is left alone" in line]
    [key] = re.findall(r"\(([0-9a-f]{16})\)", line)
    assert line.endswith(f"; DISCO_MODULE={key} searches it instead")


def test_a_module_that_is_left_alone_is_said_once_however_often_it_is_compiled(
    offered: Callable[..., list[Step | None]], caplog: pytest.LogCaptureFixture
) -> None:
    """JAX compiles a step anew where its state comes in another sharding; what it gives may be the same module."""
    seen = offered()
    run(2, width=8), run(2, width=4), run(2, width=4)
    assert [one is not None for one in seen] == [True, False, False]
    assert len([line for line in caplog.messages if "is left alone" in line]) == 1


def test_of_many_small_modules_of_one_name_the_user_is_told_three_times(
    offered: Callable[..., list[Step | None]], caplog: pytest.LogCaptureFixture
) -> None:
    """Indexing each array of a sharded state, outside of any jit, wrote a line for each of its shapes."""
    seen = offered()
    run(3)
    for width in (5, 6, 7, 8, 9):
        run(2, width)
    assert [one is not None for one in seen] == [True] + [False] * 5
    ends = [line.split("instead")[-1] for line in caplog.messages if "is left alone" in line]
    assert ends == ["", "", "; more of this name are told of with DISCO_LOG=debug only"]


def test_that_a_step_has_no_plan_is_said_once_however_often_it_is_compiled(
    install: Install, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings = Settings(search=False, directory=tmp_path)
    install(lambda request: enact_phase.handle(request, settings))
    run(2), run(2)
    assert len([line for line in caplog.messages if "there is no plan for it" in line]) == 1


def test_a_step_that_calls_python_is_not_told_to_search_when_it_is_compiled_again(
    install: Install, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The search has said why it left the step alone; that there is no plan for it follows."""
    settings = Settings(search=True, directory=tmp_path)
    install(lambda request: search_phase.handle(request, settings))

    def train() -> None:
        def step(x: Any) -> Any:
            jax.debug.callback(lambda _: None, x)
            return jax.lax.pmean(jnp.tanh(jax.lax.pmean(jnp.tanh(x * x), "data")), "data")

        mapped_step = jax.pmap(step, axis_name="data", devices=jax.devices()[:2])
        jax.block_until_ready(mapped_step(np.ones((2, 4), np.float32)))

    train(), train()
    [line] = [line for line in caplog.messages if "runs as XLA compiles it" in line]
    assert "calls back into Python" in line


def test_a_function_whose_name_is_not_in_ascii_may_be_the_step(
    offered: Callable[..., list[Step | None]],
) -> None:
    def шаг(x: Any) -> Any:
        return jax.lax.pmean(jnp.tanh(jnp.sin(x) * x + jnp.cos(x)), "data")

    seen = offered()
    on = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    spec = jax.sharding.PartitionSpec("data")
    jax.jit(jax.shard_map(шаг, mesh=on, in_specs=spec, out_specs=spec, check_vma=False))(
        np.ones(4, np.float32)
    )
    [step] = seen
    assert step is not None
    assert step.source.graph.module_name == "jit_шаг"
