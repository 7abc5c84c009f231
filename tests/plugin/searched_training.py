"""Trainings in processes of their own, for test_searched_trainings.py.

python -m tests.plugin.searched_training end HOW              one process; ends by HOW (raise, kill)
python -m tests.plugin.searched_training rank ADDRESS FOLDER  one of two processes under mpiexec; with FAULT_AT and
                                                              FAULT_HOW (kill, stop) it strikes itself there
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

from disco_hlo.plan.plan import SEARCHED
from disco_hlo.plugin.calls import schedule
from disco_hlo.plugin.calls import trial as trials
from disco_hlo.plugin.calls.schedule import FEWEST_ROUNDS, Verdict
from disco_hlo.plugin.calls.watch import Watch
from disco_hlo.plugin.phases import training_phase
from disco_hlo.plugin.settings import Settings

_MOST_CALLS = 20_000
_STEP_S = 0.02
"""The cores are the search's, too; and a training of thousands of steps would have to be repeated."""


def searching() -> list[int]:
    """Children of this process that search."""
    lists = [one.read_text().split() for one in Path("/proc/self/task").glob("*/children")]
    children = [int(child) for one in lists for child in one]
    return [one for one in children if b"phases.finding" in Path(f"/proc/{one}/cmdline").read_bytes()]


def end(how: str) -> None:
    """Train until the search's process runs, say its number, and end."""
    from tests.plugin.calls.training import batch, fresh_state, jitted

    call, state = jitted("ending_step"), fresh_state()
    for number in range(_MOST_CALLS):
        *state, loss = call(*state, batch(number))
        loss.block_until_ready()
        if found := searching():
            print(found[0], flush=True)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the script's own")


def verdict(had: list[schedule.Round], candidates: list[str], _: object) -> Verdict:
    """In the place of the clock: the plan wins once it ran often enough."""
    lacking = FEWEST_ROUNDS - len(had)
    return Verdict((SEARCHED,), None, lacking) if lacking > 0 else Verdict((SEARCHED,), SEARCHED)


def strike_at(place: str, how: str, training: threading.Thread) -> None:
    """Have this process kill or stop itself, once, as it comes to a place of its search."""
    from disco_hlo.plugin.session import Session

    struck: list[str] = []
    stage, choose, settle = Session.stage, trials.Trial.choose, Watch.settle

    def strike(here: str) -> None:
        if here == place and not struck:
            struck.append(here)
            print("struck", flush=True)
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def staged(session: Session, name: str, **options: Any) -> Any:
        if threading.current_thread() is not training:
            strike(name)
        return stage(session, name, **options)

    def chosen(trial: trials.Trial, index: int) -> str:
        strike(f"call {index}")
        name = choose(trial, index)
        strike("rounds" if name == SEARCHED and trial.outcome is None else "")
        return name

    def settled(watch: Watch, name: str) -> None:
        strike("change-over")
        settle(watch, name)

    Session.stage, trials.Trial.choose, Watch.settle = staged, chosen, settled  # type: ignore[method-assign,assignment]


def rank(address: str, folder: Path) -> None:
    """Train with another process until a plan runs, and some steps more."""
    from tests.plugin.calls.rank import Training

    if place := os.environ.get("FAULT_AT"):
        strike_at(place, os.environ["FAULT_HOW"], threading.current_thread())
    own = int(os.environ["OMPI_COMM_WORLD_RANK"])
    # After its default of 100 s JAX itself ends a process whose peer is gone.
    jax.distributed.initialize(address, num_processes=2, process_id=own, heartbeat_timeout_seconds=20)
    trials._LONGEST_PAUSE = 8
    schedule.verdict = verdict  # type: ignore[assignment]
    training = Training("searched")
    observation = training_phase.observe(Settings.from_environment())  # as JAX found us
    training.step()
    [trial] = observation.trials
    while trial.outcome is None and len(training.losses) < _MOST_CALLS:
        training.step()
        time.sleep(_STEP_S)
    settled = len(training.losses)
    for _ in range(5):
        training.step()
    for thread in threading.enumerate():
        if thread.name == "disco-search":
            thread.join(60)
    observation.stop()
    stock = Training("stock")
    for _ in training.losses:
        stock.step()
    report: dict[str, Any] = {
        "outcome": trial.outcome, "settled": settled, "losses": training.losses, "stock": stock.losses,
    }  # fmt: skip
    (folder / f"{own}.json").write_text(json.dumps(report))
    jax.distributed.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "end":
        end(sys.argv[2])
    else:
        rank(sys.argv[2], Path(sys.argv[3]))
