"""What is known of a platform before and after profiling a step on it: rank 0's times, stored or measured now.

What the store knows is not measured again. So a second model is profiled faster, and a search that is repeated
sees the same numbers and finds the same plan.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.measuring.measured_times import say_not_kept
from disco_hlo.plugin.measuring.microbenchmarks import (
    as_times,
    constants_in,
    contention_as_times,
    contention_in,
    gap_as_times,
    holds_as_times,
    holds_in,
    is_constant,
    waits_key,
)
from disco_hlo.profiler.allreduce import SweepPoint, fit, sweep_sizes
from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.in_step import InStep, counted
from disco_hlo.profiler.kernel_keys import kernel_keys
from disco_hlo.profiler.profile import Contention, Link, OpTime, Platform, Profile
from disco_hlo.profiler.store import ProfileStore, StepTime

_UNFUSED_STEP = "unfused"

Found = TypeVar("Found")


class KnownTimes:
    """Rank 0's measured times: those of the store, where there is one, and those measured now."""

    def __init__(self, platform: Platform, link: Link, store: ProfileStore | None) -> None:
        self._platform, self._link, self._store = platform, link, store
        self._ops: dict[str, OpTime] = {}
        self._unfused: dict[str, OpTime] = {}
        """Times of whole unfused steps, by fingerprint."""
        self._points: tuple[SweepPoint, ...] = ()
        self._read()

    def _read(self) -> None:
        def read(store: ProfileStore) -> None:
            self._ops, self._points = store.ops(self._platform), store.sweep(self._platform, self._link)

        self._use(read, None)

    def _keep(self, add: Callable[[ProfileStore], None]) -> None:
        """Add to the store, and take up what it makes of that: merged with earlier measurements."""
        if self._store is not None and self._store.writable:
            self._use(add, None)
            self._read()

    def _use(self, use: Callable[[ProfileStore], Found], otherwise: Found) -> Found:
        """What ``use`` gives. A store that fails (a full disk, a damaged row) is done without from then on: an
        error here would be rank 0's alone, and the others would wait for it."""
        if self._store is None:
            return otherwise
        try:
            return use(self._store)
        except DiscoError as error:
            say_not_kept(self._store.path, one_line(error))
            self._store = None
            return otherwise

    def lacks(self, source: CanonicalModule, xla: Strategy) -> dict[str, Any]:
        """What has to be measured: the device's constants, the step's ops, all-reduces of these sizes."""
        return {
            "device": constants_in(self._ops) is None,
            "ops": self._lacks_ops(source, xla) or self._lacks_waits(source),
            "contention": self._lacks_contention(source),
            "all-reduces": self._lacking_sizes(source),
        }

    def _lacks_contention(self, source: CanonicalModule) -> bool:
        """Slow-downs, and what transfers take alone: the same traces tell both. Where transfers and kernels never run
        beside each other, neither slows the other."""
        gpus = self._link.device_count if self._platform.backend == "gpu" else 1
        fingerprint = source.graph.fingerprint
        slow_downs = contention_in(self._ops, self._link, fingerprint)
        known = slow_downs is not None and self._waits_key(fingerprint, together=True) in self._ops
        return gpus > 1 and bool(source.graph.all_reduces) and not known

    def _lacks_ops(self, source: CanonicalModule, xla: Strategy) -> bool:
        missing = _step_keys(source, xla) - set(self._ops)
        LOGGER.debug("%d of %d op times are unknown", len(missing), len(_step_keys(source, xla)))
        return bool(missing) and not self._was_traced(source.graph.fingerprint)

    def _lacks_waits(self, source: CanonicalModule) -> bool:
        """Processes on CPU wait for each other in all-reduces, and in each step otherwise."""
        blocks = self._platform.backend == "cpu" and self._link.process_count > 1
        keys = {self._waits_key(source.graph.fingerprint, together) for together in (False, True)}
        return blocks and bool(source.graph.all_reduces) and not keys <= self._ops.keys()

    def _waits_key(self, fingerprint: str, together: bool) -> str:
        varied = together and self._platform.backend == "gpu"
        return waits_key(self._link, fingerprint, together, varied)

    def _was_traced(self, fingerprint: str) -> bool:
        """What a trace of this very step did not show, another one will not show either."""
        return any(step.plan == _UNFUSED_STEP for step in self._steps(fingerprint))

    def _steps(self, fingerprint: str) -> Sequence[StepTime]:
        return self._use(lambda store: store.steps(self._platform, fingerprint), ())

    def _lacking_sizes(self, source: CanonicalModule) -> list[int]:
        """A line is trusted between the sizes it was measured at, not far beyond."""
        if not source.graph.all_reduces or self._link.device_count < 2:
            return []
        known = max((point.size_bytes for point in self._points), default=0)
        wanted = sweep_sizes(1 << 10, _largest_bytes(source), per_octave=1)
        return [size for size in wanted if size > known] if len(self._points) >= 3 else list(wanted)

    def launch_ns(self, fingerprint: str) -> int:
        """Launch cost in the step with this fingerprint; 0 as long as the device's constants are not known."""
        constants = constants_in(self._ops, self._link, fingerprint)
        return 0 if constants is None else constants.launch_ns

    def keep_no_more(self) -> None:
        """Let the store be: what is added from now on is not as training runs it, and nobody else's."""
        self._store = None

    def add_constants(self, constants: DeviceConstants) -> None:
        """Take in the device's constants, measured now."""
        self._add(as_times(constants))

    def add_gap(self, fingerprint: str, gap_ns: int) -> None:
        """Take in what one step takes beyond its kernels and transfers, for each of them."""
        self._add(gap_as_times(self._link, fingerprint, gap_ns))

    def add_ops(self, fingerprint: str, times: dict[str, OpTime], step_ns: Sequence[int]) -> None:
        """Take in op times, and the times of the whole unfused step that they were traced in."""
        self._add(times)
        if not step_ns:
            return
        self._unfused[fingerprint] = _time_of(step_ns)
        time = StepTime(_UNFUSED_STEP, self._unfused[fingerprint])
        self._keep(lambda store: store.add_step(self._platform, fingerprint, time))

    def add_waits(self, fingerprint: str, apart_ns: Sequence[int], together_ns: Sequence[int]) -> None:
        """Take in how long all-reduces ran, by run, in traces of one step that transfer them one by one or together
        (on GPU: in ``varied_buckets``).

        Where a trace does not tell, another one will not either: then the time is 0.
        """
        for together, waits_ns in ((False, apart_ns), (True, together_ns)):
            time = _time_of(waits_ns) if waits_ns else OpTime(0, 0, 1)
            self._add({self._waits_key(fingerprint, together): time})

    def add_contention(self, contention: Contention, fingerprint: str) -> None:
        """Take in how one step's kernels and its transfers slow each other."""
        self._add(contention_as_times(contention, self._link, fingerprint))

    def add_holds(self, holds: Mapping[str, float]) -> None:
        """Take in what ops keep transfers from beginning beside them, by cost key."""
        self._add(holds_as_times(holds, self._link))

    def _add(self, times: dict[str, OpTime]) -> None:
        self._ops |= times
        self._keep(lambda store: store.add_ops(self._platform, times))

    def add_sweep(self, points: tuple[SweepPoint, ...]) -> None:
        """Take in the points of an all-reduce sweep."""
        self._points += points
        self._keep(lambda store: store.add_sweep(self._platform, self._link, points))

    def profile(
        self, fingerprint: str, sizes_bytes: Sequence[int] = (), together_bytes: Sequence[int] = ()
    ) -> Profile:
        """Everything that is known, for the step with this fingerprint.

        Args:
            sizes_bytes: of each of its all-reduces.
            together_bytes: of each bucket of the trace in which they were together.
        """
        constants = constants_in(self._ops, self._link, fingerprint)
        assert constants is not None, "constants are measured where they are not known"
        return Profile(
            platform=self._platform,
            ops={key: time for key, time in self._ops.items() if not is_constant(key)},
            launch_ns=constants.launch_ns,
            memory_bandwidth=constants.memory_bandwidth,
            flops_per_s=constants.flops_per_s,
            all_reduce=fit(self._points) if len(self._points) >= 3 else None,
            link=self._link,
            contention=contention_in(self._ops, self._link, fingerprint),
            holds=holds_in(self._ops, self._link),
            noise=self._noise(fingerprint, constants),
            in_step=self._in_step(fingerprint, sizes_bytes, together=False),
            together=self._in_step(fingerprint, together_bytes, together=True),
        )

    def _in_step(self, fingerprint: str, sizes_bytes: Sequence[int], together: bool) -> InStep | None:
        time = self._ops.get(self._waits_key(fingerprint, together))
        if time is None or not time.median_ns or not sizes_bytes:
            return None
        return InStep(counted(sizes_bytes), time.median_ns, time.spread_ns, time.samples)

    def _noise(self, fingerprint: str, constants: DeviceConstants) -> float:
        """From run to run of the whole step; where none was traced, of the device's constants."""
        step = self._unfused.get(fingerprint)
        if step is None:
            step = next((one.time for one in self._steps(fingerprint) if one.plan == _UNFUSED_STEP), None)
        return constants.noise if step is None or not step.median_ns else step.spread_ns / step.median_ns


def _step_keys(source: CanonicalModule, xla: Strategy) -> set[str]:
    graph = source.graph
    single = {
        node.key for node in graph.nodes
        if node.kind in (Kind.FUSIBLE, Kind.FIXED) and node.opcode not in COLLECTIVES
    }  # fmt: skip
    return single | {*kernel_keys(graph, unit_graph(graph, xla).kernels)}


def transfer_sizes(source: CanonicalModule) -> list[int]:
    """Bytes of each of the step's all-reduces."""
    return [source.graph.transfer_bytes(node) for node in source.graph.all_reduces]


def bucket_sizes(graph: Graph, strategy: Strategy) -> list[int]:
    """Bytes of each bucket of ``strategy``."""
    return [sum(graph.transfer_bytes(node) for node in bucket.all_reduces) for bucket in strategy.buckets]


def _largest_bytes(source: CanonicalModule) -> int:
    """All gradients together: the largest bucket there could be."""
    return max(1 << 16, min(sum(transfer_sizes(source)), 1 << 30))


def _time_of(taken_ns: Sequence[int]) -> OpTime:
    middle = statistics.median(taken_ns)
    spread = statistics.median(abs(ns - middle) for ns in taken_ns)
    return OpTime(int(middle), int(spread), len(taken_ns))
