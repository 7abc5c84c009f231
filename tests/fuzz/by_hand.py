"""A program evaluated op by op: a third opinion, in which nothing is fused, ordered or updated in place.

Loops and branches are Python's, and a collective is computed from what all devices hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from tests.fuzz.inputs import make_inputs, parts_of
from tests.fuzz.interpret import run_op
from tests.fuzz.operations import COLLECTIVES
from tests.fuzz.program import Body, Op, Program

Held = list[Any]
"""One value, as each device holds it."""


@dataclass
class ByHand:
    """What a program gives, ``[result][device]``."""

    outputs: list[list[NDArray[Any]]] = field(default_factory=list)
    largest: float = 0.0
    """Of all numbers that were floats, on any device, on the way."""


def evaluate(program: Program) -> ByHand:
    """Evaluate ``program`` on its own inputs."""
    inputs = make_inputs(program)
    apart = program.mode == "shard_map" and program.devices > 1
    devices = program.devices if apart else 1
    found = ByHand()
    with jax.default_device(jax.devices("cpu")[0]), jax.disable_jit():
        results = _evaluated(program, inputs, devices, found)
    for value, sharded in zip(results, program.sharded, strict=True):
        if apart or program.devices == 1:
            found.outputs.append([np.asarray(part) for part in value])
        else:
            found.outputs.append(parts_of(np.asarray(value[0]), sharded, program.devices))
    return found


def _evaluated(program: Program, inputs: Sequence[NDArray[Any]], devices: int, found: ByHand) -> list[Held]:
    held = [
        [jnp.asarray(part) for part in parts_of(one, argument.sharded and devices > 1, devices)]
        for one, argument in zip(inputs, program.arguments, strict=True)
    ]
    return _Evaluator(devices, found).body(program.body, held)


class _Evaluator:
    def __init__(self, devices: int, found: ByHand) -> None:
        self.devices, self.found = devices, found

    def body(self, body: Body, arguments: Sequence[Held]) -> list[Held]:
        values = list(arguments)
        for value in values:
            self.note(value)
        for op in body.ops:
            results = self.op(op, [values[x] for x in op.operands])
            for value in results:
                self.note(value)
            values.extend(results)
        return [values[x] for x in body.results]

    def note(self, value: Held) -> None:
        for part in value:
            if part.size and jnp.issubdtype(part.dtype, jnp.floating):
                magnitudes = np.abs(np.asarray(part).astype(np.float64))
                finite = magnitudes[np.isfinite(magnitudes)]
                self.found.largest = max(self.found.largest, float(finite.max(initial=0.0)))

    def op(self, op: Op, operands: Sequence[Held]) -> list[Held]:
        if op.name in COLLECTIVES:
            return self.collective(op, operands)
        if op.name == "cond":
            return self.cond(op, operands)
        if op.name == "scan":
            return self.scan(op, operands)
        if op.name == "while":
            return self.loop(op, operands)
        each = [run_op(op, [value[d] for value in operands]) for d in range(self.devices)]
        return [list(value) for value in zip(*each, strict=True)]

    def cond(self, op: Op, operands: Sequence[Held]) -> list[Held]:
        each = []
        for d in range(self.devices):
            decides = int(operands[0][d])
            chosen = (
                (0 if decides > 0 else 1) if len(op.bodies) == 2 else min(max(decides, 0), len(op.bodies) - 1)
            )
            alone = _Evaluator(1, self.found)
            each.append([value[0] for value in alone.body(op.bodies[chosen], [[v[d]] for v in operands[1:]])])
        return [list(value) for value in zip(*each, strict=True)]

    def scan(self, op: Op, operands: Sequence[Held]) -> list[Held]:
        a = op.attributes
        carried, sliced, length = int(a["carried"]), int(a["sliced"]), int(a["length"])
        carry = list(operands[:carried])
        stacks: list[list[Held]] = []
        for i in range(length - 1, -1, -1) if a["reverse"] else range(length):
            parts = [[one[i] for one in value] for value in operands[carried : carried + sliced]]
            results = self.body(op.bodies[0], [*carry, *parts, *operands[carried + sliced :]])
            carry = results[:carried]
            stacks.append(results[carried:])
        if a["reverse"]:
            stacks.reverse()
        stacked = [
            [jnp.stack([turn[k][d] for turn in stacks]) for d in range(self.devices)]
            for k in range(len(op.results) - carried)
        ]
        return [*carry, *stacked]

    def loop(self, op: Op, operands: Sequence[Held]) -> list[Held]:
        carried, most = int(op.attributes["carried"]), int(op.attributes["most"])
        trips = most if op.attributes["how"] == "fori" else min(max(int(operands[0][0]), 0), most)
        carry = list(operands[1 : 1 + carried])
        for i in range(trips):
            counter = [jnp.int32(i)] * self.devices
            carry = self.body(op.bodies[0], [counter, *carry, *operands[1 + carried :]])
        return carry

    def collective(self, op: Op, operands: Sequence[Held]) -> list[Held]:
        a = op.attributes
        if op.name in ("psum", "pmax"):
            groups = a.get("groups") or [list(range(self.devices))]
            return [self.reduced(value, groups, op.name) for value in operands]
        (value,) = operands
        if op.name == "ppermute":
            source = {two: one for one, two in a["pairs"]}
            return [
                [value[source[d]] if d in source else jnp.zeros_like(value[d]) for d in range(self.devices)]
            ]
        axis = int(a["axis"])
        if op.name == "all_gather":
            return [[jnp.concatenate(value, axis)] * self.devices]
        if op.name == "psum_scatter":
            whole = self.reduced(value, [list(range(self.devices))], "psum")[0]
            return [jnp.split(whole, self.devices, axis)]
        pieces = [jnp.split(one, self.devices, axis) for one in value]
        return [[jnp.concatenate([piece[d] for piece in pieces], axis) for d in range(self.devices)]]

    def reduced(self, value: Held, groups: Sequence[Sequence[int]], how: str) -> Held:
        result: Held = [None] * self.devices
        for group in groups:
            parts = [value[d] for d in group]
            add = jnp.add if how == "psum" else jnp.maximum
            *_, total = itertools.accumulate(parts, add)
            for d in group:
                result[d] = total
        return result
