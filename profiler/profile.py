"""The profile: everything measured on one kind of device, as one frozen record and one JSON file.

A profile is what the simulator computes with (DisCo, section 4.2 and 4.4): op times by cost key,
launch cost, the device's rates, the lines of collectives, contention, and how noisy all that was. It
names the device and the software it was taken with, because a time means nothing elsewhere.

A profile file is data from outside: it is decoded by schema and refused with the place and the reason.

Several profiles of one machine become one (:func:`merge`): what the layers of several models, or several hours, tell of
it. Op times are merged by key, by the weighted medians of the store. Profiles that were read from one store hold
each other's measurements: one that stands in several of them counts once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from disco_hlo.backends import BACKENDS
from disco_hlo.cores import own_cores
from disco_hlo.errors import DiscoError, ProfileError, why_unreadable
from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind
from disco_hlo.hlo.cost_model import LinearPieces, by_ring
from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.collectives import (
    MINIMUM_POINTS,
    CollectiveFit,
    InStep,
    SweepPoint,
    fit,
    in_the_step,
    with_total_of,
)
from disco_hlo.profiler.fields import Factor, Nanoseconds, Positive, Share, Spread
from disco_hlo.regular_file import read_regular, write_whole

FORMAT = "disco-hlo profile"
VERSION = 9
_MAXIMUM_BYTES = 1 << 28
_Known = TypeVar("_Known")
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
    """Between whom the collectives were measured."""

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
    transfer_launch_ns: Nanoseconds = 0
    """Between the end of a collective and the beginning of the next one in line. 0: unknown, or none."""

    def __post_init__(self) -> None:
        if (self.products is None) != (self.others is None):
            raise ProfileError(
                f"a slow-down factor of matmuls and of others, or neither, is expected, got {self}"
            )


@dataclass(frozen=True)
class Collectives:
    """What was measured of one kind of collectives."""

    swept: CollectiveFit | None = None
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
    all_reduce: CollectiveFit | None = None
    """The swept lines; predictions go by :attr:`transfers`."""
    link: Link = field(default_factory=lambda: Link(1, 1))
    contention: Contention | None = None
    holds: Mapping[str, Share] = field(default_factory=dict)
    """By cost key of an op, the share of its time that must be done before a collective begins during it, 0 to 1
    (:mod:`disco_hlo.profiler.contention`)."""
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


class DeviceFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """Of a kind of device. None where it was not measured, here and below."""

    constants: DeviceConstants | None = None
    launch_ns: Nanoseconds | None = None
    """What lies between two kernels in the training step that was timed last: on H200s a chain's links lay 0.0 to 2.1
    us apart where a step's kernels lay 0.2 to 0.9."""


class LinkFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """Of all steps whose collectives go over one link."""

    holds: dict[str, Share] = {}
    """As :attr:`Profile.holds`."""


class StepFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """Of one step on one link."""

    launch_ns: Nanoseconds | None = None
    """What lies between two of its kernels."""
    contention: Contention | None = None
    """Kernels differ in what they share with collectives: convolutions were slowed by a third where a transformer's
    matmuls were not."""
    apart: dict[str, InStep] | None = None
    """All of its collectives of each kind in one run, one by one; none of a kind: the trace did not tell, nor will
    another one."""
    together: dict[str, InStep] | None = None
    """The same in one bucket (CPU), or in buckets of varied sizes (GPU)."""
    loops: dict[str, LoopTime] | None = None
    """As :attr:`Profile.loops`."""


def place_of(link: Link, fingerprint: str = "") -> str:
    """Under which a store keeps the facts of a link, or of a step on it."""
    return f"{link.label} {link.device_count}/{link.process_count} {fingerprint[:16]}"


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
        write_whole(path.parent, {path.name: text.encode()})
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
        raise ProfileError(f"{source}: expected a profile as JSON: {why_unreadable(error)}") from None
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


