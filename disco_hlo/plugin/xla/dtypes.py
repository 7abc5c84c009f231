"""What jax calls the element types of HLO."""

from __future__ import annotations

from typing import Any

import numpy as np

from disco_hlo.errors import UnsupportedError

JAX_NAMES = {
    "pred": "bool", "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64", "u8": "uint8",
    "u16": "uint16", "u32": "uint32", "u64": "uint64", "f16": "float16", "bf16": "bfloat16",
    "f32": "float32", "f64": "float64", "c64": "complex64", "c128": "complex128",
}  # fmt: skip
"""By HLO name. Others (``token``, fp8) neither stand in packs nor are all-reduced by a sweep."""


def jax_dtype(name: str) -> Any:
    """The numpy dtype of an HLO element type name such as ``bf16``.

    Raises:
        UnsupportedError: there is none of this name.
    """
    import jax.numpy as jnp

    if name not in JAX_NAMES:
        raise UnsupportedError(f"element type {name!r}: expected one of {', '.join(sorted(JAX_NAMES))}")
    return jnp.dtype(JAX_NAMES[name])


def is_whole(dtype: np.dtype[Any]) -> bool:
    """Whether it is of whole numbers or truth values."""
    return dtype.kind in "biu" or "int" in dtype.name
