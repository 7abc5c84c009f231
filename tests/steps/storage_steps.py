"""Steps whose values share memory, on one CPU device: each got wrong numbers once, or aborted XLA.

Each is (function, arguments, donated arguments). Every strategy that the rules accept must give the numbers of XLA's
default. ``variants`` writes each in other types, with a second donated argument, and inside a scan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Form:
    """One step."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    in_integers: bool = True
    """Whether it makes sense in whole numbers."""


_ROWS = np.arange(96, dtype=np.float32).reshape(8, 12)
_PLACES = np.array([1, 3], np.int32)
_VECTOR = np.arange(64, dtype=np.float32) + 1
_WEIGHTS = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
_BATCH = np.linspace(0, 1, 8 * 64, dtype=np.float32).reshape(8, 64)


def _hands_its_operand_on(x: Any, chosen: Any) -> Any:
    """One branch returns the operand's buffer, and the other writes over it."""
    return lax.cond(chosen > 0, lambda v: v + 1, lambda v: v, x * 2) - x * 2


def _read_through_a_reshape(x: Any) -> Any:
    """The kernel reads the donated buffer at other elements than it writes, through a reshape outside of it."""
    sums = lax.reduce_window(
        x.reshape(8, 8), np.zeros((), x.dtype)[()], lax.add, (8, 1), (1, 1), ((7, 0), (0, 0))
    )
    return x - sums.reshape(64)


def _cumsum(state: Any) -> Any:
    moved = jnp.cumsum(state) * 0.5 + 1
    return jnp.tanh(moved) / (jnp.abs(moved) + 1)


def _two_results(x: Any) -> Any:
    both = jnp.broadcast_to(x[None], (2, 24))
    return both, both.reshape(48)


def _with_its_transpose(weights: Any, x: Any) -> Any:
    """A kernel has an array and its bitcast as two operands, and writes over one while it reads the other."""
    gradient = jnp.tanh(x).T @ jnp.tanh(x @ weights)
    return weights - 0.1 * (gradient + gradient.T)


FORMS = {
    "cond that hands its operand on": Form(_hands_its_operand_on, (_VECTOR[:8], np.int32(1))),
    "donated, read through a reshape": Form(_read_through_a_reshape, (_VECTOR,), (0,)),
    "donated cumsum": Form(_cumsum, (np.linspace(-1, 1, 4096, dtype=np.float32),), (0,), in_integers=False),
    "transposed scatter, then a product": Form(
        lambda x, i: (x.T, x.T.at[i].add(x.dtype.type(2)) * 3), (_ROWS, _PLACES)
    ),
    "two results in one buffer": Form(_two_results, (_VECTOR[:24],)),
    "transposed scatter": Form(lambda x, i: (x.T, x.T.at[i].add(x.dtype.type(2))), (_ROWS, _PLACES)),
    "sum with its transpose": Form(_with_its_transpose, (_WEIGHTS, _BATCH), (0,), in_integers=False),
}


def variants() -> Iterator[tuple[str, Form]]:
    """Every step as it is, and in other forms."""
    for name, form in FORMS.items():
        yield name, form
        yield f"{name}, bf16", _in_type(form, ml_dtypes.bfloat16)
        if form.in_integers:
            yield f"{name}, s32", _in_type(form, np.int32)
        yield f"{name}, second donated", _with_second_donated(form)
        yield f"{name}, scanned", _scanned(form)


def _in_type(form: Form, dtype: Any) -> Form:
    arguments = tuple(x.astype(dtype) if x.dtype == np.float32 else x for x in form.arguments)
    return replace(form, arguments=arguments)


def _with_second_donated(form: Form) -> Form:
    """Another argument, read late, takes a result of the first one's shape."""
    first = form.arguments[0]

    def function(*arguments: Any) -> Any:
        *own, second = arguments
        results = form.function(*own)
        return results, second * own[0] - second[..., ::-1]

    second = np.flip(first).copy()
    return Form(function, (*form.arguments, second), (*form.donated, len(form.arguments)))


def _scanned(form: Form) -> Form:
    """Three turns, each on what the last one left of the first argument, and all results stacked."""

    def function(*arguments: Any) -> Any:
        def turn(first: Any, _: Any) -> Any:
            results = jax.tree.leaves(form.function(first, *arguments[1:]))
            like = next((one for one in results if one.shape == first.shape), first)
            return (like * first.dtype.type(1) + first).astype(first.dtype), tuple(results)

        return lax.scan(turn, arguments[0], length=3)

    return replace(form, function=function)
