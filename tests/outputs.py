"""What a runner's module computes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from disco_hlo.plugin.measuring.runner import Runner

Outputs = tuple[tuple[NDArray[Any], ...], ...]
"""``[output][local device]``."""


def outputs_of(runner: Runner) -> Outputs:
    """Run once; the outputs of the local devices as numpy arrays."""
    with jax.transfer_guard("allow"):
        return tuple(tuple(np.asarray(one) for one in output) for output in runner.output_arrays())
