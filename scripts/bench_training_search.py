"""What a search costs a training that goes on meanwhile, on the demo's step: two devices of one process.

Trainings in turn, each a process of its own: with `ENABLE_SEARCH` unset, with a search before the first step, and with
one while it trains (`DISCO_WHEN=training`). Printed are, of each repetition, the first step's time, what part of the
default's steps were made between the beginning of the search and the first call of the plan, for how long the training
was held in that time, and after how many calls and seconds the outcome stood. Other load shifts all of it: the default
runs before and after.

    JAX_PLATFORMS=cpu python scripts/bench_training_search.py --budget 20 --repetitions 3
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WHEN = {
    "unset": {},
    "compile": {"ENABLE_SEARCH": "1"},
    "training": {"ENABLE_SEARCH": "1", "DISCO_WHEN": "training"},
}
_BEGINS, _HELD = "is the training step by its calls", re.compile(r"the training was held for ([0-9.]+) s")
_SETTLED = re.compile(r": (.+) from call (\d+) on: it is the fastest")
_AFTERWARDS = 40
"""Steps after the outcome."""


class Lines(logging.Handler):
    """The plugin's lines, with the seconds at which they came."""

    def __init__(self, began: float) -> None:
        super().__init__()
        self.began = began
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note one."""
        self.lines.append((time.perf_counter() - self.began, record.getMessage()))


def train(steps: int, longest_s: float, layers: int, batch: int) -> None:
    """Train in this process, as its environment says; prints a record."""
    sys.path.insert(0, str(ROOT / "examples"))
    import jax
    import parallel
    import transformer_lm

    transformer_lm.LAYERS = layers
    shardings = parallel.data_parallel()
    state = parallel.initial_state(transformer_lm.init, 0, shardings)
    text = transformer_lm.standard_library_text()
    step = parallel.compile_step(transformer_lm.train_step, shardings)
    batches = [
        parallel.shard(transformer_lm.sample(text, 0, number, batch), shardings) for number in range(8)
    ]
    jax.block_until_ready((state, batches))
    began = time.perf_counter()
    lines = Lines(began)
    logging.getLogger("disco_hlo").addHandler(lines)
    searched = os.environ.get("DISCO_WHEN") == "training"
    ends: list[float] = []
    left = steps
    while left and ends[-1:] < [longest_s]:
        state, loss = step(state, batches[len(ends) % len(batches)])
        jax.block_until_ready((state, loss))
        ends.append(time.perf_counter() - began)
        if not searched or any(_SETTLED.search(text) for _, text in lines.lines):
            left -= 1
    print(json.dumps({"ends": ends, "lines": lines.lines}))


def run(when: str, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """One training in a process of its own, with an empty plan directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DISCO_", "ENABLE_"))}
    with tempfile.TemporaryDirectory() as plans:
        environment = {
            **kept, **WHEN[when], "DISCO_DIR": plans, "DISCO_BUDGET_S": str(options.budget), "DISCO_LOG": "debug",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        }  # fmt: skip
        values = {**vars(options), "steps": steps}
        own = [
            sys.executable,
            __file__,
            "--train",
            *(f"--{n}={v}" for n, v in values.items() if n != "train"),
        ]
        done = subprocess.run(
            own, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def step_s(record: dict[str, Any]) -> float:
    """Median time of a step, the first ones left out."""
    ends = record["ends"][5:]
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def plain(record: dict[str, Any]) -> str:
    """A training without a search beside it."""
    return f"first step {record['ends'][0]:.1f} s, step {step_s(record) * 1e3:.0f} ms"


def told(record: dict[str, Any], default_s: float) -> str:
    """One line about a training that was searched for while it went on."""
    lines, ends = record["lines"], record["ends"]
    begins = [at for at, text in lines if _BEGINS in text]
    settled = [(at, found) for at, text in lines if (found := _SETTLED.search(text))]
    if not begins or not settled:
        return f"not settled after {ends[-1]:.0f} s: {lines[-1:]}"
    begun, (over, outcome) = begins[0], settled[0]
    held_s = sum(float(found[1]) for _, text in lines if (found := _HELD.search(text)))
    made = sum(begun < end < over for end in ends)
    share = made * default_s / (over - begun)
    free = made * default_s / (over - begun - held_s)
    return (
        f"first step {ends[0]:.1f} s; {outcome[1]} from call {outcome[2]}, after {over:.0f} s; held {held_s:.1f} s; "
        f"throughput {share:.2f} of the default's, {free:.2f} while not held; "
        f"then {step_s({'ends': ends[-_AFTERWARDS:]}) * 1e3:.0f} ms a step"
    )


def main() -> None:
    """Print one line for each training."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--longest", type=float, default=400.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4, help="the demo has 4")
    parser.add_argument("--batch", type=int, default=8, help="sequences per device; the demo has 8")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.steps, options.longest, options.layers, options.batch)
        return
    before = run("unset", options.steps, options)
    for _ in range(options.repetitions):
        print(f"load {os.getloadavg()[0]:.1f}; unset: {plain(before)}")
        record = run("training", _AFTERWARDS, options)
        after = run("unset", options.steps, options)
        print("training:", told(record, (step_s(before) + step_s(after)) / 2), flush=True)
        before = after
    print(f"unset: {plain(before)}")
    waited = run("compile", options.steps, options)
    print(f"compile: {plain(waited)}")


if __name__ == "__main__":
    main()
