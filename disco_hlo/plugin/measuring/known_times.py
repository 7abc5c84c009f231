"""What is known of a platform before and after profiling a step on it: rank 0's times, stored or measured now.

What the directory's store knows is not measured again. So a second model is profiled faster, and a search that is
repeated sees the same numbers and finds the same plan.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from msgspec import structs

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind
from disco_hlo.hlo.graph import Kind
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.kernels.times import kernel_sizes
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import by_graph
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.session import Session
from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.collectives import MINIMUM_POINTS, CollectiveFit, SweepPoint, fit, sweep_sizes
from disco_hlo.profiler.keys import kernel_keys, travelling
from disco_hlo.profiler.profile import (
    Collectives,
    Contention,
    DeviceFacts,
    Link,
    LinkFacts,
    OpTime,
    Platform,
    Profile,
    StepFacts,
    place_of,
)
from disco_hlo.profiler.store import Facts, ProfileStore

_FEW = 0.05
"""Of a step's ops. Of so many that nobody timed estimates do."""
_MOST_SWEPT_BYTES = 1 << 28
"""Of a collective other than an all-reduce. Lines are straight long before."""
Found = TypeVar("Found")
STORE_NAME = "profile.sqlite"
_UNTIMED = frozenset({"call", "conditional", "while"})
_told: set[Path] = set()
"""Stores of which this process has said that they keep nothing: a search opens one several times."""


@contextlib.contextmanager
def measured_times(session: Session) -> Iterator[ProfileStore | None]:
    """The store of ``session``'s directory, on rank 0; one that cannot be opened is done without."""
    if not session.leads:
        yield None
        return
    path = session.settings.directory / STORE_NAME
    try:
        session.settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        store = ProfileStore(path)
    except (DiscoError, OSError) as error:
        say_not_kept(path, one_line(error))
        yield None
        return
    with store:
        if not store.writable:
            say_not_kept(path, f"{path} cannot be written")
        yield store


def say_not_kept(store: Path, why: str) -> None:
    """Say, once of each store, that what is measured now will not be known to the next search."""
    level = logging.DEBUG if store in _told else logging.WARNING
    _told.add(store)
    LOGGER.log(level, "measured times are not kept: %s", why)


