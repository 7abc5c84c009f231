"""Small but real training steps, as users write them, for tests that compile and run.

Each maker returns ``(step, arguments)``: ``step`` is jitted over two CPU devices, ``arguments`` are
concrete. Batches are split over the devices; parameters and optimizer state are replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random as Dice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Step = tuple[Callable[..., Any], tuple[Any, ...]]
DEVICES = 2


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:DEVICES]), ("data",))


def replicated() -> NamedSharding:
    return NamedSharding(mesh(), PartitionSpec())


def split() -> NamedSharding:
    return NamedSharding(mesh(), PartitionSpec("data"))


def random(seed: int, *shape: int, dtype: Any = np.float32, scale: float = 0.3) -> Any:
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(dtype)


def tokens(seed: int, *shape: int, vocabulary: int = 32) -> Any:
    return np.random.default_rng([seed, *shape]).integers(0, vocabulary, shape).astype(np.int32)


def trained(
    name: str,
    loss: Callable[..., Any],
    parameters: Any,
    batch: tuple[Any, ...],
    optimizer: Any,
    *,
    donate: bool = True,
) -> Step:
    """The usual data-parallel step around a loss."""

    def step(parameters: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, *batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    step.__name__ = step.__qualname__ = name
    parameters = jax.device_put(parameters, replicated())
    state = jax.device_put(optimizer.init(parameters), replicated())
    placed = tuple(jax.device_put(array, split()) for array in batch)
    return jax.jit(step, donate_argnums=(0, 1) if donate else ()), (parameters, state, *placed)


def mlp(dtype: Any = np.float32, *, donate: bool = True) -> Step:
    parameters = {f"w{i}": random(i, 48, 48, dtype=dtype) for i in range(3)} | {
        f"b{i}": random(9 + i, 48, dtype=dtype) for i in range(3)
    }

    def loss(p: Any, x: Any) -> Any:
        for i in range(3):
            x = jnp.tanh(x @ p[f"w{i}"] + p[f"b{i}"])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return trained(
        "mlp_step",
        loss,
        parameters,
        (random(1, 16, 48, dtype=dtype),),
        optax.sgd(0.1, momentum=0.9),
        donate=donate,
    )


def mixed_precision() -> Step:
    """Gradients of two types travel as such: f32, and s32 by hand (XLA:CPU promotes bf16 ones to f32)."""

    def local(x: Any) -> Any:
        return jax.lax.psum(jnp.tanh(x), "data"), jax.lax.psum((x > 0).astype(jnp.int32) * 3, "data")

    def mixed_step(x: Any) -> Any:
        return jax.shard_map(
            local, mesh=mesh(), in_specs=PartitionSpec("data"), out_specs=PartitionSpec(), check_vma=False
        )(x)

    return jax.jit(mixed_step), (jax.device_put(random(3, 8, 32), split()),)


def mlp_wide() -> Step:
    """Large enough for XLA:CPU to split kernels into tasks."""
    parameters = {"w": random(0, 512, 512), "v": random(1, 512, 512)}

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ p["w"]) @ p["v"]) ** 2)

    return trained("wide_step", loss, parameters, (random(2, 1024, 512),), optax.adamw(1e-3))


def resnet(dtype: Any = np.float32) -> Step:
    """A residual block with batch norm over the whole batch: all-reduces in the forward pass too."""
    parameters = {
        "stem": random(0, 3, 3, 3, 8, dtype=dtype),
        **{f"conv{i}": random(1 + i, 3, 3, 8, 8, dtype=dtype) for i in range(2)},
        **{f"scale{i}": np.ones(8, dtype) for i in range(2)},
        **{f"shift{i}": np.zeros(8, dtype) for i in range(2)},
        "head": random(7, 8, 10, dtype=dtype),
    }  # fmt: skip

    def convolve(x: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def normalize(x: Any, scale: Any, shift: Any) -> Any:
        mean = x.mean((0, 1, 2))
        variance = ((x - mean) ** 2).mean((0, 1, 2))
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + shift

    def loss(p: Any, images: Any, labels: Any) -> Any:
        x = convolve(images, p["stem"])
        y = jax.nn.relu(normalize(convolve(x, p["conv0"]), p["scale0"], p["shift0"]))
        x = jax.nn.relu(x + normalize(convolve(y, p["conv1"]), p["scale1"], p["shift1"]))
        logits = (x.mean((1, 2)) @ p["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    batch = (random(5, 8, 8, 8, 3, dtype=dtype), tokens(6, 8, vocabulary=10))
    return trained("resnet_step", loss, parameters, batch, optax.sgd(0.1, momentum=0.9))


def pooled(dtype: Any = np.float32) -> Step:
    """Pooling by the maximum, twice, and relus: gradients are scattered into zeros, and masks select zeros."""
    parameters = {"w": random(0, 3, 8, dtype=dtype), "v": random(1, 8, 8, dtype=dtype)}

    def layer(x: Any, w: Any) -> Any:
        y = x @ w
        window = (1, 2, 2, 1)
        masked = jax.nn.relu(y - y.mean())
        return jax.lax.reduce_window(masked, -np.inf, jax.lax.max, window, window, "VALID")

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(layer(layer(x, p["w"]), p["v"]).astype(jnp.float32))

    batch = (random(2, 8, 12, 12, 3, dtype=dtype),)
    return trained("pooled_step", loss, parameters, batch, optax.sgd(0.1))


def in_place() -> Step:
    """Zeros that slices are written into, zeros that a loop begins with, and the zeros of a relu."""
    parameters = {"w": random(0, 16, 16), "v": random(1, 16, 16)}

    def loss(p: Any, x: Any) -> Any:
        y = x @ p["w"]
        y = y - y.mean()
        written = jax.lax.dynamic_update_slice(jnp.zeros_like(y), y[:2, :3], (1, 1))

        def body(carry: Any, i: Any) -> Any:
            total, masked = carry
            return (total + jnp.tanh(y) * i, jnp.where(total > 0, total, masked)), masked.sum()

        (total, masked), sums = jax.lax.scan(body, (jnp.zeros_like(y), jnp.zeros_like(y)), jnp.arange(3.0))
        return jnp.mean(written + masked + jax.nn.relu(total @ p["v"])) + sums.mean()

    return trained("in_place_step", loss, parameters, (random(2, 8, 16),), optax.sgd(0.1))


def loops_that_read() -> Step:
    """A search along the gradient and two metrics of the parameters, each a loop, the last so small that XLA:CPU puts
    it into a call. They only read what the update reads; the first decides it, on the others nothing in it depends."""
    parameters = {"w": random(0, 16, 16), "v": random(1, 16, 16)}

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - x) ** 2)

    def line_searched_step(p: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(p, x)
        moved = lambda rate: jax.tree.map(lambda w, g: w - rate * g, p, gradient)  # noqa: E731
        too_far = lambda rate: (loss(moved(rate), x) > value) & (rate > 1e-3)  # noqa: E731
        rate = jax.lax.while_loop(too_far, lambda rate: rate / 2, jnp.float32(64.0))
        metric = jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ p["w"]), x)
        small = jax.lax.fori_loop(0, 2, lambda i, y: y.at[i].add(p["v"][i, :4]), x[:, :4])
        return moved(rate), value + metric.mean() + small.mean()

    placed = jax.device_put(parameters, replicated()), jax.device_put(random(2, 8, 16), split())
    return jax.jit(line_searched_step, donate_argnums=(0,)), placed


def cached() -> Step:
    """Layers that write what they compute into one array and read it whole."""
    parameters = {"w": random(0, 16, 16)}

    def loss(p: Any, x: Any) -> Any:
        kept, y = jnp.zeros((8, *x.shape)), x
        for i in range(4):
            y = jax.nn.relu(y @ p["w"])
            kept = kept.at[i].set(y)
            y = y + kept.sum(0) * 0.1
        return jnp.mean((kept.max(0) - x) ** 2) + jnp.mean(jnp.where(kept > 0, kept, 0.0))

    return trained("cached_step", loss, parameters, (random(1, 8, 16),), optax.sgd(0.1))


def written_activations() -> Step:
    """Rows written into activations that are read later as they were, and the other way round."""
    parameters = {"w": random(0, 16, 16), "v": random(1, 16, 16)}

    def loss(p: Any, x: Any) -> Any:
        h = jax.nn.relu(x @ p["w"] + 1)
        z = h.at[1].set(h[0] * 2) @ p["v"]
        q = z.at[1].set(0.5)
        return jnp.mean((z - q) ** 2) + jnp.mean((q - h * z.mean()) ** 2) + jnp.mean(jnp.exp(h * q.mean()))

    return trained("written_step", loss, parameters, (random(2, 8, 16),), optax.adam(0.1))


def replayed(*, donate: bool = True) -> Step:
    """A buffer of past batches and a history of losses: both are written into, and compared with what they were."""
    parameters = {"w": random(0, 16, 16), "v": random(1, 16, 16)}

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - x) ** 2)

    def replayed_step(p: Any, past: Any, history: Any, count: Any, x: Any) -> Any:
        newer = jax.lax.dynamic_update_slice(past, x, (count, 0))
        value, gradient = jax.value_and_grad(loss)(p, past[:8] + newer[4:12])
        longer = history.at[count % 16].set(value)
        rate = jnp.where(longer.mean() > history.mean(), 0.05, 0.1)
        longer = longer.at[(count + 1) % 16].add(rate)
        p = jax.tree.map(lambda w, g: w - rate * g, p, gradient)
        change = jnp.abs(newer - past).mean() + (longer * history).sum() + longer.std()
        return p, newer, longer, count + 1, change

    state = (parameters, random(3, 32, 16), random(4, 16), np.int32(3))
    placed = *jax.device_put(state, replicated()), jax.device_put(random(2, 8, 16), split())
    return jax.jit(replayed_step, donate_argnums=(0, 1, 2, 3) if donate else ()), placed


def writing(seed: int) -> Step:
    """A random program that writes slices into arrays and reads all versions of them, and a step that writes into the
    gradient and into a table."""
    dice = Dice(seed)
    parameters = {"w": random(0, 16, 16), "v": random(1, 16, 16)}

    def scanned(u: Any, v: Any) -> Any:
        body = lambda c, k: (c.at[k].set(c[k] * 0.5 + v.mean(0)), c.sum())  # noqa: E731
        written, sums = jax.lax.scan(body, u, jnp.arange(4))
        return written * jnp.tanh(sums.mean())

    kinds: list[Callable[..., Any]] = [
        lambda u, v, p, i, r: jnp.tanh(u) + v,
        lambda u, v, p, i, r: jax.nn.relu(u - u.mean()) * v,
        lambda u, v, p, i, r: u @ p["v"],
        lambda u, v, p, i, r: u.at[r].set(v[0]),
        lambda u, v, p, i, r: u.at[:, r].set(0.7),
        lambda u, v, p, i, r: u.at[i].set(v[1] + u[2]),
        lambda u, v, p, i, r: jax.lax.dynamic_update_slice(u, v[:2], (i, 0)),
        lambda u, v, p, i, r: u * v.mean() - u.at[1].set(0.0),
        lambda u, v, p, i, r: jnp.zeros_like(u).at[r : r + 2].set(v[:2]) + u,
        lambda u, v, p, i, r: jnp.where(u > 0, u, v.at[i, 3].set(1.0)),
        lambda u, v, p, i, r: scanned(u, v),
    ]
    chosen = [(dice.choice(kinds), dice.random(), dice.random(), dice.randrange(4)) for _ in range(8)]

    def loss(p: Any, table: Any, i: Any, x: Any) -> Any:
        arrays = [x @ p["w"], table, jnp.tanh(x)]
        for kind, one, other, row in chosen:
            read = arrays[int(one * len(arrays))], arrays[int(other * len(arrays))]
            arrays.append(kind(*read, p, i, row))
        return sum(jnp.mean(jnp.tanh(array) * arrays[0]) for array in arrays), arrays[-1]

    def writing_step(p: Any, table: Any, i: Any, x: Any) -> Any:
        (value, last), gradient = jax.value_and_grad(loss, has_aux=True)(p, table, i, x)
        newer = table.at[i].set(gradient["w"][0]).at[i + 1].set(table[0] * value)
        frozen = jax.tree.map(lambda g: g.at[0].set(0.0), gradient)
        size = jnp.linalg.norm(gradient["v"])
        p = jax.tree.map(
            lambda w, g, f: w - 0.1 * f - 0.01 * g * newer.mean() / (1 + size), p, gradient, frozen
        )
        return p, newer, i + 1, value + jnp.abs(table * newer).sum(), last.sum(0)

    state = jax.device_put((parameters, random(5, 16, 16), np.int32(3)), replicated())
    donated = (0, 1) if dice.random() < 0.5 else ()
    return jax.jit(writing_step, donate_argnums=donated), (*state, jax.device_put(random(2, 16, 16), split()))


def without_elements() -> Step:
    """A parameter of no elements, as a layer of width 0 or an empty table has, with state of its own."""
    parameters = {"w": random(0, 16, 16), "none": np.zeros((0, 4), np.float32)}

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ p["w"]) ** 2) + p["none"].sum()

    return trained("empty_step", loss, parameters, (random(1, 8, 16),), optax.adam(1e-3))


def spectral() -> Step:
    """Complex parameters, and a Fourier transform."""
    parameters = {"f": random(0, 17) + 1j * random(1, 17), "w": random(2, 32, 32)}
    parameters["f"] = parameters["f"].astype(np.complex64)

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.fft.irfft(jnp.fft.rfft(x) * p["f"], 32) @ p["w"]) ** 2)

    return trained("spectral_step", loss, parameters, (random(3, 8, 32),), optax.sgd(0.1))


def _layer_norm(x: Any, scale: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale


def _block(x: Any, p: Any) -> Any:
    """One pre-norm transformer layer; x is [batch, sequence, width]."""
    width = x.shape[-1]
    y = _layer_norm(x, p["norm1"])
    query, key, value = jnp.split(y @ p["qkv"], 3, axis=-1)
    scores = jnp.einsum("bsd,btd->bst", query, key) / np.sqrt(width).astype(x.dtype)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.asarray(-1e4, x.dtype))
    x = x + jax.nn.softmax(scores) @ value @ p["out"]
    return x + jax.nn.gelu(_layer_norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def _block_parameters(seed: int, width: int, dtype: Any) -> dict[str, Any]:
    return {
        "qkv": random(seed, width, 3 * width, dtype=dtype),
        "out": random(seed + 1, width, width, dtype=dtype),
        "up": random(seed + 2, width, 2 * width, dtype=dtype),
        "down": random(seed + 3, 2 * width, width, dtype=dtype),
        "norm1": np.ones(width, dtype),
        "norm2": np.ones(width, dtype),
    }


def transformer(dtype: Any = np.float32, layers: int = 2) -> Step:
    """Embedding (its gradient is a scatter), some layers, AdamW."""
    parameters = {
        "embedding": random(0, 32, 16, dtype=dtype),
        "layers": [_block_parameters(10 * i, 16, dtype) for i in range(1, 1 + layers)],
        "head": random(3, 16, 32, dtype=dtype),
    }

    def loss(p: Any, text: Any) -> Any:
        x = p["embedding"][text]
        for layer in p["layers"]:
            x = _block(x, layer)
        logits = (x @ p["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text).mean()

    return trained("transformer_step", loss, parameters, (tokens(4, 4, 12),), optax.adamw(1e-3))


def llama(layers: int = 2) -> Step:
    """Layers as people train them today: rotary positions whose tables all layers share, RMS norms, a gated
    feed-forward, computed in bf16 from f32 weights and again in the backward pass but for matmuls; the norm of all
    gradients is clipped."""
    width, heads, length = 16, 2, 12
    half = width // heads // 2

    def weights(seed: int) -> dict[str, Any]:
        shapes = {"query": width, "key": width, "value": width, "out": width, "gate": 24, "up": 24}
        made = {name: random(seed + i, width, size) for i, (name, size) in enumerate(shapes.items())}
        norms = {f"norm{i}": np.ones(width, np.float32) for i in (1, 2)}
        return made | norms | {"down": random(seed + 9, 24, width)}

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        left, right = x[..., :half], x[..., half:]
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    def normal(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale

    def block(x: Any, p: Any, cos: Any, sin: Any) -> Any:
        y = normal(x, p["norm1"])
        query, key, value = ((y @ p[n]).reshape(*y.shape[:2], heads, -1) for n in ("query", "key", "value"))
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        scores = jnp.einsum("bshd,bthd->bhst", query, key).astype(jnp.float32)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e4)
        seen = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores).astype(x.dtype), value)
        x = x + seen.reshape(x.shape) @ p["out"]
        y = normal(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    layer = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)

    def loss(p: Any, text: Any) -> Any:
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        angle = jnp.arange(length)[:, None] / 10000.0 ** (jnp.arange(half) / half)
        cos, sin = (f(angle).astype(jnp.bfloat16)[None, :, None, :] for f in (jnp.cos, jnp.sin))
        x = p["embedding"][text]
        for w in p["layers"]:
            x = layer(x, w, cos, sin)
        logits = (x @ p["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text).mean()

    parameters = {
        "embedding": random(0, 32, width),
        "layers": [weights(10 * i) for i in range(1, 1 + layers)],
        "head": random(3, width, 32),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return trained("llama_step", loss, parameters, (tokens(4, 4, length),), optimizer)


def lstm(dtype: Any = np.float32) -> Step:
    parameters = {
        "embedding": random(0, 32, 16, dtype=dtype),
        "kernel": random(1, 32, 64, dtype=dtype),
        "bias": np.zeros(64, dtype),
        "head": random(2, 16, 32, dtype=dtype),
    }

    def loss(p: Any, text: Any) -> Any:
        def cell(carry: Any, x: Any) -> Any:
            hidden, memory = carry
            gates = jnp.concatenate([x, hidden], -1) @ p["kernel"] + p["bias"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
            return (hidden, memory), hidden

        x = jnp.swapaxes(p["embedding"][text], 0, 1)
        zero = jnp.zeros((text.shape[0], 16), x.dtype)
        _, states = jax.lax.scan(cell, (zero, zero), x)
        logits = (jnp.swapaxes(states, 0, 1) @ p["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text).mean()

    return trained("lstm_step", loss, parameters, (tokens(5, 4, 10),), optax.sgd(0.1, momentum=0.9))


def scanned_layers(dtype: Any = np.float32) -> Step:
    """A transformer that scans over its stacked layers: most of the step lies inside loops."""
    stacked = jax.tree.map(
        lambda *layers: np.stack(layers), *[_block_parameters(10 * i, 16, dtype) for i in (1, 2, 3)]
    )
    parameters = {
        "embedding": random(0, 32, 16, dtype=dtype),
        "layers": stacked,
        "head": random(3, 16, 32, dtype=dtype),
    }

    def loss(p: Any, text: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, layer: (_block(x, layer), None), p["embedding"][text], p["layers"])
        logits = (x @ p["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text).mean()

    return trained("scanned_step", loss, parameters, (tokens(4, 4, 12),), optax.sgd(0.1, momentum=0.9))


def printing(dtype: Any = np.float32) -> Step:
    """A step with a host callback."""
    parameters = {"w": random(0, 32, 32, dtype=dtype), "v": random(1, 32, 8, dtype=dtype)}

    def loss(p: Any, x: Any) -> Any:
        value = jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"]).astype(jnp.float32) ** 2)
        jax.debug.print("loss {}", value)
        return value

    return trained("printing_step", loss, parameters, (random(2, 8, 32, dtype=dtype),), optax.sgd(0.1))


def _three_layers(p: Any, x: Any) -> Any:
    for i in range(3):
        x = jnp.tanh(x @ p[f"w{i}"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def mapped_by_hand(dtype: Any = np.float32) -> Step:
    """The same kind of step written with shard_map and an explicit psum."""
    parameters = {f"w{i}": random(i, 32, 32, dtype=dtype) for i in range(3)}

    def local(p: Any, x: Any) -> Any:
        gradients = jax.tree.map(lambda g: jax.lax.pmean(g, "data"), jax.grad(_three_layers)(p, x))
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradients)

    def shard_map_step(p: Any, x: Any) -> Any:
        return jax.shard_map(
            local,
            mesh=mesh(),
            in_specs=(PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(p, x)

    placed = jax.device_put(parameters, replicated()), jax.device_put(random(4, 8, 32, dtype=dtype), split())
    return jax.jit(shard_map_step, donate_argnums=(0,)), placed


def exchanged() -> Step:
    """A layer whose devices take turns with their halves of the batch, exchange features and pass gradients on."""
    weights = {"w0": random(60, 16, 16), "w1": random(61, 16, 16)}
    around = [(0, 1), (1, 0)]

    def loss(p: Any, x: Any) -> Any:
        own = jnp.tanh(x @ p["w0"])
        theirs, rows = (jax.lax.ppermute(one, "data", around) for one in (own, x))
        mixed = jax.lax.all_to_all(jnp.sin(own), "data", 1, 0, tiled=True)
        shifted = jax.lax.ppermute(x @ p["w1"], "data", around[:1])
        return jnp.mean((own * theirs + shifted + rows) ** 2) + jnp.mean(mixed)

    def exchanged_step(p: Any, x: Any) -> Any:
        def inner(p: Any, x: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(p, x)
            gradients = jax.tree.map(lambda g: jax.lax.pmean(g, "data"), gradients)
            return jax.tree.map(lambda a, g: a - 0.1 * g, p, gradients), jax.lax.pmean(value, "data")

        specs = PartitionSpec(), PartitionSpec("data")
        mapped = jax.shard_map(inner, mesh=mesh(), in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        return mapped(p, x)

    placed = jax.device_put(weights, replicated()), jax.device_put(random(62, 16, 16), split())
    return jax.jit(exchanged_step, donate_argnums=(0,)), placed


def pmapped(dtype: Any = np.float32) -> Step:
    """The same step under pmap: replicas instead of partitions, all-reduces without channels."""
    parameters = {f"w{i}": np.stack([random(i, 32, 32, dtype=dtype)] * DEVICES) for i in range(3)}

    def pmap_step(p: Any, x: Any) -> Any:
        gradients = jax.lax.pmean(jax.grad(_three_layers)(p, x), "data")
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradients)

    step = jax.pmap(pmap_step, axis_name="data", devices=jax.devices()[:DEVICES], donate_argnums=(0,))
    return step, (parameters, random(4, DEVICES, 4, 32, dtype=dtype))
