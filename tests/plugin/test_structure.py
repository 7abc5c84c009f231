"""A step with other structure: made, recognised, refused; and when one is tried at all."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.activation.kvstore import KvChannel
from disco_hlo.backends import BACKENDS
from disco_hlo.elsewhere import elsewhere, here
from disco_hlo.errors import ActivationError, DiscoError, IllegalMoveError, PlanError, XlaRefusalError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.pipeline import Budget, Case, Optimized, optimize, unsearched
from disco_hlo.plan.plan import DEFAULT, Strategy, Structure
from disco_hlo.plan.read import read
from disco_hlo.plan.store import PlanStore
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.measuring import room
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.phases import making_structures, structure_search
from disco_hlo.plugin.phases.finding import find, share_of_a_search
from disco_hlo.plugin.phases.making_structures import Ahead, Making
from disco_hlo.plugin.phases.structure_search import StructureSearch
from disco_hlo.plugin.session import Interruption, Session, join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.structure import (
    Early,
    Restructured,
    early_module,
    enacted,
    gains_alone,
    inside_share,
    named_schedules,
    refuse_unsupported,
    restructured,
    why_not,
)
from disco_hlo.plugin.tuner_results import is_tuned, note_tuned
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.profiler.collectives import fit, point_of
from disco_hlo.profiler.profile import Platform, Profile
from disco_hlo.search.api import SearchResult, SearchSettings
from disco_hlo.search.schedule import Scheduled
from tests.activation.stores import on_ranks
from tests.hlo.test_transfers_gpu import STEP
from tests.modules import ADD, module_of
from tests.outputs import outputs_of
from tests.plugin.sessions import fake_session, session_of
from tests.steps import models
from tests.steps.intercept import intercept, intercepted
from tests.structure.test_illegal import SUMMED

WIDTH = 16


def tensor_parallel() -> tuple[Any, tuple[Any, ...]]:
    """Two layers with an all-reduce in each, on two devices."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    random = np.random.default_rng(0)

    def placed(*axes: str | None) -> jax.Array:
        value = random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))

    weights = [(placed(None, "model"), placed("model", None)) for _ in range(2)]
    x = jax.device_put(
        random.normal(size=(4, WIDTH)).astype(np.float32), NamedSharding(mesh, PartitionSpec())
    )

    def layers(weights: Any, x: jax.Array) -> jax.Array:
        for up, down in weights:
            x = x + jnp.tanh(x @ up) @ down
        return x

    return jax.jit(layers, out_shardings=NamedSharding(mesh, PartitionSpec())), (weights, x)


def on_step(look: Callable[[CompileRequest], Any]) -> Any:
    step, arguments = tensor_parallel()
    return intercept(step, arguments, look)


def parsed(text: str) -> CanonicalModule:
    return canonicalize(module_of(text))


def test_every_named_schedule_computes_the_same() -> None:
    def look(request: CompileRequest) -> dict[str, float]:
        early = early_module(request)
        runner = Runner(request, compiles.compile_module(request, None))
        expected = outputs_of(runner)
        found = {}
        for name, moves in named_schedules(early).items():
            made = restructured(early, name, moves, functools.partial(compiles.capture, request))
            executable = compiles.compile_module(request, None, None, made.early)
            got = outputs_of(Runner(request, executable, inputs_of=runner))
            found[name] = float(np.abs(got[0][0] - expected[0][0]).max())
        return found

    apart = on_step(look)
    assert {"chunk-2", "chunk-4", "split"} <= set(apart)
    assert max(apart.values()) < 1e-5


def test_a_plans_moves_make_the_step_they_made_when_it_was_searched() -> None:
    def look(request: CompileRequest) -> tuple[Restructured, Restructured, bytes]:
        early = early_module(request)
        compiled = functools.partial(compiles.capture, request)
        made = restructured(early, "chunk-2", named_schedules(early)["chunk-2"], compiled)
        record = msgspec.json.decode(msgspec.json.encode(made.record), type=type(made.record))
        with compiles.halted(request, early=True) as waiting:
            again = enacted(request, record, waiting)
            expected = outputs_of(Runner(request, compiles.compile_module(request, None, None, made.early)))
            enacts = outputs_of(Runner(request, waiting.finish(again.module)))
        for got, want in zip(enacts, expected, strict=True):
            np.testing.assert_array_equal(got[0], want[0])
        for field in ("key", "result"):
            other = msgspec.structs.replace(record, **{field: "0" * 64})
            with (
                pytest.raises(PlanError, match="search again"),
                compiles.halted(request, early=True) as waiting,
            ):
                enacted(request, other, waiting)

        @contextlib.contextmanager
        def failing_elsewhere() -> Iterator[None]:
            yield
            raise ActivationError("rank 1")

        with pytest.raises(ActivationError), compiles.halted(request, early=True) as waiting:
            enacted(request, record, waiting, failing_elsewhere())
        assert waiting._own.seen is None, "it would have waited for rank 1 in XLA's autotuner"
        return made, again, compiles.capture(request)

    made, again, default = on_step(look)
    assert again.early == made.early
    assert again.source.graph.key == made.source.graph.key == made.record.result
    assert canonicalize(default).graph.key != made.record.result
    assert len(made.source.graph.collectives) == 2 * len(canonicalize(default).graph.collectives)


