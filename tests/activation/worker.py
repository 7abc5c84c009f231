"""One rank of a job, as a process: plays a scenario of this file and leaves its result as JSON.

Started by ``jobs.py``. What the rank is to do comes in ``JOB_*`` variables.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from disco_hlo.activation import mpi
from disco_hlo.activation.agree import PlanBytes, Proposal, agree, broadcast_plan
from disco_hlo.activation.channel import Channel, CoordinationStore
from disco_hlo.activation.choose import open_channel
from disco_hlo.activation.kvstore import CHUNK_BYTES
from disco_hlo.errors import ActivationError
from tests.activation.stores import FolderStore

SETTINGS = {
    name.removeprefix("JOB_").lower(): value for name, value in os.environ.items() if name.startswith("JOB_")
}
PATIENCE_S = 50.0
"""For exchanges in which all ranks take part: on a busy machine they start seconds apart."""
TIMEOUT_S = float(SETTINGS.get("timeout_s", PATIENCE_S))
"""For exchanges that a dead rank may miss."""
FINGERPRINT = "f" * 64
PLAN_JSON = b'{"version": 1}'


def own_rank_and_size() -> tuple[int, int]:
    """Under mpiexec by MPI rank (forwards or backwards, whole or in jobs of JOB_SIZE), else as told."""
    world = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "0"))
    size = int(SETTINGS.get("size", world))
    rank = int(SETTINGS["rank"]) if "rank" in SETTINGS else int(os.environ["OMPI_COMM_WORLD_RANK"]) % size
    return (size - 1 - rank if "backwards" in SETTINGS else rank), size


def job_name() -> str:
    """Several jobs under one mpiexec are told apart by which block of MPI ranks they have."""
    if "rank" in SETTINGS:
        return "job"
    return f"job{int(os.environ['OMPI_COMM_WORLD_RANK']) // own_rank_and_size()[1]}"


def shared_store(rank: int, size: int) -> CoordinationStore:
    if "port" not in SETTINGS:
        return FolderStore(Path(SETTINGS["folder"]) / f"store-{job_name()}")
    import jax
    from jax._src import distributed

    jax.distributed.initialize(f"127.0.0.1:{SETTINGS['port']}", size, rank)
    return CoordinationStore(distributed.global_state.client)


def join() -> tuple[Channel, CoordinationStore]:
    rank, size = own_rank_and_size()
    store = shared_store(rank, size)
    return open_channel(
        rank, size, job_name(), store, os.environ, SETTINGS.get("channel", ""), timeout_s=PATIENCE_S
    ), store


def made_up_module(size_bytes: int, seed: str) -> bytes:
    """Bytes that neither repeat nor compress."""
    return hashlib.shake_256(seed.encode()).digest(size_bytes)


def attempt(step: Callable[[], Any]) -> Any:
    """The step's result, or its error as text."""
    try:
        return step()
    except ActivationError as error:
        return f"ActivationError: {error}"


def exchange() -> dict[str, Any]:
    """Everything that works, and every way to disagree, on one channel."""
    channel, _ = join()
    last = channel.size - 1
    size_bytes = int(SETTINGS.get("module_bytes", "1000"))
    sent = PlanBytes(PLAN_JSON, made_up_module(size_bytes, job_name())) if channel.rank == 0 else None
    plan, _ = broadcast_plan(channel, sent, timeout_s=TIMEOUT_S)
    digest = plan.module_sha256

    def outcome(odd_one: Proposal) -> dict[str, Any]:
        mine = odd_one if channel.rank == last else Proposal(FINGERPRINT, digest)
        return asdict(agree(channel, mine, TIMEOUT_S))

    result = {
        "channel": channel.description,
        "module_sha256": digest,
        "gathered": [
            item.decode()
            for item in channel.all_gather(str(channel.rank).encode(), tag="g", timeout_s=TIMEOUT_S)
        ],
        "same": outcome(Proposal(FINGERPRINT, digest)),
        "other batch size": outcome(Proposal("e" * 64, digest)),
        "older plan": outcome(Proposal(FINGERPRINT, "d" * 64)),
        "abstains": outcome(Proposal(FINGERPRINT, "", "module.hlo.pb is corrupt")),
        "none": broadcast_plan(channel, None, reason="the search failed", timeout_s=TIMEOUT_S)[1],
    }
    garbage = channel.broadcast(b"garbage" if channel.rank == 0 else None, tag="garbage", timeout_s=TIMEOUT_S)
    result["received"] = garbage.decode()
    channel.all_gather(b"", tag="end", timeout_s=TIMEOUT_S)
    return result


def again() -> dict[str, Any]:
    """The same processes in one job after the other, and the second with its ranks the other way round."""
    rank, size = own_rank_and_size()
    heard = []
    for number, place in enumerate((rank, size - 1 - rank)):
        store = FolderStore(Path(SETTINGS["folder"]) / f"store-{number}")
        # All initialized again at one address.
        channel = open_channel(place, size, "job", store, os.environ, "mpi", timeout_s=PATIENCE_S)
        items = channel.all_gather(f"{number} {place}".encode(), tag="g", timeout_s=TIMEOUT_S)
        heard.append([item.decode() for item in items])
    return {"heard": heard, "ends": len(mpi._EXIT_COMMS)}


