"""Problems and timelines as small drawings, in which one character is one nanosecond; and random problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
from numpy.typing import NDArray

from disco_hlo.simulator.costs import MIN_SPEED_PPM, PPM
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
    wait_ns: int = 0,
    holds: str = "",
    buffers: Sequence[BufferRow] = (),
    resident_bytes: int = 0,
) -> Problem:
    """A problem from lines, or parts between semicolons, such as ``x 8 on 1 after a b``: transfer x on the channel once
    a and b are done.

    ``on 0`` is a collective that runs on the compute stream. ``order`` is a line such as
    ``a x b ~x c``; without one the tasks run as they are listed, one at a time. Speeds are those beside the other kind;
    tasks whose names begin with p are products.
    ``wait_ns`` is what a transfer has more to do unless the compute stream idles when it begins; ``holds`` such as
    ``a2 b1`` how much of a task must be done before a transfer begins beside it.
    """
    rows = [line.split() for line in text.strip().replace(";", "\n").splitlines()]
    index = {row[0]: i for i, row in enumerate(rows)}
    resources = [int(row[row.index("on") + 1]) if "on" in row else 0 for row in rows]
    product_speed = compute_speed if product_speed is None else product_speed
    beside = round(PPM * transfer_speed)
    speeds = [
        [PPM, round(PPM * compute_speed)], [PPM, PPM], [beside, beside], [PPM, round(PPM * product_speed)]
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
        speed_ppm=np.array(speeds, np.int64)[:, : max(resources, default=0) + 1],
        products=np.array([name.startswith("p") for name in index], np.bool_),
        hold_ns=np.array([held.get(name, 0) for name in index], np.int64),
        transfer_wait_ns=wait_ns,
        order=np.array(entries, np.int32),
        buffers=Buffers.of(
            [(size, index[by], [index[name] for name in to], kept) for size, by, to, kept in buffers]
        ),
        resident_bytes=resident_bytes,
    )


def spans(timeline: Timeline, resource: int) -> list[tuple[int, int, int]]:
    """Task, start and end of what runs on the compute stream (0) or on the channel (1), in time order."""
    tasks = [task for task in timeline.started if timeline.problem.resource[task] == resource]
    return [(task, *timeline.spans_ns[:, task].tolist()) for task in tasks]


def draw(timeline: Timeline) -> list[str]:
    """One line per resource, from time 0 to the makespan: the name of what runs, ``.`` for nothing."""
    lines = []
    for resource in range(timeline.problem.speed_ppm.shape[1]):
        line = ["."] * timeline.makespan_ns
        for task, start_ns, end_ns in spans(timeline, resource):
            for moment in range(start_ns, end_ns):
                line[moment] = timeline.problem.names[task]
        lines.append("".join(line))
    return lines


DURATIONS = (
    lambda random: random.randrange(4),
    lambda random: random.randrange(40),
    lambda random: random.randrange(1_000_000),
)


def random_problem(seed: int, tasks: int, *, channel: bool = True) -> Problem:
    """Tasks with random ids, dependencies, durations of one of three scales, speeds and buffers."""
    random = Random(seed)
    topological = random.sample(range(tasks), tasks)
    rows: list[list[int]] = [[] for _ in range(tasks)]
    for place, task in enumerate(topological[1:], 1):
        count = random.choice((0, 1, 1, 2, 3))
        near = topological[max(0, place - random.choice((3, 30))) : place]
        rows[task] = sorted(random.sample(near, min(count, len(near))))
    share = random.choice((0.1, 0.5)) if channel else 0.0
    resource = [int(random.random() < share) for _ in range(tasks)]
    duration, longer = random.choice(DURATIONS), random.choice((1, 30))
    slowest = random.choice((MIN_SPEED_PPM, PPM))
    speeds = [[random.randint(slowest, PPM) for _ in range(1 + channel)] for _ in range(4)]
    speeds[0][0] = speeds[3][0] = PPM
    readers = random.randrange(min(4, tasks))
    durations_ns = [duration(random) * (longer if r else 1) for r in resource]
    holding = random.choice((0.0, 0.5, 1.0))
    predecessors, resources = Lists.of(rows), np.array(resource, np.int32)
    return Problem(
        names=tuple(f"t{i}" for i in range(tasks)),
        duration_ns=np.array(durations_ns, np.int64),
        resource=resources,
        predecessors=predecessors,
        communicates=np.array([r > 0 or random.random() < 0.1 for r in resource], np.bool_),
        speed_ppm=np.array(speeds, np.int64),
        products=np.array([random.random() < 0.3 for _ in range(tasks)], np.bool_),
        hold_ns=np.array(
            [random.randint(0, max(0, ns - 1)) if random.random() < holding else 0 for ns in durations_ns],
            np.int64,
        ),
        transfer_wait_ns=random.choice((0, 1, 17, 3000)),
        buffers=Buffers.of(
            [
                (random.randrange(100), producer, random.sample(range(tasks), readers), random.random() < 0.1)
                for producer in topological[: random.randrange(tasks + 1)]
            ]
        ),
        resident_bytes=random.randrange(10),
        order=random_order(random, predecessors, resources),
    )


def with_durations(posed: Problem, duration_ns: NDArray[np.int64]) -> Problem:
    """The same tasks with other durations, and holds no longer than these."""
    return replace(
        posed, duration_ns=duration_ns, hold_ns=np.minimum(posed.hold_ns, np.maximum(duration_ns - 1, 0))
    )


def random_order(random: Random, predecessors: Lists, resource: NDArray[np.int32]) -> NDArray[np.int32]:
    """A legal order: tasks as they become ready, each transfer waited for sooner or later, some again."""
    missing, successors = np.diff(predecessors.offset).tolist(), predecessors.reversed(len(resource))
    ready = [task for task, count in enumerate(missing) if not count]
    flying: list[int] = []
    landed: list[int] = []
    order: list[int] = []
    patience = random.random()
    while ready or flying:
        if landed and random.random() < 0.1:
            order.append(~random.choice(landed))
        if flying and (not ready or random.random() < patience * len(flying) / 20):
            settled = flying.pop(random.randrange(len(flying)))
            order.append(~settled)
            landed.append(settled)
        else:
            settled = ready.pop(random.randrange(len(ready)))
            order.append(settled)
            if resource[settled]:
                flying.append(settled)
                continue
        for successor in successors[settled].tolist():
            missing[successor] -= 1
            if not missing[successor]:
                ready.append(successor)
    return np.array(order, np.int32)
