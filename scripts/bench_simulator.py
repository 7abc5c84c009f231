"""Time the simulator: full evaluation and local moves on a step of 6,000 instructions, one core."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from disco_hlo.simulator.costs import GPU
from disco_hlo.simulator.engine import evaluate, evaluate_move, new_memo, tables_of
from disco_hlo.simulator.memory import peak_bytes
from disco_hlo.simulator.problem import Buffers, Lists, Problem
from disco_hlo.simulator.ready_queue import evaluate_ready_queue
from disco_hlo.simulator.timeline import simulate

LAYERS = 24
GRADIENTS_PER_LAYER = 6
LEAST_TASKS = 1_000
"""Enough for an optimizer update behind every all-reduce, which is what waits for it."""


def transformer_step(tasks: int, random: Random) -> Problem:
    """Forward pass, backward pass with an all-reduce per weight, optimizer updates."""
    gradients = LAYERS * GRADIENTS_PER_LAYER
    kernels = tasks - gradients
    forward, updates = kernels * 3 // 10, kernels * 2 // 10
    backward = kernels - forward - updates
    durations = [random.choice((4_000, 8_000, 20_000, 60_000)) for _ in range(kernels)]
    predecessors = [[i - 1] if 0 < i < forward + backward else [] for i in range(kernels)]
    order: list[int] = []
    for i in range(forward + backward):
        order.append(i)
        due = (i - forward + 1) * gradients // backward
        while i >= forward and len(durations) - kernels < due:
            order.append(len(durations))
            durations.append(random.choice((100_000, 900_000, 1_800_000)))
            predecessors.append([i])
    for k in range(updates):
        gradient = kernels + k * gradients // updates
        if ~gradient not in order[-1 - updates // gradients * 2 :]:
            order.append(~gradient)
        order.append(forward + backward + k)
        predecessors[forward + backward + k] = [gradient]
    resource = np.array([0] * kernels + [1] * gradients, np.int32)
    return Problem(
        names=tuple(f"t{i}" for i in range(tasks)),
        duration_ns=np.array(durations, np.int64),
        resource=resource,
        predecessors=Lists.of(predecessors),
        communicates=resource > 0,
        speed_ppm=replace(GPU, compute_speed_ppm=930_000, transfer_speed_ppm=820_000).speed_ppm(),
        order=np.array(order, np.int32),
        buffers=Buffers.of([(1 << 20, task, [min(task + 1, tasks - 1)], False) for task in range(tasks)]),
    )


def local_move(problem: Problem, random: Random) -> tuple[Problem, int, int]:
    """Two neighbouring kernels become one, or a transfer is issued some places later."""
    assert problem.order is not None
    order, duration_ns = problem.order.copy(), problem.duration_ns.copy()
    while True:
        at = random.randrange(len(order) - 30)
        first, second = int(order[at]), int(order[at + 1])
        if first >= 0 and problem.resource[first]:
            later = at + random.randrange(1, 20)
            order[at:later], order[later] = problem.order[at + 1 : later + 1], first
            return replace(problem, order=order), at, later
        if first >= 0 <= second and not problem.resource[second]:
            duration_ns[second] += duration_ns[first] // 2
            duration_ns[first] = 0
            return replace(problem, duration_ns=duration_ns), at, at + 1


def median_us(run: Callable[[], object], repeats: int) -> float:
    """Median time of a call, after a first one that does not count."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def time_moves(problem: Problem, random: Random, repeats: int) -> list[float]:
    """Times of local moves in us, ascending; each makespan is checked against a full evaluation."""
    memo, scratch = new_memo(problem), new_memo(problem)
    evaluate(problem.order, tables_of(problem), memo)
    evaluate_move(problem.order, 0, 0, tables_of(problem), memo, scratch)
    times = []
    for _ in range(repeats):
        moved, first, last = local_move(problem, random)
        tables = tables_of(moved)
        begin = time.perf_counter_ns()
        makespan = evaluate_move(moved.order, first, last, tables, memo, scratch)
        times.append((time.perf_counter_ns() - begin) / 1000)
        if makespan != evaluate(moved.order, tables, scratch):
            raise SystemExit(f"A move of the entries {first} to {last} disagrees with a full evaluation.")
    return sorted(times)


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=6000)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.tasks < LEAST_TASKS or arguments.repeats < 1:
        parser.error(f"expected --tasks of at least {LEAST_TASKS} and --repeats of at least 1")
    random = Random(arguments.seed)
    problem = transformer_step(arguments.tasks, random)
    tables, memo, timeline = tables_of(problem), new_memo(problem), simulate(problem)
    print(
        f"{len(problem)} instructions, {int((problem.resource > 0).sum())} of them all-reduces; makespan "
        f"{timeline.makespan_ns / 1e6:.1f} ms, {timeline.exposed_ns / 1e6:.1f} ms of communication exposed"
    )
    full_us = median_us(lambda: evaluate(problem.order, tables, memo), arguments.repeats)
    print(f"full evaluation   median {full_us:6.1f} us")
    moves = time_moves(problem, random, arguments.repeats)
    slowest_us = moves[len(moves) * 99 // 100]
    print(f"local move        median {statistics.median(moves):6.1f} us, 99 % within {slowest_us:.1f} us")
    free = replace(problem, order=None)
    successors, missing = free.successors, np.diff(free.predecessors.offset).astype(np.int64)
    started, spans_ns = np.empty(len(free), np.int32), np.empty((2, len(free)), np.int64)
    queue_us = median_us(
        lambda: evaluate_ready_queue(
            tables, successors.offset, successors.member, missing.copy(), started, spans_ns
        ),
        arguments.repeats,
    )
    print(f"ready queue       median {queue_us:6.1f} us")
    memory_us = median_us(lambda: peak_bytes(problem, spans_ns), arguments.repeats)
    print(f"peak memory       median {memory_us:6.1f} us")


if __name__ == "__main__":
    main()
