"""The profile: everything measured on one kind of device, as one frozen record and one JSON file.

A profile is what the simulator computes with (DisCo, section 4.2 and 4.4): op times by cost key,
launch cost, the device's rates, the all-reduce lines, contention, and how noisy all that was. It
names the device and the software it was taken with, because a time means nothing elsewhere.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.cost_model import Line, LinearPieces
from disco_hlo.profiler.allreduce import AllReduceFit, SweepPoint
from disco_hlo.profiler.checks import Checker
from disco_hlo.profiler.in_step import InStep, in_step_of, in_the_step, with_total_of
from disco_hlo.regular_file import read_regular

FORMAT = "disco-hlo profile"
VERSION = 7
_READABLE = (1, 2, 3, 4, 5, 6, 7)
"""Version 1 lacks ``in_step``, version 2 ``together``, version 4 a transfer's wait, version 5 slow-downs by kind,
version 6 what kernels hold; versions 4 and 5 may hold ``promises``, which nobody reads any more."""
_MAXIMUM_BYTES = 1 << 28
_RATES = (1e7, 1e18)
"""What a device may move or compute a second: a file that says less or more has another unit (GB/s, TFLOP/s)."""


@dataclass(frozen=True, slots=True)
class OpTime:
    """Measured time of one op or one fused kernel."""

    median_ns: int
    spread_ns: int
    """Median absolute deviation."""
    samples: int


@dataclass(frozen=True, slots=True)
class Platform:
    """What a time was measured on. Times of two platforms are never mixed."""

    device_kind: str
    """``NVIDIA H200``; on CPU see :func:`host_cpu_kind`."""
    backend: str
    """``cpu`` or ``gpu``."""
    driver: str
    """Driver or runtime version; empty on CPU."""
    jax: str
    jaxlib: str

    def __str__(self) -> str:
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.device_kind} ({self.backend}{driver}, jax {self.jax}, jaxlib {self.jaxlib})"


@dataclass(frozen=True, slots=True)
class Link:
    """Between whom the all-reduces were measured."""

    device_count: int
    process_count: int
    label: str = ""
    """What connects them, where that can vary on one machine (``nvlink``, ``sockets``)."""


@dataclass(frozen=True, slots=True)
class Contention:
    """What one thing takes longer while the other runs: slow-downs of at least 1, and a transfer's wait."""

    compute: float
    """Time of compute while a collective runs, over its time alone."""
    communication: float
    """Time of a collective while compute runs, over its time alone; without the wait, where that is known."""
    transfer_wait_ns: int = 0
    """What a collective that begins while compute runs takes longer besides, whatever its size. 0: unknown, or none."""
    products: float | None = None
    """As ``compute``, of kernels that hold a product (:data:`~disco_hlo.hlo.opcodes.PRODUCTS`) and began beside a
    collective. Both of these are known, or neither."""
    others: float | None = None
    """And of the other kernels."""
    hold: float = 0.0
    """Share of a product's time that must be done before a collective begins beside it, of those not among
    :attr:`Profile.holds`."""


