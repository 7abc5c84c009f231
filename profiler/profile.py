"""The profile: everything measured on one kind of device, as one frozen record and one JSON file.

A profile is what the simulator computes with (DisCo, section 4.2 and 4.4): op times by cost key,
launch cost, the device's rates, the all-reduce lines, contention, and how noisy all that was. It
names the device and the software it was taken with, because a time means nothing elsewhere.

A profile file is data from outside: it is decoded by schema and refused with the place and the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from disco_hlo.backends import BACKENDS
from disco_hlo.cores import own_cores
from disco_hlo.errors import DiscoError, ProfileError
from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind
from disco_hlo.hlo.cost_model import LinearPieces, by_ring
from disco_hlo.profiler.allreduce import AllReduceFit
from disco_hlo.profiler.fields import Factor, Nanoseconds, Positive, Share, Spread
from disco_hlo.profiler.in_step import InStep, in_the_step, with_total_of
from disco_hlo.regular_file import read_regular, write_whole

FORMAT = "disco-hlo profile"
VERSION = 9
_MAXIMUM_BYTES = 1 << 28
_Text = Annotated[str, Meta(max_length=1000)]
_Rate = Annotated[float, Meta(ge=1e7, le=1e18)]
"""What a device may move or compute a second: a file that says less or more has another unit (GB/s, TFLOP/s)."""


class OpTime(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Measured time of one op or one fused kernel."""

    median_ns: Nanoseconds
    spread_ns: Nanoseconds
    """Median absolute deviation."""
    samples: Positive


class LoopTime(Struct, frozen=True, forbid_unknown_fields=True):
    """What a loop takes besides its body."""

    executions: Positive
    """Of its body in one run of the step, outer loops counted: the turns of a loop that does not say how many it
    has."""
    own_ns: Nanoseconds
    """Between two turns, beyond a launch."""
    first_more_ns: Annotated[int, Meta(gt=-(1 << 62), lt=1 << 62)] = 0
    """What the body takes longer (or less long) in the first turn than in later ones."""


@dataclass(frozen=True, slots=True)
class Platform:
    """What a time was measured on. Times of two platforms are never mixed."""

    device_kind: _Text
    """``NVIDIA H200``; on CPU see :func:`host_cpu_kind`."""
    backend: _Text
    """Its name."""
    driver: _Text
    """Driver or runtime version; empty on CPU."""
    jax: _Text
    jaxlib: _Text

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ProfileError(
                f"a profile of {' or '.join(BACKENDS)} is expected, this is one of {self.backend!r:.80}"
            )

    def __str__(self) -> str:
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.device_kind} ({self.backend}{driver}, jax {self.jax}, jaxlib {self.jaxlib})"


@dataclass(frozen=True, slots=True)
class Link:
    """Between whom the all-reduces were measured."""

    device_count: Positive
    process_count: Positive
    label: _Text = ""
    """What connects them, where that can vary on one machine (``nvlink``, ``sockets``)."""


@dataclass(frozen=True, slots=True)
class Contention:
    """What one thing takes longer while the other runs: factors of at least 1, and a collective's wait."""

    compute: Factor
    """Time of compute while a collective runs, over its time alone."""
    communication: Factor
    """Time of a collective while compute runs, over its time alone; without the wait, where that is known."""
    transfer_wait_ns: Nanoseconds = 0
    """What a collective that begins while compute runs takes longer besides, whatever its size. 0: unknown, or none."""
    products: Factor | None = None
    """As ``compute``, of kernels that hold a matmul (:data:`~disco_hlo.hlo.opcodes.PRODUCTS`) and began during a
    collective. Both of these are known, or neither."""
    others: Factor | None = None
    """And of the other kernels."""
    hold: Share = 0.0
    """Share of a matmul's time that must be done before a collective begins during it, of those not among
    :attr:`Profile.holds`."""

    def __post_init__(self) -> None:
        if (self.products is None) != (self.others is None):
            raise ProfileError(
                f"a slow-down factor of matmuls and of others, or neither, is expected, got {self}"
            )


@dataclass(frozen=True)
class Collectives:
    """What was measured of one kind of collectives."""

    swept: AllReduceFit | None = None
    """Lines over sizes that no step has, each alone."""
    in_step: InStep | None = None
    """As :attr:`Profile.in_step`."""
    together: InStep | None = None
    """As :attr:`Profile.together`."""

    def line(self, backend: str, otherwise: LinearPieces | None) -> LinearPieces | None:
        """The swept lines, moved to what the step's collectives of this kind took in it; of a kind that nobody swept
        those that would do ``otherwise``, moved alike."""
        swept = self.swept.line if self.swept is not None else otherwise
        if swept is None:
            return None
        if BACKENDS[backend].asynchronous:
            return swept if self.together is None else with_total_of(self.together, swept)
        return in_the_step(swept, self.in_step, self.together)


