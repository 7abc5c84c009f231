"""Which module of a script is the training step, and what the user is told of the others."""

from __future__ import annotations

import gc
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.regions import reducing_kernels
from disco_hlo.plugin import step as steps
from disco_hlo.plugin.phases import enact_phase, search_phase
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Choice, ModuleFacts, Step, choose, facts_of, training_step, why_none
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest, Handler
from tests.graphs import graph_of
from tests.modules import module_of
from tests.plugin.handled import save_plan

STEP = ModuleFacts("jit_step", 4, 8, 4 << 20, 900)
SMALLER = ModuleFacts("jit_evaluate", 4, 1, 4, 300)
EVALUATION = ModuleFacts("jit_loss", 8, 1, 4, 45, numbers_only=True)
INITIALIZATION = ModuleFacts("jit_create_model", 8, 1, 512, 304, keys_only=True)
SINGLE_OP = ModuleFacts("jit_reduce_sum", 4, 1, 4, 4)


def facts(text: str) -> ModuleFacts:
    """Of a module on two devices."""
    return facts_of(graph_of(text, elements=256), 2)


@pytest.mark.parametrize(
    ("module", "before", "chosen", "reason"),
    [
        (
            STEP, [], True,
            "the largest module so far that reduces a computed value (900 instructions, 8 collectives that reduce, "
            "4 MiB)",
        ),
        (ModuleFacts("jit_init", 1, 8, 4 << 20, 900), [], False, "runs on one device"),
        (ModuleFacts("jit_init", 4, 0, 4, 5000), [], False, "has no all-reduce or reduce-scatter of a computed value"),
        (
            ModuleFacts("jit_accumulate", 4, 0, 0, 200, inner_collective_count=6), [], False,
            "has no all-reduce or reduce-scatter of a computed value outside loops and branches that stay as XLA "
            "compiled them (6 collectives inside); what a plan may change must stand elsewhere: one step a call, "
            "gradients averaged after the loop, layers unrolled",
        ),
        (SMALLER, [STEP], False, "not larger than jit_step (900 instructions, 8 collectives that reduce, 4 MiB)"),
        # A script that looked at its loss before it trained had two evaluations searched first, the step third.
        (
            EVALUATION, [], False,
            "returns nothing but single numbers, as an evaluation does "
            "(45 instructions, 1 collective that reduces, 4 B)",
        ),
        # Made as sharded arrays, a model took more instructions than its step, which was then never searched.
        (
            INITIALIZATION, [], False,
            "takes nothing but single numbers and random keys, as an initialization does "
            "(304 instructions, 1 collective that reduces, 512 B)",
        ),
        # Each such op outside of any jit was searched for a plan: jit_reduce_sum was "the training step".
        (SINGLE_OP, [], False, "is a single op (4 instructions, 1 collective that reduces, 4 B)"),
    ],
    ids=[
        "first", "one device", "no all-reduce", "all-reduces in loops", "smaller", "evaluation", "initialization",
        "single op",
    ],
)  # fmt: skip
def test_a_module_is_the_step_or_is_not_for_a_reason(
    module: ModuleFacts, before: list[ModuleFacts], chosen: bool, reason: str
) -> None:
    assert choose(module, before) == Choice(chosen, reason)


@pytest.mark.parametrize(
    ("module", "before"),
    [
        (STEP, [SMALLER]),
        (STEP, [ModuleFacts("jit_init", 4, 0, 0, 5000), ModuleFacts("jit_data", 1, 3, 64, 5000)]),
        (STEP, [replace(EVALUATION, instruction_count=5000)]),
        (ModuleFacts("jit_train_step", 8, 5, 4096, 200), [INITIALIZATION]),
        (ModuleFacts("jit_other", 4, 1, 8 << 20, 900), [STEP]),
    ],
    ids=["smaller", "no steps", "longer evaluation", "longer initialization", "communicates less"],
)
def test_what_came_before_does_not_hide_a_larger_step(module: ModuleFacts, before: list[ModuleFacts]) -> None:
    assert choose(module, before).chosen is True


