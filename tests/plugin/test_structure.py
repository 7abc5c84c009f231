"""A step with other structure: made, recognised, refused; and when one is tried at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _hlo

from disco_hlo.errors import IllegalMoveError, PlanError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.pipeline import Case, Optimized
from disco_hlo.plan.store import PlanStore
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.phases.structure_search import inside_share, restructured_trials, why_not
from disco_hlo.plugin.session import join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.structure import (
    Restructured,
    early_module,
    enacted,
    named_schedules,
    refuse_unsupported,
    restructured,
)
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.profiler.allreduce import fit, point_of
from disco_hlo.profiler.profile import Platform, Profile
from disco_hlo.search.api import SearchResult
from disco_hlo.search.schedule import Scheduled
from tests.hlo.test_transfers_gpu import STEP
from tests.steps import models
from tests.steps.intercept import intercept

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


def test_every_named_schedule_computes_the_same() -> None:
    def look(request: CompileRequest) -> dict[str, float]:
        early = early_module(request)
        runner = Runner(request, compiles.compile_module(request, None))
        expected = runner.outputs()
        found = {}
        for name, moves in named_schedules(early).items():
            made = restructured(request, early, name, moves)
            executable = compiles.compile_module(request, None, None, made.early)
            got = Runner(request, executable, inputs_of=runner).outputs()
            found[name] = float(np.abs(got[0][0] - expected[0][0]).max())
        return found

    apart = on_step(look)
    assert {"chunk-2", "chunk-4", "split"} <= set(apart)
    assert max(apart.values()) < 1e-5


def test_a_plans_moves_make_the_step_they_made_when_it_was_searched() -> None:
    def look(request: CompileRequest) -> tuple[Restructured, Restructured, bytes]:
        early = early_module(request)
        made = restructured(request, early, "chunk-2", named_schedules(early)["chunk-2"])
        record = msgspec.json.decode(msgspec.json.encode(made.record), type=type(made.record))
        again = enacted(request, record)
        for field in ("key", "result"):
            with pytest.raises(PlanError, match="search again"):
                enacted(request, msgspec.structs.replace(record, **{field: "0" * 64}))
        return made, again, compiles.capture(request)

    made, again, default = on_step(look)
    assert again.early == made.early
    assert again.source.graph.key == made.source.graph.key == made.record.result
    assert canonicalize(default).graph.key != made.record.result
    assert len(made.source.graph.all_reduces) == 2 * len(canonicalize(default).graph.all_reduces)


def test_no_move_is_refused() -> None:
    def look(request: CompileRequest) -> None:
        with pytest.raises(IllegalMoveError, match="changes nothing"):
            restructured(request, early_module(request), "none", [])

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

    def module(text: str) -> Any:
        return canonicalize(bytes(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()))

    with pytest.raises(IllegalMoveError, match="dimension 1 of f32\\[4,4\\] is not the outermost"):
        refuse_unsupported(module(inner))
    refuse_unsupported(module(outer))


# --- when a structure is tried --------------------------------------------------------------------


def profile(backend: str, ns_per_byte: float) -> Profile:
    points = [point_of(size, [1 + int(size * ns_per_byte)] * 3) for size in (1 << 8, 1 << 12, 1 << 16)]
    return Profile(
        Platform("none", backend, "", "0", "0"), {}, 100, 1e11, 1e13, all_reduce=fit(tuple(points))
    )


def test_a_data_parallel_step_has_nothing_between_its_transfers() -> None:
    step, arguments = models.mlp()
    graph = intercept(step, arguments, lambda r: canonicalize(compiles.capture(r))).graph
    assert len(graph.all_reduces) > 1
    assert inside_share(graph, [1] * len(graph)) == 0.0


def test_a_tensor_parallel_step_has_its_layers_between_them() -> None:
    graph = on_step(lambda request: canonicalize(compiles.capture(request))).graph
    assert inside_share(graph, [node.flops for node in graph.nodes]) > 0.3


def test_why_no_structure_is_tried() -> None:
    step = canonicalize(bytes(_hlo.hlo_module_from_text(STEP).as_serialized_hlo_module_proto()))
    plan = unfused(step.graph)

    def answer(backend: str, ns_per_byte: float) -> str:
        return why_not(Case(step, plan, costs_of(profile(backend, ns_per_byte), step)), plan)

    assert "collectives block on this device" in answer("cpu", 1.0)
    assert "of the step to communication alone" in answer("gpu", 0.0)
    assert answer("gpu", 100.0) == ""


SCANNED = """
HloModule jit_step, is_scheduled=true

add { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b) }
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


def test_structures_are_tried_where_a_loop_communicates() -> None:
    def answer(op: str) -> str:
        module = _hlo.hlo_module_from_text(SCANNED.replace("OP", op))
        step = canonicalize(bytes(module.as_serialized_hlo_module_proto()))
        plan = unfused(step.graph)
        return why_not(Case(step, plan, costs_of(profile("gpu", 100.0), step)), plan)

    groups = "channel_id=3, replica_groups={{0,1}}, use_global_device_ids=true"
    assert "of the ops' time lies between transfers" in answer("negate(x)")
    assert answer(f"all-reduce(x), {groups}, to_apply=add") == ""


def found(source: CanonicalModule) -> Optimized:
    """What a search found that found nothing."""
    graph = source.graph
    case = Case(source, unfused(graph), costs_of(profile("cpu", 1.0), source))
    return Optimized(case, SearchResult(case.xla, 1, 1, (), 0, 0, 0.0, ""), (Scheduled(case.xla, 1, 0),))


@pytest.mark.parametrize("structure", ["auto", "off"])
def test_on_cpu_no_early_module_is_even_looked_at(
    structure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(request: CompileRequest) -> bytes:
        raise AssertionError("the early module was captured")

    def look(request: CompileRequest) -> list[Any]:
        monkeypatch.setattr(compiles, "capture_structure", never)
        session = join(request, Settings(search=True, directory=tmp_path, structure=structure))
        source = canonicalize(compiles.capture(request))
        slot = PlanStore(tmp_path).slot(source.graph.key, "cpu", "cpu", 2)
        return restructured_trials(session, slot, None, found(source))

    assert on_step(look) == []


def test_a_forced_schedule_that_the_step_has_no_pattern_for_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def look(request: CompileRequest) -> list[Any]:
        session = join(request, Settings(search=True, directory=tmp_path, structure="sharded-update"))
        source = canonicalize(compiles.capture(request))
        slot = PlanStore(tmp_path).slot(source.graph.key, "cpu", "cpu", 2)
        return restructured_trials(session, slot, None, found(source))

    assert on_step(look) == []
    assert "DISCO_STRUCTURE is sharded-update; this step has the pattern for chunk-2" in caplog.text
