"""Peak memory of a simulated step.

XLA assigns buffers along its schedule, not along the clock: a buffer lives from the entry that
makes it to the last entry that needs it, and the operand of a collective to the entry that waits
for the collective. So the peak depends on the order alone.

Callable from Python and from functions compiled by numba::

    peak_of_order(order, resource, size_bytes, producer, offset, member, returned) -> int64   bytes
"""

from __future__ import annotations

from typing import Any

import numpy as np

from disco_hlo.compiled import compiled
from disco_hlo.simulator.problem import Problem


def peak_bytes(problem: Problem) -> int:
    """Peak memory of a problem in its order, parameters and constants included."""
    buffers = problem.buffers
    if not len(buffers.size_bytes):
        return problem.resident_bytes
    return problem.resident_bytes + int(
        peak_of_order(
            problem.order,
            problem.resource,
            buffers.size_bytes,
            buffers.producer,
            buffers.readers.offset,
            buffers.readers.member,
            buffers.returned,
        )
    )


@compiled
def peak_of_order(
    order: Any, resource: Any, size_bytes: Any, producer: Any, offset: Any, member: Any, returned: Any
) -> Any:
    """Most bytes that the buffers take up at any entry of ``order``.

    Args:
        order: ``int32[entries]``, as the engine takes it.
        resource: ``int32[tasks]``.
        size_bytes, producer, returned: ``[buffers]``, int64, int32, bool.
        offset, member: readers of each buffer in compressed rows, ``int32[buffers + 1]``, ``int32[]``.
    """
    issued, settled = np.empty(resource.size, np.int64), np.full(resource.size, order.size)
    for at in range(order.size):
        entry = order[at]
        if entry < 0:
            settled[~entry] = at  # where it is waited for more than once, others keep its buffers
            continue
        issued[entry] = at
        if resource[entry] == 0:
            settled[entry] = at
    change = np.zeros(order.size + 2, np.int64)
    for buffer in range(size_bytes.size):
        change[issued[producer[buffer]]] += size_bytes[buffer]
        if returned[buffer]:
            continue
        last = settled[producer[buffer]]
        for k in range(offset[buffer], offset[buffer + 1]):
            last = max(last, settled[member[k]])
        change[last + 1] -= size_bytes[buffer]
    live, peak = np.int64(0), np.int64(0)
    for at in range(order.size):
        live += change[at]
        peak = max(peak, live)
    return peak
