"""What a search costs a training that goes on meanwhile, and what it gains.

Trainings in turn, each a process of its own with an empty plan directory: XLA's default, a search while the step trains
(`DISCO_WHEN=training`), one before the first step, and the default again, for as many steps as the second made, whose
losses are held against it, and those of the first run, too: not every step computes the same twice. One line of JSON
for each goes to standard output as it ends, and all of it to `--json`. Whatever does not end within `--minutes` is
killed, and says so.

    python scripts/bench_training_search.py --step llama-tiny --json llama-tiny.json
    JAX_PLATFORMS=cpu python scripts/bench_training_search.py --step demo --layers 1 --batch 2 --budget 15
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import logging
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo_job import free_port, last_lines

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("demo", "llama-tiny", "llama-full")
WHEN = {
    "default": {},
    "compile": {"ENABLE_SEARCH": "1", "DISCO_WHEN": "compile"},
    "training": {"ENABLE_SEARCH": "1", "DISCO_WHEN": "training"},
}
_BEGINS = "is the training step by its calls"
_HELD = re.compile(r"the training was held for ([0-9.]+) s, in (\d+) pieces of up to (\d+) ms: (.+)")
_SETTLED = re.compile(r": (.+) from call (\d+) on: (?:it is the fastest|no candidate is left)")
_ENDED = "has ended, and the training goes on"
_AFTERWARDS = 40
"""Steps after the outcome."""
_DEFAULT = "XLA default"
_SLOW, _MOST_SLOW = 1.5, 200
"""Steps that take so many times as long as the default's are listed, so many of them."""
_MORE = 20
"""Steps of a job of several processes after its first one wanted no more."""
_WARM_UP = 5
_AROUND_S = 25.0
"""Of a process beside its steps."""
_BATCHES = 256
"""Fewer are soon known by heart, and then a rounding alters the loss by as much as it is."""

Step = Callable[[Any, Any], tuple[Any, Any]]


class Lines(logging.Handler):
    """The plugin's lines, with the seconds at which they came."""

    def __init__(self, began: float) -> None:
        super().__init__()
        self.began = began
        self.lines: list[tuple[float, str]] = []
        self.over = False
        """Whether a search has come to its end."""

    def emit(self, record: logging.LogRecord) -> None:
        """Note one."""
        text = record.getMessage()
        self.lines.append((time.perf_counter() - self.began, text))
        self.over = self.over or bool(_SETTLED.search(text)) or _ENDED in text


# --- one training, in this process ----------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Train as the environment says; prints a record."""
    sys.path.insert(0, str(ROOT / "examples"))
    import jax

    if options.processes > 1:
        own = None if os.environ.get("JAX_PLATFORMS") == "cpu" else options.rank
        jax.distributed.initialize(options.address, options.processes, options.rank, local_device_ids=own)
    end = End(options)
    step, state, batches = (demo if options.step == "demo" else llama)(options)
    jax.block_until_ready((state, batches))
    began = time.perf_counter()
    log = Lines(began)
    logging.getLogger("disco_hlo").addHandler(log)
    searched = os.environ.get("DISCO_WHEN") == "training"
    ends: list[float] = []
    losses: list[float] = []
    left = options.steps
    while not end.reached(len(ends), wanted=not left or ends[-1:] >= [options.longest]):
        state, loss = step(state, batches[len(ends) % len(batches)])
        losses.append(float(loss))
        ends.append(time.perf_counter() - began)
        left -= bool(left) and (not searched or log.over)
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    record = {"ends": ends, "losses": losses, "lines": log.lines, "peak_bytes": max(peaks)}
    print(json.dumps({**record, "device": jax.devices()[0].device_kind, "devices": jax.device_count()}))


class End:
    """The step before which a training ends: on all processes the same, where there are several."""

    def __init__(self, options: argparse.Namespace) -> None:
        from jax._src import distributed

        self._client = distributed.global_state.client if options.processes > 1 else None
        self._leads = options.rank == 0
        self._at: int | None = None

    def reached(self, done: int, *, wanted: bool) -> bool:
        """Whether it is reached after so many steps; ``wanted`` counts on the first process."""
        if self._client is None:
            return wanted
        if self._at is None and self._leads and wanted:
            self._at = done + _MORE
            self._client.key_value_set("bench/end", str(self._at))
        elif self._at is None and not self._leads:
            with contextlib.suppress(Exception):  # it is not there yet
                self._at = int(self._client.key_value_try_get("bench/end"))
        return self._at is not None and done >= self._at


