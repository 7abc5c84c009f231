"""The process and its job, as JAX has them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

_joining = threading.Lock()
_job: DistributedJob | None = None
"""The last one, kept to tell a client from that of the next job."""


def jit_is_disabled() -> bool:
    """Whether ``jax_disable_jit`` is on for the whole process. (JAX switches it off for the thread that compiles an op,
    so nobody sees here what the script has set for a thread.)"""
    from jax._src import config

    switch = getattr(config, "disable_jit", None)
    return bool(getattr(switch, "get_global", bool)())


def profiler_runs() -> bool:
    """Whether the script's own ``jax.profiler`` trace is under way; False where this jax does not say."""
    from jax._src import profiler

    state = getattr(profiler, "_profile_state", None)
    # The first is jax 0.12's name.
    return any(getattr(state, name, None) is not None for name in ("session", "profile_session"))


@dataclass(frozen=True)
class DistributedJob:
    """This process's part in one ``jax.distributed`` job."""

    client: Any
    """Of its coordination service."""
    address: str
    """Of its coordinator; the next job of these processes may have the same."""
    number: int
    """1, 2, ... in the order in which this process joined them: who initializes again is in another job."""


def distributed_job() -> DistributedJob | None:
    """The ``jax.distributed`` job that this process is in now, or None where there is none."""
    from jax._src import distributed

    global _job
    state = distributed.global_state
    with _joining:
        if state.client is None:
            return None
        if _job is None or _job.client is not state.client:
            number = 1 if _job is None else _job.number + 1
            _job = DistributedJob(state.client, str(state.coordinator_address), number)
        return _job


def job_number() -> int:
    """Of the job that this process is in now; 0 where it is in none. What ranks have agreed on ends with their job."""
    job = distributed_job()
    return 0 if job is None else job.number


def process_count() -> int:
    """Processes of the job, whose devices JAX knows by now."""
    import jax

    return int(jax.process_count())