def merge(profiles: Sequence[Profile]) -> Profile:
    """One profile from several of the same platform and link.

    Rates and launch cost are medians, the noise is the largest. The slow-downs are medians over those that
    found any: 1.0 and 1.0 is also what a profile says whose traces could not tell. That of collectives holds their wait
    where this is 0: where any profile tells the two apart, both are medians over those that do.

    Raises:
        ProfileError: there are none, or they were taken on different platforms or links.
    """
    if not profiles:
        raise ProfileError("there is no profile to merge")
    first = profiles[0]
    for other in profiles[1:]:
        if (other.platform, other.link) != (first.platform, first.link):
            raise ProfileError(
                f"profiles of one platform and link are expected: the first is of {first.platform}, "
                f"{first.link}, another of {other.platform}, {other.link}"
            )
    return Profile(
        platform=first.platform,
        ops={key: merged(list(dict.fromkeys(known))) for key, known in _by_key(p.ops for p in profiles)},
        launch_ns=round(median(profile.launch_ns for profile in profiles)),
        memory_bandwidth=float(median(profile.memory_bandwidth for profile in profiles)),
        flops_per_s=float(median(profile.flops_per_s for profile in profiles)),
        all_reduce=_swept(profile.all_reduce for profile in profiles),
        link=first.link,
        contention=_contention(profiles),
        holds={key: median(known) for key, known in _by_key(profile.holds for profile in profiles)},
        noise=max(profile.noise for profile in profiles),
        in_step=_in_step(profile.in_step for profile in profiles),
        together=_in_step(profile.together for profile in profiles),
        collectives={
            kind: Collectives(
                _swept(one.swept for one in known),
                _in_step(one.in_step for one in known),
                _in_step(one.together for one in known),
            )
            for kind, known in _by_key(profile.collectives for profile in profiles)
        },
        loops={  # of those that ran as often in all profiles that have them
            body: LoopTime(
                known[0].executions,
                round(median(one.own_ns for one in known)),
                round(median(one.first_more_ns for one in known)),
            )
            for body, known in _by_key(profile.loops for profile in profiles)
            if len({one.executions for one in known}) == 1
        },
    )


def _by_key(found: Iterable[Mapping[str, _Known]]) -> list[tuple[str, list[_Known]]]:
    """What all of them say of each key, by ascending key."""
    known: dict[str, list[_Known]] = {}
    for one in found:
        for key, value in one.items():
            known.setdefault(key, []).append(value)
    return sorted(known.items())


def _swept(fits: Iterable[CollectiveFit | None]) -> CollectiveFit | None:
    by_size: dict[int, list[OpTime]] = {}
    for point in dict.fromkeys(point for one in fits if one is not None for point in one.points):
        time = OpTime(point.median_ns, point.spread_ns, point.samples)
        by_size.setdefault(point.size_bytes, []).append(time)
    times = [(size, merged(known)) for size, known in sorted(by_size.items())]
    points = [SweepPoint(size, time.median_ns, time.spread_ns, time.samples) for size, time in times]
    return fit(points) if len(points) >= MINIMUM_POINTS else None


def _in_step(found: Iterable[InStep | None]) -> InStep | None:
    """Of one step. Profiles of several steps tell of none of them."""
    known = dict.fromkeys(one for one in found if one is not None)
    steps = {one.sizes for one in known}
    if len(steps) != 1:
        return None
    time = merged([OpTime(one.total_ns, one.spread_ns, one.samples) for one in known])
    each_ns = tuple(round(median(ns)) for ns in zip(*(one.each_ns for one in known), strict=False))
    return InStep(steps.pop(), time.median_ns, time.spread_ns, time.samples, each_ns)


def _contention(profiles: Sequence[Profile]) -> Contention | None:
    known = [profile.contention for profile in profiles if profile.contention is not None]
    told = [one for one in known if one != Contention(1.0, 1.0)] or known
    if not told:
        return None
    apart = [one for one in told if one.transfer_wait_ns] or told
    products = [one.products for one in told if one.products is not None]
    others = [one.others for one in told if one.others is not None]
    return Contention(
        median(one.compute for one in told),
        median(one.communication for one in apart),
        round(median(one.transfer_wait_ns for one in apart)),
        median(products) if products else None,
        median(others) if others else None,
        median(one.hold for one in told),
        round(median(one.transfer_launch_ns for one in told)),
    )


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
