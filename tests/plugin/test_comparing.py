"""A finalist's outputs beside the default's: wrong programs are refused, other roundings are not."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from disco_hlo.errors import ActivationError, IllegalStrategyError, UnsupportedError
from disco_hlo.hlo import proto
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plan import plan as plans
from disco_hlo.plan.apply import apply
from disco_hlo.plan.read import read
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring import candidates, comparing, tolerances
from disco_hlo.plugin.measuring.candidates import compare_with_default, compile_trials
from disco_hlo.plugin.measuring.comparing import Reference, Survey, passes, survey_of
from disco_hlo.plugin.measuring.inputs.indices import index_bounds
from disco_hlo.plugin.measuring.inputs.signs import positive_parameters
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.phases import enact_phase
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.session import Session, join, target
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.structure import Restructured, early_module, named_schedules, restructured
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.executables import is_whole
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.structure.propose_loops import FLOAT32_SUMS
from tests.made_plans import made_plan
from tests.outputs import outputs_of
from tests.plugin.handled import in_session
from tests.plugin.sessions import session_of
from tests.steps import models
from tests.steps.intercept import intercept

# What is compared does not depend on the versions of Python and JAX.
pytestmark = pytest.mark.product_only

Array = Any


def errors(
    folder: Path, step: models.Step, *changes: Callable[[bytes], bytes]
) -> tuple[list[str], frozenset[int] | None]:
    """What is wrong with the unfused step and with changed ones, and which inputs were positive in the end."""

    def look(session: Session, source: CanonicalModule) -> tuple[list[str], frozenset[int] | None]:
        request = session.request
        plain = unfused(source.graph)
        request.positive, request.index_bounds = positive_parameters(source), index_bounds(source)
        trials = [Trial("default", None, 0), Trial("plain", plain, 0)]
        compile_trials(session, source, trials, tag="candidate")
        for change in changes:
            executable = compiles.compile_module(request, change(apply(plain, source)))
            trials.append(Trial("changed", plain, 0, executable=executable))
        compare_with_default(session, trials[0], trials[1:])
        return [trial.error for trial in trials[1:]], request.positive

    found: tuple[list[str], frozenset[int] | None] = in_session(folder, look, lambda: step)
    return found


def assert_refused(folder: Path, step: models.Step, *changes: Callable[[bytes], bytes]) -> None:
    """Programs that compute something else are refused, and the unfused one is not."""
    (plain, *wrong), _ = errors(folder, step, *changes)
    assert plain == ""
    assert ["differs from XLA's default at" in error for error in wrong] == [True] * len(changes)


def with_cosine(module: bytes) -> bytes:
    return exchange_opcode(module, "tanh", "cosine")


def test_a_wrong_program_of_a_training_under_a_mesh_is_told_where_it_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of flax's gemma no candidate was: JAX refused to look at one device's numbers under the training's set_mesh."""
    monkeypatch.setattr(tolerances, "_ON_DEVICES", 2)  # as large outputs
    mesh = jax.make_mesh((models.DEVICES,), ("data",), (jax.sharding.AxisType.Explicit,))
    monkeypatch.setattr(models, "mesh", lambda: mesh)
    with jax.set_mesh(mesh):
        assert_refused(tmp_path, models.mlp(), with_cosine)


# --- sums that the default adds up in 16 bits -----------------------------------------------------


def stagnating_step() -> models.Step:
    """The gradient of eight rows of an embedding in bfloat16, read by 16384 tokens: each sum ends at 256 addends."""
    tokens = np.arange(16384, dtype=np.int32) % 8

    def step(table: Any, scale: Any, tokens: Any) -> Any:
        rows = jax.vjp(lambda rows: rows[tokens], table.astype(jnp.bfloat16))[1]
        addends = jnp.broadcast_to(jnp.abs(scale) + 1, (tokens.size, 128)).astype(jnp.bfloat16)
        return table - rows(addends)[0].astype(jnp.float32), scale

    table, scale = jax.device_put((models.random(0, 8, 128), models.random(1, 128)), models.replicated())
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=models.replicated())
    return jitted, (table, scale, jax.device_put(tokens, models.split()))


def with_float32_sums(request: CompileRequest) -> Restructured:
    """The request's step with its sums in float32, and nothing else changed."""
    early = early_module(request)
    moves = named_schedules(early)[FLOAT32_SUMS]
    return restructured(early, FLOAT32_SUMS, moves, functools.partial(compiles.capture, request))


