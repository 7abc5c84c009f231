"""A training of others as it is in their repositories, on data made here (docs/benchmarks/strangers-gpu.md).

    python scripts/train_stranger.py gemma --sources DIR --size full --steps 24

Their checkouts lie in DIR; where one does not, the message has the commands that get it. Their files are not changed.
What they import and the step does not use may be missing (``clu``, ``tensorflow``, ``grain``). What it does use is:
``pip install flax optax chex einops sentencepiece absl-py ml_collections jaxtyping orbax-checkpoint``.

A batch is made before it is asked for, and each step is waited for. On one GPU a search before it takes its name:
``DISCO_MODULE=jax_train_step`` (gemma), ``_fun`` (vit), ``_train_step`` (nanodo).

Exit status: 0 it trained; 1 a checkout or a library is missing; 2 bad arguments.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from strangers.training import Training, put_on_path

NAMES = ("gemma", "nanodo", "vit")
FIRST = 4
"""Steps that do not count: two compile, and two follow them."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--sources", type=Path, required=True, help="folder of the checkouts")
    parser.add_argument("--size", choices=("tiny", "full"), default="tiny", help="tiny is for CPUs (tiny)")
    parser.add_argument("--steps", type=int, default=24, help=f"more than {FIRST} (24)")
    args = parser.parse_args(argv)
    if args.steps <= FIRST:
        parser.error(f"expected --steps of more than {FIRST}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Train."""
    args = arguments(argv)
    try:
        module = importlib.import_module(f"strangers.{args.name}")
        put_on_path(module.SOURCE, args.sources.absolute())
        training = module.training(args.size)
    except (FileNotFoundError, ImportError) as error:
        sys.stderr.write(f"train_stranger: {error}\n")
        return 1
    train(training, args.steps)
    return 0


def train(training: Training, steps: int) -> None:
    """Make so many steps, wait for each, and say what they took and what they came to."""
    import jax
    import numpy as np

    times_ms, loss = [], 0.0
    for number in range(steps):
        batch = jax.block_until_ready(training.batch(number))
        began = time.perf_counter()
        came_back = jax.block_until_ready(training.step(batch))
        times_ms.append((time.perf_counter() - began) * 1e3)
        loss = training.loss(came_back)
        print(f"step {number} loss {loss!r} {times_ms[-1]:.2f} ms", flush=True)
    total = sum(np.asarray(one, np.float64).sum() for one in jax.tree.leaves(training.weights()))
    print(f"sum of the weights {float(total)!r}")
    print(f"{steps} steps: median {statistics.median(times_ms[FIRST:]):.2f} ms, last loss {loss!r}")


if __name__ == "__main__":
    sys.exit(main())
