"""One of two processes that try a plan again in their calls, for test_hanging.py: ADDRESS FOLDER FAULT [RANK] (or
mpiexec).

FAULT: a call of the plan hangs on rank 1 at one of ``hanging.PLACES``; or rank 1 ``sleeps`` in the script's own code
for longer than that may take, and goes on; or rank 0
``stands still`` for as long besides, all of its threads, once the call has ended in which it has waited for rank 1.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax

from disco_hlo.plan.store import note_compared
from disco_hlo.plugin import hangs
from disco_hlo.plugin.calls import loading, schedule
from disco_hlo.plugin.calls.schedule import FEWEST_ROUNDS, Verdict
from disco_hlo.plugin.logs import configure
from disco_hlo.plugin.phases import enact_phase
from disco_hlo.plugin.session import join, versions
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.plugin.calls.hanging import PLACES, hang
from tests.plugin.calls.rank import Training
from tests.plugin.handled import save_plan

_HANGS_S, _SLEEPS_S = 3.0, 6.0
_LONGEST_S = 120.0
STANDS_STILL = "stands still"


def main(address: str, rank: int, folder: Path, fault: str) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    configure("info")
    hangs._HANGS_S = _HANGS_S
    schedule.verdict = lambda *_: Verdict(("no fusion",), None, FEWEST_ROUNDS)  # type: ignore[assignment]
    settings = Settings(search=False, directory=folder)

    def handle(request: CompileRequest) -> Any:
        if request.module_name != "jit_tried":
            return None
        slot, digest = save_plan(request, settings, jax="0.0.1")
        session = join(request, settings)
        print("channel:", session.channel.description, file=sys.stderr)
        if session.leads:
            note_compared(slot, digest, versions(session.facts))
        return enact_phase.handle(request, settings)

    if rank and fault in PLACES:
        hang(3, fault, lambda: time.sleep(_LONGEST_S))
    loading.watch()
    jaxlink.install(handle)
    training, began = Training("tried"), time.monotonic()
    while len(training.losses) < 40 or (fault in PLACES and time.monotonic() < began + _LONGEST_S):
        training.step()
        if (
            rank and fault not in PLACES and len(training.losses) == 11
        ):  # the other one is in a call of the plan
            time.sleep(_SLEEPS_S)
        if not rank and fault == STANDS_STILL and len(training.losses) == 12:
            ctypes.PyDLL(None).sleep(round(_SLEEPS_S))  # which keeps the interpreter, as a long sort does
    (folder / f"{rank}.json").write_text(json.dumps(training.losses))
    jax.distributed.shutdown()


if __name__ == "__main__":
    own = sys.argv[4] if len(sys.argv) > 4 else os.environ["OMPI_COMM_WORLD_RANK"]
    main(sys.argv[1], int(own), Path(sys.argv[2]), sys.argv[3])
