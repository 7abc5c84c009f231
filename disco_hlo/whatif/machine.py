"""Machines as data: GPUs and what joins them, each parameter with where it comes from.

``disco_hlo/data/machines/*.toml`` (``configs/machines`` in the repository) has one machine a file; a parameter is
``name = [value, "source"]``, where the source is a paper's table, a public document, or begins with "assumed" or
"fitted".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from disco_hlo.errors import DiscoError
from disco_hlo.regular_file import read_regular

MOST_DEVICES = 1 << 20
_MOST_BYTES = 1 << 16
_FOLDER = files("disco_hlo") / "data" / "machines"

Positive = Annotated[float, Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=MOST_DEVICES)]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device."""

    compute_units: Count
    clock_ghz: Positive
    flops_per_cycle: Positive
    """Of 16-bit matmuls, in one compute unit; a multiplication and an addition are two."""
    matmul_efficiency: Share
    """Share of the peak that a large matmul reaches."""
    memory_gb_per_s: Positive
    cache_mb: Positive
    """Last level of the cache."""
    cache_gb_per_s: Positive
    """What it takes in."""
    memory_gb: Positive
    launch_us: NotNegative
    """From the end of a kernel to the start of the next."""
    stage_us: NotNegative = 0.0
    """What a matmul's stage takes besides its products and its writes."""

    @property
    def peak_flops_per_ns(self) -> float:
        """Of 16-bit matmuls."""
        return self.compute_units * self.clock_ghz * self.flops_per_cycle

    @property
    def matmul_flops_per_ns(self) -> float:
        """What a large matmul reaches."""
        return self.peak_flops_per_ns * self.matmul_efficiency


@dataclass(frozen=True, slots=True)
class Network:
    """What joins the devices: nodes of some devices, and nodes to each other."""

    topology: Literal["ring", "mesh", "switch", "torus"]
    """Of the devices of a node: a ring, all joined with all, or a switch; ``torus`` joins nodes of one device in two
    dimensions."""
    devices: Count
    """How many there are, unless asked for otherwise."""
    node_devices: Count
    """How many a node has."""
    link_gb_per_s: Positive
    """What a device sends to its node, in all, while it receives as much; on a torus, over one of its four links."""
    link_latency_us: NotNegative
    node_gb_per_s: NotNegative = 0.0
    """What a node sends to others while it receives as much; 0 where there is one node."""
    node_latency_us: NotNegative = 0.0
    kernel_us: NotNegative = 0.0
    """What a collective's kernel takes besides its messages, on a ``mesh``."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine."""

    name: str
    title: str
    device_kind: str
    """What JAX calls the device; empty where it never runs on one."""
    gpu: Gpu
    network: Network
    sources: Mapping[str, str]
    """By parameter (``gpu.clock_ghz``), where its value comes from."""

    def sourced(self, by: str) -> tuple[str, ...]:
        """Parameters whose source begins so: those that nobody stated, with "assumed"."""
        return tuple(name for name, source in self.sources.items() if source.startswith(by))


Part = TypeVar("Part", Gpu, Network)
Entry = tuple[float | int | str, Annotated[str, Meta(min_length=1)]]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    gpu: dict[str, Entry]
    network: dict[str, Entry]
    device_kind: str = ""


def names() -> tuple[str, ...]:
    """Machines that come with the package."""
    return tuple(sorted(x.name.removesuffix(".toml") for x in _FOLDER.iterdir() if x.name.endswith(".toml")))


def load(name: str) -> Machine:
    """A machine that comes with the package, or one in a file of yours (``path/to/machine.toml``).

    Raises:
        DiscoError: there is none, or a parameter is missing, unknown or out of range; names it.
    """
    if name.endswith(".toml"):
        try:
            data = read_regular(Path(name), _MOST_BYTES)
        except OSError as error:
            raise DiscoError(f"no machine can be read from {name}: {error.strerror or error}") from None
        return parse(data, Path(name).stem)
    if name not in names():
        raise DiscoError(f"no machine {name!r}: expected a file *.toml, or one of {', '.join(names())}")
    return parse((_FOLDER / f"{name}.toml").read_bytes(), name)


def parse(data: bytes, name: str) -> Machine:
    """A machine from the text of its file.

    Raises:
        DiscoError: as :func:`load`.
    """
    try:
        found = msgspec.toml.decode(data, type=_File)
        parts = {"gpu": found.gpu, "network": found.network}
        gpu, network = _convert("gpu", found.gpu, Gpu), _convert("network", found.network, Network)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DiscoError(f"machine {name}: {error}") from None
    if network.devices > network.node_devices and network.node_gb_per_s == 0 and network.topology != "torus":
        raise DiscoError(
            f"machine {name}: network.node_gb_per_s is 0, but {network.devices} devices are more than one node's "
            f"{network.node_devices}"
        )
    sources = {f"{part}.{key}": entry[1] for part in parts for key, entry in parts[part].items()}
    return Machine(name, found.title, found.device_kind, gpu, network, sources)


def _convert(part: str, entries: Mapping[str, Entry], kind: type[Part]) -> Part:
    unknown = sorted(set(entries) - {field.name for field in fields(kind)})
    if unknown:
        raise msgspec.ValidationError(f"{part} has no parameter {unknown[0]!r}")
    return msgspec.convert({key: entry[0] for key, entry in entries.items()}, kind)