@dataclass(frozen=True)
class Profile:
    """Measurements of one platform. Times are integer nanoseconds."""

    platform: Platform
    ops: Mapping[str, OpTime]
    """By cost key: ``Node.key`` for single ops, ``group_key`` for fused kernels."""
    launch_ns: Nanoseconds
    """Cost of starting one more kernel (GPU) or thunk (CPU)."""
    memory_bandwidth: _Rate
    """Bytes read plus bytes written per second by a large streaming op."""
    flops_per_s: _Rate
    """Rate of a large matrix multiplication."""
    all_reduce: AllReduceFit | None = None
    """The swept lines; predictions go by :attr:`transfers`."""
    link: Link = field(default_factory=lambda: Link(1, 1))
    contention: Contention | None = None
    holds: Mapping[str, Share] = field(default_factory=dict)
    """By cost key of an op, the share of its time that must be done before a collective begins during it, 0 to 1
    (:mod:`disco_hlo.profiler.holds`)."""
    noise: Spread = 0.0
    """Relative run-to-run spread of a whole step; differences below it mean nothing."""
    in_step: InStep | None = None
    """What the all-reduces of the step that was profiled take in it one by one, where they block (CPU)."""
    together: InStep | None = None
    """And in as few buckets as can be (CPU), or in XLA's own, every other one of them taken apart, each alone (GPU)."""

    collectives: Mapping[str, Collectives] = field(default_factory=dict)
    """The same of every other kind, by its name (:class:`~disco_hlo.hlo.collectives.CollectiveKind`)."""

    loops: Mapping[str, LoopTime] = field(default_factory=dict)
    """Of the step that was profiled, by the key of the loop's body (:attr:`~disco_hlo.hlo.graph.Graph.key`)."""

    @property
    def transfers(self) -> LinearPieces | None:
        """The all-reduce lines of this step: the swept ones, moved to what all-reduces took in it."""
        return Collectives(self.all_reduce, self.in_step, self.together).line(self.platform.backend, None)

    def line(self, kind: CollectiveKind) -> LinearPieces | None:
        """The lines of a kind, as measured as they are; None where not even those of all-reduces are known."""
        all_reduce = self.transfers
        ring = None if all_reduce is None else by_ring(kind, all_reduce)
        if kind == ALL_REDUCE:
            return all_reduce
        return self.collectives.get(str(kind), _NOTHING).line(self.platform.backend, ring)

    def require(self, device_kind: str | None, backend: str) -> None:
        """Raise :class:`ProfileError` unless the profile was taken on this kind of device; where nobody knows that
        (None), unless it was taken on one of this backend."""
        mine = self.platform
        if device_kind is None:
            if mine.backend != backend:
                raise ProfileError(
                    f"the profile was taken on {mine.device_kind} ({mine.backend}), "
                    f"this step is compiled for {backend}; name another profile"
                )
        elif (mine.device_kind, mine.backend) != (device_kind, backend):
            raise ProfileError(
                f"the profile was taken on {mine.device_kind} ({mine.backend}), "
                f"this is {device_kind} ({backend}); profile this device or name another profile"
            )


_NOTHING = Collectives()


def merged(times: Sequence[OpTime]) -> OpTime:
    """One time from several measurements: medians weighted by their samples.

    The spread is the larger of the usual spread within a measurement and the spread between them.
    """
    middle = _weighted_median((time.median_ns, time.samples) for time in times)
    within = _weighted_median((time.spread_ns, time.samples) for time in times)
    between = _weighted_median((abs(time.median_ns - middle), time.samples) for time in times)
    return OpTime(middle, max(within, between), sum(time.samples for time in times))


def _weighted_median(values: Iterable[tuple[int, int]]) -> int:
    """Of (value, weight) pairs; the middle of two values where half of the weight lies on each side."""
    ordered = sorted(values)
    total = sum(weight for _, weight in ordered)
    passed = 0
    for position, (value, weight) in enumerate(ordered):
        passed += weight
        if 2 * passed > total:
            return value
        if 2 * passed == total:
            return round((value + ordered[position + 1][0]) / 2)
    raise ProfileError("no measurement to merge")


def host_cpu_kind() -> str:
    """Device kind of CPU profiles: the host's CPU and how many cores this process may use."""
    cores = len(own_cores())
    name = "unknown"
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name}, {cores} cores"


def to_json(profile: Profile) -> str:
    """The profile as JSON text: sorted keys, one op a line, equal profiles give equal text."""
    body = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(profile)}
    times = body.pop("ops")
    head = json.dumps(body, sort_keys=True, indent=1, allow_nan=False)
    ops = ",\n".join(f"  {json.dumps(key)}: {json.dumps(time)}" for key, time in sorted(times.items()))
    return f'{head[:-2]},\n "ops": {{\n{ops}\n }}\n}}\n'


def save(profile: Profile, path: Path) -> None:
    """Write the profile; the file appears whole or not at all. :class:`ProfileError` where it cannot."""
    text = to_json(profile)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise ProfileError(f"cannot write the profile {path}: {error}") from error


def load(path: Path) -> Profile:
    """Read and validate a profile file; :class:`ProfileError` says what is wrong with it."""
    try:
        text = read_regular(path, _MAXIMUM_BYTES).decode()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a name that no file has
        raise ProfileError(
            f"cannot read the profile {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    return from_json(text, str(path))


def from_json(text: str, source: str = "the profile") -> Profile:
    """Parse JSON text of :func:`to_json`. ``source`` names the file in the messages."""
    try:
        raw: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ProfileError(f"{source} is not JSON: {error}") from None
    found = (raw.get("format"), raw.get("version")) if isinstance(raw, dict) else (None, None)
    if found != (FORMAT, VERSION):
        raise ProfileError(
            f"{source}: expected a {FORMAT} of version {VERSION}, got format {found[0]!r:.80}, "
            f"version {found[1]!r:.80}; measure again or name another file"
        )
    try:
        return msgspec.convert(raw, Profile)
    except (msgspec.ValidationError, DiscoError) as error:
        raise ProfileError(f"{source}: {error}; measure again or name another file") from None