@pytest.mark.parametrize("wrong", [False, True])
def test_sums_in_float32_are_compared_with_the_default_that_adds_up_so_too(
    wrong: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sum that stagnates in the default is far from the truth, and by no rounding of the inputs."""

    def look(session: Session, source: CanonicalModule) -> Trial:
        request = session.request
        request.positive, request.index_bounds = positive_parameters(source), index_bounds(source)
        made = with_float32_sums(request)
        default, plan = Trial("default", None, 0), Trial("plan", read(made.source), 0, restructured=made)
        compile_trials(session, source, [default, plan], tag="candidate")
        if wrong:
            other = exchange_opcode(made.early, "abs", "cosine")
            plan.executable = compiles.compile_module(request, None, None, other)
        compare_with_default(session, default, [plan])
        return plan

    caplog.set_level(logging.INFO, LOGGER.name)
    plan = in_session(tmp_path, look, stagnating_step)
    assert (plan.compared, plan.differs) == (not wrong, wrong)
    assert ("differs from XLA's default at" in plan.error) == wrong
    assert "plan: adds up in float32, and is compared with XLA's default that does so, too" in caplog.text


def test_modules_that_are_traced_are_compiled_without_what_plans_are_compared_with(tmp_path: Path) -> None:
    """Those of a structure: nobody would read what else is compiled with them."""
    compiled: list[str] = []

    def look(session: Session, source: CanonicalModule) -> Trial:
        made = with_float32_sums(session.request)
        traced = Trial("traced", read(made.source), 0, restructured=made)
        many = replace(session, compiles_at_once=8)
        compile_trials(many, source, [traced], tag="profile", then=lambda one: compiled.append(one.name))
        return traced

    assert in_session(tmp_path, look, stagnating_step).finer is None
    assert compiled == ["traced"]


def test_a_plan_with_sums_in_float32_that_never_ran_here_is_enacted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused or not by what a search compares it with."""

    def look(request: CompileRequest) -> bool:
        session = join(request, Settings(search=False, directory=tmp_path))
        source = canonicalize(compiles.capture(request))
        made = with_float32_sums(request)
        strategy = read(made.source)
        module = apply(strategy, made.source)
        plan = made_plan(target(source.graph, session.facts), strategy, module, structure=made.record)
        slot = session.slot(source.graph.key)
        slot.save(plans.encode(plan), module, "", compiles.capture(request))
        return enact_phase.handle(request, session.settings) is not None

    caplog.set_level(logging.INFO, LOGGER.name)
    assert intercept(*stagnating_step(), look), caplog.text
    assert "plan: adds up in float32, and is compared with XLA's default that does so, too" in caplog.text


FINER = "XLA's default with sums in float32"


@pytest.mark.parametrize("what", ["runs", "made", "banned", "compiled", "room", "run"])
def test_what_adds_up_in_float32_is_compared_with_the_default_that_does_so_where_that_can_be_run(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans that add up in float32 in the same places have one such default; others are compared as ever. ``what`` goes
    wrong with it."""
    runs: list[list[str]] = []

    def fails(name: str, value: Any = None) -> Any:
        if what == name:
            raise UnsupportedError(name)
        return value

    def compare(_session: Session, programs: Sequence[Trial], *_: Any) -> None:
        runs.append([one.name for one in programs])
        if programs[0].name == FINER:
            fails("run")
        programs[-1].error, programs[-1].differs = "output 0 differs", True

    monkeypatch.setattr(candidates, "compare", compare)
    monkeypatch.setattr(candidates, "compile_default", lambda *_: fails("compiled"))
    monkeypatch.setattr(
        candidates, "lack_of_memory", lambda *_, **__: "rank 1: it needs 9 MiB" if what == "room" else ""
    )
    banned = {hashlib.sha256(b"early").hexdigest(): "it ended a process"} if what == "banned" else {}
    bans = SimpleNamespace(
        reason=lambda digest: banned.get(digest, ""), trying=lambda *_: contextlib.nullcontext()
    )
    marks: Any = SimpleNamespace(bans=bans)
    made: Any = SimpleNamespace(with_finer_sums=lambda: fails("made", b"early"))
    default, plain = Trial("default", None, 0), Trial("plain", None, 0, times_ns=[7])
    finer = [
        Trial(name, None, 0, marks=marks, restructured=made, times_ns=[7]) for name in ("plan", "plan 2")
    ]
    compare_with_default(session_of(tmp_path), default, [finer[0], plain, finer[1]])
    apart, at_once = [FINER, "plan", "plan 2"], ["default", "plan", "plain", "plan 2"]
    assert runs == {"runs": [apart, ["default", "plain"]], "run": [apart, at_once]}.get(what, [at_once])
    assert (finer[1].compared, finer[1].times_ns, finer[0].compared) == (False, [], True)
    assert finer[0].finer is finer[1].finer


# --- programs that are wrong behind a mask only ---------------------------------------------------


def relu_step() -> models.Step:
    """A relu and a maximum pooling of what is positive where all inputs are."""
    parameters = {"w": models.random(0, 3, 8), "v": models.random(1, 8, 8)}

    def loss(p: Any, x: Any) -> Any:
        y = jax.nn.relu(x @ p["w"])
        pooled = jax.lax.reduce_window(y, -np.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean((pooled @ p["v"]) ** 2)

    return models.trained(
        "relu_step", loss, parameters, (models.random(2, 8, 6, 6, 3),), optax.sgd(0.1, momentum=0.9)
    )


def reading_twice(opcode: str, operand: int, instead: int) -> Callable[[bytes], bytes]:
    """Change every ``opcode`` of float arrays, each in a kernel by itself: one operand takes the place of another."""

    def change(module: bytes) -> bytes:
        message = proto.parse(module)
        kernels = {c.id: c for c in message.computations if c.is_fusion_computation}
        changed = 0
        for kernel in (i for c in message.computations for i in c.instructions if i.opcode == "fusion"):
            called = kernels[kernel.called_computation_ids[0]]
            given = {i.id: i.parameter_number for i in called.instructions if i.opcode == "parameter"}
            root = next(i for i in called.instructions if i.id == called.root_id)
            if root.opcode != opcode or root.shape.element_type not in FLOATS or not root.shape.dimensions:
                continue
            old, new = given[root.operand_ids[operand]], given[root.operand_ids[instead]]
            kernel.operand_ids[old] = kernel.operand_ids[new]
            changed += 1
        assert changed
        return proto.serialize(message)

    return change


FLOATS = [number for number, name in proto.DTYPES.items() if name in ("f32", "bf16")]


def test_a_program_that_is_wrong_only_behind_a_mask_is_refused(tmp_path: Path) -> None:
    """Positive inputs do not show it. The zeros that a mask selects are the buffer that a gradient was scattered into;
    a relu passes everything on."""
    assert_refused(tmp_path, relu_step(), reading_twice("select", 2, 1), reading_twice("maximum", 1, 0))


# --- programs that are wrong for some rows of a table only ----------------------------------------

WORDS = 41


def embedding_step() -> models.Step:
    """Word by word the next is told; a row out of range would be NaN."""
    parameters = {"embedding": models.random(0, WORDS, 16), "head": models.random(1, 16, WORDS)}

    def loss(p: Any, text: Any) -> Any:
        logits = jnp.take(p["embedding"], text[:, :-1], axis=0, mode="fill") @ p["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    text = models.tokens(2, 4, 12, vocabulary=WORDS)
    return models.trained("embedding_step", loss, parameters, (text,), optax.sgd(0.1, momentum=0.9))


def with_constant(number: int, instead: int) -> Callable[[bytes], bytes]:
    """Change every constant that is this whole number."""

    def change(module: bytes) -> bytes:
        message = proto.parse(module, proto.DetailedModule)
        found = [i for c in message.computations for i in c.instructions if list(i.literal.s32s) == [number]]
        assert found
        for constant in found:
            constant.literal.s32s[:] = [instead]
        return proto.serialize(message)

    return change


def test_a_program_that_is_wrong_from_the_third_row_of_a_table_on_is_refused(tmp_path: Path) -> None:
    """Zeros and ones do not show it. An index is compared with the last row's, as if the table had two rows."""
    assert_refused(tmp_path, embedding_step(), with_constant(WORDS - 1, 1))


def test_a_step_with_labels_passes_the_comparison(tmp_path: Path) -> None:
    assert errors(tmp_path, models.resnet())[0] == [""]


# --- inputs for which a step has no values --------------------------------------------------------


def root_step(opaque: Callable[[Any], Any]) -> models.Step:
    """A root of what the rule on signs cannot see through or takes for never negative."""
    parameters = {"w": models.random(0, 8, 8)}

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.sqrt(opaque(p["w"])) * (x @ p["w"]))

    return models.trained("root_step", loss, parameters, (models.random(2, 8, 8),), optax.sgd(0.1))


def test_where_signs_give_no_values_inputs_are_positive_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Its derivative is asked for nothing, and the root is not.
    step = root_step(lambda w: jnp.exp(100 * w) - 0.99)
    with caplog.at_level("INFO", "disco_hlo"):
        assert errors(tmp_path, step) == ([""], None)
    assert [line for line in caplog.messages if "both signs" in line] == [
        "jit_root_step computes infinities or NaNs on inputs of both signs, and none on positive ones: plans are "
        "compared on positive inputs, and an error in what a mask leaves out there stays unseen"
    ]


def test_a_step_that_has_no_values_for_any_inputs_keeps_those_of_both_signs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = root_step(lambda w: -jnp.exp(w))
    with caplog.at_level("INFO", "disco_hlo"):
        assert errors(tmp_path, step) == ([""], frozenset())
    assert "both signs" not in caplog.text


# --- outputs that are nothing but rounding --------------------------------------------------------


def normalized_step(dtype: Any = np.float32) -> models.Step:
    """Returns gradients as they are. That of a bias before a normalization is 0 but for rounding."""
    parameters = {"w": models.random(0, 16, 16, dtype=dtype), "b": models.random(1, 16, dtype=dtype)}

    def loss(p: Any, x: Any) -> Any:
        y = x @ p["w"] + p["b"]
        y = (y - y.mean(0)) * jax.lax.rsqrt(jnp.square(y - y.mean(0)).mean(0) + 1e-5)
        return jnp.mean(jnp.sin(jax.nn.relu(y) + 1).astype(jnp.float32))

    def normalized(p: Any, x: Any) -> Any:
        return jax.grad(loss)(p, x)

    arguments = (jax.device_put(parameters, models.replicated()),)
    batch = jax.device_put(models.random(2, 256, 16, dtype=dtype), models.split())
    return jax.jit(normalized), (*arguments, batch)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_an_output_that_is_nothing_but_rounding_does_not_refuse_a_right_plan_nor_hide_a_wrong_one(
    dtype: Any, tmp_path: Path
) -> None:
    assert_refused(tmp_path, normalized_step(dtype), reading_twice("select", 2, 1))


# --- one element, one tile ------------------------------------------------------------------------

SHARE = 5e-6
"""Of an update's norm: by a norm over the result nobody sees so much of it."""
STEPS = {
    "mlp": models.mlp, "mixed": models.mixed_precision, "resnet": models.resnet,
    "pooled": models.pooled, "written": models.written_activations, "replayed": models.replayed,
    "spectral": models.spectral, "lstm": models.lstm,
    "empty": models.without_elements,
}  # fmt: skip


def exchanged(runner: Runner, number: int, places: Array, values: Array) -> list[list[Array]]:
    """What a run returns, of which one output has some elements exchanged."""
    arrays = runner.output_arrays()
    own = arrays[number]
    changed = np.array(own[1])
    changed.reshape(-1)[places] = values
    own[1] = jax.device_put(changed, next(iter(own[1].devices())))
    return arrays


def least(change: Array, tiles: Array) -> int:
    """The number of the tile whose share of the whole change is the least, but not less than :data:`SHARE`; -1 where
    there is none."""
    shares = np.sqrt(np.sum(np.abs(change[tiles]) ** 2, axis=-1)) / np.linalg.norm(change)
    enough = np.flatnonzero(shares >= SHARE)
    return int(enough[np.argmin(shares[enough])]) if enough.size else -1


def tiles_of(shape: tuple[int, ...]) -> Array:
    """The places of an array by tiles of eight rows and columns, or of what there are less."""
    places = np.arange(np.prod(shape, dtype=int)).reshape(-1, shape[-1] if shape else 1)
    rows, columns = (8 if size % 8 == 0 else 1 for size in places.shape)
    cut = places.reshape(places.shape[0] // rows, rows, places.shape[1] // columns, columns)
    return cut.transpose(0, 2, 1, 3).reshape(-1, rows * columns)


@pytest.mark.parametrize("name", STEPS)
def test_one_element_or_one_tile_that_is_not_updated_is_noticed(name: str, tmp_path: Path) -> None:
    """Of elements whose change is more than the last digits of what they are added to."""

    def look(session: Session, source: CanonicalModule) -> list[tuple[int, str]]:
        request = session.request
        request.positive, request.index_bounds = positive_parameters(source), index_bounds(source)
        default = Trial("default", None, 0, executable=compiles.compile_module(request, None))
        default.runner = Runner(request, default.executable, 0)
        survey = survey_of(default.runner, default.runner.output_arrays())
        reference = Reference(session, default, survey, passes(survey, None)[0])
        assert reference._first_unlike(default.runner.output_arrays()) == ""
        said = []
        for number, outputs in enumerate(outputs_of(default.runner)):
            after, index = outputs[1].reshape(-1), survey.updated[number]
            if is_whole(after.dtype) or not after.size:
                continue
            before = np.zeros_like(after)
            if index is not None:
                before = default.runner.runs_on.floats(index, 1, np.arange(after.size))
            change = np.where(np.abs(after - before) > 16 * np.spacing(np.abs(after)), after - before, 0)
            for tiles in (np.arange(after.size)[:, None], tiles_of(outputs[1].shape)):
                if change.any() and (tile := least(change, tiles)) >= 0:
                    places = tiles[tile]
                    changed = exchanged(default.runner, number, places, before[places])
                    said.append((number, reference._first_unlike(changed)))
        return said

    found = in_session(tmp_path, look, STEPS[name])
    assert len(found) >= 2
    for number, said in found:
        assert said.startswith(f"output {number} differs from XLA's default at ["), said


def frozen_step() -> models.Step:
    """One element of a gradient is not applied; its whole row has hardly any gradient."""
    parameters = {"w": models.random(0, 64, 64)}
    reach = np.where(np.arange(64) // 8 == 1, 3e-4, 1).astype(np.float32)

    def frozen_step(p: Any, x: Any) -> Any:
        gradient = jax.grad(lambda p: jnp.mean(jnp.tanh((x * reach) @ p["w"]) ** 2))(p)["w"]
        return {"w": p["w"] - jax.lax.dynamic_update_slice(gradient, jnp.zeros((1, 1)), (11, 13))}

    placed = (
        jax.device_put(parameters, models.replicated()),
        jax.device_put(models.random(1, 8, 64), models.split()),
    )
    return jax.jit(frozen_step, donate_argnums=(0,)), placed


def test_a_program_in_which_two_elements_of_thousands_are_wrong_is_refused(tmp_path: Path) -> None:
    """They are some millionths of the update by norm, of which 1 % was allowed."""
    (plain, wrong), _ = errors(tmp_path, frozen_step(), with_constant(11, 12))
    assert plain == ""
    assert re.search(r"differs from XLA's default at \[1[12], 13\] of float32\[64, 64\]: by ", wrong)


def test_a_program_whose_large_results_are_wrong_is_refused_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the right one is not: made-up weights, both runs and the comparison stay on the devices."""
    there: list[tuple[int, ...]] = []
    really = tolerances.on_each_device

    def on_each_device(devices: Any, rule: Any, static: Any, *arguments: Any) -> Any:
        if rule is tolerances._are_wrong:
            there.append(arguments[-1][0].shape)
        return really(devices, rule, static, *arguments)

    monkeypatch.setattr(tolerances, "on_each_device", on_each_device)
    parameters = {"w": models.random(0, 520, 520)}
    batch, optimizer = (models.random(1, 8, 520),), optax.sgd(0.1, momentum=0.9)
    step = models.trained(
        "large_step", lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]) ** 2), parameters, batch, optimizer
    )
    assert_refused(tmp_path, step, with_cosine)
    assert set(there) == {(520, 520)}


# --- what is kept -----------------------------------------------------------------------------------


def test_the_new_value_of_each_parameter_is_known_by_its_values() -> None:
    """Weights and their momentum are of one shape; the loss is no update."""

    def surveyed(request: CompileRequest) -> tuple[Survey, int]:
        request.positive = frozenset()
        runner = Runner(request, compiles.compile_module(request, None), 0)
        return survey_of(runner, runner.output_arrays()), len(runner.runs_on.parameters)

    found, parameters = intercept(*models.mlp(), surveyed)
    # Parameters come in the order of the outputs: weights, momenta, and then the batch.
    assert found.updated == [*range(parameters - 1), None]
    assert found.not_finite == 0


def test_large_outputs_are_compared_in_as_many_passes_as_memory_asks_for() -> None:
    f32, whole = np.dtype(np.float32), np.dtype(np.int32)
    survey = Survey([(30, 10), (), (5,), (30, 10)], [f32, f32, whole, f32], [None] * 4, 0)
    assert [survey.kept_bytes(number) for number in range(4)] == [1500, 5, 20, 1500]
    assert passes(survey, None) == [{0, 1, 2, 3}]
    assert passes(survey, 1505) == [{0, 1}, {2}, {3}]
    assert passes(survey, 0) == [{0}, {1, 2}, {3}], "one, at least, and with it what takes no more"
    with pytest.raises(UnsupportedError, match="free memory does not do for comparing 1000 elements"):
        passes(Survey([(10,)] * 100, [f32] * 100, [None] * 100, 0), 1)


def test_in_several_passes_a_wrong_program_is_refused_and_a_right_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "room_bytes", lambda _session: 0)
    assert_refused(tmp_path, models.mlp(), with_cosine)


# --- a training that ends --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "begins", "ends"),
    [
        (["0 f32[4]"], "1 result of jit_step is compared only roughly", "that the step makes to it"),
        (["0 f32[4]", "1 f32[8]"], "2 results of jit_step are compared only", "that the step makes to them"),
    ],
)
def test_one_result_and_several_are_told_of_as_such(
    results: list[str], begins: str, ends: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request: Any = SimpleNamespace(module_name="jit_step")
    with caplog.at_level("INFO", "disco_hlo"):
        comparing._say_hardly(replace(session_of(tmp_path), request=request), Counter(results))
    [said] = caplog.messages
    assert (said.startswith(begins), said.endswith(ends)) == (True, True)


@pytest.mark.parametrize("ends", [False, True])
def test_that_a_training_ends_says_nothing_of_a_program_and_hides_no_wrong_one(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended:
        def __init__(self, *_: Any) -> None:
            pass

        def check(self, program: Trial) -> None:
            if program.name == "wrong":
                program.differs = True
                raise IllegalStrategyError("output 0 differs")
            raise ActivationError("the step is not called any more")

        def hardly_compared(self) -> Counter[str]:
            return Counter()

    monkeypatch.setattr(comparing, "Reference", Ended)
    answers = {
        "settled": Survey([], [], [], 0),
        "_passes": [frozenset()],
        "_make_runner": None,
        "_read_modules": None,
    }
    for method, result in answers.items():
        monkeypatch.setattr(comparing._Inputs, method, lambda *_, result=result: result)
    request: Any = SimpleNamespace(devices=())
    session = replace(session_of(tmp_path), request=request, over=lambda: ends)
    default, *others = [Trial(name, None, 0) for name in ("default", "wrong", "right")]
    inputs: Any = object()
    with pytest.raises(ActivationError) if ends else contextlib.nullcontext():
        compare_with_default(session, default, others, inputs)
    assert [one.error for one in others] == [
        "output 0 differs",
        "" if ends else "the step is not called any more",
    ]
    assert not any(one.compared for one in others)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("large", "kind"), [(1e30, np.float32), (1e300, np.float64)])
def test_squares_of_large_numbers_do_not_hide_what_is_updated(large: float, kind: Any) -> None:
    """A diverging training: numpy's warning of an overflow stood among the script's lines."""
    few, near, far = (np.array([large, factor * large], kind) for factor in (1.0, 1.0001, -9.0))
    assert comparing._nearest(few, ([4, 7], np.stack([far, near]))) == 7


def test_infinite_numbers_do_not_hide_what_is_updated(recwarn: pytest.WarningsRecorder) -> None:
    """A training whose loss scale had become infinite: numpy's warning stood among the script's lines."""
    inf, nan = np.inf, np.nan
    few, near = np.array([1.0, 2.0, inf, nan]), np.array([1.1, 2.0, inf, 3.0])
    far = np.array([9.0, 9.0, inf, nan])
    assert comparing._nearest(few, ([4, 7], np.stack([far, near]))) == 7
    assert comparing._nearest(few, ([4], np.array([[nan, inf, 1.0, 2.0]]))) is None
    assert not recwarn.list
