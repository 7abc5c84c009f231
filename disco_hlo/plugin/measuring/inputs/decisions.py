"""Which made-up inputs must be equal on all devices, as they decide whether a collective runs, or how often.

A branch or a loop may hold a collective. All devices must then take the same branch, or turn as often: else some wait
in a collective where the others never come, and the job hangs or XLA ends it. In training the numbers see to that, as a
loss scale that is stacked per device is equal on all. Made-up shards are not, unless they are made so.

So the rule follows the entry parameters to every such decision: through calls, fusions, branches and loops, past
collectives, which make a value equal again. The parameters that reach one are made equal on all devices, and so are
those from which a step computes what it hands on as such a parameter. A decision that the device's own number reaches
(``axis_index``), or another value that nothing makes equal, is refused.

The answer is a function of the step's canonical graph: equal on all ranks, and for all candidates of a search.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from disco_hlo.errors import DiscoError, UnsupportedError, shared
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.flatten import ModuleIndex, flatten
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.proto import Message
from disco_hlo.plugin.measuring.inputs.device_values import (
    EQUAL,
    Devices,
    DeviceValue,
    collected,
    differing,
    either,
    elementwise,
    numbered,
    of_parameter,
)

_CALLS = frozenset({"async-start", "call", "fusion"})
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


def equal_parameters(source: CanonicalModule, devices: Devices) -> frozenset[int]:
    """Numbers of the entry parameters of ``source`` whose values must be equal on all devices.

    Raises:
        UnsupportedError: whether a collective runs, or how often, depends on what no input can make equal.
    """
    holds = _Holding(source.index)
    if devices.count < 2 or not any(map(holds.decides, _instructions(source.module))):
        return frozenset()
    try:
        following = _Following(source, devices, holds)
        result = following.run()
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


def _instructions(module: Message) -> list[Message]:
    return [instruction for computation in module.computations for instruction in computation.instructions]


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


@dataclass(frozen=True)
class _Body:
    """A computation: its instructions, operands before users."""

    protos: Sequence[Message]
    operands: Sequence[Sequence[int]]
    root: int


class _Following:
    """Follows entry parameters and device numbers through a module, to what they decide."""

    def __init__(self, source: CanonicalModule, devices: Devices, holds: _Holding) -> None:
        self._index, self._devices, self._holds = source.index, devices, holds
        nodes = source.graph.nodes
        self._entry = _Body(source.protos, [node.operands for node in nodes], source.graph.root)
        self._body = functools.cache(self._read)
        self._constants: dict[int, DeviceValue] = {}
        self.decisions: dict[str, DeviceValue] = {}
        """By what is decided, in words, what decides."""

    def run(self) -> DeviceValue:
        """What the step returns."""
        count = sum(proto.opcode == "parameter" for proto in self._entry.protos)
        return self._result(self._entry, [of_parameter(number) for number in range(count)])

    def _read(self, computation: int) -> _Body:
        flat = flatten(self._index, self._index.computation(computation))
        return _Body([op.proto for op in flat.ops], [op.operands for op in flat.ops], flat.root)

    def _result(self, body: _Body, given: Sequence[DeviceValue]) -> DeviceValue:
        """What a computation returns that is given these."""
        known: list[DeviceValue] = []
        for proto, reads in zip(body.protos, body.operands, strict=True):
            if proto.opcode == "parameter":
                known.append(given[proto.parameter_number])
            else:
                known.append(self._value(proto, [known[read] for read in reads]))
        return known[body.root]

    def _call(self, computation: int, given: Sequence[DeviceValue]) -> DeviceValue:
        return self._result(self._body(computation), given)

    def _value(self, proto: Message, operands: Sequence[DeviceValue]) -> DeviceValue:
        opcode = proto.opcode
        if opcode == "while":
            return self._while(proto, operands[0])
        if opcode == "conditional":
            return self._conditional(proto, operands)
        if opcode in _CALLS:
            return self._call(proto.called_computation_ids[0], operands)
        if opcode == "tuple":
            return DeviceValue(members=tuple(operands))
        if opcode == "get-tuple-element":
            return operands[0].member(int(proto.tuple_index))
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

    def _decided(self, proto: Message, decision: DeviceValue) -> None:
        if self._holds.decides(proto):
            what = f"a {'loop' if proto.opcode == 'while' else 'branch'} ({proto.metadata.op_name or proto.name})"
            self.decisions[what] = either(self.decisions.get(what, EQUAL), decision.whole)

    def _while(self, proto: Message, carry: DeviceValue) -> DeviceValue:
        body, condition = proto.called_computation_ids
        carry = either(carry, carry)  # a turn may change the numbers
        while True:
            decision = self._call(condition, [carry]).whole
            after = either(carry, self._call(body, [carry]).decided_by(decision))
            if after == carry:
                self._decided(proto, decision)
                return carry
            carry = after

    def _conditional(self, proto: Message, operands: Sequence[DeviceValue]) -> DeviceValue:
        decision = operands[0].whole
        self._decided(proto, decision)
        results = [
            self._call(called, [given])
            for called, given in zip(proto.called_computation_ids, operands[1:], strict=True)
        ]
        return functools.reduce(either, results).decided_by(decision)
