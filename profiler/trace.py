"""From a profiler trace to plain records: which instruction ran when, in which run, on which device.

The measured half of DisCo's profiler (section 4.2): the step is run a few times under
:mod:`jax.profiler`, and XLA's own trace says when every instruction of the executed module began
and ended. This is the one file of the package that touches jax; what it returns is data.

How XLA writes the events (read on jax 0.10.2, 0.11.2 and 0.12):

* CPU: the plane ``/host:CPU`` has one event per executed thunk, with the stats ``hlo_op``,
  ``hlo_module``, ``run_id`` and ``device_ordinal``. The event covers the launch; an ``end: <op>``
  event, tied to it by a producer/consumer id, marks the completion, which for an asynchronous
  thunk (a dot on the thread pool, a loop around one) comes later and on another thread.
* GPU: the planes ``/device:GPU:<n>`` have one event per kernel or copy, with ``hlo_op`` and
  ``hlo_module``, no run id, and no event for a loop itself. Runs are told apart by the marks that
  :func:`collect` leaves on the host's timeline. Kernels inside a command buffer carry the name of
  the buffer, not of their instruction: ``command_buffers.py`` finds their names.

On GPU an execution is one kernel, and collectives are NCCL's. A collective begins on the device that is there first
and waits for the others; it moves data once it runs on all, and ends on all together. So it moves for as long as it
takes on the device that comes last. Where devices are of several processes, whose traces have clocks of their own, that
is the shortest of its times on any of them.
"""

from __future__ import annotations

import re
import time
import warnings
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from disco_hlo.errors import ProfileError
from disco_hlo.printable import counted

RUN_MARK = "disco_hlo:run"
"""Name of the host event that :func:`collect` puts around each run."""
_END_MARK = "end: "
SETTLE_S = 0.02
"""Completion events are written a little after the caller wakes up; a trace closed at once lacks some."""
ENTRY_UNIT = re.compile(r"[bgn]\d+(?=[._])")
"""How the names of what the rewriter wrote begin in the entry. XLA may add a number to the rest, in one module and not
in the other."""
UNIT = re.compile(rf"(?:(?:loop|branch|call)\d+_(?:\d+_)?)?{ENTRY_UNIT.pattern}")
"""And in any region."""
Moved = Mapping[tuple[int, str, int], int]
"""How long collectives move data, ns, by run, unit, and how often the unit was transferred before in that run."""
Interval = tuple[int, int]
"""Start and end, ns."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of one instruction (CPU), or one kernel of one (GPU)."""

    op: str
    """Instruction name in the executed module."""
    module: str
    run: int
    """Equal for all that one execution of the module ran, on all its devices; ascending in time."""
    device: int
    """Local device number."""
    start_ns: int
    end_ns: int
    """When the work was complete, asynchronous work included."""
    kernel: str = ""
    """Name of the GPU kernel; empty on CPU."""


class _Raw(NamedTuple):
    """An execution of a run that is not numbered yet."""

    start_ns: int
    end_ns: int
    device: int
    op: str
    module: str
    kernel: str
    run_id: int | None
    """What the trace calls that run; None where it does not say."""


@dataclass(frozen=True, slots=True)
class RunWindow:
    """Wall time of one call of the profiled function."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What a profiler trace says about the modules executed in it."""

    executions: tuple[Execution, ...]
    """Ordered by start time, what contains another first."""
    windows: tuple[RunWindow, ...]
    """One per profiled call, ordered; empty for a trace that :func:`collect` did not take."""


class Profiler(Protocol):
    """What takes one trace."""

    def start(self, options: Any) -> None:
        """Begin it, with :func:`options`. Raises ProfileError: a trace is under way."""

    def stop(self) -> bytes:
        """End it; a serialized ``XSpace``, empty where it had ended before."""


def collect(profiler: Profiler, run_once: Callable[[], object], repeats: int, warmup: int = 1) -> bytes:
    """Run a step under the profiler and return the trace, a serialized ``XSpace``.

    ``run_once`` executes the step once and returns when it has finished on every local device
    (``jax.block_until_ready``). It runs ``warmup`` times before the trace starts and ``repeats``
    times in it. Raises :class:`ProfileError` where a trace cannot be taken (for one, because the
    program is already taking its own); what ``run_once`` raises passes through.
    """
    import jax.profiler

    if repeats < 1 or warmup < 0:
        raise ProfileError(f"need at least 1 profiled run and 0 warm-up runs, got {repeats} and {warmup}")
    for _ in range(warmup):
        run_once()
    profiler.start(options())
    try:
        for index in range(repeats):
            with jax.profiler.TraceAnnotation(RUN_MARK, index=index):
                run_once()
        time.sleep(SETTLE_S)
    finally:
        trace = profiler.stop()
    if not trace:
        raise ProfileError("the script began a profiler trace of its own")
    return trace


