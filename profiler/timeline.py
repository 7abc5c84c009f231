"""Measured steps as records: which instruction ran when, on one device, and the op of the graph behind it.

DisCo judges a plan by a simulated timeline (section 4.4). This is the other half: the step as it ran,
read from the profiler's trace and kept beside the plan in ``timelines.json.gz``. The file is data from
outside when it is read again: decoded by schema, bounded, refused with the reason.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from disco_hlo.errors import ProfileError, why_unreadable
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import behind_bitcasts
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.profiler.instructions import median_run, outermost
from disco_hlo.profiler.keys import owners
from disco_hlo.profiler.trace import Execution, Trace
from disco_hlo.regular_file import unzipped

FORMAT = "disco-hlo timelines"
VERSION = 1
FILE_NAME = "timelines.json.gz"
MAX_BYTES = 256 << 20
"""Largest content that is unpacked."""

_Nanoseconds = Annotated[int, Meta(ge=0, le=1 << 60)]
_Index = Annotated[int, Meta(ge=0, le=1 << 31)]
_Node = Annotated[int, Meta(ge=-1, le=1 << 31)]
_Text = Annotated[str, Meta(max_length=4096)]
Lane = Literal["compute", "communication"]


class MeasuredStep(Struct, frozen=True, forbid_unknown_fields=True):
    """One run of a step on rank 0's first device: of all traced runs, the one of median length."""

    name: _Text
    """Of the candidate: ``XLA default``, ``plan``, ..."""
    step_ns: _Nanoseconds
    """First start to last end."""
    lanes: tuple[Lane, ...]
    """What runs in each lane. The spans of a lane do not overlap."""
    instructions: tuple[tuple[_Text, _Node], ...]
    """(name in the executed module, a node of the canonical graph that it computes or -1)."""
    spans: tuple[tuple[_Index, _Nanoseconds, _Nanoseconds, _Index], ...]
    """(index of the instruction, start, length, lane), by start."""


class MeasuredTimelines(Struct, frozen=True, forbid_unknown_fields=True):
    """The measured steps that belong to one plan."""

    format: str
    version: int
    module_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """Of the plan's optimized module: other timelines are another plan's."""
    steps: tuple[MeasuredStep, ...]


def measured_step(name: str, trace: Trace, executed: bytes) -> MeasuredStep:
    """The record of the module ``executed`` in a trace of it.

    Args:
        executed: the module as XLA runs it, a serialized HloModuleProto of the step.

    Raises:
        ProfileError: the trace holds no run of the module.
    """
    module = canonicalize(executed)
    owner = owners(executed)
    by_device = median_run(trace, module.graph.module_name)
    kept = outermost(by_device[min(by_device)], owner)
    talks = _collectives(module, owner)
    shown = behind_bitcasts(module.graph)
    computed = {one.name: shown[(*one.results, *one.nodes)[0]] for one in module.origins if one.nodes}
    lanes: list[tuple[Lane, int]] = []
    numbers: dict[str, int] = {}
    rows = []
    first = min(one.start_ns for one in kept)
    for one in sorted(kept, key=lambda one: (one.start_ns, one.end_ns, one.op)):
        by = owner.get(one.op, one.op)
        kind: Lane = "communication" if talks & {one.op, by} else "compute"
        lane = _free_lane(lanes, kind, one)
        number = numbers.setdefault(by, len(numbers))
        rows.append((number, one.start_ns - first, one.end_ns - one.start_ns, lane))
    named = tuple((op[:4096], computed.get(op, -1)) for op in numbers)
    last = max(one.end_ns for one in kept)
    return MeasuredStep(name, last - first, tuple(kind for kind, _ in lanes), named, tuple(rows))


def _collectives(module: CanonicalModule, owner: Mapping[str, str]) -> set[str]:
    """Names of collectives, and of the asynchronous pairs that wrap one."""
    kinds = {kind + end for kind in COLLECTIVES for end in ("", "-start", "-done")}
    opcodes = {
        instruction.name: instruction.opcode
        for computation in module.module.computations
        for instruction in computation.instructions
    }
    found = {name for name, opcode in opcodes.items() if opcode in kinds}
    around = {owner[name] for name in found if name in owner}
    return found | {name for name in around if opcodes.get(name, "").startswith("async-")}


def _free_lane(lanes: list[tuple[Lane, int]], kind: Lane, one: Execution) -> int:
    for number, (what, busy_until_ns) in enumerate(lanes):
        if what == kind and busy_until_ns <= one.start_ns:
            lanes[number] = (kind, one.end_ns)
            return number
    lanes.append((kind, one.end_ns))
    return len(lanes) - 1


def encode(module_sha256: str, steps: Iterable[MeasuredStep]) -> bytes:
    """The file's content; equal steps give equal bytes."""
    record = MeasuredTimelines(FORMAT, VERSION, module_sha256, tuple(steps))
    return gzip.compress(msgspec.json.encode(record), 6, mtime=0)


def decode(data: bytes, source: str) -> MeasuredTimelines:
    """Read :func:`encode`'s bytes.

    Raises:
        ProfileError: damaged, too large, of another version, or inconsistent; names ``source``.
    """
    try:
        text = unzipped(data, MAX_BYTES)
    except OSError as error:
        raise ProfileError(f"{source}: {error.strerror}") from None
    try:
        raw: Any = msgspec.json.decode(text)
        if not isinstance(raw, dict) or (raw.get("format"), raw.get("version")) != (FORMAT, VERSION):
            raise ProfileError(f'{source}: expected "format": "{FORMAT}", "version": {VERSION}')
        record = msgspec.convert(raw, MeasuredTimelines)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProfileError(f"{source}: {why_unreadable(error)}") from None
    for step in record.steps:
        _check(step, source)
    return record


def _check(step: MeasuredStep, source: str) -> None:
    """Spans must name lanes and instructions that there are, and follow each other in their lane."""
    ends = [0] * len(step.lanes)
    for instruction, start_ns, length_ns, lane in step.spans:
        if instruction >= len(step.instructions) or lane >= len(step.lanes):
            raise ProfileError(
                f"{source}: {step.name} has a span of an instruction or lane that is not there"
            )
        if start_ns < ends[lane]:
            raise ProfileError(f"{source}: {step.name} has spans that overlap in lane {lane}")
        ends[lane] = start_ns + length_ns
