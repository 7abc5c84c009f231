"""What a real run shows of a step whose layers are a loop, with its weights gathered in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind
from disco_hlo.hlo.graph import Kind
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.regions import step_times
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from disco_hlo.plugin.measuring.known_times import STORE_NAME
from disco_hlo.plugin.measuring.profiling import profile_step
from disco_hlo.plugin.session import join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.profiler.kernel_keys import kernel_keys
from disco_hlo.profiler.profile import Link, Profile
from disco_hlo.profiler.store import ProfileStore
from tests.known_times import PLATFORM, SWEEP, know_device
from tests.steps.intercept import intercept

LAYERS, WIDTH = 5, 64


def scanned() -> tuple[Any, tuple[Any, ...]]:
    """Two devices, each with half of every layer's weights."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    split = NamedSharding(mesh, PartitionSpec(None, "data"))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        whole = jax.lax.with_sharding_constraint(weights, everywhere)
        return jax.lax.with_sharding_constraint(jnp.tanh(x @ whole), rows), None

    def loss(weights: Any, x: Any) -> Any:
        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).mean()

    def scanned_step(weights: Any, x: Any) -> Any:
        return weights - 0.1 * jax.grad(loss)(weights, x)

    step = jax.jit(scanned_step, in_shardings=(split, rows), out_shardings=split, donate_argnums=0)
    shapes = (LAYERS, WIDTH, WIDTH), (16, WIDTH)
    return step, tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)


def test_all_that_a_loop_runs_has_a_measured_time(tmp_path: Path) -> None:
    gather, link = CollectiveKind("all-gather"), Link(2, 1)
    know_device(tmp_path)

    def body(request: CompileRequest) -> tuple[CanonicalModule, Profile]:
        session = join(request, Settings(search=True, directory=tmp_path))
        source = canonicalize(compiles.capture(request))
        with ProfileStore(tmp_path / STORE_NAME) as store:
            for kind in (ALL_REDUCE, gather):
                store.add_sweep(PLATFORM, link, SWEEP, kind)
            found = profile_step(session, source, read(source), store)
        assert found is not None
        return source, found.profile

    source, profile = intercept(*scanned(), body, devices=2)
    loops = [region for region in source.regions if region.name.startswith("loop")]
    assert len(loops) == 2, "forward and backward"
    plans = dict(read(source).regions)
    for region in loops:
        graph = region.source.graph
        single = {
            node.key for node in graph.nodes
            if node.kind in (Kind.FUSIBLE, Kind.FIXED) and node.opcode not in COLLECTIVES
        }  # fmt: skip
        assert single <= set(profile.ops)
        assert {*kernel_keys(graph, unit_graph(graph, plans[region.name]).kernels(graph))} <= set(profile.ops)
        assert profile.loops[graph.key].executions == LAYERS
    together = profile.collectives["all-gather"].together
    assert together is not None
    assert together.sizes == ((4 * WIDTH * WIDTH, 2 * LAYERS),), "every turn of both loops gathers"
    line = profile.line(gather)
    assert line is not None
    predicted = step_times(source, read(source), costs_of(profile, source), as_compiled=True)
    assert predicted.executions == {ENTRY: 1.0, **{region.name: float(LAYERS) for region in loops}}
    gathers_ns = 2 * LAYERS * int(line(4 * WIDTH * WIDTH))
    assert predicted.communication_ns >= gathers_ns