def test_among_modules_of_one_length_the_one_that_communicates_no_more_is_not_larger() -> None:
    assert choose(ModuleFacts("jit_other", 4, 1, 4 << 20, 900), [STEP]).chosen is False


@pytest.mark.parametrize(
    "module", [ModuleFacts("jit_step", 1, 0, 0, 10), EVALUATION, INITIALIZATION, SINGLE_OP]
)
def test_the_users_word_overrides_the_rule(module: ModuleFacts) -> None:
    assert choose(module, [STEP], named=True) == Choice(True, "named by DISCO_MODULE")
    assert choose(STEP, [], named=False) == Choice(False, "DISCO_MODULE names another")


def test_facts_count_all_reduces_of_computed_values_through_bitcasts() -> None:
    found = facts(
        "param; bitcast 0; all-reduce 1; multiply 0 0; bitcast 3; all-reduce 4; all-reduce 5; const; all-reduce 7; "
        "tuple 2 6 8"
    )
    assert found == ModuleFacts("jit_step", 2, 2, 4 * 1024, 10)


@pytest.mark.parametrize("opcode", ["all-gather", "all-to-all", "collective-broadcast", "collective-permute"])
def test_what_only_moves_values_makes_no_module_the_step(opcode: str) -> None:
    """``jnp.roll`` of a sharded batch was searched for a plan before the step that read it."""
    array = "f32[8]{0}"
    said = {"all-gather": "dimensions={0}", "all-to-all": "dimensions={0}"}.get(opcode, "")
    groups = "source_target_pairs={{0,1}}" if opcode == "collective-permute" else "replica_groups={{0,1}}"
    moved = "f32[16]{0}" if opcode == "all-gather" else array
    text = f"""
HloModule jit_augment, is_scheduled=true, num_partitions=2

ENTRY %main (x: f32[8]) -> {moved} {{
  %x = {array} parameter(0)
  %sine = {array} sine(%x)
  ROOT %moved = {moved} {opcode}(%sine), channel_id=1, {", ".join(filter(None, (groups, said)))}
}}
"""
    graph = canonicalize(module_of(text)).graph
    assert len(graph.collectives) == 1
    assert facts_of(graph, 2).reducing_collective_count == 0


def test_all_reduces_that_xla_made_kernels_of_make_a_module_the_step() -> None:
    """The step of a layer of experts on two GPUs was not found: its tokens travel, and all that it reduces is small."""
    source = canonicalize(
        module_of("""
HloModule jit_step, is_scheduled=true, num_partitions=2

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%kernel (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %reduced = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1}}, to_apply=%sum
}

%started (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %called = f32[8]{0} fusion(%q), kind=kCustom, calls=%kernel
}

ENTRY %main (x: f32[8]) -> (f32[8], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %sine = f32[8]{0} sine(%x)
  %start = ((f32[8]{0}), f32[8]{0}) async-start(%sine), calls=%started
  %done = f32[8]{0} async-done(%start)
  %moved = f32[8]{0} all-to-all(%sine), channel_id=2, replica_groups={{0,1}}, dimensions={0}
  ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%done, %moved)
}
""")
    )
    kernels = reducing_kernels(source)
    assert kernels == 1
    assert facts_of(source.graph, 2).reducing_collective_count == 0
    assert facts_of(source.graph, 2, reducing_kernel_count=kernels).reducing_collective_count == 1
    nothing_moves = graph_of("param; exp 0; multiply 1 1")
    assert facts_of(nothing_moves, 2, reducing_kernel_count=kernels).reducing_collective_count == 0


def test_facts_count_all_reduces_of_loop_bodies() -> None:
    entry, region = (graph_of(text, elements=256) for text in ("param; exp 0", "param; exp 0; all-reduce 1"))
    assert facts_of(entry, 2, regions=[region]) == ModuleFacts("jit_step", 2, 1, 1024, 5)