def options() -> Any:
    """What JAX's profiler is asked for."""
    import jax.profiler

    found = jax.profiler.ProfileOptions()
    found.python_tracer_level = 0
    found.host_tracer_level = 1
    found.enable_hlo_proto = False
    return found


def read(xspace: bytes) -> Trace:
    """Parse a serialized ``XSpace``; :class:`ProfileError` if it is none or holds no executions."""
    from jax.profiler import ProfileData

    with warnings.catch_warnings():
        # jaxlib's bindings name their own types in a way that Python 3.13 deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            data = ProfileData.from_serialized_xspace(xspace)
            return _trace_of([(plane.name, list(plane.lines)) for plane in data.planes])
        except (RuntimeError, ValueError, TypeError) as error:
            raise ProfileError(f"not a profiler trace ({counted(len(xspace), 'byte')}): {error}") from error


def joined(traces: Sequence[Trace]) -> Trace:
    """Traces of the same module, one after the other, as one that holds all their runs."""
    executions: list[Execution] = []
    windows: list[RunWindow] = []
    runs = end_ns = 0
    for trace in traces:
        starts = [one.start_ns for one in trace.executions] + [one.start_ns for one in trace.windows]
        later_ns = end_ns - min(starts, default=0)
        executions += [
            replace(one, run=one.run + runs, start_ns=one.start_ns + later_ns, end_ns=one.end_ns + later_ns)
            for one in trace.executions
        ]
        windows += [RunWindow(one.start_ns + later_ns, one.end_ns + later_ns) for one in trace.windows]
        runs += 1 + max((one.run for one in trace.executions), default=-1)
        ends = [one.end_ns for one in executions] + [one.end_ns for one in windows]
        end_ns = 1 + max(ends, default=0)
    return Trace(tuple(executions), tuple(windows))


def _trace_of(planes: list[tuple[str, list[Any]]]) -> Trace:
    raw: list[_Raw] = []
    for name, lines in planes:
        if name.startswith("/device:GPU:"):
            device = int(name.rsplit(":", 1)[1])
            for event in _events(lines):
                stats = dict(event.stats)
                if "hlo_op" in stats and "hlo_module" in stats:
                    raw.append(_raw(event, stats, device, event.name))
    # With kernels the host's other events are calls that started them, several for each.
    windows, launched = _host_events([lines for name, lines in planes if name == "/host:CPU"], bool(raw))
    raw = raw or launched
    if not raw:
        raise ProfileError(
            "the trace names no HLO instruction; expected hlo_op on thunk events (CPU) or kernels (GPU)"
        )
    return Trace(_numbered(raw, windows), windows)


def _events(lines: Iterable[Any]) -> Iterator[Any]:
    return (event for line in lines for event in line.events)


def _raw(event: Any, stats: Mapping[str, Any], device: int, kernel: str = "") -> _Raw:
    start = int(event.start_ns)
    end = start + int(event.duration_ns)
    run_id = stats.get("run_id")
    return _Raw(start, end, device, str(stats["hlo_op"]), str(stats["hlo_module"]), kernel, run_id)


def _host_events(planes: Iterable[list[Any]], marks_only: bool) -> tuple[tuple[RunWindow, ...], list[_Raw]]:
    """The calls, and the thunks (CPU): these end with completion events, which may stand on any line, before or after
    their launch."""
    windows: list[tuple[int, int]] = []
    launched: list[tuple[_Raw, tuple[int, int] | None]] = []
    ended: dict[tuple[int, int] | None, int] = {}
    for event in (event for lines in planes for event in _events(lines)):
        name = event.name
        if name == RUN_MARK:
            start = int(event.start_ns)
            windows.append((start, start + int(event.duration_ns)))
        elif marks_only:
            continue
        elif name.startswith(_END_MARK):
            stats = dict(event.stats)
            if "_c" in stats:
                ended[int(stats.get("_ct", 0)), int(stats["_c"])] = int(event.start_ns)
        else:
            stats = dict(event.stats)
            if "hlo_op" in stats and "hlo_module" in stats:
                flow = (int(stats.get("_pt", 0)), int(stats["_p"])) if "_p" in stats else None
                launched.append((_raw(event, stats, int(stats.get("device_ordinal", 0))), flow))
    completed = [
        one if (end := ended.get(flow, 0)) <= one.end_ns else one._replace(end_ns=end)
        for one, flow in launched
    ]
    return tuple(RunWindow(start, end) for start, end in sorted(windows)), completed


