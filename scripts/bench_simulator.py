"""Time the simulator on a step of 6,000 instructions, one core."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from disco_hlo.simulator.contention import new_progress
from disco_hlo.simulator.costs import GPU, Pace
from disco_hlo.simulator.engine import evaluate
from disco_hlo.simulator.memory import peak_bytes
from disco_hlo.simulator.problem import Buffers, Lists, Problem
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
        products=np.zeros(tasks, np.bool_),
        hold_ns=np.zeros(tasks, np.int64),
        order=np.array(order, np.int32),
        buffers=Buffers.of([(1 << 20, task, [min(task + 1, tasks - 1)], False) for task in range(tasks)]),
    )


def median_us(run: Callable[[], object], repeats: int) -> float:
    """Median time of a call, after a first one that does not count."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


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
    timeline = simulate(problem)
    print(
        f"{len(problem)} instructions, {int((problem.resource > 0).sum())} of them all-reduces; makespan "
        f"{timeline.makespan_ns / 1e6:.1f} ms, {timeline.exposed_ns / 1e6:.1f} ms of communication exposed"
    )
    progress = new_progress(len(problem), Pace(problem.speed_ppm, problem.transfer_wait_ns))
    times = (problem.duration_ns, problem.resource, problem.products, problem.hold_ns)
    engine_us = median_us(lambda: evaluate(problem.order, *times, progress), arguments.repeats)
    print(f"one evaluation    median {engine_us:6.1f} us")
    memory_us = median_us(lambda: peak_bytes(problem), arguments.repeats)
    print(f"peak memory       median {memory_us:6.1f} us")


if __name__ == "__main__":
    main()
