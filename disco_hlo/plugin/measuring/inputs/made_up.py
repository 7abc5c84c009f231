"""The values of made-up inputs: a function of the seed, the parameter and what the step asks of it, alone.

Floats are of a size at which sums neither overflow nor become subnormal: sums of positive ones grow with their number,
sums of both signs with its root. None is near zero, so that what they are multiplied with is not lost. No two of four
million neighbours are equal where their type has so many numbers, and beyond that nothing repeats: whoever reads one
element for another reads another number. They look random and can be had for any places of an array, without those
before (:class:`Scrambled`).

Integers are 0 or 1, so that a loop that counts ends, but those that ``indices`` found to be indices. Where steps are
timed these are spread over all rows, small ones most often, as token ids are where words are numbered by how often they
occur: a gather reads from a cache what it would find there in training, and a scatter collides as often; labels and
positions are more even than that, but of smaller tables. Where steps are compared, some are permutations of the rows:
each row is read as often as any other.

What a sharding replicates is equal on every device; integers are so in any case, and floats where ``decisions`` found
that they decide about a collective: all devices must take the same branches there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.cores import own_cores
from disco_hlo.plugin.xla.executables import Parameter, is_whole
from disco_hlo.plugin.xla.own_programs import PerDevice, on_each_device

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
_BLOCK = 1 << _BITS
_WITHIN = _BLOCK - 1
COINS = 32 - _BITS
"""So many coins are tossed for each place."""


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
    if is_integer(parameter):
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
    values = _floats(np, Scrambled.at(places, key), *_asked(parameter, floats))
    if parameter.dtype.kind == "c":
        turned = Scrambled.at(places, [*key, 1]).numbers()
        values = values * (1 + 1j * turned)
    made: NDArray[Any] = values.astype(parameter.dtype, copy=False)
    return made


def are_made_on_devices(parameter: Parameter) -> bool:
    """Whether :func:`floats_on_devices` makes these values: many, of a usual type."""
    return parameter.dtype.name in _USUAL and _MANY <= math.prod(parameter.shape) < 1 << 32


def floats_on_devices(
    devices: tuple[Any, ...],
    tables: PerDevice,
    parameter: Parameter,
    seed: int,
    index: int,
    places: Sequence[int],
    floats: Floats = PLAIN,
) -> list[Any]:
    """The :func:`synthetic_values` of a float parameter, made on the devices of this process, which stand at
    ``places`` and hold a :func:`table` each."""
    count = math.prod(parameter.shape)
    asked = [np.atleast_1d(one) for one in _asked(parameter, floats)]
    own = [turns(_key(parameter, seed, index, place), count) for place in places]
    same = [[one] * len(devices) for one in asked]
    return on_each_device(devices, _made, (parameter.shape, parameter.dtype), tables, own, *same)[0]


def _made(shape: tuple[int, ...], dtype: np.dtype[Any], table: Any, turns: Any, *asked: Any) -> tuple[Any]:
    import jax.numpy as jnp

    drawn = Scrambled.of_all(table, turns, math.prod(shape))
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


def _floats(xp: Any, drawn: Scrambled, size: Any, signed: Any, up: Any, down: Any, coin: Any) -> Any:
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


def is_integer(parameter: Parameter) -> bool:
    """Whether the parameter holds whole numbers or truth values."""
    return is_whole(parameter.dtype)


# --- random numbers for any places of an array ----------------------------------------------------


class Scrambled:
    """What stands at some places of an array of random numbers.

    It is read from one table, shifted and with bits flipped for each array: a permutation of four million numbers, and
    beside each number some tossed coins. Host and devices read it alike.

    Args:
        drawn: entries of the table for them, shifted and flipped; of numpy, or in a program of JAX.
    """

    def __init__(self, drawn: Any) -> None:
        self._drawn = drawn

    @classmethod
    def at(cls, places: NDArray[np.int64], key: Sequence[int]) -> Scrambled:
        """On the host, at some places, ascending, of the array with this key."""
        found = np.empty(places.shape, np.uint32)
        if not places.size:
            return cls(found)
        first, last = int(places[0]) >> _BITS, int(places[-1]) >> _BITS
        edges = np.searchsorted(places, np.arange(first, last + 2) << _BITS)
        for block, start, stop in zip(range(first, last + 1), edges[:-1], edges[1:], strict=True):
            shift, flipped = _turn(key, block)
            drawn = _drawn(places[start:stop], int(shift))
            np.bitwise_xor(drawn, flipped, out=found[start:stop])
        return cls(found)

    @classmethod
    def of_all(cls, table: Any, turns: Any, count: int) -> Scrambled:
        """In a program of JAX, at all places of an array with so many elements; what :func:`table` and, for the
        array's key, :func:`turns` give is handed to it."""
        import jax

        places = jax.lax.iota(np.uint32, count)
        block = places >> np.uint32(_BITS)
        shift, flipped = (turns[:, one].at[block].get(mode="promise_in_bounds") for one in range(2))
        here = (places + shift) & np.uint32(_WITHIN)
        return cls(table.at[here].get(mode="promise_in_bounds") ^ flipped)

    def numbers(self) -> Any:
        """f32 from 0 to below 1, all different within each block of four million places; exact, so that what is
        computed of them with one rounding is different, too."""
        numbers = (self._drawn & np.uint32(_WITHIN)).astype(np.float32)
        return (numbers + np.float32(0.5)) * np.float32(1 / _BLOCK)

    def coin(self, number: Any) -> Any:
        """Heads or tails for each place; one of :data:`COINS`, by a u32."""
        return (self._drawn >> (np.uint32(_BITS) + number % np.uint32(COINS))) & np.uint32(1) != 0


def turns(key: Sequence[int], count: int) -> NDArray[np.uint32]:
    """By how much each block of an array with so many elements is shifted in the table, and which bits are flipped:
    ``[block, 2]``."""
    blocks = range((count + _WITHIN) >> _BITS)
    return np.array([_turn(key, block) for block in blocks], np.uint32).reshape(-1, 2)


def _turn(key: Sequence[int], block: int) -> NDArray[np.uint32]:
    turn = np.random.default_rng([*key, block]).integers(0, 1 << 32, 2, dtype=np.uint32)
    turn[0] &= _WITHIN
    return turn


def _drawn(places: NDArray[np.int64], shift: int) -> NDArray[np.uint32]:
    """What the table has for some places of one block."""
    first, count = (int(places[0]) + shift) & _WITHIN, places.size
    if int(places[-1]) - int(places[0]) == count - 1:  # neighbours, which most are
        values = table()
        start = values[first : first + count]
        return start if start.size == count else np.concatenate([start, values[: count - start.size]])
    here = places + shift
    here &= _WITHIN
    return table()[here]


@functools.cache
def table() -> NDArray[np.uint32]:
    """The table, 16 MiB."""
    random = np.random.default_rng(0)
    coins = random.integers(0, 1 << COINS, _BLOCK, dtype=np.uint32) << np.uint32(_BITS)
    made: NDArray[np.uint32] = random.permutation(np.arange(_BLOCK, dtype=np.uint32)) | coins
    return made
