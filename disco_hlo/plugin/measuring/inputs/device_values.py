"""What is known of a value that every device computes for itself: between which devices it may differ, and why.

Two things make a value differ. Entry parameters may: their shards hold other numbers on each device. And ops do that
give each device something of its own, as ``partition-id`` does. A collective over all devices makes a value equal again
(``all-reduce``, ``all-gather``), or hands each device another part of it (``reduce-scatter``, ``all-to-all``). One over
groups of devices leaves what it knows of each group. Small whole numbers that follow from a device's number alone are
computed for each device, as partitioners find their shards by tables of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.collectives import Groups, written_groups
from disco_hlo.hlo.proto import DTYPES, DetailedInstruction, Message
from disco_hlo.structure.literals import computed_value, literal_value

_NONE: frozenset[int] = frozenset()
_LARGEST = 1 << 12
"""Elements of the largest array that is computed."""
_CROSS_PARTITION = frozenset(
    {"all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all"}
)
"""Collectives whose groups name partitions wherever they have a channel."""
_COMPARED: dict[str, Any] = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater,
    "GE": np.greater_equal,
}  # fmt: skip


@dataclass(frozen=True)
class Devices:
    """The devices of a module: replicas of one program, or partitions of it."""

    replicas: int
    partitions: int

    @property
    def count(self) -> int:
        """How many there are."""
        return self.replicas * self.partitions

    def groups_of(self, collective: Message) -> Groups | None:
        """The groups of a collective, each in its order; None where the module has both replicas and partitions.

        Args:
            collective: without ``-start``, in detail.
        """
        everyone = (tuple(range(self.count)),)
        written = written_groups(collective) or everyone
        if self.partitions == 1:
            return written
        if self.replicas > 1:
            return None
        if collective.channel_id <= 0:  # among the replicas, of which there is one
            return tuple((device,) for device in range(self.count))
        return (
            written if collective.use_global_device_ids or collective.opcode in _CROSS_PARTITION else everyone
        )


@dataclass(frozen=True)
class DeviceValue:
    """A value of which every device has its own, or the members of a tuple."""

    parameters: frozenset[int] = _NONE
    """Entry parameters on which it depends: where one differs between devices, it may."""
    kinds: tuple[int, ...] = ()
    """By device. Devices of one kind hold the same, as long as :attr:`parameters` are equal on all. Empty: one kind."""
    why: str = field(default="", compare=False)
    """What made it differ in kind."""
    numbers: tuple[NDArray[Any], ...] = field(default=(), compare=False)
    """What it is on each device, where that follows from the device's number alone."""
    members: tuple[DeviceValue, ...] = ()
    """Of a tuple."""

    def member(self, number: int) -> DeviceValue:
        """A member of a tuple; where none are told apart, any."""
        return self.members[number] if self.members else self

    @property
    def whole(self) -> DeviceValue:
        """The same, members not told apart."""
        return joined(self.members) if self.members else self

    def decided_by(self, decision: DeviceValue) -> DeviceValue:
        """The same value, where another decides whether this one it is."""
        if not decision.parameters and not decision.kinds:
            return self
        if self.members:
            return replace(self, members=tuple(one.decided_by(decision) for one in self.members))
        return joined((self, decision))


EQUAL = DeviceValue()
"""The same on all devices."""


def of_parameter(number: int) -> DeviceValue:
    """What an entry parameter holds."""
    return DeviceValue(frozenset({number}))


def differing(devices: Devices, why: str, parameters: frozenset[int] = _NONE) -> DeviceValue:
    """Something of its own on each device."""
    return DeviceValue(parameters, tuple(range(devices.count)), why)


def numbered(values: Sequence[NDArray[Any]], why: str) -> DeviceValue:
    """Known numbers, by device."""
    kinds = _kinds((one.dtype.str, one.shape, one.tobytes()) for one in values)
    return DeviceValue(_NONE, kinds, why if kinds else "", tuple(values))


def joined(values: Sequence[DeviceValue]) -> DeviceValue:
    """What is computed from all of these, or is one of them."""
    parts = [value.whole for value in values]
    parameters = _NONE.union(*(part.parameters for part in parts))
    several = list(dict.fromkeys(part.kinds for part in parts if part.kinds))
    kinds = several[0] if len(several) == 1 else _kinds(zip(*several, strict=True))
    return DeviceValue(parameters, kinds, next((part.why for part in parts if part.why), ""))


