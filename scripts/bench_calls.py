"""What a call of a step costs more than stock: while it is watched, and after it was given back.

Two jitted functions of the same program on two devices, one that JAX calls as ever and one that is watched, are called
in turn, each call waited for. What is printed is the median over the calls, and the quartiles of the differences.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.activation.channel import LocalChannel
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.calls.observing import Observation
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.printable import counted

CALLS, ARGUMENTS = 300, (10, 100, 600)
State = list[jax.Array]
Step = Callable[[State, jax.Array], tuple[State, jax.Array]]


def made(count: int, name: str) -> tuple[Step, State, jax.Array]:
    """A step with so many arrays of state, donated, under this name; its first state, and a batch."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())

    def step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
        mean = x.mean()
        return [one * 0.9 + mean for one in state], jnp.sum(state[0])

    step.__name__ = name
    state = [jax.device_put(np.ones(8, np.float32), whole) for _ in range(count)]
    x = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    return jax.jit(step, donate_argnums=0, out_shardings=(whole, whole)), state, x


def in_turn(steps: list[tuple[Step, State, jax.Array]], calls: int) -> list[list[int]]:
    """Nanoseconds of each call of each step; their states go on."""
    times: list[list[int]] = [[] for _ in steps]
    for _ in range(calls):
        for (step, state, x), own in zip(steps, times, strict=True):
            started = time.perf_counter_ns()
            state[:], loss = step(state, x)
            jax.block_until_ready((state, loss))
            own.append(time.perf_counter_ns() - started)
    return times


def told(count: int, what: str, times: list[list[int]]) -> None:
    """One line of the table."""
    stock, own = times
    low, middle, high = statistics.quantiles([b - a for a, b in zip(stock, own, strict=True)], n=4)
    print(
        f"| {count} | {what} | {statistics.median(stock) / 1e6:.3f} | {statistics.median(own) / 1e6:.3f} "
        f"| {middle / 1e6:+.3f} ({low / 1e6:+.3f} to {high / 1e6:+.3f}) |",
        flush=True,
    )


def main() -> None:
    """Print one table."""
    jaxlink.install(lambda _: None)
    print(f"jax {jax.__version__}, {CALLS} calls each, {counted(os.cpu_count() or 1, 'core')}")
    print("| arguments | | stock, ms | ours, ms | difference, ms (quartiles) |")
    print("| --- | --- | --- | --- | --- |")
    for count in ARGUMENTS:
        stock, twin = made(count, "stock"), made(count, "twin")
        in_turn([stock, twin], 5)
        told(count, "stock against stock", in_turn([stock, twin], CALLS))
        observation = Observation(lambda _: LocalChannel(), timeout_s=60)
        observation.start()
        watched = made(count, "watched")
        in_turn([watched], 5)
        [trial] = [one for one in observation.trials if one.watch.module_name == "jit_watched"]
        told(count, "watched", in_turn([stock, watched], CALLS))
        trial.watch.settle(DEFAULT)
        in_turn([watched], 5)
        told(count, "given back", in_turn([stock, watched], CALLS))
        observation.stop()


if __name__ == "__main__":
    main()