@pytest.mark.product_only  # the older XLA:CPU adds up in float32 by itself
@pytest.mark.parametrize("forbids", ["XLA_FLAGS", "compiler_options"])
def test_sums_are_made_in_float32_unless_the_user_forbids_finer_types(
    forbids: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither proposed by a search nor taken from a plan."""
    option = "xla_allow_excess_precision"

    def summed(tokens: jax.Array, cotangents: jax.Array) -> jax.Array:
        return jnp.zeros((8, 2), jnp.bfloat16).at[tokens].add(cotangents)

    def early(**jit: Any) -> Early:
        arguments = jnp.zeros((4,), jnp.int32), jnp.ones((4, 2), jnp.bfloat16)
        return intercept(jax.jit(summed, **jit), arguments, early_module, devices=1)  # type: ignore[no-any-return]

    moves = named_schedules(early())["float32-sums"]
    if forbids == "XLA_FLAGS":
        monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --{option}=false")
    forbidden = early(compiler_options={option: False} if forbids == "compiler_options" else {})
    assert named_schedules(forbidden) == {}
    with pytest.raises(IllegalMoveError, match=f"{option} is off"):
        forbidden.moved(moves)


def test_a_step_that_adds_up_rows_in_16_bits_may_gain_where_nothing_communicates() -> None:
    def step(kind: str) -> CanonicalModule:
        return canonicalize(module_of(SUMMED.replace("bf16", kind), scheduled=True))

    assert gains_alone(step("bf16"))
    assert not gains_alone(step("f32"))


def test_matmuls_and_sums_in_16_bits_are_no_coarser_in_a_step_that_is_changed() -> None:
    """XLA:CPU refused some such matmuls, and added up in bfloat16: 1 and 256 are 256."""

    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        ones = jnp.abs(jnp.tanh(x)) + jnp.bfloat16(1)
        return x @ w, jax.lax.reduce(ones, jnp.bfloat16(0), jax.lax.add, (1,))

    def look(request: CompileRequest) -> list[list[Any]]:
        early = early_module(request)
        runner = Runner(request, compiles.compile_module(request, None))
        changed = compiles.compile_module(request, None, None, early.module)
        return [outputs_of(one) for one in (runner, Runner(request, changed, inputs_of=runner))]

    arguments = jnp.ones((64, 4096), jnp.bfloat16), jnp.ones((4096, 8), jnp.bfloat16)
    default, changed = intercept(jax.jit(step), arguments, look, devices=1)
    for [own], [theirs] in zip(changed, default, strict=True):
        wide, other = np.asarray(own, np.float32), np.asarray(theirs, np.float32)
        assert np.abs(wide - other).max() <= float(jnp.finfo(jnp.bfloat16).eps) * np.abs(other).max()


def test_that_a_library_shall_take_matmuls_does_not_hide_them_from_moves() -> None:
    lowered = jax.jit(lambda x, w: x @ w).lower(*[jnp.ones((256, 256), jnp.bfloat16)] * 2)
    users = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}
    keys = [
        intercepted(lowered, lambda _: True, lambda request: early_module(request).key, options)
        for options in ({}, users)
    ]
    assert keys[0] == keys[1]


def test_no_move_is_refused() -> None:
    def look(request: CompileRequest) -> None:
        with pytest.raises(IllegalMoveError, match="changes nothing"):
            restructured(early_module(request), "none", [], functools.partial(compiles.capture, request))

    on_step(look)


def test_a_gather_along_an_inner_dimension_is_refused_on_cpu() -> None:
    """XLA:CPU puts the parts one behind the other, wherever the layout wants them."""
    inner = """
HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[4,2]) -> f32[4,4] {
  %x = f32[4,2]{1,0} parameter(0)
  ROOT %gathered = f32[4,4]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,1}},
    use_global_device_ids=true, dimensions={1}
}
"""
    outer = inner.replace("f32[4,2]{1,0}", "f32[4,2]{0,1}").replace("f32[4,4]{1,0}", "f32[4,4]{0,1}")

    with pytest.raises(IllegalMoveError, match="dimension 1 of f32\\[4,4\\] is not the outermost"):
        refuse_unsupported(parsed(inner))
    refuse_unsupported(parsed(outer))


# --- when a structure is tried --------------------------------------------------------------------


def profile(backend: str, ns_per_byte: float) -> Profile:
    points = [point_of(size, [1 + int(size * ns_per_byte)] * 3) for size in (1 << 8, 1 << 12, 1 << 16)]
    return Profile(
        Platform("none", backend, "", "0", "0"), {}, 100, 1e11, 1e13, all_reduce=fit(tuple(points))
    )


def case_of(source: CanonicalModule, backend: str, ns_per_byte: float) -> Case:
    """Unfused."""
    return Case(source, unfused(source.graph), costs_of(profile(backend, ns_per_byte), source))


def test_a_data_parallel_step_has_nothing_between_its_transfers() -> None:
    step, arguments = models.mlp()
    graph = intercept(step, arguments, lambda r: canonicalize(compiles.capture(r))).graph
    assert len(graph.collectives) > 1
    assert inside_share(graph, [1] * len(graph)) == 0.0


def test_a_tensor_parallel_step_has_its_layers_between_them() -> None:
    graph = on_step(lambda request: canonicalize(compiles.capture(request))).graph
    assert inside_share(graph, [node.flops for node in graph.nodes]) > 0.3


@pytest.mark.product_only  # compiles the engine
def test_why_no_structure_is_tried() -> None:
    step = parsed(STEP)

    def answer(backend: str, ns_per_byte: float) -> str:
        case = case_of(step, backend, ns_per_byte)
        return why_not(case, case.times)

    assert "collectives block on this device" in answer("cpu", 1.0)
    assert "of the step to communication alone" in answer("gpu", 0.0)
    assert answer("gpu", 100.0) == ""


SCANNED = (
    "HloModule jit_step, is_scheduled=true\n"
    + ADD
    + """