def either(one: DeviceValue, other: DeviceValue) -> DeviceValue:
    """One of two values, of which tuples are told apart by their members; what is known of the numbers is lost."""
    if one.members and len(one.members) == len(other.members):
        pairs = zip(one.members, other.members, strict=True)
        return DeviceValue(members=tuple(either(*pair) for pair in pairs))
    return joined((one, other))


def _kinds(of_devices: Iterable[Hashable]) -> tuple[int, ...]:
    """By device, a number that devices with equal entries share; empty where all do."""
    seen: dict[Hashable, int] = {}
    kinds = tuple(seen.setdefault(one, len(seen)) for one in of_devices)
    return kinds if len(seen) > 1 else ()


def collected(devices: Devices, proto: Message, operands: Sequence[DeviceValue]) -> DeviceValue:
    """What a collective leaves on each device.

    Args:
        proto: with or without ``-start``.
    """
    collective = DetailedInstruction.FromString(proto.SerializeToString())
    collective.opcode = proto.opcode.removesuffix("-start")
    before = joined(operands)
    groups = devices.groups_of(collective)
    known = groups is not None and {d for group in groups for d in group} == set(range(devices.count))
    if groups is None or not known or collective.opcode in ("collective-permute", "ragged-all-to-all"):
        return differing(devices, _named(collective.opcode), before.parameters)
    parted = collective.opcode in ("all-to-all", "reduce-scatter")
    kinds = before.kinds or (0,) * devices.count
    found: list[Hashable] = [None] * devices.count
    for group in groups:
        held = tuple(kinds[device] for device in group)
        for place, device in enumerate(group):
            found[device] = (held, place if parted else 0)
    left = _NONE if len(groups) == 1 and not parted else before.parameters
    after = _kinds(found)
    return DeviceValue(left, after, (before.why or _named(collective.opcode)) if after else "")


def _named(opcode: str) -> str:
    return f"{'an' if opcode[0] == 'a' else 'a'} {opcode}"


def elementwise(proto: Message, operands: Sequence[DeviceValue], devices: Devices) -> DeviceValue:
    """What an op that knows of no devices gives."""
    if proto.opcode == "constant":
        return _constant(proto, devices)
    if operands and all(one.numbers for one in operands):
        values = _computed(proto, [one.numbers for one in operands])
        if values is not None:
            return numbered(values, joined(operands).why)
    return joined(operands)


def _constant(proto: Message, devices: Devices) -> DeviceValue:
    if np.prod(proto.shape.dimensions, dtype=np.int64) > _LARGEST or not _is_whole(proto):
        return EQUAL
    value = literal_value(DetailedInstruction.FromString(proto.SerializeToString()))
    return EQUAL if value is None else numbered((value,) * devices.count, "")


def _computed(proto: Message, operands: Sequence[tuple[NDArray[Any], ...]]) -> list[NDArray[Any]] | None:
    if not _is_whole(proto) or np.prod(proto.shape.dimensions, dtype=np.int64) > _LARGEST:
        return None
    detailed = DetailedInstruction.FromString(proto.SerializeToString())
    values = []
    for own in zip(*operands, strict=True):
        try:
            value = _on_one_device(detailed, own)
        except (ValueError, TypeError, IndexError, DiscoError):
            return None
        if value is None:
            return None
        values.append(np.asarray(value))
    return values


def _on_one_device(proto: Message, operands: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    opcode, first = proto.opcode, operands[0]
    if opcode == "compare":
        return np.asarray(_COMPARED[proto.comparison_direction](*operands))
    if opcode == "select":
        return np.where(*operands)
    if opcode in ("divide", "remainder"):
        if first.min(initial=0) < 0 or operands[1].min(initial=1) <= 0:
            return None
        return np.asarray((np.floor_divide if opcode == "divide" else np.remainder)(*operands))
    if opcode == "not" and first.dtype == np.bool_:
        return ~first
    if opcode in ("and", "or") and first.dtype == np.bool_:
        return np.asarray((np.logical_and if opcode == "and" else np.logical_or)(*operands))
    if opcode == "broadcast" and first.size == 1:
        return np.full(tuple(proto.shape.dimensions), first.reshape(-1)[0], first.dtype)
    return computed_value(proto, list(operands))


def _is_whole(proto: Message) -> bool:
    name = DTYPES.get(proto.shape.element_type, "")
    return name == "pred" or (name[:1] in ("s", "u") and name[1:].isdigit())
