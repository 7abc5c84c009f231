"""A Llama-like decoder, trained as people train it today: bf16 compute, f32 master weights, AdamW, recomputation.

    python examples/llama.py --size full --shard fsdp --layers scan --steps 20
    python examples/llama.py --size full --shard dp --layers unroll --accumulate 4
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 python examples/llama.py --shard fsdp+tp

`--shard dp` keeps all state on every device. `fsdp` splits parameters, gradients and optimizer state over the devices;
each layer's weights are gathered where they are used (ZeRO-3). `fsdp+tp` splits heads and hidden width over pairs of
devices as well. The text is Python's own standard library, a token a byte. Sizes: configs/parallel/llama.toml.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import parallel
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tensor_parallel import normed
from transformer_lm import standard_library_text

SHARDS = ("dp", "fsdp", "fsdp+tp")
LAYERS = ("scan", "unroll")
PROJECTIONS = ("apart", "together")
RECOMPUTE = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "all": jax.checkpoint_policies.nothing_saveable,
}
"""What the backward pass finds again: everything, the results of matmuls, or each layer's input alone."""
ROTARY_BASE = 10_000.0

Params = dict[str, Any]


class Config(NamedTuple):
    """Sizes; `length` tokens a row, `rows_per_device` rows a device and microbatch."""

    layers: int
    width: int
    heads: int
    hidden: int
    length: int
    vocabulary: int
    rows_per_device: int
    dtype: str


class Form(NamedTuple):
    """How the step is written; see the module's text."""

    shard: str = "dp"
    layers: str = "scan"
    recompute: str = "dots"
    accumulate: int = 1
    projections: str = "apart"
    """Whether query, key and value have a matrix each, or one."""


class State(NamedTuple):
    """What the step reads and replaces, in float32."""

    params: Params
    opt_state: Any


def load(size: str) -> Config:
    """The configuration of that size; ValueError where it is bad."""
    return parallel.read_sizes(Config, parallel.CONFIGS / "llama.toml", size)


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Shape of each weight of a layer."""
    width, heads, hidden = config.width, config.heads, config.hidden
    head = width // heads
    return {
        "attention_norm": (width,),
        "query": (width, heads, head),
        "key": (width, heads, head),
        "value": (width, heads, head),
        "out": (heads, head, width),
        "mlp_norm": (width,),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }


SPLIT = {
    "query": ("data", "model", None),
    "key": ("data", "model", None),
    "value": ("data", "model", None),
    "projections": ("data", None, "model", None),
    "out": ("model", None, "data"),
    "gate": ("data", "model"),
    "up": ("data", "model"),
    "down": ("model", "data"),
    "embedding": ("model", "data"),
    "head": ("data", "model"),
}
"""Mesh axis along which FSDP ("data") and tensor parallelism ("model") split each matrix; norms are never split."""


class Layout(NamedTuple):
    """Where everything lives on the mesh."""

    mesh: Mesh
    form: Form

    def stored(self, name: str, *, stacked: bool = False) -> NamedSharding:
        """Of a weight between steps."""
        used = {"dp": (), "fsdp": ("data",), "fsdp+tp": ("data", "model")}[self.form.shard]
        axes = [axis if axis in used else None for axis in SPLIT.get(name, ())]
        return NamedSharding(self.mesh, PartitionSpec(*([None] if stacked else []), *axes))

    def gathered(self, name: str) -> NamedSharding:
        """Of a weight while a layer uses it: whole, but for what tensor parallelism splits."""
        used = ("model",) if self.form.shard == "fsdp+tp" else ()
        return NamedSharding(
            self.mesh, PartitionSpec(*(axis if axis in used else None for axis in SPLIT.get(name, ())))
        )

    @property
    def rows(self) -> NamedSharding:
        """Of activations and tokens: rows over "data"."""
        return NamedSharding(self.mesh, PartitionSpec("data"))

    @property
    def everywhere(self) -> NamedSharding:
        """On every device."""
        return NamedSharding(self.mesh, PartitionSpec())


def layout(form: Form) -> Layout:
    """The mesh of all devices; SystemExit where tensor parallelism finds no pairs."""
    devices = np.array(jax.devices())
    model = 2 if form.shard == "fsdp+tp" else 1
    if devices.size % model:
        raise SystemExit(f"--shard fsdp+tp needs an even number of devices, found {devices.size}")
    return Layout(Mesh(devices.reshape(-1, model), ("data", "model")), form)


def init_params(config: Config, form: Form, key: jax.Array) -> Params:
    """Weights N(0, 0.02) in float32, norms 1; layers stacked along a first axis for `--layers scan`."""
    shapes = layer_shapes(config)
    keys = iter(jax.random.split(key, sum(name in SPLIT for name in (*shapes, "embedding", "head"))))

    def drawn(name: str, shape: tuple[int, ...]) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape) if name in SPLIT else jnp.ones(shape)

    stacked = {name: drawn(name, (config.layers, *shape)) for name, shape in shapes.items()}
    if form.projections == "together":
        stacked["projections"] = jnp.stack([stacked.pop(name) for name in ("query", "key", "value")], axis=2)
    layers: Any = stacked
    if form.layers == "unroll":
        layers = [{name: leaf[i] for name, leaf in stacked.items()} for i in range(config.layers)]
    return {
        "embedding": drawn("embedding", (config.vocabulary, config.width)),
        "layers": layers,
        "norm": jnp.ones(config.width),
        "head": drawn("head", (config.width, config.vocabulary)),
    }


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al., RoFormer, 2021) of [batch, length, heads, head]."""
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    cosine, sine = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate((left * cosine - right * sine, right * cosine + left * sine), axis=-1)


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal self-attention of [batch, length, heads, head]; cuDNN's kernel on GPUs."""
    on_gpu = jax.default_backend() == "gpu" and query.dtype == jnp.bfloat16
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation="cudnn" if on_gpu else "xla"
    )


