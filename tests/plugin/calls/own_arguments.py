"""One process of a two-process gloo job, for test_two_processes.py: own_arguments.py ADDRESS RANK FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.activation.channel import LocalChannel
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.calls.observing import Observation
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.host_memory import copied
from disco_hlo.plugin.xla.jaxlink import shards_of


def main(address: str, rank: int, folder: Path) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    whole = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec())
    jaxlink.install(lambda _: None)
    observation = Observation(lambda _: LocalChannel(), 60)
    observation.start()

    @jax.jit
    def step(weight: jax.Array, key: jax.Array, rate: jax.Array) -> jax.Array:
        drawn = jax.random.normal(key, weight.shape)
        return weight - rate * jnp.tanh(jnp.sin(weight) * drawn + jnp.cos(weight))

    weight = jax.make_array_from_process_local_data(whole, np.ones((4, 4), np.float32))
    key, rate = jax.random.fold_in(jax.random.key(3), 5), jnp.float32(0.25)
    weight = step(weight, key, rate)
    [trial] = observation.trials
    seen: list[list[float]] = []

    def look(_: int) -> str:
        for one in trial.watch.arguments:
            [shard] = shards_of(one)
            [values] = copied([shard.data])
            assert shard.device == jax.local_devices()[0]
            assert values[shard.index].shape == one.shape
            seen.append(np.ravel(values).tolist())
        return DEFAULT

    trial.watch.swap(look)
    given = [weight.addressable_data(0), jax.random.key_data(key), rate]
    step(weight, key, rate)
    report = {"seen": seen, "given": [np.ravel(one).tolist() for one in given]}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    observation.stop()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
