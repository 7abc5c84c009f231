"""Train one of the models on random data of its true shapes, data parallel over every device of the job.

    python examples/train.py --model bert --size full
    JAX_NUM_CPU_DEVICES=2 JAX_PLATFORMS=cpu python examples/train.py --model bert --size tiny
    mpiexec -n 2 python examples/train.py --model bert --size full --distributed

Sizes and the batch per device come from configs/models/<model>.toml.
"""

import importlib
from pathlib import Path

import parallel
from models.training import Training, make_rows, parameter_count, read_config

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "models"
MODELS = ("bert", "gpt12", "reformer", "resnet50", "rnnlm", "transformer", "vgg19")
BATCHES = 2


def load(model: str, size: str, config: Path | None = None) -> Training:
    """The model's training step at that size; ValueError or OSError where its configuration is bad."""
    module = importlib.import_module(f"models.{model}")
    return module.build(read_config(module.Config, config or CONFIGS / f"{model}.toml", size))


def main() -> None:
    """Train and record."""
    parser = parallel.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--size", default="tiny", help="table of the file: full or tiny (default tiny)")
    parser.add_argument("--config", type=Path, metavar="TOML", help="instead of configs/models/<model>.toml")
    args = parser.parse_args()
    training = parallel.loaded(lambda: load(args.model, args.size, args.config))
    parallel.initialize(args)

    shardings = parallel.data_parallel()
    state = parallel.initial_state(training.init, args.seed, shardings)
    parameters = parameter_count(state)
    rows = parallel.local_rows(training.batch_per_device)
    # A few batches, kept on the devices and used in turn: the step is timed, not the host's random numbers.
    batches = [
        parallel.shard(make_rows(training.example, args.seed, index, range(rows.start, rows.stop)), shardings)
        for index in range(BATCHES)
    ]
    size = f"{parameters} parameters, {training.batch_per_device} rows per device"
    parallel.say(f"{args.model} ({args.size}): {size}")
    step = parallel.compile_step(training.step, shardings)
    state, record = parallel.fit(step, state, lambda index: batches[index % BATCHES], args)
    run = {
        "model": args.model,
        "size": args.size,
        "seed": args.seed,
        "steps": args.steps,
        "parameters": parameters,
        "batch_per_device": training.batch_per_device,
    }
    parallel.finish({**run, **record}, args.json)


if __name__ == "__main__":
    main()
