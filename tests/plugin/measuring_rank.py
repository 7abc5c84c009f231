"""One of two processes that measure candidates, for test_lockstep.py: ADDRESS RANK FOLDER FAULT.

Rank 1 fails in the first round, at the second candidate: FAULT is where, ``inputs`` or ``run``; ``run on all`` is
a run that fails on both ranks.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.logs import configure
from disco_hlo.plugin.measuring import candidates
from disco_hlo.plugin.measuring.candidates import compile_trials, measure
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.session import join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles, executables, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest

FAILS_AT = {"inputs": 4, "run": 8, "run on all": 8}
"""Once each has run, the default's and the candidate's warm-ups come before, and the default in the first round; but
the ranks meet before each, in a run of their own."""


def arrange(fault: str, rank: int) -> None:
    """Let this rank fail at the candidate's first timed run."""
    numbers = itertools.count(1)
    if rank == 0 and fault != "run on all":
        return

    def failing(make: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            if next(numbers) == FAILS_AT[fault]:
                raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return make(*args)

        return wrapped

    if fault == "inputs":
        # Within what all ranks do together.
        jax.block_until_ready = failing(jax.block_until_ready)
    else:
        executables.execute = failing(executables.execute)


def trained(rank: int) -> list[float]:
    """What the one step of the script makes of its state."""

    def step(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return weight + x.sum(), -weight

    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    x = jax.make_array_from_process_local_data(split, np.full((1, 3), rank + 1, np.float32))
    weight = jax.make_array_from_process_local_data(whole, np.full(5, -2, np.float32))
    updated, _ = jax.jit(step, out_shardings=whole, donate_argnums=0)(weight, x)
    found: list[float] = np.asarray(updated.addressable_data(0)).tolist()
    return found


def main(address: str, rank: int, folder: Path, fault: str) -> None:
    # How soon jax ends a rank whose other is gone; 100 s if nobody says.
    jax.distributed.initialize(address, num_processes=2, process_id=rank, heartbeat_timeout_seconds=3)
    configure("info")
    report: dict[str, Any] = {}

    def handle(request: CompileRequest) -> LoadedExecutable | None:
        if request.module_name != "jit_step":
            return None
        session = join(request, Settings(search=True, directory=folder, timeout_s=60))
        source = canonicalize(compiles.capture(request))
        trials = [Trial("XLA default", None, 0), Trial("no fusion", unfused(source.graph), 0)]
        compile_trials(session, source, trials, tag="candidate")
        first_runs = candidates._first_runs

        def have_run(*arguments: Any) -> None:
            first_runs(*arguments)
            arrange(fault, rank)

        candidates._first_runs = have_run
        if fault == "run":  # the other waits for a rank that does not come
            session = replace(session, settings=replace(session.settings, timeout_s=2))
        measure(session, trials, budget_s=0.1)
        report["trials"] = [[trial.error, len(trial.times_ns)] for trial in trials]
        return None

    jaxlink.install(handle)
    report["updated"] = trained(rank)
    (folder / f"{rank}.json").write_text(json.dumps(report))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