def demo(options: argparse.Namespace) -> tuple[Step, Any, list[Any]]:
    """The demo's step."""
    import parallel
    import transformer_lm

    transformer_lm.LAYERS = options.layers
    shardings = parallel.data_parallel()
    state = parallel.initial_state(transformer_lm.init, 0, shardings)
    text = transformer_lm.standard_library_text()
    batches = [
        parallel.shard(transformer_lm.sample(text, 0, number, options.batch), shardings)
        for number in range(_BATCHES)
    ]
    return parallel.compile_step(transformer_lm.train_step, shardings), state, batches


def llama(options: argparse.Namespace) -> tuple[Step, Any, list[Any]]:
    """A Llama's step."""
    import jax
    import llama
    import transformer_lm

    config, form = llama.load(options.step.removeprefix("llama-")), llama.Form(options.shard)
    where = llama.layout(form)
    initial = jax.jit(
        functools.partial(llama.init, config, form), out_shardings=llama.state_shardings(config, where)
    )
    state = initial(jax.random.key(0, impl="rbg"))
    text = transformer_lm.standard_library_text()
    batches = [llama.batch_of(config, where, text, 0, number) for number in range(_BATCHES)]
    return llama.compile_step(config, where), state, batches


# --- all of them ----------------------------------------------------------------------------------


