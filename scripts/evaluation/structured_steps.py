"""The steps whose collectives lie inside the layer, as compiles in our hands, by name.

``tp-forward`` and ``tp-train`` (examples/tensor_parallel.py), ``attention-8`` and so on
(examples/self_attention.py: CoCoNet, figure 3 and section 6.2), ``adam-26`` for 2**26 elements
(examples/sharded_adam.py: CoCoNet, section 6.1) and ``adam-replicated-26``, its baseline: the moments whole everywhere.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from disco_hlo.errors import DiscoError
from disco_hlo.plugin.xla import jaxlink
from evaluation.step import EXAMPLES, intercepted

NAMES = re.compile(r"tp-forward|tp-train|(attention|mlp)-(8|16)|adam-(replicated-)?([89]|1\d|2\d|30)")
EXPECTED = (
    "tp-forward, tp-train, attention-8, attention-16, mlp-8, mlp-16, adam-8 to adam-30, "
    "or adam-replicated-8 to adam-replicated-30"
)
_TINY_ADAM = 10


def request_of(step: str, size: str) -> jaxlink.CompileRequest:
    """The compile of the named step over all devices, as jax would ask for it; nothing is run.

    Raises:
        DiscoError: jax compiled nothing.
    """
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    made = _compilable(step, size)
    found = intercepted(made.function.lower(*made.arguments))
    if found is None:
        raise DiscoError(f"jax compiled nothing for {step}")
    return found


def _compilable(step: str, size: str) -> Any:
    import self_attention
    import sharded_adam
    import tensor_parallel

    tiny = size == "tiny"
    kind, *variant, number = step.split("-")
    if kind == "adam":
        return sharded_adam.compilable(_TINY_ADAM if tiny else int(number), replicated=bool(variant))
    if kind == "tp":
        return tensor_parallel.compilable(tensor_parallel.load(size), training=number == "train")
    return self_attention.compilable(self_attention.load("tiny" if tiny else step))
