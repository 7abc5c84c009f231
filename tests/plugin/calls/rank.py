"""One process of a two-process gloo job, for test_two_processes.py: rank.py ADDRESS FOLDER [RANK] (or mpiexec)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.activation.channel import CoordinationStore
from disco_hlo.activation.choose import open_channel
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.store import note_compared
from disco_hlo.plugin import session as sessions
from disco_hlo.plugin.calls import loading, schedule
from disco_hlo.plugin.calls import trial as trials
from disco_hlo.plugin.calls.observing import Observation
from disco_hlo.plugin.calls.trial import Trial
from disco_hlo.plugin.phases import enact_phase, second_trial
from disco_hlo.plugin.session import join, versions
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles, jaxlink
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.plugin.calls.dropout import following, kept
from tests.plugin.handled import save_plan

STEPS = 120
_QUICKLY_S = 2.0


class Training:
    """A step over both processes, under a name; one that prints its loss if that is ``told``."""

    def __init__(self, name: str, told: bool = False) -> None:
        mesh = Mesh(np.array(jax.devices()), ("data",))
        self.whole, self.split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))

        def step(weight: jax.Array, key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            def loss_of(weight: jax.Array) -> jax.Array:
                return jnp.mean((jnp.tanh(x @ weight) * kept(key, (8, 16)) - x) ** 2)

            loss, slope = jax.value_and_grad(loss_of)(weight)
            if told:
                jax.debug.print("loss {}", loss)
            return weight - 0.1 * slope, following(key), loss

        step.__name__ = name
        outputs = (self.whole, self.whole, self.whole)
        self._step = jax.jit(step, donate_argnums=(0, 1), out_shardings=outputs)
        self._state = (
            self._placed(np.eye(16, dtype=np.float32), self.whole),
            jax.jit(lambda: jax.random.key(3), out_shardings=self.whole)(),
        )
        self._rank = jax.process_index()
        self.losses: list[float] = []

    def _placed(self, values: Any, sharding: Any) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, values)

    def step(self) -> None:
        drawn = np.random.default_rng(2 * len(self.losses) + self._rank).normal(size=(4, 16))
        x = self._placed(drawn.astype(np.float32), self.split)
        *state, loss = self._step(*self._state, x)
        self._state = tuple(state)
        self.losses.append(float(loss.addressable_data(0)))


def candidate(trial: Trial) -> Any:
    with jaxlink.ours():
        return compiles.compile_module(trial.watch.request, None)


def tried_again(folder: Path, stock: list[float]) -> dict[str, object]:
    """Trainings that enact a plan of another jax: in the first ranks try it, and in the second they know."""
    settings = Settings(search=False, directory=folder / "plans")
    saved: list[str] = []
    outcomes: list[str] = []
    note = second_trial._Again.note

    def handle(request: CompileRequest) -> Any:
        if request.module_name != "jit_again":
            return None
        if not saved:
            slot, digest = save_plan(request, settings, jax="0.0.1")
            saved.append(digest)
            session = join(request, settings)
            if session.leads:
                note_compared(slot, digest, versions(session.facts))
        return enact_phase.handle(request, settings)

    def noted(again: Any, name: str, rounds: list[schedule.Round]) -> None:
        outcomes.append(name)
        note(again, name, rounds)

    second_trial._Again.note = noted  # type: ignore[method-assign]
    schedule.verdict = lambda had, names, _: schedule.Verdict(names, DEFAULT if len(had) >= 5 else None, 5)  # type: ignore[assignment]
    loading.watch()
    jaxlink.install(handle)
    apart = []
    for _ in range(2):
        training = Training("again")
        for _ in range(40):
            training.step()
        apart.append(float(np.abs(np.subtract(training.losses, stock[:40])).max()))
    return {
        "outcomes": outcomes,
        "apart": apart,
        "lost": second_trial._outcomes == dict.fromkeys(saved, False),
    }


def main(address: str, rank: int, folder: Path) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    trials._LONGEST_PAUSE = 8
    job = jaxlink.distributed_job()
    assert job is not None
    channel = open_channel(
        rank=rank, size=2, job_id=job.address, store=CoordinationStore(job.client), environ=os.environ,
        preference="", timeout_s=60,
    )  # fmt: skip
    report: dict[str, object] = {"channel": channel.description}

    def wanted(request: CompileRequest) -> bool:
        return request.module_name == "jit_together" or (rank == 0 and request.module_name == "jit_alone")

    jaxlink.install(lambda _: None)
    stock = Training("stock")
    for _ in range(STEPS):
        stock.step()
    observation = Observation(lambda _: channel, 60, wanted)
    observation.start()

    together = Training("together")
    together.step()
    [trial] = observation.trials
    ran, choose = ["XLA default"], trial.choose

    def noted(index: int) -> str:
        ran.append(choose(index))
        return ran[-1]

    trial.watch.swap(noted)
    trial.refuse("not on rank 1", "no memory") if rank else trial.offer("not on rank 1", candidate(trial))
    for number in range(1, STEPS):
        if number == (3, 20)[rank]:
            trial.offer("again", candidate(trial))
        if number == 40:
            trial.complete()
        together.step()
    observation.drain()
    report["ran"] = ran
    report["settled"] = trial.outcome
    report["rounds"] = len(trial.rounds)
    report["losses"] = [together.losses == stock.losses, len(together.losses)]

    observation._timeout_s = _QUICKLY_S
    alone = Training("alone")
    for _ in range(12):
        alone.step()
    report["alone"] = alone.losses == stock.losses[:12]
    report["still watched"] = [one.watch.module_name for one in observation.trials]
    observation.stop()
    if jaxlink.keeps_donation():
        sessions._channels[job.number, (0, 1)] = channel, None
        report["again"] = tried_again(folder, stock.losses)
    (folder / f"{rank}.json").write_text(json.dumps(report))
    jax.distributed.shutdown()


if __name__ == "__main__":
    own = sys.argv[3] if len(sys.argv) > 3 else os.environ["OMPI_COMM_WORLD_RANK"]
    main(sys.argv[1], int(own), Path(sys.argv[2]))