@dataclass(frozen=True)
class Profile:
    """Measurements of one platform. Times are integer nanoseconds."""

    platform: Platform
    ops: Mapping[str, OpTime]
    """By cost key: ``Node.key`` for single ops, ``group_key`` for fused kernels."""
    launch_ns: int
    """Cost of starting one more kernel (GPU) or thunk (CPU)."""
    memory_bandwidth: float
    """Bytes read plus bytes written per second by a large streaming op."""
    flops_per_s: float
    """Rate of a large matrix multiplication."""
    all_reduce: AllReduceFit | None = None
    """The swept lines; predictions go by :attr:`transfers`."""
    link: Link = field(default_factory=lambda: Link(1, 1))
    contention: Contention | None = None
    holds: Mapping[str, float] = field(default_factory=dict)
    """By cost key of an op, the share of its time that must be done before a collective begins beside it, 0 to 1
    (:mod:`disco_hlo.profiler.holds`)."""
    noise: float = 0.0
    """Relative run-to-run spread of a whole step; differences below it mean nothing."""
    in_step: InStep | None = None
    """What the all-reduces of the step that was profiled take in it one by one, where they block (CPU)."""
    together: InStep | None = None
    """And in as few buckets as can be (CPU), or in XLA's own, every other one of them taken apart, each alone (GPU)."""

    @property
    def transfers(self) -> LinearPieces | None:
        """The all-reduce lines of this step: the swept ones, moved to what all-reduces took in it."""
        if self.all_reduce is None:
            return None
        swept = self.all_reduce.line
        if self.platform.backend == "gpu":
            return swept if self.together is None else with_total_of(self.together, swept)
        return in_the_step(swept, self.in_step, self.together)

    def __post_init__(self) -> None:
        check = Checker("the profile")
        check.integer(self.launch_ns, "launch_ns", minimum=0)
        check.number(self.memory_bandwidth, "memory_bandwidth", above=0.0)
        check.number(self.flops_per_s, "flops_per_s", above=0.0)
        check.number(self.noise, "noise", minimum=0.0)
        for key, time in self.ops.items():
            _check_op_time(time, key, check)
        for key, share in self.holds.items():
            _check_share(share, f"holds.{key}", check)

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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = "cpu"
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
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "platform": asdict(profile.platform),
        "launch_ns": profile.launch_ns,
        "memory_bandwidth": profile.memory_bandwidth,
        "flops_per_s": profile.flops_per_s,
        "noise": profile.noise,
        "link": asdict(profile.link),
        "contention": None if profile.contention is None else asdict(profile.contention),
        "holds": dict(profile.holds),
        "all_reduce": None if profile.all_reduce is None else _fit_body(profile.all_reduce),
        "in_step": None if profile.in_step is None else asdict(profile.in_step),
        "together": None if profile.together is None else asdict(profile.together),
    }
    head = json.dumps(body, sort_keys=True, indent=1, allow_nan=False)
    ops = ",\n".join(
        f"  {json.dumps(key)}: [{time.median_ns}, {time.spread_ns}, {time.samples}]"
        for key, time in sorted(profile.ops.items())
    )
    return f'{head[:-2]},\n "ops": {{\n{ops}\n }}\n}}\n'


def _fit_body(fit: AllReduceFit) -> dict[str, Any]:
    return {
        "pieces": [[line.from_bytes, line.ns_per_byte, line.offset_ns] for line in fit.line.lines],
        "points": [
            [point.size_bytes, point.median_ns, point.spread_ns, point.samples] for point in fit.points
        ],
        "median_error": fit.median_error,
        "maximum_error": fit.maximum_error,
    }


