"""The values of made-up inputs: a function of the seed, the parameter and what the step asks of it, alone.

Floats are of a size at which sums neither overflow nor become subnormal: sums of positive ones grow with their number,
sums of both signs with its root. None is near zero, so that what they are multiplied with is not lost. No two of four
million neighbours are equal where their type has so many numbers, and beyond that nothing repeats: whoever reads one
element for another reads another number. They look random and can be had for any places of an array, without those
before (:class:`Draws`).

Integers are 0 or 1, so that a loop that counts ends, but those that ``indices`` found to be indices. Where steps are
timed these are spread over all rows, small ones most often, as token ids are where words are numbered by how often they
occur: a gather reads from a cache what it would find there in training, and a scatter collides as often; labels and
positions are more even than that, but of smaller tables. Where steps are compared, some are permutations of the rows:
each row is read as often as any other.

What a sharding replicates is equal on every device; integers are so in any case, and floats where ``decisions`` found
that they decide about a collective: all devices must take the same branches there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.cores import own_cores
from disco_hlo.plugin.xla.executables import Parameter, is_whole
from disco_hlo.plugin.xla.own_programs import on_each_device

_AT_ONCE = 1 << 18
"""Numbers made at once: they stay in a cache, and other memory than theirs is hardly needed."""
_WORTH_THREADS, _THREADS = 8, 8
_LARGEST_PERMUTED = 1 << 22
_MANY = 1 << 18
"""Of so many numbers each device makes its own: fewer are made before a program for it is compiled."""
_USUAL = frozenset({"bfloat16", "float16", "float32"})
_SIGN, _NUDGE = range(2)
"""Coins; that of a nudge is the first of several."""
_BITS = 22
_WITHIN = np.uint32((1 << _BITS) - 1)
_MIX_1, _MIX_2, _MIX_3 = np.uint32(0x9E3779B1), np.uint32(0x2C1B3C6D), np.uint32(0x297A2D39)
"""Odd, so that to multiply by one of them only brings numbers into another order."""


@dataclass(frozen=True, slots=True)
class Floats:
    """Which floats are made."""

    signed: bool = False
    """Of both signs; else all are positive."""
    nudge: float = 0.0
    """By what part of it each is raised or lowered, at random; by its last digit at least."""
    change: int = 0
    """Which of them are raised: the number of a draw."""


PLAIN = Floats()


def synthetic_values(
    parameter: Parameter,
    seed: int,
    index: int,
    place: int,
    floats: Floats = PLAIN,
    *,
    bound: int = 2,
    permuted: bool = False,
) -> NDArray[Any]:
    """Values of entry parameter ``index`` on the device at ``place``.

    Args:
        bound: integers are below it, and not negative.
        permuted: integers below a larger bound than 2 are permutations of all numbers below it.
    """
    count = math.prod(parameter.shape)
    if is_whole(parameter.dtype):
        random = np.random.default_rng([seed, index])
        return _integers(random, count, bound, permuted).astype(parameter.dtype).reshape(parameter.shape)
    values = np.empty(count, parameter.dtype)

    def make(start: int) -> None:
        places = np.arange(start, min(count, start + _AT_ONCE))
        values[start : start + _AT_ONCE] = floats_at(places, parameter, seed, index, place, floats)

    starts = range(0, count, _AT_ONCE)
    if len(starts) < _WORTH_THREADS:
        for start in starts:
            make(start)
    else:
        with ThreadPoolExecutor(min(_THREADS, len(own_cores()))) as pool:
            list(pool.map(make, starts))
    return values.reshape(parameter.shape)


def floats_at(
    places: NDArray[np.int64],
    parameter: Parameter,
    seed: int,
    index: int,
    place: int,
    floats: Floats = PLAIN,
) -> NDArray[Any]:
    """Those of the :func:`synthetic_values` of a float parameter that stand at ``places`` of the flat array."""
    key = _key(parameter, seed, index, place)
    values = _floats(np, Draws(places.astype(np.uint32), keys(key)), *_asked(parameter, floats))
    if parameter.dtype.kind == "c":
        turned = Draws(places.astype(np.uint32), keys([*key, 1])).numbers()
        values = values * (1 + 1j * turned)
    made: NDArray[Any] = values.astype(parameter.dtype, copy=False)
    return made


def are_made_on_devices(parameter: Parameter) -> bool:
    """Whether :func:`floats_on_devices` makes these values: many, of a usual type."""
    return parameter.dtype.name in _USUAL and _MANY <= math.prod(parameter.shape) < 1 << 32


def floats_on_devices(
    devices: tuple[Any, ...],
    parameter: Parameter,
    seed: int,
    index: int,
    places: Sequence[int],
    floats: Floats = PLAIN,
) -> list[Any]:
    """The :func:`synthetic_values` of a float parameter, made on the devices of this process, which stand at
    ``places``."""
    asked = [np.atleast_1d(one) for one in _asked(parameter, floats)]
    own = [keys(_key(parameter, seed, index, place)) for place in places]
    same = [[one] * len(devices) for one in asked]
    return on_each_device(devices, _made, (parameter.shape, parameter.dtype), own, *same)[0]


def _made(shape: tuple[int, ...], dtype: np.dtype[Any], own: Any, *asked: Any) -> tuple[Any]:
    import jax.numpy as jnp

    drawn = Draws(jnp.arange(math.prod(shape), dtype=np.uint32), own)
    return (_floats(jnp, drawn, *asked).astype(dtype).reshape(shape),)


def _key(parameter: Parameter, seed: int, index: int, place: int) -> list[int]:
    return [seed, index, place if parameter.sharded else 0]


def _asked(parameter: Parameter, floats: Floats) -> tuple[Any, ...]:
    """What :func:`_floats` is told: size, whether signed, what raised and lowered numbers are multiplied with, and by
    which coin they are chosen."""
    import ml_dtypes

    kind, wide = ml_dtypes.finfo(parameter.dtype), _wide(parameter)
    signed = floats.signed and float(kind.min) < 0  # there are floats without a sign
    longest = max(*parameter.shape[-2:], 1, 1)
    size = max(longest**-0.5 if signed else 1 / longest, 4 * float(kind.smallest_normal))
    up_and_down = raised_and_lowered(parameter, floats.nudge)
    return wide(size), np.bool_(signed), *up_and_down, coins_of(floats.change)


def raised_and_lowered(parameter: Parameter, nudge: float) -> tuple[Any, Any]:
    """What a nudge multiplies the numbers of a parameter with."""
    import ml_dtypes

    # Divided rather than lowered: where the last digit is all of a number, in a type of scales, nothing is left.
    up = _wide(parameter)(1 + max(nudge, float(ml_dtypes.finfo(parameter.dtype).eps)) if nudge else 1)
    return up, 1 / up


def coins_of(change: int) -> np.uint32:
    """By which coin the numbers to be raised are chosen."""
    return np.uint32(_NUDGE + change)


def _wide(parameter: Parameter) -> Any:
    return np.dtype(np.float64 if parameter.dtype in (np.float64, np.complex128) else np.float32).type


def _floats(xp: Any, drawn: Draws, size: Any, signed: Any, up: Any, down: Any, coin: Any) -> Any:
    """The numbers, by numpy or in a program of JAX: the same bits."""
    values = (drawn.numbers().astype(size.dtype) + size.dtype.type(0.5)) * size
    values = xp.where(drawn.coin(np.uint32(_SIGN)) & signed, -values, values)
    return values * xp.where(drawn.coin(coin), up, down)


def _integers(random: np.random.Generator, count: int, bound: int, permuted: bool) -> NDArray[Any]:
    if bound <= 2:
        return random.integers(0, bound, count, dtype=np.uint8)
    if not permuted:
        return skewed_indices(random, bound, count)
    rows = _permutation(random, bound, count)
    runs, places = np.divmod(np.arange(count), rows.size)
    turned: NDArray[np.int64] = rows[(places + runs * int(random.integers(1, rows.size))) % rows.size]
    return turned


def _permutation(random: np.random.Generator, bound: int, count: int) -> NDArray[np.int64]:
    """All numbers below ``bound`` in some order, or so many of them as are needed of very many."""
    if bound <= _LARGEST_PERMUTED:
        return random.permutation(bound)
    # Without an array as long as the table: one number of each of so many stretches.
    needed = min(bound, max(2, count))
    stretches = np.linspace(0, bound, needed + 1).astype(np.int64)
    return random.permutation(random.integers(stretches[:-1], stretches[1:]))


def skewed_indices(random: np.random.Generator, bound: int, count: int) -> NDArray[np.int64]:
    """So many indices of ``bound`` rows, small ones often, large ones seldom: even by their logarithm (Zipf's law)."""
    found = np.exp(random.uniform(0, math.log(bound + 1), count)).astype(np.int64) - 1
    return np.minimum(found, bound - 1)  # the logarithm is rounded


# --- random numbers for any places of an array ----------------------------------------------------


@dataclass(frozen=True)
class Draws:
    """What stands at some places of an array of random numbers, on the host by numpy and in programs of JAX alike."""

    places: Any
    """u32: of the flat array."""
    keys: Any
    """``[2]`` u32: the array's own (:func:`keys`)."""

    def numbers(self) -> Any:
        """f32 from 0 to below 1, all different within each block of four million places; exact, so that what is
        computed of them with one rounding is different, too."""
        block = (self.places >> np.uint32(_BITS)) * _MIX_1 + self.keys[:1]
        number = ((self.places ^ block) * _MIX_2) & _WITHIN
        # A part of a block holds other numbers in each array: the sums of equal shapes differ.
        other = block >> np.uint32(32 - _BITS)
        number = ((number ^ (number >> np.uint32(_BITS // 2)) ^ other) * _MIX_3) & _WITHIN
        # Twice, as rows of thousands of numbers would resemble each other.
        number = ((number ^ (number >> np.uint32(_BITS // 2))) * _MIX_2) & _WITHIN
        return (number.astype(np.float32) + np.float32(0.5)) * np.float32(1 / (1 << _BITS))

    def coin(self, number: Any) -> Any:
        """Heads or tails for each place; one of many coins, by a u32."""
        drawn = self.places * _MIX_1 + self.keys[1:]
        drawn = (drawn ^ (drawn >> np.uint32(15))) * (_MIX_2 + np.uint32(2) * number)
        return drawn < np.uint32(1 << 31)


def keys(key: Sequence[int]) -> NDArray[np.uint32]:
    """What :class:`Draws` of the array with this key go by."""
    return np.random.default_rng(key).integers(0, 1 << 32, 2, dtype=np.uint32)
