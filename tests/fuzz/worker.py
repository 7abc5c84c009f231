"""The process that compiles and runs: reads tasks as JSON lines, and says of each pair what it tries before it does.

An XLA that aborts takes this process with it; whoever started it reads from the last line what it was trying.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

WRITING, DEFAULT = "the program", "XLA's default"
"""What is tried before any strategy."""
PAST_GATE = " past the gate"
"""Behind a strategy that is run although the last gate refused its module."""
CLEAR_EVERY = 20
"""So many programs share jax's caches, which otherwise grow without end."""


def environment(platform: str, devices: int, jobs: int) -> dict[str, str]:
    """What a worker runs under; jax reads it once, before it is imported."""
    found = {
        name: value
        for name, value in os.environ.items()
        if name not in ("ENABLE_SEARCH", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")
        and not name.startswith("DISCO_")
    }
    if platform == "gpu":
        found["JAX_PLATFORMS"] = "cuda,cpu"
        found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.8 / jobs:.3f}"
        # Tuning kernels takes longer than all else, and products in TF32 would differ from what is computed by hand.
        found["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "--xla_gpu_autotune_level=0")
        found.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    else:
        found["JAX_PLATFORMS"] = "cpu"
        # What XLA executes is settled before LLVM's optimizations, which take half of every compile.
        flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
        found["XLA_FLAGS"] = flags
    found["TF_CPP_MIN_LOG_LEVEL"] = "2"
    return found


def serve(tasks: IO[str], say: Callable[[dict[str, Any]], None]) -> None:
    """Do what each line of ``tasks`` asks for, until there are no more."""
    # Imported here: the environment that jax reads is the process's.
    import jax

    from tests.fuzz.grammar import generate
    from tests.fuzz.pairs import Case, SkippedError
    from tests.fuzz.program import from_json, has_regions
    from tests.fuzz.strategies import Wanted

    def past_gate(one: Wanted) -> None:
        say({"trying": f"{one}{PAST_GATE}"})

    warnings.simplefilter("ignore")  # jax warns of donated arguments that no result takes over
    say({"ready": jax.device_count()})
    for number, line in enumerate(tasks):
        task = json.loads(line)
        if number % CLEAR_EVERY == CLEAR_EVERY - 1:
            jax.clear_caches()
        if task["do"] == "warm":
            _compile_search()
            say({"done": True})
            continue
        say({"trying": WRITING})
        given = task["program"]
        program = generate(given, task["devices"]) if isinstance(given, int) else from_json(given)
        if task["regions"] and not has_regions(program):
            say({"skipped": "plain: it has no loop and no branch"})
            say({"done": True})
            continue
        wanted = [Wanted(kind, seed) for kind, seed in task["strategies"]]
        began = time.perf_counter()
        try:
            say({"trying": DEFAULT})
            case = Case(program, task["by_hand"], past_gate if task["past_gate"] else None)
            if task["regions"] and not case.source.regions:
                raise SkippedError("plain: XLA left no loop and no branch, or none that can be written anew")
            for one in wanted:
                say({"trying": str(one)})
                outcome = case.attempt(one)
                say({"pair": str(one), "kind": outcome.kind, "detail": outcome.detail})
                if outcome.kind == task["until"]:
                    break
        except SkippedError as error:
            say({"skipped": str(error)})
        say({"done": True, "seconds": time.perf_counter() - began})


def _compile_search() -> None:
    """Let numba compile the search, once on a machine."""
    import random

    from disco_hlo.plan.baselines import unfused
    from tests.fuzz.searching import after_moves, after_search
    from tests.search.steps import random_step

    graph = random_step(random.Random(1), 40)
    for run in (after_moves, after_search):
        run(graph, unfused(graph), random.Random(2))


def main() -> None:
    """Serve standard input; answers go where standard output went, and nothing else does."""
    # Where nothing is installed, the package is the checkout's.
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
    from checkout import find_package

    find_package()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    serve(sys.stdin, say)


if __name__ == "__main__":
    main()
