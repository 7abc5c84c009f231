"""Which made-up inputs must be equal on all devices, as they decide whether a collective runs, or how often.

A branch or a loop may hold a collective. All devices must then take the same branch, or turn as often: else some wait
in a collective where the others never come, and the job hangs or XLA ends it. In training the numbers see to that, as a
loss scale that is stacked per device is equal on all. Made-up shards are not, unless they are made so.

So the rule follows the entry parameters to every such decision: through calls, fusions, branches and loops, past
collectives, which make a value equal again. The parameters that reach one are made equal on all devices, and so are
those from which a step computes what it hands on as such a parameter. A decision that the device's own number reaches
(``axis_index``), or another value that nothing makes equal, is refused.

What is known of a value on the way (:class:`DeviceValue`): between which devices it may differ, and why. Entry
parameters may, since their shards hold other numbers on each device, and ops that give each device something of its
own, as ``partition-id`` does. A collective over all devices makes a value equal again (``all-reduce``, ``all-gather``),
or hands each device another part of it (``reduce-scatter``, ``all-to-all``). One over groups of devices leaves what it
knows of each group. Small whole numbers that follow from a device's number alone are computed for each device, as
partitioners find their shards by tables of them.

The answer is a function of the step's canonical graph: equal on all ranks, and for all candidates of a search.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import DiscoError, UnsupportedError, shared
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import Groups, written_groups
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.opcodes import COLLECTIVE, COLLECTIVES
from disco_hlo.hlo.proto import Message
from disco_hlo.plugin.measuring.inputs.bodies import Following, Known, detailed, holds_whole_numbers
from disco_hlo.structure.program import computed_value, literal_value

_SAME = frozenset({
    "add-dependency", "async-done", "async-update", "copy", "copy-done", "copy-start", "domain", "opt-barrier",
})  # fmt: skip
"""Ops that hand their first operand on, members and all."""
_DEVICE_NUMBERS = frozenset({"partition-id", "replica-id"})
_OWN = frozenset({"infeed", "recv", "recv-done", "rng", "rng-get-and-update-state"})
"""Ops that may give each device something of its own, from no operand."""
_STARTED = frozenset(f"{opcode}-start" for opcode in COLLECTIVES)
_DONE = frozenset(f"{opcode}-done" for opcode in COLLECTIVES)
_WAY_OUT = "decide by a value that is all-reduced (lax.pmax), or train without ENABLE_SEARCH"
_NONE: frozenset[int] = frozenset()
_LARGEST = 1 << 12
"""Elements of the largest array that is computed."""


def equal_parameters(source: CanonicalModule, devices: Devices) -> frozenset[int]:
    """Numbers of the entry parameters of ``source`` whose values must be equal on all devices. Raises
    UnsupportedError: whether a collective runs, or how often, depends on what no input can make equal."""
    holds = _Holding(source.index)
    computations = source.module.computations
    if devices.count < 2 or not any(holds.decides(one) for own in computations for one in own.instructions):
        return frozenset()
    try:
        following = _Following(source, devices, holds)
        result = following.of_entry(lambda proto: of_parameter(int(proto.parameter_number)))
    except (DiscoError, LookupError, ValueError, RecursionError) as error:
        raise shared(
            UnsupportedError(
                f"what decides about collectives in branches or loops cannot be followed ({type(error).__name__}: "
                f"{error}): on made-up inputs devices might wait for each other; train without ENABLE_SEARCH"
            )
        ) from error
    found: frozenset[int] = frozenset()
    for what, decision in following.decisions.items():
        _refuse_difference(what, decision)
        found |= decision.parameters
    return _with_their_origins(source, result, found)


def _refuse_difference(what: str, decision: DeviceValue) -> None:
    if decision.kinds:
        raise shared(
            UnsupportedError(
                f"{what} holds a collective and depends on {decision.why}: on made-up inputs devices might wait for "
                f"each other; {_WAY_OUT}"
            )
        )


def _with_their_origins(
    source: CanonicalModule, result: DeviceValue, parameters: frozenset[int]
) -> frozenset[int]:
    """With the parameters from which the step computes what it hands on as one of them."""
    aliases: list[tuple[int, DeviceValue]] = []
    for entry in source.module.input_output_alias.entries:
        place = entry.output_shape_index
        aliases.append((int(entry.parameter_number), result.member(int(place[0])) if place else result))
    while True:
        handed_on = [output for number, output in aliases if number in parameters]
        for output in handed_on:
            _refuse_difference("a branch or loop that reads what the step hands on to itself", output.whole)
        found = parameters.union(*(output.whole.parameters for output in handed_on))
        if found == parameters:
            return found
        parameters = found


class _Holding:
    """Which computations hold a collective, in themselves or in what they call."""

    def __init__(self, index: ModuleIndex) -> None:
        self._index = index
        self._known: dict[int, bool] = {}

    def decides(self, proto: Message) -> bool:
        """Whether the op decides about a collective."""
        return proto.opcode in ("while", "conditional") and any(map(self, proto.called_computation_ids))

    def __call__(self, computation: int) -> bool:
        known = self._known.get(computation)
        if known is None:
            known = self._known[computation] = any(
                one.opcode in COLLECTIVES
                or one.opcode in _STARTED
                or any(map(self, one.called_computation_ids))
                for one in self._index.computation(computation).instructions
            )
        return known


class _Following(Following["DeviceValue"]):
    """Follows entry parameters and device numbers through a module, to what they decide."""

    def __init__(self, source: CanonicalModule, devices: Devices, holds: _Holding) -> None:
        super().__init__(source, DeviceValue, either)
        self._devices, self._holds = devices, holds
        self._constants: dict[int, DeviceValue] = {}
        self.decisions: dict[str, DeviceValue] = {}
        """By what is decided, in words, what decides."""

    def decided(self, proto: Message, decision: DeviceValue, result: DeviceValue) -> DeviceValue:
        """As there, and noted where a collective runs or does not by it."""
        if self._holds.decides(proto):
            what = f"a {'loop' if proto.opcode == 'while' else 'branch'} ({proto.metadata.op_name or proto.name})"
            self.decisions[what] = either(self.decisions.get(what, EQUAL), decision.whole)
        return result.decided_by(decision.whole)

    def computed(self, proto: Message, operands: Sequence[DeviceValue], _: Sequence[Message]) -> DeviceValue:
        """As there."""
        opcode = proto.opcode
        if opcode in _SAME or opcode in _DONE:
            return operands[0]
        if opcode in COLLECTIVES or opcode in _STARTED:
            return collected(self._devices, proto, operands)
        if opcode in _DEVICE_NUMBERS:
            return self._device_number(opcode)
        if opcode in _OWN:
            return differing(self._devices, opcode)
        if opcode == "constant":
            known = self._constants.get(proto.id)
            if known is None:
                known = self._constants[proto.id] = elementwise(proto, (), self._devices)
            return known
        return elementwise(proto, operands, self._devices)

    def _device_number(self, opcode: str) -> DeviceValue:
        devices, why = self._devices, "the device's own number (axis_index)"
        if devices.replicas > 1 and devices.partitions > 1:
            return differing(devices, why)
        if (devices.partitions if opcode == "partition-id" else devices.replicas) == 1:
            return EQUAL
        return numbered([np.array(number, np.uint32) for number in range(devices.count)], why)


# --- what is known of a value ---------------------------------------------------------------------


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
        """The groups of a collective, in detail and without ``-start``, each in its order; None where the module has
        both replicas and partitions."""
        everyone = (tuple(range(self.count)),)
        written = written_groups(collective) or everyone
        if self.partitions == 1:
            return written
        if self.replicas > 1:
            return None
        if collective.channel_id <= 0:  # among the replicas, of which there is one
            return tuple((device,) for device in range(self.count))
        of_all = collective.use_global_device_ids or COLLECTIVE[collective.opcode].of_partitions
        return written if of_all else everyone


@dataclass(frozen=True)
class DeviceValue(Known):
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
    """What a collective, with or without ``-start``, leaves on each device."""
    collective = detailed(proto)
    collective.opcode = proto.opcode.removesuffix("-start")
    before = joined(operands)
    groups = devices.groups_of(collective)
    known = COLLECTIVE[collective.opcode]
    is_for_all = groups is not None and {d for group in groups for d in group} == set(range(devices.count))
    if groups is None or not is_for_all or not (known.alike or known.parted):
        return differing(devices, _named(collective.opcode), before.parameters)
    kinds = before.kinds or (0,) * devices.count
    found: list[Hashable] = [None] * devices.count
    for group in groups:
        held = tuple(kinds[device] for device in group)
        for place, device in enumerate(group):
            found[device] = (held, place if known.parted else 0)
    left = _NONE if len(groups) == 1 and not known.parted else before.parameters
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
    if np.prod(proto.shape.dimensions, dtype=np.int64) > _LARGEST or not holds_whole_numbers(proto):
        return EQUAL
    value = literal_value(detailed(proto))
    return EQUAL if value is None else numbered((value,) * devices.count, "")


def _computed(proto: Message, operands: Sequence[tuple[NDArray[Any], ...]]) -> list[NDArray[Any]] | None:
    if not holds_whole_numbers(proto) or np.prod(proto.shape.dimensions, dtype=np.int64) > _LARGEST:
        return None
    op, values = detailed(proto), []
    for own in zip(*operands, strict=True):
        try:
            value = _on_one_device(op, own)
        except (ValueError, TypeError, IndexError, DiscoError):
            return None
        if value is None:
            return None
        values.append(np.asarray(value))
    return values


def _on_one_device(proto: Message, operands: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    opcode, first = proto.opcode, operands[0]
    if opcode == "select":
        return np.where(*operands)
    if opcode == "not" and first.dtype == np.bool_:
        return ~first
    if opcode in ("and", "or") and first.dtype == np.bool_:
        return np.asarray((np.logical_and if opcode == "and" else np.logical_or)(*operands))
    if opcode == "broadcast" and first.size == 1:
        return np.full(tuple(proto.shape.dimensions), first.reshape(-1)[0], first.dtype)
    return computed_value(proto, list(operands))
