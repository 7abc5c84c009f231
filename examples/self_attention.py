"""The end of a self-attention block, tensor parallel: the running example of CoCoNet (figure 3).

    python examples/self_attention.py --size attention-8 --steps 20
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 python examples/self_attention.py

A matmul over a width that is split over the devices, the sum of its parts, then bias, dropout and residual on every
device alike. Sizes: configs/parallel/self_attention.toml.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import parallel
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DROPOUT = 0.1


class Config(NamedTuple):
    """Sizes: [batch, length, inner] times [inner, width]."""

    batch: int
    length: int
    width: int
    inner: int
    dtype: str


def load(size: str) -> Config:
    """The configuration of that size; ValueError where it is bad."""
    return parallel.read_sizes(Config, parallel.CONFIGS / "self_attention.toml", size)


def self_attention(w: jax.Array, b: jax.Array, x: jax.Array, r: jax.Array, key: jax.Array) -> jax.Array:
    """`dropout(x @ w + b) + r`; w [inner, width], b [width], x [batch, length, inner], r like the result."""
    summed = x @ w + b
    kept = jax.random.bernoulli(jax.random.wrap_key_data(key), 1 - DROPOUT, summed.shape)
    return jnp.where(kept, summed / (1 - DROPOUT), 0) + r


def compilable(config: Config) -> parallel.Compilable:
    """The jitted function over every device, and the shapes it takes."""
    mesh = Mesh(np.array(jax.devices()), ("model",))

    def on(*axes: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, config.dtype)

    jitted = jax.jit(
        self_attention,
        in_shardings=(on("model", None), on(), on(None, None, "model"), on(), on()),
        out_shardings=on(),
    )
    batch, length, width, inner, _ = config
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    wanted = (
        shape(inner, width),
        shape(width),
        shape(batch, length, inner),
        shape(batch, length, width),
        key,
    )
    return parallel.Compilable(jitted, wanted)


def main() -> None:
    """Call it again and again on random values."""
    parser = parallel.parser(__doc__)
    parser.add_argument("--size", default="tiny", help="table of the file (default tiny)")
    args = parser.parse_args()
    config = parallel.loaded(lambda: load(args.size))
    parallel.initialize(args)
    function, shapes = compilable(config)
    random = np.random.default_rng(args.seed)
    values = [jnp.asarray(random.normal(size=shape.shape), shape.dtype) for shape in shapes[:-1]]

    def run(_state: Any, index: int) -> tuple[Any, jax.Array]:
        out = function(*values, np.array([args.seed, index], np.uint32))
        return None, jnp.mean(out.astype(jnp.float32) ** 2)

    _, record = parallel.fit(run, None, lambda index: index, args)
    parallel.finish({"model": "self_attention", "size": args.size, "steps": args.steps, **record}, args.json)


if __name__ == "__main__":
    main()
