"""A small data-parallel training script, as a user writes it: it knows nothing of the plugin.

    python train.py --kind jit --steps 4
    TRAIN_RANK=0 TRAIN_SIZE=2 TRAIN_PORT=29000 python train.py      (one of several processes)
    TRAIN_PORT=29000 mpiexec -n 2 python train.py

Prints one JSON object with the losses. The last statements keep the step alive until the process ends.
"""

import argparse
import json
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LAYERS = 2
WIDTH = 32
KINDS = ["jit", "shard_map", "pmap", "no_all_reduce", "tensor", "scheduled", "scanned"]

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=KINDS, default="jit")
parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
parser.add_argument("--length", type=int, default=100, help="steps until a schedule has its last rate")
parser.add_argument("--batch", type=int, default=4, help="rows per device")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--last-batch", type=int, help="rows per device in the last step, if others")
args = parser.parse_args()
TENSOR, SCANNED = args.kind == "tensor", args.kind == "scanned"

rank = os.environ.get("TRAIN_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
size = os.environ.get("TRAIN_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE")
if rank is not None:
    address = f"127.0.0.1:{os.environ['TRAIN_PORT']}"
    patience_s = int(os.environ.get("TRAIN_HEARTBEAT_S", "100"))
    jax.distributed.initialize(
        address, num_processes=int(size), process_id=int(rank), heartbeat_timeout_seconds=patience_s
    )


def loss_of(params, x, y):
    for layer in range(LAYERS):
        x = jnp.tanh(x @ params[f"w{layer}"] + params[f"b{layer}"])
    return jnp.mean((x - y) ** 2)


def tensor_loss_of(params, x, y):
    """The layers' inner width split over the devices (see `tensor` below): an all-reduce inside each layer."""
    for layer in range(LAYERS):
        x = x + jnp.tanh(x @ params[f"w{layer}"]) @ params[f"v{layer}"] + params[f"b{layer}"]
    return jnp.mean((x - y) ** 2)


def scanned_loss_of(params, x, y):
    """Layers in a loop that gathers each layer's weights, which are split over the devices (see `scanned` below)."""

    def layer(x, weights):
        w, v, b = jax.lax.with_sharding_constraint(weights, whole)
        return x + jnp.tanh(x @ w) @ v + b, None

    x, _ = jax.lax.scan(layer, x, (params["w"], params["v"], params["b"]))
    return jnp.mean((x - y) ** 2)


def updated(params, momentum, gradients, rate=args.rate):
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - rate * m, params, momentum), momentum


def train_step(params, momentum, x, y):
    inner = tensor_loss_of if TENSOR else scanned_loss_of if SCANNED else loss_of
    loss, gradients = jax.value_and_grad(inner)(params, x, y)
    return *updated(params, momentum, gradients), loss


def scheduled_step(params, state, x, y):
    """The rate falls as half a cosine wave; the state knows how many steps were made, 50 of them earlier."""
    momentum, made = state
    rate = args.rate * 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.minimum(made, args.length) / args.length))
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    params, momentum = updated(params, momentum, gradients, rate)
    return params, (momentum, made + 1), loss


def mean(value):
    return jax.lax.pmean(value, "data")


def mapped_step(params, momentum, x, y, reduce=mean):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    return *updated(params, momentum, reduce(gradients)), reduce(loss)


def lonely_step(params, momentum, x, y):
    params, momentum, loss = mapped_step(params, momentum, x, y, reduce=lambda value: value)
    return params, momentum, loss[None]


rng = np.random.default_rng(0)
params = {f"w{i}": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for i in range(LAYERS)}
params |= {f"b{i}": np.zeros(WIDTH, np.float32) for i in range(LAYERS)}
if TENSOR:
    params |= {
        f"v{i}": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for i in range(LAYERS)
    }
if SCANNED:
    params = {
        "w": rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5,
        "v": rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5,
        "b": np.zeros((LAYERS, WIDTH), np.float32),
    }
momentum = jax.tree.map(np.zeros_like, params)

mesh = Mesh(np.array(jax.devices()), ("data",))
whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
first = jax.process_index() * jax.local_device_count()


def batch(number):
    rows = args.last_batch if args.last_batch and number == args.steps - 1 else args.batch
    rng = np.random.default_rng([1, number])
    x = rng.normal(size=(rows * jax.device_count(), WIDTH)).astype(np.float32)
    y = np.tanh(x[:, ::-1])
    mine = slice(first * rows, (first + jax.local_device_count()) * rows)
    return (x, y) if TENSOR else (x[mine], y[mine])


if args.kind == "pmap":
    train = jax.pmap(mapped_step, axis_name="data", donate_argnums=(0, 1))
    devices = jax.local_device_count()
    params, momentum = jax.tree.map(lambda leaf: np.stack([leaf] * devices), (params, momentum))
    place = lambda leaf: leaf.reshape(devices, args.batch, WIDTH)  # noqa: E731
elif TENSOR:
    place = partial(jax.device_put, device=whole)
    tensor = {"w": NamedSharding(mesh, PartitionSpec(None, "data")), "v": split, "b": whole}
    shardings = {name: tensor[name[0]] for name in params}
    params, momentum = jax.device_put((params, momentum), (shardings, shardings))
    train = jax.jit(train_step, donate_argnums=(0, 1), out_shardings=(shardings, shardings, whole))
elif SCANNED:
    place = partial(jax.make_array_from_process_local_data, split)
    layers = NamedSharding(mesh, PartitionSpec(None, "data"))
    shardings = {"w": layers, "v": layers, "b": whole}
    params, momentum = jax.device_put((params, momentum), (shardings, shardings))
    train = jax.jit(train_step, donate_argnums=(0, 1), out_shardings=(shardings, shardings, whole))
else:
    place = partial(jax.make_array_from_process_local_data, split)
    params, momentum = jax.device_put((params, momentum), whole)
    step, outputs = train_step, whole
    if args.kind == "scheduled":
        step, momentum = scheduled_step, jax.device_put((momentum, np.float32(50)), whole)
    elif args.kind != "jit":
        inner = mapped_step if args.kind == "shard_map" else lonely_step
        everywhere, rows = PartitionSpec(), PartitionSpec("data")
        results = (everywhere, everywhere, everywhere if args.kind == "shard_map" else rows)
        specs = (everywhere, everywhere, rows, rows)
        step = jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
        step.__name__ = inner.__name__
        outputs = jax.tree.map(partial(NamedSharding, mesh), results)
    train = jax.jit(step, donate_argnums=(0, 1), out_shardings=outputs)

losses = []
for number in range(args.steps):
    params, momentum, loss = train(params, momentum, *map(place, batch(number)))
    losses.append(float(np.ravel(loss.addressable_data(0))[0]))
print(json.dumps({"losses": losses}))
