"""Which channel a job uses: MPI where it was started under MPI, else jax.distributed's store.

Started under MPI is not the same as being one JAX job. A sweep of independent runs under one
``mpiexec`` shares an MPI world, and initializing MPI waits for all of that world; so MPI is touched
only where the job *is* the world, or the user's own code has initialized it. All ranks take the same
channel: each says over the key-value store what it can do, and it is MPI for all or for none.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from disco_hlo.activation import mpi
from disco_hlo.activation.channel import (
    Channel,
    CoordinationStore,
    Gone,
    LocalChannel,
    absence,
    name_ranks,
    nobody_gone,
)
from disco_hlo.activation.kvstore import KvChannel
from disco_hlo.errors import ActivationError
from disco_hlo.printable import counted

_HANDSHAKE_S = 30.0
_LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
_SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

_PROCESS = secrets.token_hex(8)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank brings to the choice."""

    preference: str
    """``DISCO_CHANNEL`` of this rank."""
    obstacle: str
    """Why this rank cannot use MPI; empty if it can."""
    universe: str = ""
    """Names the launch this rank belongs to, where the launcher tells; equal for one MPI world."""
    runs_mpi: bool = False
    """Whether MPI is initialized in this process already."""
    process: str = ""
    """Tells this process from another one that was this rank before."""


def mpi_world_size(environ: Mapping[str, str]) -> int | None:
    """Processes of the MPI launch this one belongs to, by the launcher's environment; None outside MPI."""
    names = list(_LAUNCHER_SIZES)
    if "PMIX_RANK" in environ or "PMI_RANK" in environ:
        names += _SLURM_SIZES
    for name in names:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return None


def offer(size: int, environ: Mapping[str, str], preference: str) -> Offer:
    """What this rank of a job of ``size`` processes can do; MPI is not touched."""
    world = mpi_world_size(environ)
    universe = environ.get("PMIX_NAMESPACE") or "{}.{}".format(
        environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    )
    return Offer(preference, _obstacle(size, world), universe, mpi.initialized_by_user(), _PROCESS)


def _obstacle(size: int, world: int | None) -> str:
    if world is None:
        return "not started under MPI"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install 'disco-hlo[mpi]')"
    if world < size:
        return f"MPI's world has {counted(world, 'process')}, the job {size}"
    if world > size and not mpi.initialized_by_user():
        return f"MPI's world has {world} processes, this job only {size} of them"
    return ""


def choose(offers: Sequence[Offer]) -> tuple[str, str]:
    """``("mpi" | "kv", why)``, the same for the same offers.

    Raises:
        ActivationError: a rank insists on what the job cannot have.
    """
    insists = {
        name: [rank for rank, one in enumerate(offers) if one.preference == name] for name in ("mpi", "kv")
    }
    if insists["mpi"] and insists["kv"]:
        raise ActivationError(
            f"DISCO_CHANNEL differs: mpi on {name_ranks(insists['mpi'])}, kv on {name_ranks(insists['kv'])}"
        )
    if insists["kv"]:
        return "kv", "DISCO_CHANNEL=kv"
    problem = _against_mpi(offers)
    if problem and insists["mpi"]:
        raise ActivationError(f"DISCO_CHANNEL=mpi, but {problem}")
    return ("kv", problem) if problem else ("mpi", "every rank was started under MPI")


def _against_mpi(offers: Sequence[Offer]) -> str:
    for obstacle in sorted({one.obstacle for one in offers} - {""}):
        ranks = [rank for rank, one in enumerate(offers) if one.obstacle == obstacle]
        return f"{obstacle} ({name_ranks(ranks)})"
    if len({one.universe for one in offers}) > 1:
        return "the ranks come from different MPI launches"
    outside = [rank for rank, one in enumerate(offers) if not one.runs_mpi]
    if 0 < len(outside) < len(offers):
        # To initialize it there would wait for ever: the others have done so with the process that was there before.
        return f"MPI runs on the other ranks already and not on {name_ranks(outside)}, as if started again"
    return ""


