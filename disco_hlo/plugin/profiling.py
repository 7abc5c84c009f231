"""Measure what the cost model needs, on the step's own devices (DisCo, sections 4.2 and 5.2).

Two modules are traced: the unfused step, for the time of every op alone, and the step with XLA's own
kernels, for fused ones. All-reduces are swept over sizes between the very devices of the step. What
the store already knows of this platform is not measured again, so a second model is profiled faster,
and a repeated search sees the same numbers. All ranks run everything; rank 0's clock counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from disco_hlo.errors import DiscoError, ProfileError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Kind
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.plan.baselines import unfused
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plugin import jaxlink
from disco_hlo.plugin.candidates import Trial, compile_trial
from disco_hlo.plugin.job import available_bytes
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.microbenchmarks import measure_constants
from disco_hlo.plugin.runner import Runner, all_reduce_runner, memory
from disco_hlo.plugin.session import Session
from disco_hlo.profiler import trace as tracing
from disco_hlo.profiler.allreduce import AllReduceFit, SweepPoint, fit, point_of, sweep_sizes
from disco_hlo.profiler.costs import fused_key
from disco_hlo.profiler.instructions import Coverage, coverage, instruction_times
from disco_hlo.profiler.keys import keyed_times, owners
from disco_hlo.profiler.profile import Link, OpTime, Platform, Profile, host_cpu_kind
from disco_hlo.profiler.store import ProfileStore

PROFILED_RUNS = 12
SWEEP_REPEATS = 7
SWEEP_CHAIN = 3
"""Dependent all-reduces in one run of the sweep; the time of one is the run's, shared out."""
GRAPHS_OFF = {"xla_gpu_enable_command_buffer": ""}
"""Command buffers hide which kernel belongs to which instruction; they are off while profiling only."""


@dataclass(frozen=True)
class Profiled:
    """What profiling found; on ranks other than 0 nothing."""

    profile: Profile
    measured: str
    """What was measured anew, for the log."""


def platform_of(session: Session) -> Platform:
    """What times measured in this session are valid for."""
    facts = session.facts
    gpu = facts.backend == "gpu"
    return Platform(
        device_kind=facts.device_kind if gpu else host_cpu_kind(),
        backend=facts.backend,
        driver=facts.runtime_version.splitlines()[0][:200] if gpu else "",
        jax=facts.jax_version,
        jaxlib=facts.jaxlib_version,
    )


def profile_step(
    session: Session, source: CanonicalModule, xla: Strategy, store: ProfileStore | None
) -> Profiled | None:
    """Measure what ``store`` does not know yet; returns the profile on rank 0, None elsewhere.

    Raises:
        UnsupportedError: the step cannot be run on made-up inputs.
        ProfileError: traces cannot be taken or make no sense.
    """
    platform = platform_of(session)
    link = Link(session.facts.device_count, session.facts.process_count)
    known = store.ops(platform) if session.leads and store is not None else {}
    points = store.sweep(platform, link) if session.leads and store is not None else ()
    wanted = session.tell([_lacks_ops(source, xla, known), len(points) < 3, _largest_bytes(source)], "to profile")
    constants = measure_constants(session)
    if wanted[0]:
        fresh = _trace_modules(session, source, xla)
        if session.leads and store is not None:
            store.add_ops(platform, fresh)
            known = store.ops(platform)
        elif session.leads:
            known = fresh
    if wanted[1] and source.graph.all_reduces and session.facts.device_count > 1:
        swept = _sweep(session, wanted[2])
        if session.leads and store is not None:
            store.add_sweep(platform, link, swept)
            points = store.sweep(platform, link)
        else:
            points = swept
    if not session.leads:
        return None
    profile = Profile(
        platform=platform,
        ops=known,
        launch_ns=constants.launch_ns,
        memory_bandwidth=constants.memory_bandwidth,
        flops_per_s=constants.flops_per_s,
        all_reduce=_fit(points),
        link=link,
        noise=constants.noise,
    )
    measured = [what for what, done in (("ops", wanted[0]), ("all-reduces", wanted[1])) if done]
    return Profiled(profile, " and ".join(measured) or "nothing: all known")


def _fit(points: Sequence[SweepPoint]) -> AllReduceFit | None:
    return fit(points) if len(points) >= 3 else None


def _lacks_ops(source: CanonicalModule, xla: Strategy, known: dict[str, OpTime]) -> bool:
    graph = source.graph
    single = {
        node.key for node in graph.nodes
        if node.kind in (Kind.FUSIBLE, Kind.FIXED) and node.opcode not in COLLECTIVES
    }  # fmt: skip
    fused = {fused_key(graph, group) for group in xla.groups if group.kind != "triton"}
    missing = (single | fused) - set(known)
    LOGGER.debug("%d of %d op times are unknown", len(missing), len(single | fused))
    return len(missing) > 0.02 * len(single | fused)


def _largest_bytes(source: CanonicalModule) -> int:
    """All gradients together: the largest bucket there could be."""
    total = sum(source.graph.nodes[node].shape.size_bytes for node in source.graph.all_reduces)
    return max(1 << 16, min(total, 1 << 30))


def _trace_modules(session: Session, source: CanonicalModule, xla: Strategy) -> dict[str, OpTime]:
    found: dict[str, OpTime] = {}
    for name, strategy in (("unfused step", unfused(source.graph)), ("XLA's kernels", xla)):
        trial = Trial(name, strategy, 0)
        compile_trial(session, source, trial, tag=f"profile {name}", extra_options=_options(session))
        if trial.error:
            LOGGER.debug("%s cannot be profiled: %s", name, trial.error)
            continue
        with session.stage(f"profile {name}"):
            found |= _traced(session, trial)
    if session.leads and not found:
        raise ProfileError("neither the unfused step nor XLA's own could be profiled")
    return found


def _options(session: Session) -> dict[str, str]:
    return dict(GRAPHS_OFF) if session.facts.backend == "gpu" else {}


def _traced(session: Session, trial: Trial) -> dict[str, OpTime]:
    needed, free = memory(trial.executable).total_bytes, available_bytes(session.request)
    if free is not None and needed > 0.9 * free:
        raise ProfileError(f"the {trial.name} needs {needed >> 20} MiB a device, {free >> 20} MiB are free")
    runner = Runner(session.request, trial.executable, session.settings.seed)
    taken = tracing.read(tracing.collect(runner.run, PROFILED_RUNS, warmup=2))
    executed = jaxlink.read_executable(trial.executable)
    written = canonicalize(executed)
    times = instruction_times(taken, written.graph.module_name, owners(executed))
    seen: Coverage = coverage(taken, written.graph.module_name, owners(executed))
    LOGGER.debug(
        "%s: %.2f ms a step, %.0f %% of it in %d instructions, %.2f of them at once",
        trial.name, seen.wall_ns / 1e6, 100 * seen.busy_share, len(times), seen.parallelism,
    )  # fmt: skip
    return keyed_times(written.graph, written.origins, times)


def _sweep(session: Session, largest_bytes: int) -> tuple[SweepPoint, ...]:
    points = []
    for size in sweep_sizes(1 << 10, largest_bytes, per_octave=1):
        with session.stage(f"all-reduce of {size} bytes"):
            runner = all_reduce_runner(session.request, size, repeats=SWEEP_CHAIN, seed=session.settings.seed)
            runner.run()
            points.append(point_of(size, [max(1, runner.run() // SWEEP_CHAIN) for _ in range(SWEEP_REPEATS)]))
    return tuple(points)
