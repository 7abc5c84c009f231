"""What the examples share: starting the job, laying data over its devices, and the training loop.

Plain data parallelism by `jax.jit`: the training state is replicated, the batch is split along its
first axis, and XLA adds the all-reduces of the gradients. The same code runs in one process with
any number of devices and in several processes, one per GPU or CPU (`mpiexec -n 2 ... --distributed`).
"""

import argparse
import json
import os
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

State = Any
Batch = Any
Step = Callable[[State, Batch], tuple[State, jax.Array]]

DEFAULT_PORT = 29765
CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "parallel"


class Shardings(NamedTuple):
    """Where arrays live: `replicated` on every device, `batch` split along axis 0 over all of them."""

    replicated: NamedSharding
    batch: NamedSharding


def positive_int(text: str) -> int:
    """argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return value


def seed_int(text: str) -> int:
    """argparse type: an integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, got {text}")
    return value


def json_path(text: str) -> Path:
    """argparse type: a file to write, whose directory exists."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory; expected a file to write")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the directory {path.absolute().parent} does not exist")
    return path


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options every example has: how long to train, what to record, how the job is started."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=positive_int, default=100, help="training steps (default 100)")
    parser.add_argument(
        "--seed", type=seed_int, default=0, help="seed of the parameters and the data (default 0)"
    )
    parser.add_argument("--log-every", type=positive_int, default=10, help="steps between lines (default 10)")
    parser.add_argument("--json", type=json_path, metavar="OUT", help="write losses and step times here")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="several processes, started by mpiexec (rank and size from OMPI_COMM_WORLD_RANK and _SIZE)",
    )
    parser.add_argument(
        "--port",
        type=positive_int,
        default=os.environ.get("JAX_COORDINATOR_PORT", str(DEFAULT_PORT)),
        help=f"coordinator's port (default $JAX_COORDINATOR_PORT or {DEFAULT_PORT})",
    )
    parser.add_argument("--host", default="127.0.0.1", help="coordinator's host (default 127.0.0.1)")
    return parser


def loaded(load: Callable[[], Any]) -> Any:
    """What `load` makes of a configuration; one that is bad ends the script with one message and code 2."""
    try:
        return load()
    except (OSError, ValueError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def read_sizes(kind: Any, path: Path, size: str) -> Any:
    """Table `[size]` of a TOML file as a NamedTuple; ValueError where a key is missing or unknown."""
    table = tomllib.loads(path.read_text()).get(size)
    if table is None:
        raise ValueError(f"{path} has no table [{size}]")
    if table.keys() != set(kind._fields):
        raise ValueError(f"{path} [{size}] has keys {sorted(table)}, expected {sorted(kind._fields)}")
    return kind(**table)


def initialize(args: argparse.Namespace) -> None:
    """Join the other processes of the job when `--distributed` is given; must precede any use of a device.

    Exits with code 2 where mpiexec did not start this process.
    """
    if not args.distributed:
        return
    environment = os.environ
    if "OMPI_COMM_WORLD_RANK" not in environment:
        print(
            "--distributed: OMPI_COMM_WORLD_RANK is not set; start with `mpiexec -n 2 python ...`, "
            "or leave --distributed out",
            file=sys.stderr,
        )
        raise SystemExit(2)
    jax.distributed.initialize(
        coordinator_address=f"{args.host}:{args.port}",
        num_processes=int(environment["OMPI_COMM_WORLD_SIZE"]),
        process_id=int(environment["OMPI_COMM_WORLD_RANK"]),
        local_device_ids=[_local_gpu(environment)],
    )


def _local_gpu(environment: "os._Environ[str]") -> int:
    # One GPU per process. CUDA_VISIBLE_DEVICES may list the host's GPUs or just this process's own.
    # CPU devices are not affected.
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    local_rank = int(environment["OMPI_COMM_WORLD_LOCAL_RANK"])
    return local_rank % len(visible.split(",")) if visible else local_rank


def data_parallel() -> Shardings:
    """Shardings over every device of the job, on one mesh axis called "data"."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    return Shardings(NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data")))