def open_channel(
    rank: int,
    size: int,
    job_id: str,
    store: CoordinationStore | None,
    environ: Mapping[str, str],
    preference: str = "",
    *,
    timeout_s: float = 60.0,
    gone: Gone = nobody_gone,
) -> Channel:
    """Join the ranks of this job; every rank calls this once, at about the same time.

    Args:
        job_id: names the job; equal on all its ranks (the coordinator's address serves).
        store: jax.distributed's key-value store; None only in a job of one process.
        preference: mpi or kv, as ``DISCO_CHANNEL`` says; empty chooses by itself.
        gone: tells where waiting for the other ranks is no use.

    Raises:
        ActivationError: ranks are missing, ``preference`` cannot be had, or this process takes the place of one that
            had joined the job.
    """
    if size == 1:
        return LocalChannel()
    if store is None:
        raise ActivationError(
            f"a job of {size} processes without jax.distributed's key-value store: cannot agree"
        )
    meeting = KvChannel(rank, size, job_id, store, gone)
    chosen = _decide(meeting, "choose", astuple(offer(size, environ, preference)), _choice, timeout_s)
    if chosen["processes"][rank] != _PROCESS:
        raise ActivationError(
            f"rank {rank} was started again, and the job goes on with what the process before it agreed on; "
            "initialize jax.distributed again on all ranks"
        )
    log.debug("channel between %d ranks: %s (%s)", size, chosen["channel"], chosen["why"])
    if chosen["channel"] == "kv":
        return meeting
    joined, problem = _join_mpi(meeting, job_id, store, timeout_s)
    if joined is not None:
        return joined
    if chosen["insisted"]:
        raise ActivationError(f"DISCO_CHANNEL=mpi, but {problem}")
    log.warning("MPI does not join this job's ranks (%s); using %s", problem, meeting.description)
    return meeting


def _choice(answers: list[Any]) -> dict[str, Any]:
    offers = [Offer(*answer) for answer in answers]
    name, why = choose(offers)
    insisted = any(one.preference == "mpi" for one in offers)
    return {"channel": name, "why": why, "insisted": insisted, "processes": [one.process for one in offers]}


def _decide(
    meeting: KvChannel, tag: str, item: object, rule: Callable[[list[Any]], dict[str, Any]], timeout_s: float
) -> dict[str, Any]:
    """What ``rule`` makes of the items of all ranks; where it cannot, all ranks raise the same error."""

    def outcome(answers: Mapping[int, bytes]) -> bytes:
        try:
            if absent := absence(meeting, answers, timeout_s):
                raise ActivationError(absent)
            result = rule([json.loads(answers[rank]) for rank in range(meeting.size)])
        except ActivationError as error:
            result = {"error": str(error)}
        except (ValueError, TypeError, KeyError) as error:
            result = {"error": f"a rank's answer is not readable; the same disco-hlo everywhere? ({error})"}
        return json.dumps(result).encode()

    decided: dict[str, Any] = json.loads(
        meeting.decide(json.dumps(item).encode(), outcome, tag=tag, timeout_s=timeout_s)
    )
    if "error" in decided:
        raise ActivationError(decided["error"])
    return decided


def _join_mpi(
    meeting: KvChannel, job_id: str, store: CoordinationStore, timeout_s: float
) -> tuple[mpi.MpiChannel | None, str]:
    """The MPI channel if it works on all ranks, else None and why; the same outcome on all."""
    problem, seat = "", None
    try:
        seat = astuple(mpi.take_seat())
    except ActivationError as error:
        problem = str(error)
    item = {"seat": seat, "problem": problem, "secret": secrets.token_hex(16)}
    plan = _decide(meeting, "seats", item, _seating, timeout_s)
    if plan["problem"]:
        return None, str(plan["problem"])
    channel = None
    try:
        channel = _handshake(meeting, job_id, store, plan)
    except ActivationError as error:
        problem = str(error)
    problem = _decide(meeting, "joined", problem, _first_problem, timeout_s + 3 * _HANDSHAKE_S)["problem"]
    if channel is None or problem:
        return None, problem
    channel.leave_together()
    return channel, ""


def _seating(answers: list[Any]) -> dict[str, Any]:
    problem = _first_problem([answer["problem"] for answer in answers])["problem"]
    if problem:
        return {"problem": problem}
    seats = [mpi.Seat(*answer["seat"]) for answer in answers]
    first = seats[0]
    world_ranks = [seat.rank for seat in seats]
    one_world = len({(seat.size, seat.library) for seat in seats}) == 1 and len(set(world_ranks)) == len(
        seats
    )
    if not one_world or first.size < len(seats):
        # A launcher of another MPI than mpi4py's leaves every process alone in a world of one.
        return {"problem": f"the ranks are not in one MPI world (the first is {first.rank} of {first.size})"}
    secret = answers[0]["secret"]
    return {"problem": "", "world_ranks": world_ranks, "library": first.library, "secret": secret}


def _first_problem(problems: list[Any]) -> dict[str, Any]:
    found = (f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
    return {"problem": next(found, "")}


def _handshake(
    meeting: KvChannel, job_id: str, store: CoordinationStore, plan: dict[str, Any]
) -> mpi.MpiChannel:
    """Make the communicator, and prove that it reaches the ranks of this job and no others."""
    channel = mpi.MpiChannel(
        plan["world_ranks"],
        meeting.rank,
        job_id,
        store,
        library=plan["library"],
        timeout_s=_HANDSHAKE_S,
        gone=meeting.gone,
    )
    secret = plan["secret"].encode()
    mine = secret if meeting.rank == 0 else None
    if channel.broadcast(mine, tag="handshake", timeout_s=_HANDSHAKE_S) != secret:
        raise ActivationError("MPI leads to other processes than this job's")
    return channel
