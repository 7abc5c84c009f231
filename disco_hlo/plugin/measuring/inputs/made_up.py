"""The values of made-up inputs: a function of the seed, the parameter and what the step asks of it, alone.

Floats are of a size at which sums neither overflow nor become subnormal: sums of positive ones grow with their number,
sums of both signs with its root. None is near zero, so that what they are multiplied with is not lost. Integers are 0
or 1, so that a loop that counts ends, but those that ``indices`` found to be indices: these are spread over all rows,
small ones most often, as token ids are where words are numbered by how often they occur. So a gather reads from a cache
what it would find there in training, and a scatter collides as often; labels and positions are more even than that, but
of smaller tables. What a sharding replicates is equal on every device; integers are so in any case, and floats where
``decisions`` found that they decide about a collective: all devices must take the same branches there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.proto import DTYPES, parse
from disco_hlo.plugin.xla.dtypes import JAX_NAMES
from disco_hlo.plugin.xla.executables import Parameter

_PATTERN_ELEMENTS = 1 << 16
_COARSEST = 2.0**-8
"""Of bf16. What is kept in 8 bits is computed from something finer."""
_TENSOR_FLOAT = 2.0**-11
"""Half a last digit of TF32, in which a GPU may multiply f32."""


def synthetic_values(
    parameter: Parameter,
    seed: int,
    index: int,
    place: int,
    *,
    signed: bool = False,
    nudge: float = 0.0,
    bound: int = 2,
    equal: bool = False,
) -> NDArray[Any]:
    """Values of entry parameter ``index`` on the device at ``place``.

    They are a pattern that is repeated, over the flat array.

    Args:
        signed: floats are of both signs; else all are positive.
        nudge: by what part of it each float is raised or lowered, at random; by its last digit at least.
        bound: integers are below it, and not negative.
        equal: every device has the same.
    """
    own = 0 if equal else place
    return np.resize(_pattern(parameter, seed, index, own, signed, nudge, bound), parameter.shape)


def sampled_values(
    parameter: Parameter,
    seed: int,
    index: int,
    place: int,
    every: int,
    *,
    signed: bool = False,
    nudge: float = 0.0,
    bound: int = 2,
    equal: bool = False,
) -> NDArray[Any]:
    """Every so manieth of the :func:`synthetic_values`, flat."""
    pattern = _pattern(parameter, seed, index, 0 if equal else place, signed, nudge, bound)
    places = np.arange(0, math.prod(parameter.shape), every)
    sampled: NDArray[Any] = pattern[places % max(1, pattern.size)]
    return sampled


def _pattern(
    parameter: Parameter, seed: int, index: int, place: int, signed: bool, nudge: float, bound: int
) -> NDArray[Any]:
    import ml_dtypes

    integer = is_integer(parameter)
    own = place if parameter.sharded and not integer else 0
    random = np.random.default_rng([seed, index, own])
    count = min(_PATTERN_ELEMENTS, int(np.prod(parameter.shape)))
    if integer:
        whole = random.integers(0, bound, count) if bound <= 2 else skewed_indices(random, bound, count)
        return whole.astype(parameter.dtype)
    kind = ml_dtypes.finfo(parameter.dtype)
    signed = signed and float(kind.min) < 0  # there are floats without a sign
    longest = max(*parameter.shape[-2:], 1, 1)
    size = max(longest**-0.5 if signed else 1 / longest, 4 * float(kind.smallest_normal))
    pattern = random.uniform(0.5, 1.5, count) * size
    if signed:
        pattern *= random.choice((-1.0, 1.0), count)
    if nudge:
        # Divided rather than lowered: where the last digit is all of a number, in a type of scales, nothing is left.
        pattern *= (1 + max(nudge, float(kind.eps))) ** random.choice((-1.0, 1.0), count)
    return pattern.astype(parameter.dtype)


def skewed_indices(random: np.random.Generator, bound: int, count: int) -> NDArray[np.int64]:
    """So many indices of ``bound`` rows, small ones often, large ones seldom: even by their logarithm (Zipf's law)."""
    found = np.exp(random.uniform(0, math.log(bound + 1), count)).astype(np.int64) - 1
    return np.minimum(found, bound - 1)  # the logarithm is rounded


def is_integer(parameter: Parameter) -> bool:
    """Whether the parameter holds whole numbers or truth values."""
    return parameter.dtype.kind in "biu" or "int" in parameter.dtype.name


def rounding_of(module: bytes, platform: str) -> float:
    """By what part of it a number changes at most where a step rounds it, in the coarsest type that it computes in.

    Args:
        module: what runs, as a serialized HloModuleProto.
        platform: ``cpu``, or what the GPU's is called.
    """
    import jax.numpy as jnp

    kinds = {
        DTYPES.get(instruction.shape.element_type, "")
        for computation in parse(module).computations
        for instruction in computation.instructions
    }
    parts = [float(jnp.finfo(JAX_NAMES[kind]).eps) for kind in kinds & JAX_NAMES.keys() if _is_float(kind)]
    if platform != "cpu" and "f32" in kinds:
        parts.append(_TENSOR_FLOAT)
    return min(max(parts, default=0.0), _COARSEST)


def _is_float(kind: str) -> bool:
    return kind.startswith(("f", "bf"))
