"""One process of a two-process gloo job, for test_lockstep.py: ADDRESS RANK FOLDER."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.activation.channel import CoordinationStore
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.collectives import ALL_REDUCE
from disco_hlo.plugin.measuring import runner
from disco_hlo.plugin.measuring.inputs.arguments import fit_inputs
from disco_hlo.plugin.measuring.microbenchmarks import Sweep
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.xla import compiles, executables, jaxlink, job
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest

LATE_S = 0.5


def waits_for_a_late_rank(step: runner.Runner, rank: int, store: CoordinationStore) -> bool:
    """Whether rank 0, ready half a second before rank 1 has its inputs, does not start its clock before that."""
    inputs, fresh = step.runs_on, step.runs_on.fresh
    waited = True

    def late() -> list[Any]:
        nonlocal waited
        waited = store.get("the clock runs", LATE_S) is None
        return fresh()

    readings = itertools.count()

    def noted() -> int:
        if next(readings) == 0:
            store.put("the clock runs", b"")
        return time.perf_counter_ns()

    if rank == 0:
        runner.time = SimpleNamespace(perf_counter_ns=noted)  # type: ignore[assignment]
    else:
        inputs.fresh = late  # type: ignore[method-assign]
    try:
        step.run()
    finally:
        runner.time = time
        inputs.fresh = fresh  # type: ignore[method-assign]
    return waited


def weights_in_a_row(step: runner.Runner, count: int) -> list[list[float]]:
    """What each of so many steps in a row, and the one ahead of them, takes for the weight."""
    seen: list[list[float]] = []
    execute = executables.execute

    def noted(executable: LoadedExecutable, arguments: list[Any]) -> Any:
        seen.append(np.asarray(arguments[0].addressable_data(0)).tolist())
        return execute(executable, arguments)

    executables.execute = noted  # type: ignore[assignment]
    try:
        step.run_in_a_row(count)
    finally:
        executables.execute = execute
    return seen[-count - 1 :]  # the steps before were to see whether the state stays near what it was


def runs_with_a_decision(request: CompileRequest) -> list[int]:
    """What decides about a step's collective, after some runs of that step on made-up inputs."""
    module = compiles.capture(request)
    fit_inputs(request, canonicalize(module))
    executable = compiles.compile_module(request, module)
    for seed in range(8):
        runner.Runner(request, executable, seed=seed).run()
    return sorted(request.equal)


def main(address: str, rank: int, folder: Path) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    report: dict[str, object] = {}

    def handle(request: CompileRequest) -> LoadedExecutable | None:
        if request.module_name == "jit_guarded":
            report["guarded"] = runs_with_a_decision(request)
        if request.module_name != "jit_step":
            return None
        module = compiles.capture(request)
        rewritten = compiles.compile_module(request, exchange_opcode(module, "negate", "abs"))
        step = runner.Runner(request, rewritten, seed=1)
        times = [step.run() for _ in range(3)]
        distributed = jaxlink.distributed_job()
        assert distributed is not None
        store = CoordinationStore(distributed.client)
        report["waits"] = waits_for_a_late_rank(step, rank, store)
        sweep = Sweep(request, ALL_REDUCE, seed=1).chain(1024, 2)
        store.put(f"module/{rank}", hashlib.sha256(module).digest())
        hashes = [store.get(f"module/{other}", 30) for other in (0, 1)]
        facts = job.device_facts(request)
        report["ran"] = all(t > 0 for t in times)
        report["same_module"] = None not in hashes and hashes[0] == hashes[1]
        report["outputs"] = [[np.asarray(part).tolist() for part in out] for out in step.output_arrays()]
        report["in a row"] = weights_in_a_row(step, 3)
        report["sums"] = [np.asarray(part).tolist() for part in sweep.output_arrays()[0]]
        report["job"] = distributed.address
        report["places"] = [facts.process_index, facts.process_count, facts.device_count]
        report["local"] = len(request.local_devices)
        return rewritten

    def guarded(scale: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.cond(
            scale.sum() * jnp.sin(1e6 * scale.sum()) > 0,
            lambda: x * jax.lax.pmean(x.sum(), "data"),
            lambda: x,
        )

    def step(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return weight + x.sum(), -weight

    jaxlink.install(handle)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    x = jax.make_array_from_process_local_data(split, np.full((2, 3), rank + 1, np.float32))
    weight = jax.make_array_from_process_local_data(whole, np.full(5, -2, np.float32))
    updated, flipped = jax.jit(step, out_shardings=whole, donate_argnums=0)(weight, x)
    mapped = jax.shard_map(guarded, mesh=mesh, in_specs=split.spec, out_specs=split.spec, check_vma=False)
    stacked = jax.make_array_from_process_local_data(split, np.ones(2, np.float32))
    jax.jit(mapped)(stacked, x)
    report["updated"] = np.asarray(updated.addressable_data(0)).tolist()
    report["flipped"] = np.asarray(flipped.addressable_data(0)).tolist()
    (folder / f"{rank}.json").write_text(json.dumps(report))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