class KnownTimes:
    """Rank 0's measured times: those of the store, where there is one, and those measured now."""

    def __init__(self, platform: Platform, link: Link, store: ProfileStore | None) -> None:
        self._platform, self._link, self._store = platform, link, store
        self._ops: dict[str, OpTime] = self._use(lambda store: store.ops(platform), {})
        self._unfused: dict[str, OpTime] = {}
        """Times of whole unfused steps, by fingerprint."""
        self._points: dict[str, tuple[SweepPoint, ...]] = {}
        """Of the kinds of collectives that were asked for, by name."""
        self._facts: dict[tuple[str, str], DeviceFacts | LinkFacts | StepFacts] = {}
        """By kind and place."""
        self._known(DeviceFacts, "")
        self._known(LinkFacts, place_of(link))

    def _swept(self, kind: CollectiveKind) -> tuple[SweepPoint, ...]:
        if str(kind) not in self._points:
            self._points[str(kind)] = self._use(
                lambda store: store.sweep(self._platform, self._link, kind), ()
            )
        return self._points[str(kind)]

    def _keep(self, add: Callable[[ProfileStore], None]) -> bool:
        """Add to the store; whether it has that now, merged with earlier measurements."""
        if self._store is not None and self._store.writable:
            self._use(add, None)
            return self._store is not None
        return False

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

    def lacks(
        self,
        source: CanonicalModule,
        xla: Strategy,
        like: CanonicalModule | None = None,
        *,
        beside_training: bool = False,
    ) -> dict[str, Any]:
        """What has to be measured: the device's constants, the step's ops, of each kind of collectives, by its name,
        these sizes. Of another structure of the step ``like`` kernels alone, and of what collectives take only what
        that step does not tell. Few unknown ops are left to estimates: single ones on a GPU, and beside a training
        kernels, too, where what other steps on this link tell is taken over as well."""
        # The traces that tell contention show XLA's kernels, too.
        traced = like is None and self._step(source.graph.fingerprint).contention is not None
        for step in ([like] if like is not None else []) + [source] if beside_training else []:
            self._take_over_from_link(step)
        if like is not None:
            self._take_over(source, like)
        asynchronous = BACKENDS[self._platform.backend].asynchronous
        kernels = not traced and self._are_lacking(source, _kernel_keys(source, xla), few=beside_training)
        # On GPU the unfused step is two modules more: of 10,000 instructions they took a minute for 2 of 195 ops.
        few = beside_training or asynchronous
        nodes = like is None and self._are_lacking(source, _node_keys(source, xla), few=few)
        ops = kernels or nodes or self._lacks_waits(source)
        both = ops and not asynchronous
        return {
            "device": self._device.constants is None,
            "ops": ops,
            "unfused ops": nodes or both,
            "contention": self._lacks_contention(source),
            "collectives": self._lacking_sizes(source),
        }

    def _take_over(self, source: CanonicalModule, like: CanonicalModule) -> None:
        """How kernels and collectives slow each other, and what ranks wait, where all kinds of collectives are those of
        ``like``. For this search: they are not that step's own."""
        if not set(travelling(source)) <= set(travelling(like)):
            return
        known, own = (self._step(one.graph.fingerprint) for one in (like, source))
        self._facts[StepFacts.__name__, place_of(self._link, source.graph.fingerprint)] = structs.replace(
            own, contention=known.contention, apart=known.apart, together=known.together
        )

    def _take_over_from_link(self, source: CanonicalModule) -> None:
        """How kernels and collectives slow each other, from the step in the middle of those known on this link: by
        steps of one model in ten forms it differed by a twentieth. And what loops take that other steps have, too."""
        fingerprint = source.graph.fingerprint
        own, place = self._step(fingerprint), place_of(self._link)
        others: list[StepFacts] = self._use(
            lambda store: store.facts_under(self._platform, StepFacts, place), []
        )
        slowed = sorted((one.contention for one in others if one.contention), key=lambda one: one.compute)
        if own.contention is not None or not slowed:
            return
        loops = {key: loop for one in others for key, loop in (one.loops or {}).items()}
        self._facts[StepFacts.__name__, place_of(self._link, fingerprint)] = structs.replace(
            own, contention=slowed[len(slowed) // 2], apart={}, together={}, loops=own.loops or loops
        )

    def _lacks_contention(self, source: CanonicalModule) -> bool:
        """Slow-downs, and what transfers take alone: the same traces tell both. Where transfers and kernels never run
        beside each other, neither slows the other."""
        overlapping = BACKENDS[self._platform.backend].asynchronous and self._link.device_count > 1
        step = self._step(source.graph.fingerprint)
        # Facts from before sizes were told apart have contention without the launch of collectives, too.
        told = step.together is not None and all(one.each_ns for one in step.together.values())
        known = step.contention is not None and told
        return overlapping and bool(travelling(source)) and not known

    def _are_lacking(self, source: CanonicalModule, keys: set[str], *, few: bool) -> bool:
        missing = keys - set(self._ops)
        LOGGER.debug("%d of %d op times are unknown", len(missing), len(keys))
        if few and len(missing) <= _FEW * len(keys):
            return False
        # What a trace of this very step did not show, another one will not show either.
        return bool(missing) and self._traced(source.graph.fingerprint) is None

    def _lacks_waits(self, source: CanonicalModule) -> bool:
        """Processes on CPU wait for each other in collectives, and in each step otherwise."""
        blocks = not BACKENDS[self._platform.backend].asynchronous and self._link.process_count > 1
        step = self._step(source.graph.fingerprint)
        return blocks and bool(travelling(source)) and None in (step.apart, step.together)

    def _traced(self, fingerprint: str) -> OpTime | None:
        """The time of the whole unfused step, where one was traced."""
        if fingerprint in self._unfused:
            return self._unfused[fingerprint]
        return self._use(lambda store: store.step(self._platform, fingerprint), None)

    def _lacking_sizes(self, source: CanonicalModule) -> dict[str, list[int]]:
        """A line is trusted between the sizes it was measured at, not far beyond."""
        moved = travelling(source)
        if not moved or self._link.device_count < 2:
            return {}
        lacking: dict[str, list[int]] = {}
        for kind, largest in _largest_bytes(moved).items():
            points = self._swept(kind)
            known = max((point.size_bytes for point in points), default=0) if len(points) >= 3 else 0
            sizes = [size for size in sweep_sizes(1 << 10, largest, per_octave=1) if size > known]
            lacking |= {str(kind): sizes} if sizes else {}
        return lacking

    def launch_ns(self, fingerprint: str) -> int:
        """Launch cost in the step with this fingerprint; 0 as long as the device's constants are not known."""
        constants = self._constants(fingerprint)
        return 0 if constants is None else constants.launch_ns

    def _constants(self, fingerprint: str) -> DeviceConstants | None:
        """With the launch cost of the step with this fingerprint, where it was timed, else of the last one that was."""
        constants = self._device.constants
        timed = (self._step(fingerprint).launch_ns, self._device.launch_ns)
        launch_ns = next((ns for ns in timed if ns is not None), None)
        if constants is None or launch_ns is None:
            return constants
        return replace(constants, launch_ns=launch_ns)

    @property
    def _device(self) -> DeviceFacts:
        return self._known(DeviceFacts, "")

    def _step(self, fingerprint: str) -> StepFacts:
        return self._known(StepFacts, place_of(self._link, fingerprint))

    def _known(self, kind: type[Facts], place: str) -> Facts:
        key = (kind.__name__, place)
        if key not in self._facts:
            self._facts[key] = self._use(lambda store: store.facts(self._platform, kind, place), kind())
        return cast(Facts, self._facts[key])

    def _change(self, kind: type[Facts], place: str, change: Callable[[Facts], Facts]) -> None:
        self._facts[kind.__name__, place] = change(self._known(kind, place))
        self._keep(lambda store: store.change(self._platform, kind, place, change))

    def contention(self, fingerprint: str) -> Contention | None:
        """How kernels and collectives of the step with this fingerprint slow each other, as far as it is known."""
        return self._step(fingerprint).contention

    def keep_no_more(self) -> None:
        """Let the store be: what is added from now on is not as training runs it, and nobody else's."""
        self._store = None

    def add_constants(self, constants: DeviceConstants) -> None:
        """Take in the device's constants, measured now."""
        self._change(DeviceFacts, "", lambda known: structs.replace(known, constants=constants))

    def add_gap(self, fingerprint: str, gap_ns: int) -> None:
        """Take in what one step takes beyond its kernels and transfers, for each of them."""
        self._change(DeviceFacts, "", lambda known: structs.replace(known, launch_ns=gap_ns))
        self.add_facts(fingerprint, launch_ns=gap_ns)

    def add_ops(self, fingerprint: str, times: dict[str, OpTime], step_ns: Sequence[int]) -> None:
        """Take in op times, and the times of the whole unfused step that they were traced in."""
        self._ops |= times
        if self._keep(lambda store: store.add_ops(self._platform, times)):
            self._ops = self._use(lambda store: store.ops(self._platform), self._ops)
        if not step_ns:
            return
        self._unfused[fingerprint] = time = _time_of(step_ns)
        self._keep(lambda store: store.add_step(self._platform, fingerprint, time))

    def add_facts(self, fingerprint: str, **facts: Any) -> None:
        """Take in what one step's traces tell, by the fields of ``StepFacts``. Where a trace does not tell, another one
        will not either: that is a fact as well, an empty one."""
        place = place_of(self._link, fingerprint)
        self._change(StepFacts, place, lambda known: structs.replace(known, **facts))

    def add_holds(self, holds: Mapping[str, float]) -> None:
        """Take in what ops keep transfers from beginning beside them, by cost key."""
        place = place_of(self._link)
        self._change(LinkFacts, place, lambda known: structs.replace(known, holds={**known.holds, **holds}))

    def add_sweep(self, points: tuple[SweepPoint, ...], kind: CollectiveKind = ALL_REDUCE) -> None:
        """Take in the points of a sweep of one kind of collectives."""
        self._points[str(kind)] = self._swept(kind) + points
        if self._keep(lambda store: store.add_sweep(self._platform, self._link, points, kind)):
            del self._points[str(kind)]  # it is read again when it is asked for

    def profile(self, fingerprint: str, kinds: Iterable[CollectiveKind] = ()) -> Profile:
        """Everything that is known, for the step with this fingerprint and these kinds of collectives."""
        constants, step, traced = (
            self._constants(fingerprint),
            self._step(fingerprint),
            self._traced(fingerprint),
        )
        assert constants is not None, "constants are measured where they are not known"
        apart, together = step.apart or {}, step.together or {}
        return Profile(
            platform=self._platform,
            ops=dict(self._ops),
            launch_ns=constants.launch_ns,
            memory_bandwidth=constants.memory_bandwidth,
            flops_per_s=constants.flops_per_s,
            all_reduce=_fit(self._swept(ALL_REDUCE)),
            link=self._link,
            contention=step.contention,
            holds=dict(self._known(LinkFacts, place_of(self._link)).holds),
            noise=traced.spread_ns / traced.median_ns if traced and traced.median_ns else constants.noise,
            in_step=apart.get(str(ALL_REDUCE)),
            together=together.get(str(ALL_REDUCE)),
            collectives={
                str(kind): Collectives(_fit(self._swept(kind)), apart.get(str(kind)), together.get(str(kind)))
                for kind in sorted({*kinds} - {ALL_REDUCE}, key=str)
            },
            loops=step.loops or {},
        )


def _fit(points: Sequence[SweepPoint]) -> CollectiveFit | None:
    return fit(points) if len(points) >= MINIMUM_POINTS else None


def _node_keys(source: CanonicalModule, xla: Strategy) -> set[str]:
    """Of ops that take time of their own: neither what runs a region nor what waits for another instruction."""
    return {
        node.key
        for graph, _ in by_graph(source, xla)
        for node in graph.nodes
        if node.kind in (Kind.FUSIBLE, Kind.FIXED)
        and node.opcode not in COLLECTIVES | _UNTIMED
        and not node.opcode.endswith("-done")
    }


def _kernel_keys(source: CanonicalModule, xla: Strategy) -> set[str]:
    found: set[str] = set()
    for graph, plan in by_graph(source, xla):
        found |= {*kernel_keys(graph, unit_graph(graph, plan).kernels(graph))}
    return found | set(kernel_sizes(source))


def _largest_bytes(moved: Mapping[CollectiveKind, Sequence[int]]) -> dict[CollectiveKind, int]:
    """All of a kind together: the largest bucket there could be. All-reduces are swept wherever anything moves, for
    what others take where their own sweep fails."""
    found = {ALL_REDUCE: 1 << 16}
    for kind, sizes in moved.items():
        found[kind] = max(1 << 16, min(sum(sizes), 1 << 30 if kind == ALL_REDUCE else _MOST_SWEPT_BYTES))
    return found


def _time_of(taken_ns: Sequence[int]) -> OpTime:
    middle = statistics.median(taken_ns)
    spread = statistics.median(abs(ns - middle) for ns in taken_ns)
    return OpTime(int(middle), int(spread), len(taken_ns))
