"""The values of a program's arguments, by its seed: numbers that are all different, so that any two that change places
are seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from tests.fuzz.interpret import global_shape, mesh, spec
from tests.fuzz.operations import DTYPE_OF
from tests.fuzz.program import Argument, Program, Type

_BF16_DIFFERENT = 2048
"""So many numbers of bf16 lie between 2**-6 and 4 on either side of 0, and a few more."""


def make_inputs(program: Program) -> list[NDArray[Any]]:
    """One whole array for each argument."""
    dice = np.random.default_rng([program.seed, 20261])
    return [
        _values(argument, Type(one.dtype, global_shape(program, number)), dice)
        for number, (one, argument) in enumerate(zip(program.body.parameters, program.arguments, strict=True))
    ]


def _values(argument: Argument, of: Type, dice: np.random.Generator) -> NDArray[Any]:
    count, dtype = of.elements, DTYPE_OF[of.dtype]
    if argument.role == "index":
        return _distinct_below(max(1, argument.limit), count, dice).reshape(of.shape).astype(dtype)
    if argument.role == "scalar":
        return dice.integers(0, max(1, argument.limit), of.shape).astype(dtype)
    if argument.role == "key":
        return dice.integers(0, 1 << 32, of.shape, np.uint64).astype(dtype)
    if of.dtype == "pred":
        return dice.integers(0, 2, of.shape).astype(dtype)
    if of.dtype in ("s32", "u32"):
        return (
            (dice.permutation(count) - (count // 2 if of.dtype == "s32" else 0))
            .reshape(of.shape)
            .astype(dtype)
        )
    if of.dtype == "bf16":
        return _distinct_bf16(count, dice).reshape(of.shape)
    # Odd multiples of what is left over: no two add up to 0, and none is 0.
    spread = (2 * dice.permutation(count) + 1 - count) / max(1, count) * 2 + 1 / (3 * count + 1)
    return np.asarray(spread, np.float64).reshape(of.shape).astype(dtype)


def _distinct_below(limit: int, count: int, dice: np.random.Generator) -> NDArray[np.int64]:
    """Different as long as there are enough."""
    rounds = [dice.permutation(limit) for _ in range(-(-count // limit))]
    return np.concatenate(rounds or [np.zeros(0, np.int64)])[:count]


def _distinct_bf16(count: int, dice: np.random.Generator) -> NDArray[Any]:
    patterns = np.arange(_BF16_DIFFERENT // 2, dtype=np.uint16) + np.uint16(0x3C80)  # from 2**-6 up
    both = np.concatenate([patterns, patterns | np.uint16(0x8000)])
    return both[_distinct_below(_BF16_DIFFERENT, count, dice)].view(DTYPE_OF["bf16"])


def moved_by_a_bit(arrays: Sequence[NDArray[Any]], seed: int) -> list[NDArray[Any]]:
    """The same with each float moved to a neighbour, up or down by chance."""
    dice = np.random.default_rng([seed, 77])
    moved = []
    for one in arrays:
        bits = {2: np.int16, 4: np.int32}.get(one.dtype.itemsize)
        if one.dtype.kind in "iub" or bits is None:
            moved.append(one)
            continue
        step = dice.choice(np.array([-1, 1], bits), one.shape)
        moved.append((one.view(bits) + step).astype(bits).view(one.dtype))
    return moved


def place(program: Program, arrays: Sequence[NDArray[Any]]) -> list[Any]:
    """The arrays on the devices; new ones with every call, since a step may take their storage."""
    if program.devices == 1:
        return [jax.device_put(one, jax.devices()[0]) for one in arrays]
    on = mesh(program.devices)
    return [
        jax.device_put(one, NamedSharding(on, spec(argument.sharded)))
        for one, argument in zip(arrays, program.arguments, strict=True)
    ]


def parts_of(array: NDArray[Any], sharded: bool, devices: int) -> list[NDArray[Any]]:
    """What each device holds of an array."""
    return np.split(array, devices) if sharded and devices > 1 else [array] * devices