def killed() -> dict[str, Any]:
    """JOB_VICTIM dies before, while or after the plan is broadcast; what do the others come to?"""
    channel, store = join()
    mpi.EXIT_WAIT_S = 1.0
    moment = SETTINGS["moment"] if channel.rank == int(SETTINGS["victim"]) else "never"
    # Two pieces, and made before the ranks meet: from then on little but a dead rank takes time.
    sent = PlanBytes(PLAN_JSON, made_up_module(CHUNK_BYTES + 1, "killed")) if channel.rank == 0 else None
    channel.all_gather(b"", tag="start", timeout_s=PATIENCE_S)
    if moment == "before":
        die()
    if moment == "during":
        die_at_second_step(channel, store)
    plan = attempt(lambda: broadcast_plan(channel, sent, timeout_s=TIMEOUT_S)[0])
    if moment != "never":
        die()
    proposal = (
        Proposal(FINGERPRINT, plan.module_sha256)
        if isinstance(plan, PlanBytes)
        else Proposal(FINGERPRINT, "", plan)
    )
    outcome = attempt(lambda: asdict(agree(channel, proposal, TIMEOUT_S)))
    return {"plan": plan if isinstance(plan, str) else "arrived", "outcome": outcome}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_second_step(channel: Channel, store: CoordinationStore) -> None:
    """Make this rank die between two pieces of what it sends or receives."""
    steps = 0

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == 2:
                die()
            return step(*args)

        return call

    if hasattr(channel, "_send_to_all"):
        channel._send_to_all = counted(channel._send_to_all)
    else:
        store.put, store.get = counted(store.put), counted(store.get)


def independent() -> dict[str, Any]:
    """A job of its own that happens to share an MPI launch with others."""
    channel, _ = join()
    sent = PlanBytes(PLAN_JSON, made_up_module(1000, os.environ["OMPI_COMM_WORLD_RANK"]))
    plan, _ = broadcast_plan(channel, sent, timeout_s=TIMEOUT_S)
    agreed = agree(channel, Proposal(FINGERPRINT, plan.module_sha256), TIMEOUT_S)
    return {
        "channel": channel.description,
        "enacts its own": agreed.enact_sha256 == sent.module_sha256,
        "mpi touched": "mpi4py.MPI" in sys.modules,
    }


def beside_users_mpi() -> dict[str, Any]:
    """The user's script runs MPI itself, and has a message under way while we talk."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    neighbour, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    request = world.isend({"from": world.rank}, neighbour, tag=7)
    # The jobs do not start together.
    time.sleep(0.5 * int(job_name()[-1]))
    channel, _ = join()
    sent = PlanBytes(PLAN_JSON, made_up_module(1000, job_name())) if channel.rank == 0 else None
    plan, _ = broadcast_plan(channel, sent, timeout_s=TIMEOUT_S)
    agreed = agree(channel, Proposal(FINGERPRINT, plan.module_sha256), TIMEOUT_S)
    received = world.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    request.wait()
    return {
        "channel": channel.description,
        "module": "own" if plan.module == made_up_module(1000, job_name()) else "another job's",
        "enact": agreed.enact,
        "user's message": received["from"] == source,
        "sum": world.allreduce(1),
    }


def uninitialized() -> dict[str, Any]:
    """The user's script means to call MPI_Init itself, later."""
    import mpi4py

    mpi4py.rc.initialize = False
    channel, _ = join()
    channel.all_gather(b"", tag="end", timeout_s=TIMEOUT_S)
    from mpi4py import MPI

    MPI.Init()
    return {"channel": channel.description, "sum": MPI.COMM_WORLD.allreduce(1)}


def interrupted() -> dict[str, Any]:
    """Ctrl-C while rank 0 waits for a rank that does not come."""
    channel, _ = join()
    if channel.rank != 0:
        wait_for_results(1)
        return {}
    # A suite in the background of a shell hands its processes SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        channel.all_gather(b"", tag="nobody", timeout_s=60)
    except KeyboardInterrupt:
        return {"ended by": "KeyboardInterrupt"}
    return {"ended by": "nothing"}


def wait_for_results(count: int) -> None:
    """Until so many ranks have left theirs."""
    while len(list(Path(SETTINGS["folder"]).glob("*.json"))) < count:
        time.sleep(0.05)


if __name__ == "__main__":
    scenario = {
        one.__name__: one
        for one in (exchange, again, killed, independent, beside_users_mpi, uninitialized, interrupted)
    }
    try:
        outcome = scenario[sys.argv[1]]()
    except ActivationError as error:
        outcome = {"error": str(error)}
    number = (
        int(os.environ["OMPI_COMM_WORLD_RANK"])
        if "OMPI_COMM_WORLD_RANK" in os.environ
        else int(SETTINGS["rank"])
    )
    (Path(SETTINGS["folder"]) / f"{number}.json").write_text(json.dumps(outcome))
    # jax.distributed waits for dead ranks when a process ends in order, and its store ends with rank 0.
    if "port" in SETTINGS:
        if sys.argv[1] == "exchange" and own_rank_and_size()[0] == 0:
            wait_for_results(own_rank_and_size()[1])
        os._exit(0)
