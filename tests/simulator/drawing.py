"""Problems and timelines as small drawings: one character is one nanosecond."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from disco_hlo.simulator.costs import PPM
from disco_hlo.simulator.problem import Buffers, Lists, Problem
from disco_hlo.simulator.timeline import Timeline

BufferRow = tuple[int, str, str, bool]
"""Bytes, producer, readers (a letter each), returned."""


def problem(
    text: str,
    order: str = "",
    *,
    compute_speed: float = 1.0,
    product_speed: float | None = None,
    transfer_speed: float = 1.0,
    shared_link: bool = True,
    wait_ns: int = 0,
    holds: str = "",
    buffers: Sequence[BufferRow] = (),
    resident_bytes: int = 0,
) -> Problem:
    """A problem from lines such as ``x 8 on 1 after a b``: transfer x on channel 1 once a and b are done.

    ``on 0`` is a collective that runs on the compute stream. ``order`` is a line such as
    ``a x b ~x c``; without one the tasks run as they are listed, one at a time. Speeds are those beside the other kind;
    tasks whose names begin with p are products.
    ``wait_ns`` is what a transfer has more to do unless the compute stream idles when it begins; ``holds`` such as
    ``a2 b1`` how much of a task must be done before a transfer begins beside it.
    """
    rows = [line.split() for line in text.strip().splitlines()]
    index = {row[0]: i for i, row in enumerate(rows)}
    resources = [int(row[row.index("on") + 1]) if "on" in row else 0 for row in rows]
    channels = max(resources, default=0)
    alone = [PPM // max(k, 1) if shared_link else PPM for k in range(channels + 1)]
    beside = [round(speed * transfer_speed) for speed in alone]
    compute = [PPM, *[round(PPM * compute_speed)] * channels]
    product = [
        PPM, *[round(PPM * (compute_speed if product_speed is None else product_speed))] * channels,
    ]  # fmt: skip
    one_by_one = (f"{row[0]} ~{row[0]}" if on else row[0] for row, on in zip(rows, resources, strict=True))
    order = order or " ".join(one_by_one)
    entries = [~index[token[1:]] if token[0] == "~" else index[token] for token in order.split()]
    held = {hold[0]: int(hold[1:]) for hold in holds.split()}
    return Problem(
        names=tuple(index),
        duration_ns=np.array([int(row[1]) for row in rows], np.int64),
        resource=np.array(resources, np.int32),
        predecessors=Lists.of(
            [index[name] for name in row[row.index("after") + 1 :]] if "after" in row else [] for row in rows
        ),
        communicates=np.array(["on" in row for row in rows], np.bool_),
        speed_ppm=np.array([compute, alone, beside, product], np.int64),
        products=np.array([name.startswith("p") for name in index], np.bool_),
        hold_ns=np.array([held.get(name, 0) for name in index], np.int64),
        transfer_wait_ns=wait_ns,
        order=np.array(entries, np.int32),
        buffers=Buffers.of(
            [(size, index[by], [index[name] for name in to], kept) for size, by, to, kept in buffers]
        ),
        resident_bytes=resident_bytes,
    )


def draw(timeline: Timeline) -> list[str]:
    """One line per resource, from time 0 to the makespan: the name of what runs, ``.`` for nothing."""
    lines = []
    for resource in range(timeline.problem.channels + 1):
        line = ["."] * timeline.makespan_ns
        for span in timeline.spans(resource):
            for moment in range(span.start_ns, span.end_ns):
                line[moment] = timeline.problem.names[span.task]
        lines.append("".join(line))
    return lines