def decoder_layer(where: Layout, dtype: str, x: jax.Array, weights: Params) -> jax.Array:
    """One layer, pre-norm, with residuals: [batch, length, width] to the same."""
    w = {
        name: jax.lax.with_sharding_constraint(leaf.astype(dtype), where.gathered(name))
        for name, leaf in weights.items()
    }
    h = normed(x, w["attention_norm"])
    if "projections" in w:
        query, key, value = jnp.unstack(jnp.einsum("bsd,dnhe->bsnhe", h, w["projections"]), axis=2)
    else:
        query, key, value = (jnp.einsum("bsd,dhe->bshe", h, w[name]) for name in ("query", "key", "value"))
    mixed = attention(rotated(query), rotated(key), value)
    x = x + jnp.einsum("bshe,hed->bsd", mixed, w["out"])
    h = normed(x, w["mlp_norm"])
    x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    return jax.lax.with_sharding_constraint(x, where.rows)


def loss_of(config: Config, where: Layout, params: Params, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats of the next token; tokens [rows, length + 1] int32."""
    layer = jax.checkpoint(
        functools.partial(decoder_layer, where, config.dtype), policy=RECOMPUTE[where.form.recompute]
    )

    def whole(name: str) -> jax.Array:
        return jax.lax.with_sharding_constraint(params[name].astype(config.dtype), where.gathered(name))

    x = jax.lax.with_sharding_constraint(whole("embedding")[tokens[:, :-1]], where.rows)
    if where.form.layers == "scan":
        x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
    else:
        for weights in params["layers"]:
            x = layer(x, weights)
    logits = normed(x, params["norm"].astype(config.dtype)) @ whole("head")
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()


def optimizer() -> optax.GradientTransformation:
    """AdamW, clipped by global norm; warm-up, then a cosine."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 20, 1000)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))


def init(config: Config, form: Form, key: jax.Array) -> State:
    """The state before the first step."""
    params = init_params(config, form, key)
    return State(params, optimizer().init(params))


def train_step(config: Config, where: Layout, state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
    """One step of AdamW on tokens [microbatches, rows, length + 1] int32; gradients are summed in float32."""

    def add(total: Params, microbatch: jax.Array) -> tuple[Params, jax.Array]:
        loss, gradients = jax.value_and_grad(functools.partial(loss_of, config, where))(
            state.params, microbatch
        )
        return jax.tree.map(jnp.add, total, gradients), loss

    if len(tokens) == 1:
        loss, gradients = jax.value_and_grad(functools.partial(loss_of, config, where))(
            state.params, tokens[0]
        )
    else:
        nothing = jax.tree.map(jnp.zeros_like, state.params)
        gradients, losses = jax.lax.scan(add, nothing, tokens)
        gradients = jax.tree.map(lambda total: total / len(tokens), gradients)
        loss = losses.mean()
    updates, opt_state = optimizer().update(gradients, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state), loss


def state_shardings(config: Config, where: Layout) -> State:
    """Where each array of the state lives; moments lie with their parameters."""
    shapes = jax.eval_shape(lambda: init(config, where.form, jax.random.key(0)))

    def stored(path: Any, _leaf: Any) -> NamedSharding:
        return where.stored(path[-1].key, stacked=where.form.layers == "scan" and path[0].key == "layers")

    params = jax.tree_util.tree_map_with_path(stored, shapes.params)
    opt_state = optax.tree_map_params(
        optimizer(), lambda _leaf, sharding: sharding, shapes.opt_state, params,
        transform_non_params=lambda _leaf: where.everywhere,
    )  # fmt: skip
    return State(params, opt_state)


def compile_step(config: Config, where: Layout) -> Any:
    """The jitted step (state, tokens) -> (state, loss); the old state is donated."""
    shardings = state_shardings(config, where)
    tokens = NamedSharding(where.mesh, PartitionSpec(None, "data"))
    return jax.jit(
        functools.partial(train_step, config, where),
        donate_argnums=0,
        in_shardings=(shardings, tokens),
        out_shardings=(shardings, where.everywhere),
    )


def abstract_arguments(config: Config, where: Layout) -> tuple[State, jax.ShapeDtypeStruct]:
    """Shapes of the step's arguments, to lower it without their memory."""
    state = jax.eval_shape(lambda: init(config, where.form, jax.random.key(0)))
    rows = config.rows_per_device * where.mesh.shape["data"]
    return state, jax.ShapeDtypeStruct((where.form.accumulate, rows, config.length + 1), jnp.int32)


def batch_of(config: Config, where: Layout, text: np.ndarray, seed: int, step: int) -> jax.Array:
    """The step's tokens, the same however the devices are spread over processes."""
    _, shape = abstract_arguments(config, where)
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - shape.shape[-1], shape.shape[:2])
    tokens = text[starts[..., None] + np.arange(shape.shape[-1])].astype(np.int32)
    sharding = NamedSharding(where.mesh, PartitionSpec(None, "data"))
    return jax.make_array_from_callback(shape.shape, sharding, lambda index: tokens[index])


def main() -> None:
    """Train and record."""
    parser = parallel.parser(__doc__)
    parser.add_argument(
        "--size", default="tiny", help="table of the file: large, full or tiny (default tiny)"
    )
    parser.add_argument(
        "--shard", choices=SHARDS, default="dp", help="what is split over the devices (default dp)"
    )
    parser.add_argument(
        "--layers", choices=LAYERS, default="scan", help="a loop over layers, or none (default scan)"
    )
    parser.add_argument(
        "--recompute",
        choices=RECOMPUTE,
        default="dots",
        help="what is saved for the backward pass (default dots: matmuls)",
    )
    parser.add_argument(
        "--accumulate", type=parallel.positive_int, default=1, help="microbatches a step (default 1)"
    )
    parser.add_argument(
        "--projections",
        choices=PROJECTIONS,
        default="apart",
        help="a matrix each for query, key and value, or one (default apart)",
    )
    args = parser.parse_args()
    config = parallel.loaded(lambda: load(args.size))
    parallel.initialize(args)
    form = Form(args.shard, args.layers, args.recompute, args.accumulate, args.projections)
    where = layout(form)
    shardings = state_shardings(config, where)
    key = jax.random.key(args.seed, impl="rbg")
    state = jax.jit(functools.partial(init, config, form), out_shardings=shardings)(key)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    parallel.say(
        f"{parameters} parameters, {' '.join(f'{name} {value}' for name, value in form._asdict().items())}"
    )
    text = standard_library_text()
    step = compile_step(config, where)
    batch = functools.partial(batch_of, config, where, text, args.seed)
    _, record = parallel.fit(step, state, batch, args)
    run = {
        "model": "llama",
        "size": args.size,
        "seed": args.seed,
        "steps": args.steps,
        "parameters": parameters,
    }
    parallel.finish({**run, **form._asdict(), **record}, args.json)


if __name__ == "__main__":
    main()
