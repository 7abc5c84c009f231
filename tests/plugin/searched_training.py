"""Trainings in processes of their own, for test_searched_trainings.py.

python -m tests.plugin.searched_training end HOW              one process; ends by HOW (raise, kill) as a search runs
python -m tests.plugin.searched_training end held             one process; ends as a worker waits to hold a call
python -m tests.plugin.searched_training end begun            one process; ends as a search's modules are imported
python -m tests.plugin.searched_training enact                one process, which prints; with the plan in DISCO_DIR
python -m tests.plugin.searched_training rank ADDRESS FOLDER  one of two processes under mpiexec; with FAULT_AT (a
                                                              place, or several) and FAULT_HOW (kill, stop, sleep) it
                                                              strikes itself there
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import jax

from disco_hlo import elsewhere
from disco_hlo.plan.plan import SEARCHED
from disco_hlo.plugin.calls import schedule
from disco_hlo.plugin.calls import trial as trials
from disco_hlo.plugin.calls.watch import Watch
from disco_hlo.plugin.phases import training_phase
from disco_hlo.plugin.settings import Settings
from tests.plugin.calls.verdicts import once_it_ran_often
from tests.ports import free_port

_MOST_CALLS = 20_000
_STEP_S = 0.02
"""The cores are the search's, too; and a training of thousands of steps would have to be repeated."""


def searching() -> list[int]:
    """Children of this process that search."""
    lists = [one.read_text().split() for one in Path("/proc/self/task").glob("*/children")]
    children = [int(child) for one in lists for child in one]
    search = b"disco_hlo.elsewhere", b"%d" % os.getpid(), b"%d" % elsewhere.NICENESS
    commands = {one: Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0") for one in children}
    return [one for one, command in commands.items() if tuple(command[-4:-1]) == search]


class SlowImport:
    """An import of what a search is made of that takes as long as on a busy machine."""

    begun = threading.Event()
    outlived: ClassVar[list[object]] = []
    """By these, as what a script holds by its names."""

    def find_spec(self, name: str, *_: object) -> None:
        """Look nowhere, which takes its time."""
        if name == "disco_hlo.plugin.phases.search_in_training":
            self.begun.set()
            time.sleep(_WORKER_WAITS_S / 2)


def end(how: str) -> None:
    """Train until the search's process runs, say its number, and end."""
    from tests.plugin.calls.training import batch, fresh_state, jitted

    if how == "begun":
        sys.meta_path.insert(0, SlowImport())
    call, state = jitted("ending_step"), fresh_state()
    for number in range(_MOST_CALLS):
        *state, loss = call(*state, batch(number))
        loss.block_until_ready()
        if how == "begun" and SlowImport.begun.is_set():
            SlowImport.outlived.append(call)
            return
        if how == "held" and any(one.name.startswith("disco-compile") for one in threading.enumerate()):
            time.sleep(_WORKER_WAITS_S)
            return
        if found := searching():
            print(found[0], flush=True)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)  # it may come to another thread first
            raise RuntimeError("the script's own")


PLACES = (
    "traced calls", "agreed to hold", "one compile", "slice", "compile", "search", "room for real inputs",
    "a run of plan", "rounds", "change-over",
)  # fmt: skip
"""Of a search, in turn: in a call under the profiler, while what is profiled has a call's arguments, before candidates
are compiled, and so on."""
OWN_CODE, CANDIDATE, CALL = "own code", "a candidate's run", "a candidate's call"
"""Places besides: between two calls of the script's while a call is waited for, once a candidate is to run, and in the
first call that one runs."""
_LONG_S, _SLEPT_S = 4.0, 6.0
"""Where one sleeps, no run takes as long as the former; in the script's own code it sleeps for the latter."""
_STOOD_STILL_S = 0.4
"""After a stop it goes on."""
_WORKER_WAITS_S = 3.0
"""After it has begun, a worker has compiled a small program by then, and waits for a call to be held."""
_LONGEST_S = 300.0
"""Of a training with a fault in it."""


def strike_at(places: Sequence[str], how: str, training: threading.Thread) -> Callable[[str], None]:
    """Have this process kill or stop itself once at each of these places of its search, or a thread of it sleep. What
    comes back is to be called in the script's own code, with the place that this is."""
    from disco_hlo.plugin.calls.traced import TracedCalls
    from disco_hlo.plugin.measuring import candidates
    from disco_hlo.plugin.measuring.lending import Slices
    from disco_hlo.plugin.phases import search_in_training
    from disco_hlo.plugin.session import Session
    from disco_hlo.plugin.xla import executables

    struck: list[str] = []
    tried: list[Any] = []
    offered: list[object] = []

    def strike(here: str) -> None:
        if here in places and here not in struck:
            struck.append(here)
            print("struck", flush=True)
            if how in ("sleep", "hang"):
                time.sleep(_SLEPT_S if here == OWN_CODE else _LONGEST_S)
                return
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def struck_in(owner: Any, name: str, place: Callable[..., str], *, after: bool = False) -> None:
        original = getattr(owner, name)

        def striking(*arguments: Any, **options: Any) -> Any:
            if not after:
                strike(place(*arguments))
            found = original(*arguments, **options)
            if after:
                strike(place(*arguments))
            return found

        setattr(owner, name, striking)

    def stage(_: Session, name: str) -> str:
        return name if threading.current_thread() is not training else ""

    def compiled(_: Session, _source: object, trials: Sequence[Any]) -> str:
        tried.extend(one for one in trials if one.strategy is not None)
        return "compile"

    def executed(executable: object, _: object) -> str:
        is_tried = executable in [one.executable for one in tried]  # no longer once it is offered
        return CANDIDATE if is_tried else CALL * (executable in offered)

    def chosen(trial: trials.Trial, _: int) -> str:
        return "rounds" if len(trial._stretch.turns) > 1 and trial.outcome is None else ""

    struck_in(Session, "stage", stage)
    struck_in(trials.Trial, "choose", lambda _, index: f"call {index}")
    struck_in(trials.Trial, "choose", chosen, after=True)
    struck_in(trials.Trial, "_hold_for", lambda *_: "agreed to hold")
    struck_in(Watch, "settle", lambda *_: "change-over")
    struck_in(TracedCalls, "after_call", lambda *_: "traced calls")
    struck_in(candidates, "_compile", lambda *_: "one compile")
    struck_in(Slices, "runner", lambda *_: "slice", after=True)
    struck_in(search_in_training, "compile_trials", compiled)
    struck_in(trials.Trial, "offer", lambda *given: offered.append(given[2]) or "")
    struck_in(executables, "execute", executed)
    return strike