condition { p = (s32[], f32[65536]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(4)
  ROOT c = pred[] compare(i, n), direction=LT }
body { p = (s32[], f32[65536]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[65536] get-tuple-element(p), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
  y = f32[65536] OP
  ROOT t = (s32[], f32[65536]) tuple(j, y) }
ENTRY main { x = f32[65536] parameter(0), backend_config={"operation_queue_id":"0"}
  v = f32[65536] parameter(1)
  g = f32[65536] all-reduce(x), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=add
  h = f32[65536] all-reduce(v), channel_id=2, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=add
  z = s32[] constant(0)
  t = (s32[], f32[65536]) tuple(z, x)
  l = (s32[], f32[65536]) while(t), condition=condition, body=body, backend_config={"known_trip_count":{"n":"4"}}
  a = f32[65536] get-tuple-element(l), index=1
  ROOT r = (f32[65536], f32[65536], f32[65536]) tuple(a, g, h) }
"""
)


REDUCED = "all-reduce(x), channel_id=3, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=add"


@pytest.mark.product_only  # compiles the engine
def test_structures_are_tried_where_a_loop_communicates_or_multiplies() -> None:
    def answer(op: str) -> str:
        case = case_of(parsed(SCANNED.replace("OP", op)), "gpu", 100.0)
        return why_not(case, case.times)

    assert "of the ops' time lies between transfers" in answer("negate(x)")
    assert answer(REDUCED) == ""
    assert answer('custom-call(x), custom_call_target="multiply"') == ""


def found(
    source: CanonicalModule, backend: str = "cpu", *, searched_s: float = 0.0, ns: int = 1
) -> Optimized:
    """What searches found that found nothing."""
    case = case_of(source, backend, 1.0)
    result = SearchResult(case.xla, ns, ns, (), 0, 0, 0.0, "")
    return Optimized(case, result, (Scheduled(case.xla, ns, 0),), searched_s)


def searching(session: Session, unchanged: Any, making: Any = None) -> StructureSearch:
    """Without a plan directory."""
    return StructureSearch(session, None, None, unchanged, making)  # type: ignore[arg-type]


def trials_of(request: CompileRequest, folder: Path, structure: str) -> list[Any]:
    session = join(request, Settings(search=True, directory=folder, structure=structure))
    source = canonicalize(compiles.capture(request))
    slot = PlanStore(folder).slot(source.graph.key, "cpu", "cpu", 2)
    return StructureSearch(session, slot, None, found(source), Making(session, source)).trials()


@pytest.mark.parametrize("structure", ["auto", "off"])
def test_on_cpu_no_early_module_is_even_looked_at(
    structure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(request: CompileRequest) -> bytes:
        raise AssertionError("the early module was captured")

    def look(request: CompileRequest) -> list[Any]:
        monkeypatch.setattr(compiles, "capture_structure", never)
        return trials_of(request, tmp_path, structure)

    assert on_step(look) == []


def test_structures_made_by_other_interpreters_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(request: CompileRequest) -> list[Restructured]:
        source = canonicalize(compiles.capture(request))
        found = []
        for least in (len(source.graph) + 1, 0):
            monkeypatch.setattr(room, "WORTH_A_PROCESS", least)
            monkeypatch.setattr(room, "own_cores", lambda: [0, 1])
            assert room.interpreter(source) is (elsewhere if least == 0 else here)
            session = join(request, Settings(search=True, directory=tmp_path, structure="split"))
            making = Making(session, source)
            found.append(making.structures().made["split"].result())
            making.end()
        return found

    first, second = on_step(made)
    assert (first.early, first.module, first.record) == (second.early, second.module, second.record)
    assert first.source.graph.key == second.source.graph.key


def picked(op: str, result: str = "") -> Restructured:
    """What a rank made of a structure, by the kernel that its autotuner picked; whatever it says of it."""
    module = module_of(SCANNED.replace("OP", op))
    source = canonicalize(module)
    record = Structure("chunk-2", "f00d", result or source.graph.key, ({"move": op},))
    return Restructured(b"early", module, source, record, Early(b"", "f00d", False, ()))


@pytest.mark.parametrize("other", ["tanh(x)", "negate(x)"])
def test_all_ranks_run_what_rank_0_has_made_of_a_structure(other: str, tmp_path: Path) -> None:
    made = [picked(op) for op in ("negate(x)", other, "negate(x)")]

    def taken(channel: KvChannel) -> tuple[Restructured, bytes]:
        session = session_of(tmp_path, channel, timeout_s=20.0)
        found = structure_search.as_rank_0(session, "chunk-2", made[channel.rank])
        return found, channel.broadcast(b"next" if channel.rank == 0 else None, tag="next", timeout_s=20.0)

    for (one, following), own in zip(on_ranks(3, taken), made, strict=True):
        assert one.module == made[0].module if other == "tanh(x)" else one is own
        assert one.record.result == one.source.graph.key == made[0].source.graph.key
        assert one.record.moves == own.record.moves
        assert following == b"next", "ranks are in step"


def test_what_a_rank_cannot_take_from_rank_0_is_left_out_on_all_and_the_next_is_taken(tmp_path: Path) -> None:
    made = [{"a": picked("negate(x)", "another"), "b": picked("negate(x)")}, {"a": picked("tanh(x)")}]
    made[1]["b"] = picked("tanh(x)")

    def agreed(channel: KvChannel) -> dict[str, bytes]:
        own: dict[str, Future[Restructured]] = {"a": Future(), "b": Future(), "c": Future()}
        for name, one in made[channel.rank].items():
            own[name].set_result(one)
        own["c"].set_exception(IllegalMoveError("no")) if channel.rank else own["c"].set_result(made[0]["b"])
        session = session_of(tmp_path, channel, timeout_s=20.0)
        mine = making_structures.Structures(None, {}, own)  # type: ignore[arg-type]
        return {name: one.module for name, one in structure_search._agreed(session, mine, "acb").items()}

    assert on_ranks(2, agreed) == [{"b": made[0]["b"].module}] * 2


@pytest.mark.parametrize(
    ("structure", "reason"), [("sharded-update", ""), ("fused-kernels", "(a fused kernel: needs ")]
)
def test_a_forced_schedule_that_the_step_has_no_pattern_for_is_one_line(
    structure: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert on_step(lambda request: trials_of(request, tmp_path, structure)) == []
    (line,) = [one for one in caplog.messages if one.startswith("DISCO_STRUCTURE is ")]
    assert line.startswith(f"DISCO_STRUCTURE is {structure}; this step has the pattern for chunk-2")
    assert reason in line


UNCHANGED: Any = SimpleNamespace(
    case=SimpleNamespace(source=None, costs=SimpleNamespace(profile=None), limit_bytes=1)
)
"""A step as it is, of which nothing is known."""


def made_by(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[str], str], names: Sequence[str] = ("a", "b", "c")
) -> None:
    """Structures of these names, or of the one that is asked for, are made by ``make``, one at a time."""
    monkeypatch.setattr(making_structures, "early_module", lambda *_: SimpleNamespace(key="f00d"))
    monkeypatch.setattr(
        making_structures, "named_schedules", lambda _early, asked, _pays: {one: [] for one in asked or names}
    )
    monkeypatch.setattr(making_structures, "restructured", lambda _early, name, *_: make(name))
    monkeypatch.setattr(making_structures, "compiles_at_once", lambda _: 1)


def done(value: Any) -> Future[Any]:
    found = Future[Any]()
    found.set_result(value)
    return found


def not_held(folder: Path, processes: int = 1, **settings: Any) -> Any:
    """A session whose structures are made by threads."""
    asked = Settings(search=True, directory=folder, **settings)
    return fake_session(settings=asked, channel=SimpleNamespace(size=processes))


def test_what_was_tuned_on_other_devices_counts_as_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Picks are those of a kind of device: on another one that shares the plan directory XLA finds none of them, and
    writes an error for each kernel."""
    source = parsed(SCANNED.replace("OP", REDUCED))
    monkeypatch.setattr(making_structures, "compiles_at_once", lambda _: 1)

    def digest(device_kind: str) -> str:
        session = not_held(tmp_path, structure="off")
        session.facts.device_kind = device_kind
        making = Making(session, source)
        making.end()
        return making._digest("keep-all", [])

    assert digest("H200") == digest("H200") != digest("H100")


@pytest.mark.parametrize(
    ("op", "structure", "made"),
    [
        (REDUCED, "auto", ["chunk-2", "wrong"]),
        (REDUCED, "off", []),
        ("negate(x)", "auto", []),
        ("negate(x)", "chunk-2", ["chunk-2"]),
    ],
    ids=["in the loop", "off", "not in the loop", "asked for"],
)
def test_structures_are_made_beside_the_search_where_they_may_be_worth_it(
    op: str, structure: str, made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def make(name: str) -> str:
        asked.append(name)
        if name == "wrong":
            raise IllegalMoveError("does not fit")
        return name

    made_by(monkeypatch, make, ("chunk-2", "wrong"))
    making = Making(not_held(tmp_path, structure=structure), parsed(SCANNED.replace("OP", op)))
    wait(making.structures().made.values())
    making.end()
    assert sorted(asked) == made


def test_schedules_are_found_while_the_step_is_profiled_and_nothing_is_captured_any_more_when_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, profiled, done = threading.Event(), threading.Event(), list[str]()

    def capture(_request: object) -> bytes:
        assert compiled.wait(20)
        done.append("captured")
        return b"early"

    def find(_request: object, module: bytes, run: object) -> Any:
        assert (module, run) == (b"early", elsewhere)
        assert profiled.wait(20)
        return SimpleNamespace(key="f00d", schedules={"chunk-2": ()})

    monkeypatch.setattr(making_structures, "interpreter", lambda _: elsewhere)
    monkeypatch.setattr(compiles, "capture_structure", capture)
    monkeypatch.setattr(making_structures, "early_of", find)
    monkeypatch.setattr(making_structures, "named_schedules", lambda early, *_: dict(early.schedules))
    monkeypatch.setattr(making_structures, "restructured", lambda _early, name, _moves, _compiled: name)
    monkeypatch.setattr(making_structures, "compiles_at_once", lambda _: 1)
    session = session_of(tmp_path)
    source = parsed(SCANNED.replace("OP", REDUCED))
    ahead = Ahead(session, source)
    with ahead.beside_compiles():
        compiled.set()
    assert done == ["captured"]
    assert ahead.early is not None
    assert not ahead.early.done(), "what needs no device goes on"
    profiled.set()
    making = Making(session, source, early=ahead.early)
    assert making.structures().made["chunk-2"].result() == "chunk-2"
    making.end()
    assert done == ["captured"], "once"


@pytest.mark.parametrize(
    ("op", "structure", "run"),
    [("negate(x)", "auto", elsewhere), (REDUCED, "off", elsewhere), (REDUCED, "auto", here)],
    ids=["not in the loop", "off", "in this interpreter"],
)
def test_nothing_is_found_ahead_that_is_not_tried_or_would_disturb_the_profile(
    op: str, structure: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making_structures, "interpreter", lambda _: run)
    ahead = Ahead(session_of(tmp_path, structure=structure), parsed(SCANNED.replace("OP", op)))
    with ahead.beside_compiles():
        pass
    assert ahead.early is None


def test_nothing_is_found_ahead_where_one_rank_cannot_and_others_would_wait_for_it_in_a_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [parsed(SCANNED.replace("OP", REDUCED)) for _ in range(2)]
    monkeypatch.setattr(
        making_structures, "interpreter", lambda source: here if source is sources[1] else elsewhere
    )

    def ahead(channel: KvChannel) -> object:
        found = Ahead(session_of(tmp_path, channel, timeout_s=20.0), sources[channel.rank])
        with found.beside_compiles():
            return found.early

    assert on_ranks(2, ahead) == [None, None]


def ranked(
    monkeypatch: pytest.MonkeyPatch, takes_ns: dict[str, int], own_ns: int, structure: str = "auto"
) -> tuple[list[str], list[str]]:
    """Names of the structures worth a search and what the user is told, where each is predicted to take so long and the
    step so; of one that takes nothing XLA had no time."""
    step = parsed(STEP)
    left = iter(takes_ns.values())

    def result(ns: int) -> Any:
        if not ns:
            raise making_structures.LateError("late")
        return SimpleNamespace(source=step)

    monkeypatch.setattr(structure_search, "foreseen", lambda *_: (next(ns for ns in left if ns), 0.0, 0))
    monkeypatch.setattr(structure_search, "unsearched", lambda case: Scheduled(case.xla, own_ns, 0))
    session = not_held(Path(), structure=structure)
    made = {name: SimpleNamespace(result=lambda ns=ns: result(ns)) for name, ns in takes_ns.items()}
    structures: Any = SimpleNamespace(made=made)
    monkeypatch.setattr(structure_search, "ThreadPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    return [one.name for one in searching(session, found(step))._ranked(structures)], session.said


def test_a_structure_that_would_not_be_called_faster_than_the_step_as_it_is_is_not_profiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    takes_ns = {"a": 990, "slower": 1100, "b": 800, "late": 0, "hardly": 991}
    names, said = ranked(monkeypatch, takes_ns, own_ns=1000)
    assert names == ["b", "a"]
    assert said == ["no time was left to compile these structures: late"]
    assert ranked(monkeypatch, {"gather-once": 110}, 100, "gather-once") == (["gather-once"], [])


@pytest.mark.parametrize(
    ("predicted_ns", "unmeasured", "profiled"),
    [
        (900, 0.009, False),
        (900, 0.05, False),
        (990, 0.05, True),
        (700, 0.06, True),
        (1100, 0.02, True),
        (1200, 0.02, False),
        (1200, 0.05, True),
    ],
    ids=[
        "hardly any", "tried either way", "if fast", "much", "searched either way", "in neither", "searched if fast",
    ],
)  # fmt: skip
def test_a_structure_is_profiled_only_where_that_could_decide_whether_it_is_tried(
    predicted_ns: int, unmeasured: float, profiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile of a few kernels took 7 s, whatever hung on it. The best plan so far takes 1000 ns."""
    monkeypatch.setattr(structure_search, "foreseen", lambda *_: (predicted_ns, unmeasured, 0))
    monkeypatch.setattr(structure_search, "unsearched", lambda case: Scheduled(case.xla, 2000, 0))
    step = parsed(STEP)
    structures: Any = SimpleNamespace(
        made={"a": SimpleNamespace(result=lambda: SimpleNamespace(source=step))}
    )
    for structure, expected in (("auto", profiled), ("a", unmeasured > 0.01)):
        session = not_held(Path(), structure=structure)
        [one] = searching(session, found(step, ns=1000))._ranked(structures)
        assert one.lacking is expected


def test_a_structure_far_behind_another_is_neither_held_for_nor_profiled() -> None:
    """Two on 2 H200 were profiled for 12 s, at 109 ms, where one was predicted to take 95; neither was measured."""
    ranked = [structure_search.Ranked(ns, str(ns), True, 0) for ns in (100, 110, 111)]
    assert structure_search._rivals(ranked, 3) == ranked[:2]
    assert structure_search._rivals(ranked, 1) == ranked[:1]
    assert structure_search._rivals([], 3) == []


@pytest.mark.parametrize(
    ("times_ns", "made"),
    [
        (
            {DEFAULT: 50, "a": 60, "keep": 10, "c": 40, "d": 22, "e": 49, "f": 20, "g": 45},
            ["f", "d"],
        ),
        ({"a": 60, "b": 10}, ["a", "b"]),
    ],
    ids=["the fastest two with room", "the step's own draft was refused"],
)
def test_calls_are_held_only_for_structures_whose_drafts_are_the_fastest(
    times_ns: dict[str, int], made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft is compiled without the autotuner, on rank 0, and takes no device from the training. All ranks meet at
    the same places: one that waited in a stage that others do not come to would have searched no structure. Nothing is
    held for the second fastest, whose kernels have all been tuned before; of the others that is not tried, as XLA wrote
    436 errors to the stderr of a training, one for each kernel that it did not know."""
    holds, tuned, known, met = list[str](), list[str](), list[str](), list[str]()
    gpu = BACKENDS["gpu"]

    def move(_early: object, name: str, _moves: object) -> bytes:
        assert not holds, "a held call waits for XLA alone"
        return name.encode()

    def capture(_request: object, changed: bytes = b"", extra_options: object = None) -> bytes:
        if extra_options == gpu.by_known_picks:
            known.append(changed.decode())
        elif not extra_options:
            assert holds, "the autotuner takes devices"
            tuned.append(changed.decode())
        return changed

    def read(_early: object, name: str, *_: object) -> Any:
        assert not holds, "a held call waits for XLA alone"
        return SimpleNamespace(source=name)

    def predict(name: str, _known: object) -> tuple[int, float, int]:
        return times_ns[name], 0.0, 2 if name == "keep" else 0

    @contextlib.contextmanager
    def holding(what: str) -> Iterator[None]:
        holds.append(what)
        yield
        holds.clear()

    early = SimpleNamespace(key="f00d", run=lambda *_: DEFAULT)
    monkeypatch.setattr(making_structures, "early_module", lambda *_: early)
    names = [name for name in times_ns if name != DEFAULT]
    monkeypatch.setattr(making_structures, "named_schedules", lambda *_: {name: [] for name in names})
    monkeypatch.setattr(making_structures, "restructured", read)
    monkeypatch.setattr(making_structures, "moved", move)
    monkeypatch.setattr(making_structures, "of_module", read)
    monkeypatch.setattr(structure_search, "foreseen", predict)
    monkeypatch.setattr(structure_search, "interpreter", lambda _: here)
    monkeypatch.setattr(making_structures, "compiles_at_once", lambda _: 1)
    monkeypatch.setattr(compiles, "capture", capture)
    told: list[list[str]] = []

    def tell(value: list[str], tag: str) -> list[str]:
        met.append(tag)
        told.append(value)
        return told[0]

    for leads in (True, False):
        session = fake_session(
            settings=Settings(search=True, directory=tmp_path, when="training"), leads=leads, tell=tell,
            request=SimpleNamespace(tuner_results=tmp_path / str(leads)), channel=SimpleNamespace(size=2),
            compiles_between_steps=True, compiling=holding, gathered=lambda value, _: [value, [[0, False]]],
            stage=lambda name, **_: met.append(name) or contextlib.nullcontext(),
        )  # fmt: skip
        making = Making(session, parsed(SCANNED.replace("OP", REDUCED)))
        note_tuned(tmp_path / str(leads), making._digest(made[1], []))
        structures = making.structures()
        likeliest, over = searching(session, UNCHANGED if leads else None)._likeliest(structures, None)
        making.make(structures, likeliest)
        making.end()
        assert list(structures.made) == made
        assert over == ("keep" in times_ns)
        assert all(is_tuned(tmp_path / str(leads), making._digest(name, [])) for name in made)
    assert known == 2 * [made[1]]
    assert tuned == 2 * [name for name in made if name != made[1]]
    assert met[: len(met) // 2] == met[len(met) // 2 :]


@pytest.mark.parametrize(
    ("drafts_ns", "worth"),
    [
        ({"made": 100, "keep-some": 98, "keep-some-rotate": 130}, ["keep-some"]),
        ({"made": 100, "keep-some": 100}, []),
        ({"made": 100, "keep-some": None}, []),
        ({"made": None, "keep-some": None}, ["keep-some"]),
        ({}, ["keep-some"]),
    ],
    ids=["one is faster", "as fast as what is made", "refused", "all drafts are refused", "nothing holds calls"],
)  # fmt: skip
def test_calls_are_held_for_what_is_kept_in_part_only_where_a_draft_of_it_is_faster(
    drafts_ns: dict[str, int | None], worth: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 2 H200 they were held for 6 s, 120 s of a training, for two that were no faster than what was made. Where XLA
    refuses every draft nothing was kept in part, as nothing was predicted."""

    def predict(name: str, _known: object) -> tuple[int, float, int]:
        if (ns := drafts_ns[name]) is None:
            raise XlaRefusalError("it knows no kernel")
        return ns, 0.0, 0

    monkeypatch.setattr(structure_search, "foreseen", predict)
    monkeypatch.setattr(structure_search, "interpreter", lambda _: here)
    made: list[str] = []
    making: Any = SimpleNamespace(
        drafts=lambda _, schedules: {name: done(name) for name in schedules},
        make=lambda found, names: made.extend(names),
    )
    drafts = {"made": done("made")} if drafts_ns else {}
    structures: Any = SimpleNamespace(early=None, made={"made": None}, drafts=drafts)
    schedules: dict[str, Any] = {name: [] for name in drafts_ns if name != "made"} or {"keep-some": []}
    searching(fake_session(), UNCHANGED, making)._made(structures, ["made"], schedules)
    assert made == worth


def test_what_is_kept_in_part_is_made_where_what_keeps_all_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was compared with the draft of what it stands in for, which keeps more and is faster: it was never made."""
    drafts_ns = {DEFAULT: 100, "keep-all": 50, "keep-some": 80}
    monkeypatch.setattr(structure_search, "foreseen", lambda name, _: (drafts_ns[name], 0.0, 0))
    monkeypatch.setattr(structure_search, "interpreter", lambda _: here)
    monkeypatch.setattr(structure_search, "most_bytes", lambda *_: 1)
    monkeypatch.setattr(structure_search, "needed_bytes", lambda *_: (2, "it needs 2 MiB a device"))
    monkeypatch.setattr(StructureSearch, "_ranked", lambda _, found: [
        structure_search.Ranked(drafts_ns[name], name, False, 1) for name in found.made
    ])  # fmt: skip
    monkeypatch.setattr(structure_search, "in_part", lambda *arguments: arguments[-1]({"keep-some": []}))

    def make(found: Any, names: Sequence[str]) -> None:
        found.made.update(dict.fromkeys(names))

    making = SimpleNamespace(
        drafts=lambda _, schedules: {name: done(name) for name in schedules},
        make=make,
        in_time=lambda chosen: chosen,
    )
    drafts = {name: done(name) for name in (DEFAULT, "keep-all")}
    structures: Any = making_structures.Structures(None, {"keep-all": []}, {"keep-all": None}, drafts)  # type: ignore[arg-type,dict-item]
    search = searching(fake_session(), UNCHANGED, making)
    assert search._promising(structures, None, over=False) == {"keep-some": False}


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ("kept pick", "kept pick"),
        (XlaRefusalError("a kernel is new"), "own pick"),
        (RuntimeError("XLA failed before it saw the structure"), "own pick"),
    ],
    ids=["a pick is kept", "none is known", "nothing was seen"],
)
def test_a_structure_is_searched_as_a_later_process_makes_it(
    kept: str | Exception, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 2 H100 a saved plan was refused at the next start: of a kernel that several compiles had tried at once, its
    structure had another pick than the one that XLA keeps."""

    def capture(_request: object, changed: bytes, options: object) -> bytes:
        assert (changed, options) == (b"early", BACKENDS["gpu"].by_known_picks)
        if isinstance(kept, Exception):
            raise kept
        return kept.encode()

    def read(_early: object, name: str, _moves: object, _changed: bytes, module: bytes) -> Any:
        return SimpleNamespace(name=name, record=module.decode())

    monkeypatch.setattr(making_structures, "compiles_at_once", lambda _: 1)
    monkeypatch.setattr(compiles, "capture", capture)
    monkeypatch.setattr(making_structures, "of_module", read)
    source: Any = SimpleNamespace(
        graph=SimpleNamespace(backend="gpu", nodes=[]), module=SimpleNamespace(computations=())
    )
    making = Making(not_held(tmp_path, structure="off"), source)
    own = SimpleNamespace(early=b"early", record=SimpleNamespace(moves=()), name="a")
    structures = making_structures.Structures(None, {}, {"a": done(own)})  # type: ignore[arg-type]
    making.settle(structures, ["a"])
    settled: Any = structures.made["a"].result(10)
    making.end()
    assert ("own pick" if settled is own else settled.record) == expected
    assert settled.name == "a"


def test_structures_that_would_not_be_compiled_in_time_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by(monkeypatch, lambda name: name)
    source = parsed(SCANNED.replace("OP", REDUCED))

    def errors(processes: int = 1, **settings: Any) -> list[type | None]:
        making = Making(not_held(tmp_path, processes, **settings), source)
        found = [type(one.exception()) for one in making.structures().made.values()]
        making.end()
        return [None if one is type(None) else one for one in found]

    assert errors() == [None] * 3
    monkeypatch.setattr(making_structures, "making_s", lambda _: 0.0)
    assert errors() == [making_structures.LateError] * 3
    assert errors(when="training") == [None] * 3, "nobody waits"
    assert errors(processes=2) == [None] * 3, "the other would wait inside XLA's autotuner"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_leaves_no_structure_out_for_which_another_may_wait_in_a_compile(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ending = threading.Event(), threading.Event()

    def make(name: str) -> str:
        begun.set()
        ending.wait(20)
        return name

    made_by(monkeypatch, make)
    making = Making(not_held(tmp_path, processes), parsed(SCANNED.replace("OP", REDUCED)))
    assert begun.wait(20)
    made = making.structures().made
    end = threading.Thread(target=making.end)
    end.start()
    if processes == 1:
        with pytest.raises(CancelledError):
            made["c"].result(20)
    ending.set()
    end.join()
    assert [one.cancelled() for one in made.values()] == [False] + [processes == 1] * 2


def test_structures_that_there_is_no_time_to_profile_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step took 90 s to profile, so one of them 30 s."""
    monkeypatch.setattr(making_structures, "compiles_at_once", lambda _: 1)
    said: list[str] = []

    def in_time(**settings: Any) -> list[str]:
        session = not_held(tmp_path, **settings)
        making = Making(session, parsed(STEP), None, 90.0)
        kept = making.in_time([("a", True), ("known", False), ("b", True), ("c", True)])
        making.end()
        said.extend(session.said)
        return [name for name, _ in kept]

    assert in_time(budget_s=10) == ["a", "known", "b"]
    assert said == ["c is not tried: no time is left to profile it"]
    assert in_time(budget_s=1) == ["a", "known", "b"]
    monkeypatch.setattr(making_structures, "making_s", lambda _: 20.0)
    said.clear()
    assert in_time(budget_s=10) == ["a", "known"]
    assert said == [
        "a is tried by estimates: no time is left to profile it",
        *(f"{name} is not tried: no time is left to profile it" for name in "bc"),
    ]
    assert in_time(budget_s=1, when="training") == ["a", "known", "b", "c"]


# --- how the budget is shared ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "when", "ns_per_byte", "share"),
    [
        ("auto", "compile", 100.0, 1 / 2),
        ("auto", "compile", 0.0, 1),
        ("auto", "training", 100.0, 1),
        ("off", "compile", 100.0, 1),
        ("gather-once", "compile", 0.0, 1 / 2),
    ],
)
def test_structures_that_may_be_tried_get_as_much_of_the_budget_as_a_search_of_the_step(
    structure: str, when: str, ns_per_byte: float, share: float
) -> None:
    case = case_of(parsed(STEP), "gpu", ns_per_byte)
    settings = Settings(search=True, directory=Path(), structure=structure, when=when)
    assert share_of_a_search(settings, case) == pytest.approx(share)


@pytest.mark.product_only  # compiles the simulator
@pytest.mark.parametrize(("structure", "halved"), [("gather-once", True), ("off", False)])
def test_a_budget_of_which_a_search_gets_half_is_told_so(structure: str, halved: bool) -> None:
    """ "preparing the search took 4.6 s of a budget of 2.5 s", where DISCO_BUDGET_S was 5."""
    lines: list[str] = []
    source = parsed(STEP)
    settings = Settings(
        search=True, directory=Path(), structure=structure, when="compile", budget_s=2e-6, log_level="warning"
    )
    find(
        settings, lambda line, *what: lines.append(line % what),
        source, read(source), profile("gpu", 100.0), Interruption(),
    )  # fmt: skip
    [line] = [line for line in lines if line.startswith("preparing the search took")]
    half = "1e-06 s (half of DISCO_BUDGET_S; the other half is for other structures of the step), writing"
    assert f"of a budget of {half if halved else '2e-06 s, writing'} a plan takes" in line


class Searching:
    """Searches of structures on a made-up clock: each takes what it is said to take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, starts_ns: dict[str, int], takes_s: float) -> None:
        self.had_s: list[float] = []
        step = parsed(STEP)
        self.step = step
        left = iter(starts_ns.values())

        def optimize(case: Case, _: object, budget: Budget, *, also: list[Strategy]) -> Optimized:
            self.had_s.append(budget.seconds or 0.0)
            plans = tuple(Scheduled(one, 50, 0) for one in also)
            return Optimized(case, SearchResult(case.xla, 50, 50, (), 0, 0, 0.0, ""), plans, takes_s)

        monkeypatch.setattr(structure_search, "optimize", optimize)
        monkeypatch.setattr(structure_search, "unsearched", lambda case: Scheduled(case.xla, next(left), 0))
        self._profiles = {name: profile("gpu", 1.0) for name in starts_ns}

    def run(self, searched_s: float, **settings: Any) -> list[str]:
        return list(self.best(searched_s, **settings))

    def best(self, searched_s: float, search: Any = None, **settings: Any) -> dict[str, Scheduled]:
        asked = Settings(search=True, directory=Path(), budget_s=180, **settings)
        made: Any = {name: SimpleNamespace(source=self.step, module=b"") for name in self._profiles}
        before = found(self.step, "gpu", searched_s=searched_s, ns=100)
        structures = replace(searching(fake_session(settings=asked), before), search=search)
        return structures._searched(self._profiles, made, None, before)


def test_structures_share_what_the_searches_of_the_step_left_of_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One got a tenth of the budget, in which it kept XLA's own order."""
    searching = Searching(monkeypatch, {"a": 90, "hopeless": 120, "b": 110}, takes_s=10)
    assert searching.run(120) == ["a", "b"]
    assert searching.had_s == [30, 30]


@pytest.mark.parametrize(("cores", "at_once", "each_s"), [(7, 1, 20), (8, 2, 30), (32, 3, 60)])
def test_structures_are_searched_abreast_where_each_restart_has_a_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, at_once: int, each_s: float
) -> None:
    """Two took 10.6 s one after the other, on 32 cores, and three had 2.2 s each, in which none came to a candidate,
    where each could have had 6.6. What a search makes worse is taken as it was."""
    monkeypatch.setattr(structure_search, "own_cores", lambda: range(cores))
    searching = Searching(monkeypatch, {"a": 90, "b": 80, "c": 110}, takes_s=10)
    together = threading.Barrier(at_once)

    def search(module: bytes, case: Case, seconds: float) -> Scheduled:
        assert (module, seconds) == (b"", each_s)
        if at_once != 2:  # of three the last is alone
            together.wait(30)  # raises BrokenBarrierError where fewer are under way
        return Scheduled(case.xla, 85, 0)

    best = searching.best(120, search)
    assert {name: one.predicted_ns for name, one in best.items()} == {"a": 85, "b": 80, "c": 85}


def test_a_structure_whose_search_is_killed_keeps_the_order_that_it_began_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def search(*_: object) -> Scheduled:
        raise DiscoError("the search's process ended with -9 and found nothing")

    [(name, one)] = Searching(monkeypatch, {"a": 90}, takes_s=10).best(120, search).items()
    assert (name, one.predicted_ns) == ("a", 90)


def test_a_structure_that_is_asked_for_gets_as_much_as_the_step_and_none_gets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searching = Searching(monkeypatch, {"gather-once": 300}, takes_s=60)
    assert searching.run(120, structure="gather-once") == ["gather-once"]
    assert searching.had_s == [60]
    late = Searching(monkeypatch, {"a": 90}, takes_s=9)
    assert late.run(190) == ["a"]
    assert late.had_s == [18]


def test_a_structure_for_which_there_is_no_time_keeps_the_best_order_of_its_kernels() -> None:
    """It was predicted 157.9 ms in that order, and was then a candidate of 194.9 ms in XLA's own."""
    step = parsed(STEP)
    waits = replace(read(step), order=("n1", "b0.start", "b0.done", "n5", "n3", "b1.start", "b1.done"))
    case = Case(step, waits, costs_of(profile("gpu", 1.0), step))
    start = unsearched(case)
    none = Budget.of(1e-9)
    assert optimize(case, SearchSettings(), none).best.predicted_ns > start.predicted_ns
    assert (
        optimize(case, SearchSettings(), none, also=[start.strategy]).best.predicted_ns == start.predicted_ns
    )
