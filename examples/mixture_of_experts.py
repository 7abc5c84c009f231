"""A layer of experts, one on each device: tokens travel to their expert and back (Switch Transformer's routing).

    python examples/mixture_of_experts.py --size full --steps 20
    python examples/mixture_of_experts.py --size full --steps 20 --forward
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 python examples/mixture_of_experts.py

Each device has a share of the tokens and sends every expert as many slots; what does not fit passes by. So there are
two all-to-alls forward, before and behind an expert's two matmuls, and two backward. Sizes:
configs/parallel/mixture_of_experts.toml.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import parallel
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LEARNING_RATE = 1e-2
AXIS = "expert"


class Config(NamedTuple):
    """Sizes: tokens of all devices, `spare` times as many slots; an expert is `hidden` wide inside."""

    tokens: int
    width: int
    hidden: int
    spare: float
    dtype: str


def load(size: str) -> Config:
    """The configuration of that size; ValueError where it is bad."""
    return parallel.read_sizes(Config, parallel.CONFIGS / "mixture_of_experts.toml", size)


def slots(config: Config, devices: int) -> int:
    """How many tokens of one device an expert takes: a multiple of 128, from 1024 on."""
    wanted = round(config.spare * config.tokens / devices**2)
    return wanted if wanted < 1024 else -(-wanted // 128) * 128


def shapes_of(config: Config, devices: int) -> dict[str, tuple[int, ...]]:
    """Of the parameters, all experts'."""
    return {
        "router": (config.width, devices),
        "up": (devices, config.width, config.hidden),
        "down": (devices, config.hidden, config.width),
    }


def placed(token: jax.Array, experts: int, room: int) -> tuple[jax.Array, jax.Array]:
    """The slot of each token, by its expert: `experts * room` where its expert is full."""
    is_for = token[:, None] == jnp.arange(experts)
    turn = jnp.sum(jnp.where(is_for, jnp.cumsum(is_for, 0) - 1, 0), -1)
    return jnp.where(turn < room, token * room + turn, experts * room), turn < room


def layer(params: dict[str, jax.Array], x: jax.Array, room: int) -> jax.Array:
    """One device's tokens [tokens, width] with what their experts make of them added."""
    experts = lax.axis_size(AXIS)
    chances = jax.nn.softmax((x @ params["router"]).astype(jnp.float32))
    token = jnp.argmax(chances, -1)
    slot, fits = placed(token, experts, room)
    sent = jnp.zeros((experts * room, x.shape[1]), x.dtype).at[slot].set(x, mode="drop")
    arrived = lax.all_to_all(sent, AXIS, 0, 0, tiled=True)
    made = jax.nn.gelu(arrived @ params["up"][0]) @ params["down"][0]
    back = lax.all_to_all(made, AXIS, 0, 0, tiled=True)
    weight = jnp.where(fits, jnp.max(chances, -1), 0).astype(x.dtype)
    return x + weight[:, None] * back.at[slot].get(mode="fill", fill_value=0)


def compilable(config: Config, *, training: bool) -> parallel.Compilable:
    """The jitted step over every device: (params, x, y) -> (params, loss), or (params, x) -> out."""
    devices = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    room = slots(config, devices)
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    specs = {"router": whole, "up": split, "down": split}

    def apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        local = jax.shard_map(
            lambda params, x: layer(params, x, room), mesh=mesh, in_specs=(specs, split), out_specs=split
        )
        made: jax.Array = local(params, x)
        return made

    def train_step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        def loss_of(params: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean((apply(params, x).astype(jnp.float32) - y.astype(jnp.float32)) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g.astype(p.dtype), params, gradients), loss

    params = {
        name: jax.ShapeDtypeStruct(shape, config.dtype) for name, shape in shapes_of(config, devices).items()
    }
    rows = jax.ShapeDtypeStruct((config.tokens, config.width), config.dtype)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    of_tokens = NamedSharding(mesh, split)
    if not training:
        jitted = jax.jit(apply, in_shardings=(shardings, of_tokens), out_shardings=of_tokens)
        return parallel.Compilable(jitted, (params, rows))
    jitted = jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, of_tokens, of_tokens),
        out_shardings=(shardings, NamedSharding(mesh, whole)),
    )
    return parallel.Compilable(jitted, (params, rows, rows))


def main() -> None:
    """Train on random tokens, or run the layer forward."""

    def drawn(_config: Config, made: parallel.Compilable, seed: int) -> tuple[Any, list[jax.Array]]:
        keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 8))

        def normal(shape: jax.ShapeDtypeStruct, sharding: Any, scale: float) -> jax.Array:
            make = jax.jit(
                lambda key: scale * jax.random.normal(key, shape.shape, shape.dtype), out_shardings=sharding
            )
            values: jax.Array = make(next(keys))
            return values

        shapes, *rows = made.arguments
        of_params, *of_rows = made.function.lower(shapes, *rows).compile().input_shardings[0]
        params = {
            name: normal(shape, of_params[name], shape.shape[-2] ** -0.5) for name, shape in shapes.items()
        }
        return params, [normal(shape, sharding, 1.0) for shape, sharding in zip(rows, of_rows, strict=True)]

    parallel.train_layers("mixture_of_experts", __doc__, load, compilable, drawn)


if __name__ == "__main__":
    main()