def _numbered(raw: list[_Raw], windows: tuple[RunWindow, ...]) -> tuple[Execution, ...]:
    if not windows and any(one.run_id is None for one in raw):
        raise ProfileError(
            "the trace does not say which run its events belong to; "
            "take it with disco_hlo.profiler.trace.collect"
        )
    starts = [window.start_ns for window in windows]
    runs: dict[tuple[int, int], int] = {}
    raw = sorted(raw, key=lambda one: (one.start_ns, -one.end_ns, one.device, one.op))
    strange = _outside(raw, windows)
    executions = []
    for start_ns, end_ns, device, op, module, kernel, run_id in raw:
        if (module, run_id) in strange:
            continue
        key = (1, run_id) if run_id is not None else (0, max(bisect_right(starts, start_ns) - 1, 0))
        run = runs.setdefault(key, len(runs))
        executions.append(Execution(op, module, run, device, start_ns, end_ns, kernel))
    return tuple(executions)


def _outside(raw: list[_Raw], windows: tuple[RunWindow, ...]) -> set[tuple[str, int | None]]:
    """Runs that no window is of, by module, where every window has one of that module. A script may run another module
    of the same name between two calls of a step, and ends of it may lie in a window: the run of most executions counts,
    of as many the last to begin. Where a window has none, as of runs that nobody waited for in it, all count."""
    begun: dict[tuple[str, int], list[int]] = defaultdict(list)
    for one in raw:
        if one.run_id is not None:
            begun[one.module, one.run_id].append(one.start_ns)
    found: dict[str, dict[RunWindow, tuple[str, int]]] = defaultdict(dict)
    for run, starts_ns in begun.items():
        for window in windows:
            if window.start_ns <= starts_ns[0] and starts_ns[-1] <= window.end_ns:
                before = found[run[0]].get(window)
                if before is None or len(begun[before]) <= len(starts_ns):
                    found[run[0]][window] = run
    whole = {module: set(of.values()) for module, of in found.items() if len(of) == len(windows)}
    return {run for run in begun if run[0] in whole and run not in whole[run[0]]}


def is_transfer(execution: Execution) -> bool:
    """Whether this kernel moves data between devices."""
    return execution.kernel.lower().startswith("nccl")


def unit_of_name(op: str) -> str:
    """What two modules of the same units have in common of an instruction's name."""
    found = UNIT.match(op)
    return found[0] if found else op


def span(execution: Execution) -> Interval:
    """From start to end."""
    return execution.start_ns, execution.end_ns


def by_place(trace: Trace, module_name: str) -> dict[tuple[int, int], list[Execution]]:
    """Kernels by run and device, in order of their start."""
    found: dict[tuple[int, int], list[Execution]] = defaultdict(list)
    for item in trace.executions:
        if item.module == module_name:
            found[item.run, item.device].append(item)
    return found


def moved_ns(trace: Trace, module_name: str, among: Container[str] = ()) -> Moved:
    """As the devices of this trace have it.

    Args:
        among: instructions that communicate, for traces that do not show which kernels do (CPU).
    """
    found: dict[tuple[int, str, int], int] = {}
    for (run, _), items in by_place(trace, module_name).items():
        for (unit, number), item in numbered(items, among):
            length_ns = item.end_ns - item.start_ns
            found[run, unit, number] = min(found.get((run, unit, number), length_ns), length_ns)
    return found


def least(of_all: Sequence[Moved]) -> Moved:
    """As all devices have it, told by the traces of each process; what one does not show is left out."""
    common = set(of_all[0]).intersection(*of_all[1:])
    return {key: min(one[key] for one in of_all) for key in sorted(common)}


def numbered(
    items: Iterable[Execution], among: Container[str] = ()
) -> Iterator[tuple[tuple[str, int], Execution]]:
    """Collectives of one run on one device, each by its unit and how often that was there before."""
    seen: Counter[str] = Counter()
    for item in items:
        if not is_transfer(item) and item.op not in among:
            continue
        unit = unit_of_name(item.op)
        yield (unit, seen[unit]), item
        seen[unit] += 1


def moving(item: Execution, key: tuple[int, str, int], moved: Moved) -> Interval:
    """The part of a collective in which it moves data; all of it where nobody knows better."""
    length_ns = item.end_ns - item.start_ns
    return item.end_ns - min(length_ns, moved.get(key, length_ns)), item.end_ns


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """What all of them cover, disjoint and ascending."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length_ns(intervals: Iterable[Interval]) -> int:
    """Of all together; what several cover counts for each."""
    return sum(end - start for start, end in intervals)


def covered_ns(own: Interval, intervals: Sequence[Interval]) -> int:
    """How much of ``own`` lies in ``intervals``, which are disjoint and ascending."""
    start, end = own
    covered = 0
    for position in range(bisect_right(intervals, start, key=itemgetter(1)), len(intervals)):
        begins, ends = intervals[position]
        if begins >= end:
            break
        covered += min(end, ends) - max(start, begins)
    return covered
