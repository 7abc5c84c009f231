"""One update by Adam whose moments are split over the data axis (CoCoNet, figure 6; ZeRO's first stage).

    python examples/sharded_adam.py --elements 26 --steps 20
    python examples/sharded_adam.py --elements 26 --steps 20 --replicated
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 python examples/sharded_adam.py --elements 14

Every device has its own gradient and a copy of the parameters, but only its share of the moments. What is
summed, updated and gathered where is left to XLA. With ``--replicated`` every device has all moments and does all
of the update: the baseline (AR-Opt) of CoCoNet's figure 10.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parallel
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LEARNING_RATE, BETA_1, BETA_2, EPSILON = 1e-3, 0.9, 0.999, 1e-8


def adam(
    p: jax.Array, m: jax.Array, v: jax.Array, gradients: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """p, m, v [elements] after one step; gradients [devices, elements], one row of each device."""
    g = gradients.sum(0) / gradients.shape[0]
    m = BETA_1 * m + (1 - BETA_1) * g
    v = BETA_2 * v + (1 - BETA_2) * g * g
    step = (m / (1 - BETA_1**count)) / (jnp.sqrt(v / (1 - BETA_2**count)) + EPSILON)
    return p - LEARNING_RATE * step, m, v


def compilable(log2_elements: int, *, replicated: bool = False) -> parallel.Compilable:
    """The jitted update of 2**log2_elements float32 parameters over every device, and the shapes it takes.

    Args:
        replicated: every device has all moments, not only its share of them.
    """
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    moments = whole if replicated else split
    jitted = jax.jit(
        adam,
        donate_argnums=(0, 1, 2),
        in_shardings=(whole, moments, moments, split, whole),
        out_shardings=(whole, moments, moments),
    )
    vector = jax.ShapeDtypeStruct((1 << log2_elements,), jnp.float32)
    rows = jax.ShapeDtypeStruct((jax.device_count(), 1 << log2_elements), jnp.float32)
    return parallel.Compilable(jitted, (vector, vector, vector, rows, jax.ShapeDtypeStruct((), jnp.float32)))


def main() -> None:
    """Update random parameters again and again by random gradients."""
    parser = parallel.parser(__doc__)
    parser.add_argument("--elements", type=int, choices=range(8, 31), default=14, help="power of two")
    parser.add_argument("--replicated", action="store_true", help="all moments on every device")
    args = parser.parse_args()
    parallel.initialize(args)
    update, shapes = compilable(args.elements, replicated=args.replicated)
    random = np.random.default_rng(args.seed)
    gradients = jnp.asarray(random.normal(size=shapes[3].shape), jnp.float32)
    size = shapes[0].shape
    state: Any = (jnp.asarray(random.normal(size=size), jnp.float32), jnp.zeros(size), jnp.zeros(size))

    def run(state: Any, index: int) -> tuple[Any, jax.Array]:
        state = update(*state, gradients, np.float32(index + 1))
        return state, jnp.mean(state[0] ** 2)

    _, record = parallel.fit(run, state, lambda index: index, args)
    parallel.finish(
        {"model": "sharded_adam", "elements": args.elements, "steps": args.steps, **record}, args.json
    )


if __name__ == "__main__":
    main()