def with_fault(
    folder: Path, environment: Mapping[str, str], victim: int, places: Sequence[str], how: str
) -> list[tuple[int | None, float]]:
    """Two processes that train together, one of which is struck: how each ended, and after how many seconds since the
    last strike; None where it had to be killed."""
    from tests.e2e.jobs import FORKS  # here, as what trains needs none

    command = ("--module", __spec__.name, "rank", f"127.0.0.1:{free_port()}", str(folder))
    ranks, said = [], [folder / f"{rank}.txt" for rank in (0, 1)]
    for rank in (0, 1):
        own = {"OMPI_COMM_WORLD_RANK": str(rank)}
        own |= {"FAULT_HOW": how} | ({"FAULT_AT": ",".join(places)} if rank == victim else {})
        said[rank].touch()
        ranks.append(FORKS.start(["--into", str(said[rank]), *command], {**environment, **own}))
    struck, strikes, last = ranks[victim], 0, time.monotonic()
    end = last + _LONGEST_S
    ends: list[tuple[int | None, float]] = [(None, 0.0)] * 2
    try:
        while time.monotonic() < end and any(code is None for code, _ in ends):
            seen = said[victim].read_text().count("struck\n")
            if seen > strikes:
                strikes, last = seen, time.monotonic()
                if how == "stop":
                    time.sleep(_STOOD_STILL_S)
                    struck.send_signal(signal.SIGCONT)
            for rank, process in enumerate(ranks):
                if ends[rank][0] is None and process.poll() is not None:
                    ends[rank] = process.returncode, time.monotonic() - last
            time.sleep(0.1)
        assert strikes == len(places) or how == "kill", (strikes, said[victim].read_text())
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    return ends


def environment_of(directory: Path, devices: int, patience: int = 50) -> dict[str, str]:
    """Of a training that is searched for."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        "ENABLE_SEARCH": "1",
        "DISCO_WHEN": "training",
        "DISCO_DIR": str(directory),
        "DISCO_BUDGET_S": "60",
        "DISCO_FINALISTS": "1",
        "DISCO_PATIENCE": str(patience),
        "DISCO_SHARE": "1",
    }


def rank(address: str, folder: Path) -> None:
    """Train with another process until a plan runs, and some steps more."""
    from disco_hlo.plugin import hangs
    from disco_hlo.plugin.phases import search_in_training
    from tests.plugin.calls.rank import Training

    strike: Callable[[str], None] = lambda _: None  # noqa: E731
    if place := os.environ.get("FAULT_AT"):
        strike = strike_at(place.split(","), os.environ["FAULT_HOW"], threading.current_thread())
    if os.environ.get("FAULT_HOW") in ("sleep", "hang"):
        hangs._HANGS_S = _LONG_S
    own = int(os.environ["OMPI_COMM_WORLD_RANK"])
    # After its default of 100 s JAX itself ends a process whose peer is gone.
    patience_s = 8 if os.environ.get("FAULT_HOW") == "kill" else 20
    jax.distributed.initialize(address, num_processes=2, process_id=own, heartbeat_timeout_seconds=patience_s)
    trials._LONGEST_PAUSE = 8
    schedule.verdict = once_it_ran_often(SEARCHED)  # type: ignore[assignment]
    # As where devices have no room for the autotuner beside a step.
    search_in_training.with_room_to_compile = lambda session: replace(session, compiles_between_steps=True)
    # Nobody follows the calls of a step that calls the script's functions.
    training = Training("searched", told=os.environ.get("FAULT_HOW") != "hang")
    observation = training_phase.observe(Settings.from_environment())  # as JAX found us
    training.step()
    [trial] = observation.trials
    while trial.outcome is None and len(training.losses) < _MOST_CALLS:
        training.step()
        strike("" if trial.hold is None else OWN_CODE)
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


def enact() -> None:
    """Five steps of a training that prints."""
    from tests.plugin.calls.training import batch, fresh_state, jitted, telling

    call, state = jitted("telling_step", telling), fresh_state()
    for number in range(5):
        *state, loss = call(*state, batch(number))
        loss.block_until_ready()
    jax.effects_barrier()


if __name__ == "__main__":
    if sys.argv[1] == "enact":
        enact()
    elif sys.argv[1] == "end":
        end(sys.argv[2])
    else:
        rank(sys.argv[2], Path(sys.argv[3]))
