"""A step in an explicit order, as XLA's schedule has it: one pass from first to last.

DisCo, section 4.4, with XLA's own semantics in place of the ready queue: the compute stream goes through the order; a
collective begins once the stream has reached the place where it is issued and its channel is free; a wait holds the
stream until a collective has finished. ``contention`` has what they cost each other.

Callable from Python and from functions compiled by numba. Nothing is checked here:
:class:`~disco_hlo.simulator.problem.Problem` did.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import compiled
from disco_hlo.simulator.contention import NOW, compute, issue, open_progress, restart, wait
from disco_hlo.simulator.costs import COMPUTE, PRODUCT


@compiled
def evaluate(order: Any, duration_ns: Any, resource: Any, products: Any, hold_ns: Any, progress: Any) -> Any:
    """Makespan of ``order`` in ns; ``progress.spans_ns`` has start and end of each task.

    Args:
        order: ``int32[entries]``: ``i`` runs or issues task i, ``~i`` waits for collective i.
        duration_ns, resource, products, hold_ns: ``[tasks]``, as a problem has them.
        progress: :class:`~disco_hlo.simulator.contention.Progress` with room for all tasks.
    """
    p = open_progress(progress)
    restart(p)
    for entry in order:
        if entry < 0:
            wait(p, ~entry)
        elif resource[entry] > 0:
            issue(p, entry, resource[entry] - 1, duration_ns[entry])
        else:
            p.start_ns[entry] = p.number[NOW]
            row = PRODUCT if products[entry] else COMPUTE
            compute(p, duration_ns[entry], hold_ns[entry], row, products[entry])
            p.end_ns[entry] = p.number[NOW]
    return p.number[NOW]
