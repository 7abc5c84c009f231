"""What XLA:GPU's autotuner picked: kept beside the plans, and handed from rank to rank.

It picks by timing, and what it picks decides what XLA fuses around a matmul or a convolution: a step tuned anew may be
another module, for which there is no plan. In a job of several processes every rank tunes a share and keeps that. So
after a search every rank gets what the others have, and before a job compiles anything together rank 0 hands out its
own: like the plan, what was picked need only lie in the plan directory of rank 0.

XLA makes a small file of each pick, named after the instruction and the device it is for. Beside them an empty file of
ours says of a module that all of its kernels have a pick.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from disco_hlo.activation.channel import Channel, CoordinationStore
from disco_hlo.activation.kvstore import KvChannel
from disco_hlo.backends import BACKENDS
from disco_hlo.errors import ActivationError, PlanError
from disco_hlo.plan.files import read_bounded, replace_files
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.jaxlink import CompileRequest

Picks = dict[str, bytes]
"""Files by their path in the folder, with ``/``."""

_NAME = re.compile(r"(?:[A-Za-z0-9_-]{1,128}/)?[A-Za-z0-9_-]{1,128}\.[a-z]{1,12}")
_LARGEST_BYTES = 1 << 20
_ALL_BYTES = 64 << 20
_handed_out: dict[tuple[int, Path], Path | None] = {}
"""By the job and the plan directory: a rank that was started again waits for what rank 0 has in the job that both are
in now."""


def folder_of(request: CompileRequest, directory: Path, timeout_s: float) -> Path | None:
    """Where compiles of the request keep what the autotuner picks and find it again; None where they do not: on CPU,
    and where nothing can be written.

    The first request that spans all processes of a job waits for what rank 0 has. One request at a time.
    """
    if not any(one.autotunes and request.backend.platform in one.platforms for one in BACKENDS.values()):
        return None
    here = (jaxlink.job_number(), directory)
    if here in _handed_out:
        return _handed_out[here]
    job, size = jaxlink.distributed_job(), jaxlink.process_count()
    if job is None or size == 1 or len(request.process_indices) < size:
        return _own_folder(directory)
    rank = request.backend.process_index()
    channel = KvChannel(rank, size, f"{job.address} autotune", CoordinationStore(job.client))
    _handed_out[here] = hand_out(channel, directory, timeout_s)
    return _handed_out[here]


def hand_out(channel: Channel, directory: Path, timeout_s: float) -> Path | None:
    """Rank 0's picks to all ranks, in the place of other picks for the same op: a plan was found for what rank 0's XLA
    made. Returns this rank's folder, one for this process alone where its own cannot take them. Where they do not come
    a line in the log says so."""
    folder = _own_folder(directory)
    leads = channel.rank == 0
    try:
        packed = msgspec.msgpack.encode(_picks_in(folder)) if leads else None
        received = channel.broadcast(packed, tag="autotune", timeout_s=timeout_s)
        return folder if leads else _with(folder, _decoded(received))
    except (ActivationError, PlanError, msgspec.MsgspecError, OSError) as error:
        LOGGER.warning(
            "the results of rank 0's XLA autotuner did not arrive (%s): rank %d tunes by itself, and may then compile "
            "another module, for which there is no plan",
            one_line(error),
            channel.rank,
        )
        return folder


def note_tuned(folder: Path | None, module: str) -> None:
    """Note that the kernels of a module, a digest that stands for it, have their picks; one that cannot be noted is
    tuned anew."""
    if folder is not None:
        try:
            _put(folder, {_tuned(module): b""})
        except (PlanError, OSError) as error:
            LOGGER.debug("%s", one_line(error))


def is_tuned(folder: Path | None, module: str) -> bool:
    """Whether that was noted (:func:`note_tuned`); not where the folder cannot be looked into."""
    return folder is not None and os.path.exists(folder / _tuned(module))  # Path.exists may raise


def _tuned(module: str) -> str:
    return f"{module}.tuned"


def exchange(session: Session) -> None:
    """What any rank's autotuner picked, to all ranks; all at once. Nothing on CPU, or in a job of one process.

    Raises:
        ActivationError: ranks were silent.
    """
    folder, channel = session.request.tuner_results, session.channel
    if not BACKENDS[session.facts.backend].autotunes or channel.size == 1:
        return
    mine = {} if folder is None else _picks_in(folder)
    every = channel.all_gather(
        msgspec.msgpack.encode(sorted(mine)), tag="picks by name", timeout_s=session.timeout_s
    )
    names: list[set[str]] = [set(msgspec.msgpack.decode(one, type=list[str])) for one in every]
    lacking = set[str]().union(*names) - names[0].intersection(*names)
    others = set().union(*names[: channel.rank])
    offered = {name: mine[name] for name in lacking - others if name in mine}
    packed = channel.all_gather(msgspec.msgpack.encode(offered), tag="picks", timeout_s=session.timeout_s)
    if folder is None:
        return
    try:
        _put(
            folder, {name: data for one in packed for name, data in _decoded(one).items() if name not in mine}
        )
    except (PlanError, msgspec.MsgspecError, OSError) as error:
        session.say(
            "what XLA's autotuner picked on other ranks is not kept (%s): a start on other hosts may have no plan",
            one_line(error),
        )


@functools.cache
def _own_folder(directory: Path) -> Path | None:
    from jaxlib.version import __version__ as jaxlib_version

    folder = directory / "autotune" / f"jaxlib-{jaxlib_version}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        LOGGER.warning(
            "what XLA's autotuner picks is not kept, the next start may have no plan: %s", one_line(error)
        )
        return None
    return folder


def _picks_in(folder: Path | None) -> Picks:
    """All that lies in a folder; what is no pick, too large, or cannot be looked at, is left out: others wait to hear
    what there is."""
    found: Picks = {}
    if folder is None:
        return found
    left = _ALL_BYTES
    try:
        paths = sorted(folder.rglob("*"))
    except OSError as error:
        LOGGER.debug("%s", one_line(error))
        return found
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if not _NAME.fullmatch(name):
            continue
        try:
            data = None if path.is_dir() else read_bounded(path, min(left, _LARGEST_BYTES))
        except (PlanError, OSError) as error:
            LOGGER.debug("%s", one_line(error))
            continue
        if data is not None:
            found[name] = data
            left -= len(data)
    return found


def _decoded(packed: bytes) -> Picks:
    picks = msgspec.msgpack.decode(packed, type=dict[str, bytes])
    return {name: data for name, data in picks.items() if _NAME.fullmatch(name)}


def _with(folder: Path | None, picks: Picks) -> Path | None:
    """A folder that holds ``picks`` as well: this one, or where that cannot be written one for this process alone."""
    if folder is not None:
        try:
            _put(folder, picks)
            return folder
        except (PlanError, OSError) as error:
            LOGGER.debug("%s cannot take what rank 0's autotuner picked: %s", folder, one_line(error))
    alone = Path(tempfile.mkdtemp(prefix="disco-autotune-"))
    atexit.register(_remove, alone, os.getpid())
    _put(alone, {**_picks_in(folder), **picks})
    return alone


def _remove(folder: Path, process: int) -> None:
    """At the end of ``process``, not of a fork of it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _put(folder: Path, picks: Mapping[str, bytes]) -> None:
    """Write what is not there as it is here.

    Raises:
        PlanError, OSError: it cannot be written.
    """
    by_folder: dict[Path, Picks] = {}
    for name, data in picks.items():
        path = folder / name
        if not path.exists() or (path.is_file() and read_bounded(path, _LARGEST_BYTES) != data):
            by_folder.setdefault(path.parent, {})[path.name] = data
    for place, files in by_folder.items():
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_files(place, files)