def compile_step(step: Step, shardings: Shardings) -> Step:
    """The jitted data-parallel step `(state, batch) -> (state, loss)`; the old state is donated."""
    return jax.jit(
        step,
        donate_argnums=(0,),
        in_shardings=(shardings.replicated, shardings.batch),
        out_shardings=(shardings.replicated, shardings.replicated),
    )


def initial_state(init: Callable[[jax.Array], State], seed: int, shardings: Shardings) -> State:
    """`init(key)` on every device alike: same seed, same parameters in every process."""
    # The "rbg" generator compiles several times faster than the default one, once per shape drawn.
    key = jax.random.key(seed, impl="rbg")
    return jax.jit(init, out_shardings=shardings.replicated)(key)


def local_rows(rows_per_device: int) -> slice:
    """The rows of the global batch that this process holds: `rows_per_device` for each of its devices."""
    first = sum(device.process_index < jax.process_index() for device in jax.devices())
    return slice(first * rows_per_device, (first + jax.local_device_count()) * rows_per_device)


def shard(local_batch: Batch, shardings: Shardings) -> Batch:
    """Global arrays (rows of all processes) from this process's own rows."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(shardings.batch, x), local_batch)


def fit(
    step: Step, state: State, batch_of: Callable[[int], Batch], args: argparse.Namespace
) -> tuple[State, dict[str, Any]]:
    """Train for `args.steps` steps on `batch_of(0)`, `batch_of(1)`, ...; the final state and a record.

    The record holds `losses` and `step_s`, one entry per step: seconds from the call to the last
    output being ready. The first entry holds the compilation too.
    """
    losses: list[float] = []
    step_s: list[float] = []
    for index in range(args.steps):
        batch = jax.block_until_ready(batch_of(index))
        started = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, batch))
        step_s.append(time.perf_counter() - started)
        losses.append(float(loss))
        if index % args.log_every == 0 or index == args.steps - 1:
            say(f"step {index:5d}   loss {losses[-1]:.4f}   {1e3 * step_s[-1]:9.2f} ms")
    return state, {"losses": losses, "step_s": step_s, **_summary(step_s)}


def _summary(step_s: Sequence[float]) -> dict[str, Any]:
    # The first step compiles, the second may still allocate.
    steady = step_s[2:] or step_s[-1:]
    return {
        "median_step_s": statistics.median(steady),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "device_kind": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


class Compilable(NamedTuple):
    """A jitted function and the shapes it is to be called with."""

    function: Any
    arguments: tuple[Any, ...]


def train_layers(
    model: str,
    description: str | None,
    load: Callable[[str], Any],
    compilable: Callable[..., Compilable],
    drawn: Callable[[Any, Compilable, int], tuple[Any, Sequence[jax.Array]]],
) -> None:
    """An example of layers by themselves, from its options to its record: they are trained, or run forward.

    `load` reads a size, `compilable(config, training=...)` makes the step, `drawn` parameters and rows for a seed.
    """
    options = parser(description)
    options.add_argument("--size", default="tiny", help="table of the file: full or tiny (default tiny)")
    options.add_argument("--forward", action="store_true", help="run the layers, train nothing")
    args = options.parse_args()
    config = loaded(lambda: load(args.size))
    initialize(args)
    made = compilable(config, training=not args.forward)
    params, rows = drawn(config, made, args.seed)

    def run(state: State, _batch: Batch) -> tuple[State, jax.Array]:
        if args.forward:
            return state, jnp.mean(made.function(state, rows[0]).astype(jnp.float32) ** 2)
        stepped: tuple[State, jax.Array] = made.function(state, *rows)
        return stepped

    _, record = fit(run, params, lambda index: index, args)
    finish({"model": model, "size": args.size, "steps": args.steps, **record}, args.json)


def finish(record: dict[str, Any], path: Path | None) -> None:
    """Print the summary line and, from process 0 alone, write the record as JSON: whole or not at all."""
    say(
        f"{record['steps']} steps on {record['devices']} {record['device_kind']} device(s) of "
        f"{record['processes']} process(es): median {1e3 * record['median_step_s']:.2f} ms, "
        f"last loss {record['losses'][-1]:.4f}"
    )
    if path is None or jax.process_index() != 0:
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with partial.open("w") as file:
        file.write(json.dumps(record, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def say(text: str) -> None:
    """Print from process 0 alone."""
    if jax.process_index() == 0:
        print(text, flush=True)