def save(profile: Profile, path: Path) -> None:
    """Write the profile; the file appears whole or not at all. :class:`ProfileError` where it cannot."""
    text = to_json(profile)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ProfileError(f"cannot write the profile {path}: {error}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        Path(draft).unlink(missing_ok=True)
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
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{source} is not JSON: {error}") from error
    check = Checker(source)
    body = check.record(body, "the file")
    if body.get("format") != FORMAT:
        check.fail("format", f"expected {FORMAT!r}, got {body.get('format')!r}")
    if body.get("version") not in _READABLE:
        known = ", ".join(map(str, _READABLE))
        check.fail("version", f"this program reads versions {known}, got {body.get('version')!r}")
    return _profile_of(body, check)


def _profile_of(body: dict[str, Any], check: Checker) -> Profile:
    platform = check.record(body.get("platform"), "platform")
    link = check.record(body.get("link"), "link")
    ops = check.record(body.get("ops"), "ops")
    names = ("device_kind", "backend", "driver", "jax", "jaxlib")
    return Profile(
        platform=Platform(*(check.text(platform.get(name), f"platform.{name}") for name in names)),
        ops={key: _op_time(values, key, check) for key, values in ops.items()},
        launch_ns=check.integer(body.get("launch_ns"), "launch_ns", minimum=0),
        memory_bandwidth=_rate(body, "memory_bandwidth", check),
        flops_per_s=_rate(body, "flops_per_s", check),
        all_reduce=_fit_of(body.get("all_reduce"), check),
        link=Link(
            check.integer(link.get("device_count"), "link.device_count", minimum=1),
            check.integer(link.get("process_count"), "link.process_count", minimum=1),
            check.text(link.get("label"), "link.label"),
        ),
        contention=_contention_of(body.get("contention"), check),
        holds={
            key: _check_share(share, f"holds.{key}", check)
            for key, share in check.record(body.get("holds", {}), "holds").items()
        },
        noise=check.number(body.get("noise"), "noise", minimum=0.0),
        in_step=in_step_of(body.get("in_step"), check),
        together=in_step_of(body.get("together"), check, "together"),
    )


def _rate(body: dict[str, Any], name: str, check: Checker) -> float:
    rate = check.number(body.get(name), name, above=0.0)
    if not _RATES[0] <= rate <= _RATES[1]:
        check.fail(name, f"expected {_RATES[0]:g} to {_RATES[1]:g} a second, got {rate:g}")
    return rate


def _op_time(values: Any, key: str, check: Checker) -> OpTime:
    median, spread, samples = check.row(values, 3, f"ops.{key}")
    time = OpTime(median, spread, samples)
    _check_op_time(time, key, check)
    return time


def _check_op_time(time: OpTime, key: str, check: Checker) -> None:
    check.integer(time.median_ns, f"ops.{key}: median_ns", minimum=0)
    check.integer(time.spread_ns, f"ops.{key}: spread_ns", minimum=0)
    check.integer(time.samples, f"ops.{key}: samples", minimum=1)


def _check_share(value: Any, name: str, check: Checker) -> float:
    share = check.number(value, name, minimum=0.0)
    if share > 1.0:
        check.fail(name, f"expected a share, 0 to 1, got {share}")
    return share


def _fit_of(body: Any, check: Checker) -> AllReduceFit | None:
    if body is None:
        return None
    body = check.record(body, "all_reduce")
    pieces: list[Line] = []
    for index, row in enumerate(check.rows(body.get("pieces"), "all_reduce.pieces")):
        where = f"all_reduce.pieces[{index}]"
        start, slope, base = check.row(row, 3, where)
        piece = Line(
            check.integer(start, where, minimum=0),
            check.number(slope, where, minimum=0.0),
            check.number(base, where),
        )
        ascending = piece.from_bytes > pieces[-1].from_bytes if pieces else piece.from_bytes == 0
        if not ascending or piece.ns_per_byte * piece.from_bytes + piece.offset_ns < 0:
            check.fail(where, "pieces start at 0 bytes, ascend, and predict no negative time")
        pieces.append(piece)
    if not pieces:
        check.fail("all_reduce.pieces", "expected at least one piece")
    points = []
    for index, row in enumerate(check.rows(body.get("points"), "all_reduce.points")):
        where = f"all_reduce.points[{index}]"
        size, median, spread, samples = check.row(row, 4, where)
        points.append(
            SweepPoint(
                check.integer(size, where, minimum=0), check.integer(median, where, minimum=1),
                check.integer(spread, where, minimum=0), check.integer(samples, where, minimum=1),
            )
        )  # fmt: skip
    errors = (
        check.number(body.get(name), f"all_reduce.{name}", minimum=0.0)
        for name in ("median_error", "maximum_error")
    )
    return AllReduceFit(LinearPieces(tuple(pieces)), tuple(points), *errors)


def _contention_of(body: Any, check: Checker) -> Contention | None:
    if body is None:
        return None
    body = check.record(body, "contention")
    kinds = {name: body[name] for name in ("products", "others") if body.get(name) is not None}
    if len(kinds) == 1:
        check.fail("contention", f"expected products and others, or neither, got {[*kinds]}")
    by_kind = {name: check.number(value, f"contention.{name}", minimum=1.0) for name, value in kinds.items()}
    return Contention(
        check.number(body.get("compute"), "contention.compute", minimum=1.0),
        check.number(body.get("communication"), "contention.communication", minimum=1.0),
        check.integer(body.get("transfer_wait_ns", 0), "contention.transfer_wait_ns", minimum=0),
        hold=_check_share(body.get("hold", 0.0), "contention.hold", check),
        **by_kind,
    )
