"""One of two processes beside whose training a candidate runs, for test_hangs.py: ADDRESS RANK FOLDER FAULT.

FAULT: the candidate ``hangs`` on rank 1's device, ``hangs late`` there, when rank 0 has run it, or ``fails`` there; or
rank 1 ``stands still`` before it until rank 0 has waited for too long, and goes on. Or the candidate ``hangs at first``
on rank 1's device, when XLA's default alone has run, and no training does.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from disco_hlo.activation.channel import CoordinationStore, nobody_gone
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin import hangs
from disco_hlo.plugin.logs import configure
from disco_hlo.plugin.measuring import lockstep
from disco_hlo.plugin.measuring.candidates import compile_trials
from disco_hlo.plugin.measuring.comparing import settle_inputs
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.trial import Trial, marked
from disco_hlo.plugin.session import Session, join, join_beside
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles, executables, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.plugin.measuring_rank import trained

_LONG_S, _LONGER_S = 2.0, 5.0
"""The latter where both go on: what takes no time takes less on a machine that has no core to spare."""
_WENT_ON_S = 1.0
"""Rank 0 asks a dozen times."""


def stand_still(session: Session) -> None:
    """Until rank 0 has said that it has waited for too long, and longer."""
    job = jaxlink.distributed_job()
    assert job is not None
    store, directory = CoordinationStore(job.client), session.channel.wait()._directory  # type: ignore[attr-defined]
    while not store.values(directory):
        time.sleep(0.05)
    time.sleep(_WENT_ON_S)


def arrange(fault: str, endless: Any) -> None:
    """Let the next execution on this rank be the last one."""
    really = executables.execute

    def execute(*args: Any) -> Any:
        if fault == "hangs late":
            jax.block_until_ready(really(*args))
        if fault.startswith("hangs"):
            endless(0).block_until_ready()
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    executables.execute = execute


def main(address: str, rank: int, folder: Path, fault: str) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    configure("info")
    hangs._HANGS_S = _LONGER_S if fault == "stands still" else _LONG_S
    endless = jax.jit(lambda x: jax.lax.while_loop(lambda y: y >= 0, lambda y: 1 - y, x)).lower(0).compile()

    def handle(request: CompileRequest) -> LoadedExecutable | None:
        if request.module_name != "jit_step":
            return None
        settings = Settings(search=True, directory=folder)
        if fault == "hangs at first":
            session = join(request, settings)
            settle_inputs(session, Trial(DEFAULT, None, 0, executable=request.call_default()))
        else:
            session = join_beside(request, settings, "search", nobody_gone)
            request.call_ns = 1
        source = canonicalize(compiles.capture(request))
        slot = session.slot(source.graph.key)
        slot.path.mkdir(parents=True, exist_ok=True)
        trial = Trial("no fusion", unfused(source.graph), 0, marks=slot)
        compile_trials(session, source, [trial], tag="candidate")
        runner = Runner(request, trial.executable)
        arguments = runner.inputs()
        if rank == 1 and fault != "stands still":
            arrange(fault, endless)

        def run() -> Any:
            if rank == 1 and fault == "stands still":
                stand_still(session)
            return runner.output_arrays(arguments)

        guard = functools.partial(marked, session, trial, "run")
        lockstep.run_on_all(session, "a run of no fusion", run, guard)
        return None

    jaxlink.install(handle)
    (folder / f"{rank}.json").write_text(json.dumps({"updated": trained(rank)}))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
