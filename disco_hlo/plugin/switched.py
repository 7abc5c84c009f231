"""Which ranks of a job have the plugin, known without waiting for those that have not.

A rank that has it says so in the job's key-value store while JAX discovers plugins, or as it joins a later job. Only
then JAX makes its clients of the devices, and a client waits until it knows the devices of all ranks. So at the first
compile for devices of several ranks each of these has said so, or never will. A rank without the plugin does nothing.
A process that is alone has nobody to agree with.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os

from disco_hlo.activation.channel import CoordinationStore, key_part, name_ranks
from disco_hlo.activation.choose import mpi_world_size
from disco_hlo.errors import ActivationError
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.jaxlink import CompileRequest


def announce() -> None:
    """Say that this rank has the plugin. Nothing outside of a ``jax.distributed`` job."""
    job = jaxlink.distributed_job()
    if job is not None:
        with contextlib.suppress(ActivationError):
            CoordinationStore(job.client).renew(f"{_place(job.address)}/{job.rank}", b"1")


def lacks_ranks(request: CompileRequest) -> bool:
    """Whether a rank that runs this module has no plugin, so that the ranks cannot agree on anything; the first of the
    others says so, once a job. False where this rank has not announced itself either."""
    if len(request.process_indices) == 1:
        return False
    job = jaxlink.distributed_job()
    having = set[int]() if job is None else _having(job)
    rank, running = request.backend.process_index(), set(request.process_indices)
    lacking = running - having
    if rank not in having or not lacking:
        return False
    verb = "does" if len(lacking) == 1 else "do"
    _say(rank == min(running & having), f"{name_ranks(lacking)} {verb}", len(request.process_indices))
    return True


def is_alone() -> bool:
    """Whether no other process trains with this one, by what JAX and the launcher's environment say. Its training step
    may run on one device. A child of another one's ``multiprocessing`` is not alone: it may load data for that."""
    from multiprocessing import parent_process

    one = jaxlink.process_count() == 1 and (mpi_world_size(os.environ) or 1) == 1
    return one and parent_process() is None


def said() -> bool:
    """Whether this rank has said that others lack the plugin."""
    return _say.cache_info().currsize > 0


@functools.lru_cache(1)
def _having(job: jaxlink.DistributedJob) -> set[int]:
    try:
        return {int(rank) for rank in CoordinationStore(job.client).names(_place(job.address))}
    except ActivationError as error:
        LOGGER.debug("which ranks have the plugin is not known: %s", error)
        return set()


@functools.cache
def _say(leads: bool, lacking: str, size: int) -> None:
    LOGGER.log(
        logging.WARNING if leads else logging.DEBUG,
        "all steps are left alone: of %d ranks, %s not have ENABLE_SEARCH, or disco-hlo is off there; set it on all "
        "(mpiexec -x ENABLE_SEARCH)",
        size, lacking,
    )  # fmt: skip


def _place(address: str) -> str:
    return f"disco/{key_part(address)}/switched"
