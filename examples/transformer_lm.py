"""A small Transformer language model, trained on the source files of the Python standard library.

Four pre-LN layers, width 128, four heads, sequences of 128 bytes, AdamW; data parallel over every
device of the job. Needs jax and optax, and no download.

    python examples/transformer_lm.py --steps 200
    JAX_NUM_CPU_DEVICES=2 JAX_PLATFORMS=cpu python examples/transformer_lm.py
    mpiexec -n 2 python examples/transformer_lm.py --distributed
"""

import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import parallel

LAYERS = 4
WIDTH = 128
HEADS = 4
SEQUENCE = 128
VOCABULARY = 256
BATCH_PER_DEVICE = 8
CORPUS_BYTES = 4 << 20
VALIDATION_SHARE = 0.1
VALIDATION_BATCHES = 4

Params = dict[str, Any]


class State(NamedTuple):
    """What the step reads and replaces."""

    params: Params
    opt_state: optax.OptState


def standard_library_text() -> np.ndarray:
    """The standard library's top-level source files as bytes, [n] uint8: files by name, 4 MiB at most."""
    directory = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(directory.glob("*.py")))
    if len(text) < 100 * SEQUENCE:
        raise SystemExit(
            f"{directory} holds {len(text)} bytes of *.py files; expected Python with its sources"
        )
    return np.frombuffer(text[:CORPUS_BYTES], np.uint8)


def sample(text: np.ndarray, seed: int, step: int, batch_per_device: int) -> np.ndarray:
    """This process's rows of step's batch, [rows, SEQUENCE + 1] int32; the same job-wide batch however
    its devices are spread over processes."""
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(text) - SEQUENCE - 1, size=jax.device_count() * batch_per_device)
    starts = starts[parallel.local_rows(batch_per_device)]
    return text[starts[:, None] + np.arange(SEQUENCE + 1)].astype(np.int32)


def init_params(key: jax.Array) -> Params:
    """Weights N(0, 0.02), biases 0, layer norm scales 1; output weights of a block shrunk by its depth."""
    keys = iter(jax.random.split(key, 6 * LAYERS + 3))

    def dense(inputs: int, outputs: int, scale: float = 1.0) -> Params:
        weight = 0.02 * scale * jax.random.normal(next(keys), (inputs, outputs))
        return {"weight": weight, "bias": jnp.zeros(outputs)}

    def norm() -> Params:
        return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}

    def layer() -> Params:
        shrink = (2 * LAYERS) ** -0.5
        return {
            "attention_norm": norm(),
            "query": dense(WIDTH, WIDTH),
            "key": dense(WIDTH, WIDTH),
            "value": dense(WIDTH, WIDTH),
            "out": dense(WIDTH, WIDTH, shrink),
            "mlp_norm": norm(),
            "up": dense(WIDTH, 4 * WIDTH),
            "down": dense(4 * WIDTH, WIDTH, shrink),
        }

    return {
        "embedding": 0.02 * jax.random.normal(next(keys), (VOCABULARY, WIDTH)),
        "position": 0.02 * jax.random.normal(next(keys), (SEQUENCE, WIDTH)),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": norm(),
        "head": dense(WIDTH, VOCABULARY),
    }


def dense(p: Params, x: jax.Array) -> jax.Array:
    """[..., inputs] -> [..., outputs]."""
    return x @ p["weight"] + p["bias"]


def layer_norm(p: Params, x: jax.Array) -> jax.Array:
    """Normalise the last axis."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def attention(p: Params, x: jax.Array) -> jax.Array:
    """Causal self-attention, [batch, sequence, width] -> the same."""

    def heads(name: str) -> jax.Array:
        return dense(p[name], x).reshape(*x.shape[:2], HEADS, WIDTH // HEADS)

    scores = jnp.einsum("bqhd,bkhd->bhqk", heads("query"), heads("key")) * (WIDTH // HEADS) ** -0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, heads("value"))
    return dense(p["out"], mixed.reshape(x.shape))


def loss_of(params: Params, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of the next byte; tokens [batch, SEQUENCE + 1] int32."""
    x = params["embedding"][tokens[:, :-1]] + params["position"]
    for layer in params["layers"]:
        x = x + attention(layer, layer_norm(layer["attention_norm"], x))
        x = x + dense(layer["down"], jax.nn.gelu(dense(layer["up"], layer_norm(layer["mlp_norm"], x))))
    logits = dense(params["head"], layer_norm(params["norm"], x))
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def optimizer() -> optax.GradientTransformation:
    """AdamW, learning rate 1e-3 after 20 steps of warm-up."""
    return optax.adamw(optax.linear_schedule(0.0, 1e-3, 20), b2=0.95, weight_decay=0.01)


def init(key: jax.Array) -> State:
    """The state before the first step."""
    params = init_params(key)
    return State(params, optimizer().init(params))


def train_step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
    """One step of AdamW on the mean loss of the job's batch."""
    loss, gradients = jax.value_and_grad(loss_of)(state.params, tokens)
    updates, opt_state = optimizer().update(gradients, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state), loss


def validation_loss(params: Params, text: np.ndarray, batch: int, shardings: parallel.Shardings) -> float:
    """Mean loss over fixed batches of held-out text."""
    evaluate = jax.jit(loss_of, out_shardings=shardings.replicated)
    losses = [
        float(evaluate(params, parallel.shard(sample(text, 0, index, batch), shardings)))
        for index in range(VALIDATION_BATCHES)
    ]
    return sum(losses) / len(losses)


def main() -> None:
    """Train, validate, record."""
    parser = parallel.parser(__doc__)
    parser.add_argument(
        "--batch-per-device",
        type=parallel.positive_int,
        default=BATCH_PER_DEVICE,
        help=f"sequences per device (default {BATCH_PER_DEVICE})",
    )
    args = parser.parse_args()
    parallel.initialize(args)

    shardings = parallel.data_parallel()
    text = standard_library_text()
    train_text, validation_text = np.split(text, [int(len(text) * (1 - VALIDATION_SHARE))])
    state = parallel.initial_state(init, args.seed, shardings)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    parallel.say(f"{parameters} parameters, {len(train_text)} bytes of text")

    def batch_of(step: int) -> jax.Array:
        return parallel.shard(sample(train_text, args.seed, step, args.batch_per_device), shardings)

    state, record = parallel.fit(parallel.compile_step(train_step, shardings), state, batch_of, args)
    held_out = validation_loss(state.params, validation_text, args.batch_per_device, shardings)
    parallel.say(f"validation loss {held_out:.4f} nats per byte")
    run = {"model": "transformer_lm", "seed": args.seed, "steps": args.steps, "parameters": parameters}
    parallel.finish(
        {**run, "batch_per_device": args.batch_per_device, "validation_loss": held_out, **record}, args.json
    )


if __name__ == "__main__":
    main()
