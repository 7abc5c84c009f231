"""A decoder in flax nnx, trained as its guides say: modules, `nnx.Optimizer`, `nnx.jit`, layers scanned, state split.

    python examples/nnx_trainer.py --steps 200
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 python examples/nnx_trainer.py --shard dp
    mpiexec -n 2 python examples/nnx_trainer.py --distributed

Four pre-norm layers, width 128; compute in bfloat16, parameters and AdamW in float32; the model's and the optimizer's
arrays are split over the devices (`--shard fsdp`) or on each of them (`dp`). The text is Python's own standard library.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import parallel
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformer_lm import SEQUENCE, VOCABULARY, sample, standard_library_text

LAYERS = 4
WIDTH = 128
HEADS = 4
ROWS_PER_DEVICE = 4


class Block(nnx.Module):
    """One layer: attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, dtype=jnp.bfloat16, use_bias=False, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[rows, length, width] to the same."""
        causal = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.attention_norm(x), mask=causal)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Decoder(nnx.Module):
    """A byte-level language model."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (SEQUENCE, WIDTH)))
        self.blocks = stacked(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next byte; tokens [rows, length] int32."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def through(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        x = (self.embedding(tokens) + self.positions[: tokens.shape[1]]).astype(jnp.bfloat16)
        return self.head(self.norm(through(x, self.blocks)).astype(jnp.float32))


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: Decoder, optimizer: nnx.Optimizer[Decoder], tokens: jax.Array) -> jax.Array:
    """One step; tokens [rows, length + 1] int32."""

    def loss_of(model: Decoder) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def split(leaf: Any, mesh: Mesh) -> NamedSharding:
    """The sharding of an array: its longest axis over the devices, where they divide it."""
    devices, shape = mesh.size, np.shape(leaf)
    longest = max(range(len(shape)), key=lambda axis: shape[axis], default=None)
    if longest is None or shape[longest] % devices:
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(*([None] * longest), "data"))


def made(seed: int, shard: str, mesh: Mesh) -> tuple[Decoder, nnx.Optimizer[Decoder]]:
    """Model and optimizer, each array made where it will lie."""

    def make() -> tuple[Decoder, nnx.Optimizer[Decoder]]:
        model = Decoder(nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adamw(3e-4, b2=0.95, weight_decay=0.1), wrt=nnx.Param)

    graph, shapes = nnx.split(nnx.eval_shape(make))
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda leaf: split(leaf, mesh) if shard == "fsdp" else everywhere, shapes)
    state = jax.jit(lambda: nnx.split(make())[1], out_shardings=shardings)()
    found: tuple[Decoder, nnx.Optimizer[Decoder]] = nnx.merge(graph, state)
    return found


def main() -> None:
    """Train and record."""
    parser = parallel.parser(__doc__)
    parser.add_argument(
        "--shard", choices=("dp", "fsdp"), default="fsdp", help="what is split (default fsdp)"
    )
    args = parser.parse_args()
    parallel.initialize(args)
    shardings = parallel.data_parallel()
    model, optimizer = made(args.seed, args.shard, shardings.batch.mesh)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    text = standard_library_text()
    parallel.say(f"{parameters} parameters, shard {args.shard}")

    def batch_of(step: int) -> jax.Array:
        return parallel.shard(sample(text, args.seed, step, ROWS_PER_DEVICE), shardings)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        return state, train_step(*state, tokens)

    _, record = parallel.fit(step, (model, optimizer), batch_of, args)
    run = {"model": "nnx_trainer", "seed": args.seed, "steps": args.steps, "parameters": parameters}
    parallel.finish({**run, "shard": args.shard, **record}, args.json)


if __name__ == "__main__":
    main()