def run(when: str, steps: int, longest_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """One training in a process of its own; what went wrong is its ``error``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "DISCO_STRUCTURE" or not name.startswith(("DISCO_", "ENABLE_"))
    }
    if kept.get("JAX_PLATFORMS") == "cpu" and "device_count" not in kept.get("XLA_FLAGS", ""):
        devices = 2 // options.processes
        kept["XLA_FLAGS"] = f"{kept.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    shown = {name: getattr(options, name) for name in ("step", "layers", "batch", "shard", "processes")}
    shown |= {"steps": steps, "longest": max(0.8 * longest_s, longest_s - _AROUND_S)}
    shown |= {"address": f"127.0.0.1:{free_port()}"}
    command = [sys.executable, __file__, "--train", *(f"--{name}={value}" for name, value in shown.items())]
    settings = {"DISCO_BUDGET_S": str(options.budget), "DISCO_LOG": "debug"}
    settings |= {"DISCO_SHARE": str(options.share)} if options.share else {}
    with tempfile.TemporaryDirectory() as folder:
        plans = Path(folder) / "plans"
        plans.mkdir()
        environment = {**kept, **WHEN[when], **settings, "DISCO_DIR": str(plans)}
        said = [
            (Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err") for rank in range(options.processes)
        ]
        jobs = []
        for rank, (out, err) in enumerate(said):
            with out.open("w") as to_out, err.open("w") as to_err:
                own = [*command, f"--rank={rank}"]
                jobs.append(subprocess.Popen(own, env=environment, stdout=to_out, stderr=to_err))
        end = time.monotonic() + max(1.0, longest_s)
        try:
            codes = [job.wait(max(0.1, end - time.monotonic())) for job in jobs]
        except subprocess.TimeoutExpired:
            return {"error": f"killed after {longest_s:.0f} s", "last": last_lines(said[0][1], 200)}
        finally:
            for job in jobs:
                job.kill()
                job.wait()
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            return {"error": f"rank {rank} ended with {codes[rank]}", "last": last_lines(said[rank][1], 200)}
        found: dict[str, Any] = json.loads(said[0][0].read_text().splitlines()[-1])
    return found


def median_step_ms(ends: list[float]) -> float:
    """Median time of a step."""
    return 1e3 * statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


def mean_step_s(*records: dict[str, Any]) -> float:
    """Mean time of a step in several trainings, each of the same weight: what throughput is measured by."""
    each = [record["ends"][_WARM_UP:] for record in records]
    return statistics.mean(float(ends[-1] - ends[0]) / (len(ends) - 1) for ends in each)


def plain(record: dict[str, Any]) -> dict[str, Any]:
    """What a training without a search beside it shows."""
    if "error" in record:
        return record
    ends, kept = record["ends"], ("peak_bytes", "device", "devices")
    told = {"first_step_s": ends[0], "step_ms": median_step_ms(ends[_WARM_UP:]), "steps": len(ends)}
    return told | {name: record[name] for name in kept}


def searched(record: dict[str, Any], default_s: float) -> dict[str, Any]:
    """What a training shows that was searched for while it went on."""
    if "error" in record:
        return record
    lines, ends = record["lines"], record["ends"]
    held: list[dict[str, Any]] = [
        {"for": what, "s": float(s), "pieces": int(pieces), "longest_ms": int(ms)}
        for _, text in lines if (found := _HELD.search(text)) for s, pieces, ms, what in [found.groups()]
    ]  # fmt: skip
    told: dict[str, Any] = {**plain(record), "lines": lines[-400:], "held": held}
    slow = [(end, later - end) for end, later in itertools.pairwise(ends) if later - end > _SLOW * default_s]
    told["slow_steps"] = [{"at_s": at, "ms": 1e3 * s} for at, s in slow[:_MOST_SLOW]]
    begun = next((at for at, text in lines if _BEGINS in text), None)
    over = next(((at, found) for at, text in lines if (found := _SETTLED.search(text))), None)
    if begun is None:
        return {**told, "outcome": "not begun"}
    at = ends[-1] if over is None else over[0]
    told |= {
        "searched_for_s": at - begun, "held_s": sum(one["s"] for one in held),
        "share_of_throughput": sum(begun < end < at for end in ends) * default_s / (at - begun),
    }  # fmt: skip
    if over is None:
        return {**told, "outcome": "not settled"}
    after_ms, calls, outcome = median_step_ms(ends[-_AFTERWARDS:]), int(over[1][2]), over[1][1]
    paid = None if outcome == _DEFAULT else paid_after(at, calls, default_s, after_ms / 1e3)
    return {
        **told, "outcome": outcome, "settled_at_call": calls, "settled_after_s": at,
        "step_ms_afterwards": after_ms, "paid_for_itself_after_steps": paid,
    }  # fmt: skip


def paid_after(plan_s: float, calls: int, default_s: float, step_s: float) -> int | None:
    """After how many steps a training has caught up with XLA's default, whose plan runs from call ``calls`` on,
    ``plan_s`` after its beginning; None where it never does: its steps are no faster."""
    if step_s >= default_s:
        return None
    return calls + max(0, math.ceil((plan_s - calls * default_s) / (default_s - step_s)))


def compared(record: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """The losses of a searched training against the default's, step by step."""
    if "error" in record or "error" in default:
        return {}
    pairs = list(zip(record["losses"], default["losses"], strict=False))
    apart = [abs(one - other) / max(abs(other), 1e-30) for one, other in pairs]
    return {
        "losses_compared": len(pairs), "losses_equal": sum(one == other for one, other in pairs),
        "losses_largest_relative_difference": max(apart), "default_step_ms": plain(default)["step_ms"],
        "peak_of_defaults": record["peak_bytes"] / max(1, default["peak_bytes"]),
    }  # fmt: skip


def main() -> None:
    """Run all trainings, and say what they show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step", choices=STEPS, default="demo")
    parser.add_argument("--shard", default="fsdp", help="of a Llama (default fsdp)")
    parser.add_argument("--layers", type=int, default=4, help="of the demo, which has 4")
    parser.add_argument("--batch", type=int, default=8, help="the demo's sequences per device; it has 8")
    parser.add_argument("--budget", type=float, default=20.0, help="DISCO_BUDGET_S (default 20)")
    parser.add_argument("--share", type=float, help="DISCO_SHARE")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (default 8)")
    parser.add_argument("--processes", type=int, default=1, help="of the job, a GPU for each (default 1)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--longest", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options)
        return
    end: float = time.monotonic() + 60 * options.minutes
    shown: dict[str, Any] = {"step": options.step, "shard": options.shard, "budget_s": options.budget}

    def left_s(part: float) -> float:
        return part * (end - time.monotonic())

    def show(name: str, values: dict[str, Any]) -> None:
        shown[name] = values
        print(name, json.dumps({key: value for key, value in values.items() if key != "lines"}), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(shown, indent=1) + "\n")

    first = run("default", options.steps, left_s(0.3), options)
    show("default", plain(first))
    if "error" in first:
        return
    record = run("training", _AFTERWARDS, left_s(0.85), options)
    show("training", searched(record, mean_step_s(first)))
    again = run("default", len(record.get("ends", [])) or options.steps, left_s(0.5), options)
    if "error" not in again:  # the machine may have been busier, or less so
        show("training", searched(record, mean_step_s(first, again)))
    show("training against default", compared(record, again))
    show("default against default", compared(first, again))
    way = plain(run("compile", options.steps, left_s(1.0), options))
    if "error" not in way:
        later_s, default_s = way["first_step_s"] - plain(first)["first_step_s"], mean_step_s(first)
        way["paid_for_itself_after_steps"] = paid_after(later_s, 0, default_s, way["step_ms"] / 1e3)
    show("compile", way)


if __name__ == "__main__":
    main()