@pytest.mark.parametrize(
    ("argument", "keys_only"),
    [
        ("f32[]", True),
        ("u32[2]", True),
        ("u32[4,4]", True),
        ("u32[64]", False),
        ("f32[2]", False),
    ],
)
def test_facts_tell_an_initialization_by_its_arguments(argument: str, keys_only: bool) -> None:
    found = facts(f"{argument} param; broadcast 0; all-reduce 1")
    assert found.keys_only is keys_only


@pytest.mark.parametrize(
    ("result", "numbers_only"),
    [
        ("f32[]", True),
        ("f32[2]", False),
        ("(f32[],f32[1])", True),
        ("(f32[],(f32[2]))", False),
    ],
)
def test_facts_tell_an_evaluation_by_what_it_returns(result: str, numbers_only: bool) -> None:
    """By what it all-reduces it is not told: with split parameters that is activations."""
    found = facts(f"param; {result} negate 0")
    assert found.numbers_only is numbers_only


Install = Callable[[Handler], None]
Offered = Callable[..., list[Step | None]]


@pytest.fixture(autouse=True)
def forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was compiled so far, and what the plugin says is kept."""
    steps._histories.clear()
    caplog.set_level(logging.INFO, "disco_hlo")


@pytest.fixture
def offered(install: Install) -> Offered:
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


def test_of_two_steps_of_one_name_the_key_chooses(offered: Offered) -> None:
    seen = offered(or_planned=True)
    run(2), run(1)
    large, small = [one.source.graph for one in seen if one is not None]
    assert large.module_name == small.module_name
    steps._histories.clear()
    chosen = offered(module=small.key[:16])
    run(2), run(1)
    assert [one and one.source.graph.fingerprint for one in chosen] == [None, small.fingerprint]


def test_a_key_that_no_step_has_is_said_with_what_was_compiled(offered: Offered) -> None:
    settings = Settings(search=True, directory=Path("/plans"), module="0" * 16)
    assert offered(module=settings.module) == []
    run(1)
    assert why_none(settings).startswith(
        "no module is called 0000000000000000 or has a key that begins so (DISCO_MODULE); compiled were "
    )


def test_only_eight_hex_digits_or_more_may_be_a_key() -> None:
    def may_be(module: str | None) -> bool:
        return Settings(search=True, directory=Path("/plans"), module=module).may_be_key

    assert [may_be(text) for text in ("3f9a0c12", "3f9a0c1", "3F9A0C12", "decoder_", "f" * 65, None)] == [
        True, False, False, False, False, False,
    ]  # fmt: skip


def test_a_step_of_other_shapes_is_offered_to_enactment_though_not_chosen(offered: Offered) -> None:
    seen = offered(or_planned=True)
    run(2, width=8), run(2, width=4)
    first, second = seen
    assert first is not None
    assert second is not None
    assert (first.chosen, second.chosen) == (True, False)
    assert first.source.graph.fingerprint != second.source.graph.fingerprint


def test_what_a_process_compiles_for_itself_does_not_count_among_what_all_compile(
    offered: Offered, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = offered()
    for layers, processes in ((3, (0,)), (2, (0, 1)), (1, (0, 1))):
        monkeypatch.setattr(CompileRequest, "process_indices", processes)
        run(layers)
    assert [one is not None for one in seen] == [True, True, False]


def test_of_a_step_that_is_left_alone_it_is_said_once_how_to_search_it_however_often_it_is_compiled(
    offered: Offered, caplog: pytest.LogCaptureFixture
) -> None:
    """JAX compiles a step anew where its state comes in another sharding; what it gives may be the same module."""
    seen = offered()
    run(2, width=8), run(2, width=4), run(2, width=4)
    assert [one is not None for one in seen] == [True, False, False]
    [line] = [line for line in caplog.messages if "is left alone" in line]
    [key] = re.findall(r"\(([0-9a-f]{16})\)", line)
    assert line.endswith(f"; DISCO_MODULE={key} searches it instead")


def test_of_many_small_modules_of_one_name_the_user_is_told_three_times(
    offered: Offered, caplog: pytest.LogCaptureFixture
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


@pytest.mark.parametrize("option", ["", "xla_cpu_enable_fast_math"])
def test_a_step_that_jax_compiles_anew_for_other_shardings_runs_its_plan_as_it_was_compiled(
    option: str, install: Install, tmp_path: Path
) -> None:
    """The first call of a training takes fresh parameters, the second those of a step. With a plan, flax's gemma
    example took 60 s for its second compile, 31 without."""
    ran: list[LoadedExecutable | None] = []

    def handle(request: CompileRequest) -> LoadedExecutable | None:
        if request.module_name != "jit_twice_step":
            return None
        settings = Settings(search=False, directory=tmp_path)
        if not ran:
            save_plan(request, settings)
        ran.append(enact_phase.handle(request, settings))
        return ran[-1]

    def twice_step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w)))(w)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8), split)
    w = start = np.linspace(-0.5, 0.5, 64, dtype=np.float32).reshape(8, 8)
    install(handle)
    step = jax.jit(twice_step)
    for number in range(3):
        if number == 1 and option:  # another compile of the same module
            step = jax.jit(twice_step, compiler_options={option: False})
        w = step(w, x)
    first, second = ran
    assert first is not None
    assert (second is first) == (not option)
    del first, second
    ran.clear(), jax.clear_caches()
    gc.collect()
    [(number, _)] = enact_phase._enacted.values()
    assert number not in map(id, jax.local_devices()[0].client.live_executables()), "JAX alone keeps it"
    jaxlink.uninstall()
    jax.clear_caches()
    for _ in range(3):
        start = jax.jit(twice_step)(start, x)
    np.testing.assert_allclose(w, start, rtol=1e-6)


def test_where_a_step_on_one_device_has_changed_it_is_said_once_that_its_plan_is_for_another(
    install: Install, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Nothing was said of a step whose name has plans, and the training ran without one."""
    target = {
        "key": "ab" * 32, "fingerprint": "ab" * 32, "module_name": "jit_lonely", "backend": "cpu",
        "device_kind": "cpu", "device_count": 1, "process_count": 1,
    }  # fmt: skip
    folder = tmp_path / "abababababababab" / "cpu-cpu-x1"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"target": target}))
    settings = Settings(search=False, directory=tmp_path)
    install(lambda request: enact_phase.handle(request, settings))

    @jax.jit
    def lonely(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x) @ x

    lonely(np.ones((3, 3), np.float32)), lonely(np.ones((4, 4), np.float32))
    [line] = [line for line in caplog.messages if "there is no plan for it" in line]
    assert "for jit_lonely a plan lies beside (disco list), but another batch size" in line


def test_a_step_that_waits_for_python_is_not_told_to_search_when_it_is_compiled_again(
    install: Install, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The search has said why it left the step alone; that there is no plan for it follows."""
    settings = Settings(search=True, directory=tmp_path)
    install(lambda request: search_phase.handle(request, settings))

    def train() -> None:
        def step(x: Any) -> Any:
            x = jax.pure_callback(lambda one: one, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return jax.lax.pmean(jnp.tanh(jax.lax.pmean(jnp.tanh(x * x), "data")), "data")

        mapped_step = jax.pmap(step, axis_name="data", devices=jax.devices()[:2])
        jax.block_until_ready(mapped_step(np.ones((2, 4), np.float32)))

    train(), train()
    [line] = [line for line in caplog.messages if "runs as XLA compiles it" in line]
    assert "waits for Python" in line


def test_a_function_whose_name_is_not_in_ascii_may_be_the_step(offered: Offered) -> None:
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
