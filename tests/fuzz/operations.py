"""The ops that programs are made of: what each computes, one device's part of it.

``OPS[name]`` takes the attributes and the operands and gives the result, or a tuple of results. Loops, branches and
collectives are no entries of it: ``interpret`` writes them as jax has them, ``by_hand`` evaluates them op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DTYPE_OF = {
    "f32": np.dtype(np.float32),
    "bf16": jnp.dtype(jnp.bfloat16),
    "s32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "pred": np.dtype(np.bool_),
}
NAME_OF = {dtype: name for name, dtype in DTYPE_OF.items()}

Attributes = Mapping[str, Any]
Function = Callable[..., Any]


def _reduce(a: Attributes, x: Any) -> Any:
    axes = tuple(a["axes"])
    if a["how"] == "sum":
        return jnp.sum(x, axes, dtype=x.dtype)
    return jnp.max(x, axes) if a["how"] == "max" else jnp.min(x, axes)


def _window(a: Attributes, x: Any) -> Any:
    how = {"sum": lax.add, "max": lax.max}[a["how"]]
    start = 0 if a["how"] == "sum" else -(2**30)
    padding = tuple((int(low), int(high)) for low, high in a["padding"])
    return lax.reduce_window(
        x, jnp.asarray(start, x.dtype), how, tuple(a["size"]), tuple(a["stride"]), padding
    )


def _cumulative(a: Attributes, x: Any) -> Any:
    how = {"sum": lax.cumsum, "max": lax.cummax, "logsumexp": lax.cumlogsumexp, "prod": lax.cumprod}[a["how"]]
    return how(x, axis=int(a["axis"]), reverse=bool(a["reverse"]))


def _scatter(a: Attributes, x: Any, index: Any, update: Any) -> Any:
    place = x.at[(slice(None),) * int(a["axis"]) + (index,)]
    how = {"add": place.add, "set": place.set, "max": place.max, "mul": place.multiply}[a["how"]]
    return how(update, unique_indices=bool(a["unique"]), mode=str(a["mode"]))


def _dot(a: Attributes, x: Any, y: Any) -> Any:
    contract, batch = a["contract"], a["batch"]
    return lax.dot_general(
        x, y, ((tuple(contract[0]), tuple(contract[1])), (tuple(batch[0]), tuple(batch[1]))),
        preferred_element_type=x.dtype,
    )  # fmt: skip


def _random(a: Attributes, key: Any) -> Any:
    shape = tuple(a["shape"])
    if a["how"] == "bits":
        return lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint32) >> 8, jnp.int32)
    return jax.random.uniform(key, shape) if a["how"] == "uniform" else jax.random.normal(key, shape)


def _pad(a: Attributes, x: Any) -> Any:
    return lax.pad(
        x,
        jnp.asarray(a["value"], x.dtype),
        [(int(low), int(high), int(inside)) for low, high, inside in a["sizes"]],
    )


OPS: dict[str, Function] = {
    "tanh": lambda a, x: jnp.tanh(x),
    "sin": lambda a, x: jnp.sin(x),
    "neg": lambda a, x: -x,
    "abs": lambda a, x: jnp.abs(x),
    "log1p": lambda a, x: jnp.log1p(jnp.abs(x)),
    "decay": lambda a, x: jnp.exp(-jnp.abs(x)),
    "rsqrt": lambda a, x: lax.rsqrt(jnp.abs(x) + jnp.asarray(1, x.dtype)),
    "not": lambda a, x: ~x,
    "scale": lambda a, x: x * jnp.asarray(a["by"], x.dtype) + jnp.asarray(a["plus"], x.dtype),
    "add": lambda a, x, y: x + y,
    "sub": lambda a, x, y: x - y,
    "mul": lambda a, x, y: x * y,
    "max": lambda a, x, y: jnp.maximum(x, y),
    "min": lambda a, x, y: jnp.minimum(x, y),
    "div": lambda a, x, y: x / (jnp.abs(y) + jnp.asarray(1, y.dtype)),
    "and": lambda a, x, y: x & y,
    "xor": lambda a, x, y: x ^ y,
    "compare": lambda a, x, y: x > y if a["how"] == "gt" else x <= y,
    "select": lambda a, p, x, y: jnp.where(p, x, y),
    "convert": lambda a, x: x.astype(DTYPE_OF[a["to"]]),
    "reduce": _reduce,
    "broadcast": lambda a, x: lax.broadcast_in_dim(x, tuple(a["shape"]), tuple(a["axes"])),
    "transpose": lambda a, x: jnp.transpose(x, tuple(a["axes"])),
    "reshape": lambda a, x: x.reshape(tuple(a["shape"])),
    "slice": lambda a, x: lax.slice(x, tuple(a["start"]), tuple(a["limit"]), tuple(a["stride"])),
    "pad": _pad,
    "concatenate": lambda a, *xs: lax.concatenate(xs, int(a["axis"])),
    "reverse": lambda a, x: lax.rev(x, tuple(a["axes"])),
    "roll": lambda a, x: jnp.roll(x, int(a["by"]), int(a["axis"])),
    "iota": lambda a: lax.broadcasted_iota(jnp.int32, tuple(a["shape"]), int(a["axis"])),
    "full": lambda a: jnp.full(tuple(a["shape"]), a["value"], DTYPE_OF[a["dtype"]]),
    "gather": lambda a, x, index: jnp.take(x, index, axis=int(a["axis"]), mode=str(a["mode"])),
    "scatter": _scatter,
    "dynamic_slice": lambda a, x, *starts: lax.dynamic_slice(x, starts, tuple(a["size"])),
    "dynamic_update_slice": lambda a, x, part, *starts: lax.dynamic_update_slice(x, part, starts),
    "window": _window,
    "cumulative": _cumulative,
    "dot": _dot,
    "conv": lambda a, x, w: lax.conv_general_dilated(x, w, tuple(a["stride"]), str(a["padding"])),
    "random": _random,
    "sort": lambda a, x: lax.sort(x, dimension=int(a["axis"])),
    "sort_pairs": lambda a, x, y: tuple(lax.sort((x, y), dimension=int(a["axis"]), num_keys=1)),
    "argmax": lambda a, x: jnp.argmax(x, int(a["axis"])).astype(jnp.int32),
    "barrier": lambda a, *xs: lax.optimization_barrier(xs),
}

COLLECTIVES = ("psum", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute")
LOOPS = ("scan", "while")
AXIS = "d"
"""The mesh axis of ``shard_map``."""

_MOVES = {
    "neg", "abs", "max", "min", "select", "broadcast", "transpose", "reshape", "slice", "pad", "concatenate", "reverse",
    "roll", "gather", "dynamic_slice", "dynamic_update_slice", "sort", "sort_pairs", "barrier", "all_gather",
    "all_to_all", "ppermute", "pmax", "iota", "full", "compare", "argmax", "and", "xor", "not",
}  # fmt: skip
_MAXIMA = {"reduce", "window", "cumulative"}
DECIDES = ("compare", "argmax", "sort_pairs")
"""Ops whose result may be quite another where an operand is rounded in another way."""


def keeps_exact(name: str, attributes: Attributes) -> bool:
    """Whether floats that nothing has rounded are still exact behind this op, however it is compiled."""
    if name == "scatter":
        return attributes["how"] in ("set", "max")
    if name == "convert":
        return True
    return name in _MOVES or (name in _MAXIMA and attributes["how"] in ("max", "min"))
