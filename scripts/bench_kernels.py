"""Time the fused kernels of disco_hlo/kernels against XLA's separate operations, on the GPUs of one process.

    python scripts/bench_kernels.py --out build/kernels --seconds 1500

Every kernel over sizes of the papers' figures, over its tuning range; then the best point, the same without
communication-aware order, what it replaces, and its two limits (computing alone, communicating alone), in turn, medians
of 50. Every measurement is a row: one line here, one JSON object in OUT/rows.jsonl, which a later run goes on from.

Each kernel and size is a process of its own. If it says nothing for a minute it is killed, and what it tried becomes a
row with that reason: a kernel that waits for ever costs a minute, not the rest. A point that does not compile, or whose
result is wrong, is a row with the reason, too.

Times are those of one call among many in one program, each waiting for the one before: a program of many less one of
few, over the number between them, so that neither dispatch nor Python counts. Between two calls one element of each
argument is set by the result, since a compiler leaves out what it need not do again: all times have those few
microseconds in them. The floor of all kernels that talk to
other devices is a row, too: one that only raises a flag on each and waits for theirs.

`--interpret --tiny` tries everything on CPU devices, without times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SILENCE_S = 60
MOST_STARTS = 5
"""How often a kernel and size is begun again after it was killed."""
REPEATS, QUICK_REPEATS = 50, 10
FEW, MANY = 2, 10
"""Calls in the two programs whose difference is timed; a quick look times the longer one only."""
LARGEST_VARIANCE = 1000.0
"""Of a sum of small whole products: some 180 at most among millions, and bfloat16 counts to 256."""
TOLERANCE = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 1e-5}
"""Of the largest number of a result: one rounding."""

# (M, K of one device, N): rows of the whole result, what this device multiplies over, columns.
MATMULS = (
    (8192, 4096, 4096),
    (4096, 4096, 4096),
    (16384, 4096, 4096),
    (8192, 7168, 8192),
    (2048, 4096, 4096),
)
# The first is 4096 rows, columns and depth a GPU, on two of them.
GATHERS = MATMULS
VECTORS = (
    (8192, 4096),
    (16384, 4096),
    (32768, 4096),
    (65536, 4096),
    (8192, 8192),
    (16384, 8192),
    (65536, 8192),
)
ADAMS = tuple(1 << power for power in (22, 24, 26, 28))
SIZES: dict[str, Sequence[Any]] = {
    "floor": ((),),
    "all-gather-matmul": GATHERS,
    "matmul-reduce-scatter": MATMULS,
    "matmul-all-reduce": MATMULS,
    "matmul-all-to-all": MATMULS,
    "matvec-all-reduce": VECTORS,
    "adam": ADAMS,
}
TINY: dict[str, Sequence[Any]] = {
    "floor": ((),),
    "all-gather-matmul": ((512, 128, 256),),
    "matmul-reduce-scatter": ((512, 128, 256),),
    "matmul-all-reduce": ((512, 128, 256),),
    "matmul-all-to-all": ((512, 128, 256),),
    "matvec-all-reduce": ((512, 256),),
    "adam": (1 << 14,),
}


def main() -> None:
    """Run every kernel and size in a process of its own, or be that process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the rows; a later run goes on from them"
    )
    parser.add_argument("--seconds", type=float, default=1500, help="for everything together")
    parser.add_argument("--kernels", nargs="+", choices=SIZES, default=list(SIZES), help="in this order")
    parser.add_argument("--sizes", type=int, default=99, help="only the first so many of each kernel")
    parser.add_argument("--devices", type=int, default=2, help="with --interpret; else all GPUs are used")
    parser.add_argument("--tiny", action="store_true", help="one small size and two points for each kernel")
    parser.add_argument("--interpret", action="store_true", help="on CPU devices, without times")
    parser.add_argument(
        "--silence", type=float, default=SILENCE_S, help="seconds after which a process is killed"
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job:
        measure(chosen, **json.loads(chosen.job))
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    record = Record(chosen.out / "rows.jsonl")
    end = monotonic() + chosen.seconds
    sizes = {kernel: of_it[: chosen.sizes] for kernel, of_it in (TINY if chosen.tiny else SIZES).items()}
    jobs = list(jobs_of(chosen.kernels, sizes))
    for index, (kernel, size) in enumerate(jobs):
        if record.has(kernel, size, "final"):
            continue
        share = (end - monotonic()) / (len(jobs) - index)
        if share <= 0:
            print(f"{kernel} {size}: no time left; the same command goes on from here")
            break
        run_job(chosen, record, kernel, size, monotonic() + share)
    print(f"{len(record.rows)} rows in {record.path}")


def jobs_of(kernels: Sequence[str], sizes: dict[str, Sequence[Any]]) -> Iterator[tuple[str, Any]]:
    """Kernels and sizes: every kernel's first size, then every kernel's second, so that none is left out."""
    for index in range(max(len(sizes[kernel]) for kernel in kernels)):
        yield from ((kernel, sizes[kernel][index]) for kernel in kernels if index < len(sizes[kernel]))


# --- the parent: processes, rows, the watchdog ---


class Record:
    """The rows so far, in memory and in a file of one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def has(self, kernel: str, size: Any, kind: str) -> bool:
        """Whether there is such a row."""
        return bool(self.of(kernel, size, kind))

    def of(self, kernel: str, size: Any, kind: str) -> list[dict[str, Any]]:
        """Rows of one kernel and size; tuples have become lists in the file."""
        size = json.loads(json.dumps(size))
        return [r for r in self.rows if (r["kernel"], r["size"], r["kind"]) == (kernel, size, kind)]

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, and show it."""
        row = json.loads(json.dumps(row))
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(line_of(row), flush=True)


def line_of(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    size = " × ".join(map(str, row["size"] if isinstance(row["size"], list) else [row["size"]]))
    head = f"{row['kernel']:21} {size:21} {row['kind']:8}"
    if "error" in row:
        return f"{head} {row['error'][:150]} {row.get('tiles') or ''}"
    times = ", ".join(f"{name} {time:.1f} us" for name, time in row.get("us", {}).items() if time is not None)
    ratio = f"{row['ratio']:.2f}x " if row.get("ratio") else ""
    exact = {True: "exact ", False: "rounded "}.get(row.get("exact"), "")
    return f"{head} {ratio}{exact}{times} {row.get('tiles') or ''}"


def run_job(chosen: argparse.Namespace, record: Record, kernel: str, size: Any, end: float) -> None:
    """Measure one kernel and size, with a new process wherever one was killed or died."""
    for _ in range(MOST_STARTS):
        seconds = max(end - monotonic(), 1.0)
        job = {"kernel": kernel, "size": size, "seconds": seconds, "done": record.of(kernel, size, "point")}
        command = [sys.executable, __file__, "--out", str(chosen.out), "--job", json.dumps(job)]
        command += [
            flag for flag, is_set in (("--tiny", chosen.tiny), ("--interpret", chosen.interpret)) if is_set
        ]
        trying, reason = run_process(command, environment_of(chosen), record, chosen)
        if reason is None:
            return
        row = {"kernel": kernel, "size": size, "error": reason}
        record.add(row | (trying or {"kind": "final"}))
        if trying is None or trying["kind"] != "point":
            return


def environment_of(chosen: argparse.Namespace) -> dict[str, str]:
    """What a process runs under."""
    if not chosen.interpret:
        return {"NCCL_NVLS_ENABLE": "0", **os.environ}
    # As tests/kernels/interpreter.py says; not imported here, since it imports jax.
    flags = f"--xla_force_host_platform_device_count={chosen.devices}"
    return {**os.environ, "NPROC": "64", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def run_process(
    command: list[str], environment: dict[str, str], record: Record, chosen: argparse.Namespace
) -> tuple[dict[str, Any] | None, str | None]:
    """Keep the rows that a process says; what it was trying, and why it ended, unless it ended well."""
    lines: queue.Queue[str | None] = queue.Queue()
    errors = chosen.out / "errors.log"
    with errors.open("a") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    reader = threading.Thread(target=read_into, args=(process.stdout, lines), daemon=True)
    reader.start()
    trying: dict[str, Any] | None = None
    try:
        while (line := lines.get(timeout=chosen.silence)) is not None:
            kind, _, content = line.partition(" ")
            if kind == "TRYING":
                trying = json.loads(content)
            elif kind == "ROW":
                record.add(json.loads(content))
    except queue.Empty:
        process.kill()
        process.wait()
        reader.join()
        return trying, f"said nothing for {chosen.silence:.0f} s and was killed"
    code = process.wait()
    last = (errors.read_text().strip().splitlines() or [""])[-1]
    return trying, None if code == 0 else f"its process ended with {code}: {last[:300]}"


def read_into(pipe: Any, lines: queue.Queue[str | None]) -> None:
    """Pass on what a process says, and that it has ended."""
    with pipe:
        for line in pipe:
            lines.put(line.strip())
    lines.put(None)


# --- the child: one kernel and size ---


def say(kind: str, content: Any) -> None:
    """Tell the parent."""
    print(kind, json.dumps(content), flush=True)


def measure(
    chosen: argparse.Namespace, kernel: str, size: Any, seconds: float, done: list[dict[str, Any]]
) -> None:
    """Try all points that are not done, as long as there is time, then measure the best."""
    end = monotonic() + seconds
    say("TRYING", {"kind": "start"})
    bench = Bench(chosen.interpret)
    say("TRIED", "devices")
    if kernel == "floor":
        us = bench.time({"floor": bench.floor()}, REPEATS)
        say("ROW", {"kernel": kernel, "size": size, "kind": "final", "us": us, **bench.about})
        bench.leave()
    problem = Problem(bench, kernel, size)
    separate = bench.time({"separate": problem.separate()})["separate"]
    times = {json.dumps(row["tiles"]): row["us"]["fused"] for row in done if "us" in row}
    tried = {json.dumps(row.get("tiles")) for row in done}
    for tiles in problem.tuning[: 2 if chosen.tiny else None]:
        described = {"kind": "point", "tiles": dataclasses.asdict(tiles)}
        key = json.dumps(described["tiles"])
        if key in tried or (monotonic() > end and times):
            continue
        say("TRYING", described)
        row = {
            "kernel": kernel,
            "size": size,
            **described,
            **guarded(lambda t=tiles: problem.point(t, separate)),
        }
        if "us" in row:
            times[key] = row["us"]["fused"]
        say("ROW", row)
    say("TRYING", {"kind": "final"})
    row = {"kernel": kernel, "size": size, "kind": "final"}
    if times:
        best = min(times, key=lambda key: times[key] or 0.0)
        row |= guarded(lambda: problem.final(json.loads(best)))
    else:
        row |= {"error": "no point worked"}
    say("ROW", row | bench.about)
    bench.leave()


def guarded(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` gives, or why it does not."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 a row says so, and the others go on
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        return {"error": f"{type(error).__name__}: {first[:300]}"}


@dataclasses.dataclass(frozen=True)
class Call:
    """A function of one device's arrays, how those lie on the mesh, and the global arrays."""

    local: Callable[..., Any]
    arguments: Any
    results: Any
    arrays: Any


class Bench:
    """The devices, and how calls on them are timed."""

    def __init__(self, interpret: bool) -> None:
        import jax

        from disco_hlo.kernels.catalog import AXIS

        self.interpret = interpret
        devices = jax.devices()
        self.mesh = jax.sharding.Mesh(devices, (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
        self.about = {
            "device": devices[0].device_kind,
            "devices": len(devices),
            "jax": jax.__version__,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }

    def running(self) -> AbstractContextManager[None]:
        """Around whatever runs a fused kernel."""
        if not self.interpret:
            return nullcontext()
        from tests.kernels.interpreter import interpreted

        return interpreted(detect_races=False)

    def leave(self) -> None:
        """End at once: nothing is left to write, and an interpreter's threads may still wait."""
        os._exit(0)

    def time(self, calls: dict[str, Call], repeats: int = QUICK_REPEATS) -> dict[str, float | None]:
        """Microseconds of one call of each, measured in turn.

        What is fused was checked before, so the interpreter need not run it again.
        """
        import jax

        if self.interpret:
            for name, call in calls.items():
                if not name.startswith("fused"):
                    with self.running():
                        jax.block_until_ready(self.in_a_row(call, FEW)(*call.arrays))
                    say("TRIED", name)
            return dict.fromkeys(calls)
        counts = (MANY,) if repeats == QUICK_REPEATS else (FEW, MANY)
        programs = {
            (name, count): self.in_a_row(call, count) for name, call in calls.items() for count in counts
        }
        for (name, count), program in programs.items():
            jax.block_until_ready(program(*calls[name].arrays))
            say("TRIED", [name, count])
        seconds: dict[tuple[str, int], list[float]] = {key: [] for key in programs}
        for _ in range(repeats):
            for (name, count), program in programs.items():
                begun = perf_counter()
                jax.block_until_ready(program(*calls[name].arrays))
                seconds[name, count].append(perf_counter() - begun)
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        between = counts[-1] - (FEW if len(counts) > 1 else 0)
        return {name: (medians[name, MANY] - medians.get((name, FEW), 0.0)) / between * 1e6 for name in calls}

    def in_a_row(self, call: Call, count: int) -> Callable[..., Any]:
        """A program that calls `count` times, each time after the call before."""
        import jax
        import jax.numpy as jnp

        def after(arrays: Any, result: Any) -> Any:
            """The arrays, one element of each set by the result, all of which must be there."""
            firsts = [
                leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves(jax.lax.optimization_barrier(result))
            ]
            sign = jnp.sign(sum(firsts[1:], firsts[0]))
            return jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(sign.astype(leaf.dtype)), arrays)

        def local(*arrays: Any) -> Any:
            for _ in range(count - 1):
                arrays = after(arrays, call.local(*arrays))
            return call.local(*arrays)

        return jax.jit(
            jax.shard_map(
                local, mesh=self.mesh, in_specs=call.arguments, out_specs=call.results, check_vma=False
            )
        )

    def floor(self) -> Call:
        """A kernel that raises a flag on every other device and waits for theirs."""
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from disco_hlo.kernels.catalog import AXIS, WHOLE

        devices = self.mesh.size

        def body(x: Any, y: Any) -> None:
            flag = pl.get_global(plgpu.SemaphoreType.REGULAR((1,))).at[0]
            for offset in range(1, devices):
                other = jax.lax.rem(jax.lax.axis_index(AXIS) + offset, jnp.int32(devices))
                pl.semaphore_signal(flag, device_id={AXIS: other})
            pl.semaphore_wait(flag, devices - 1, decrement=False)
            y[...] = x[...]

        def local(x: Any) -> Any:
            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return plgpu.kernel(body, out_type=like, grid=(1,), grid_names=("block",))(x)

        return Call(local, WHOLE, WHOLE, (jnp.zeros(128, jnp.float32),))


class Problem:
    """One kernel on arrays of one size."""

    def __init__(self, bench: Bench, kernel: str, size: Any) -> None:
        from disco_hlo.kernels.catalog import FUSED

        self.bench, self.kernel, self.fused = bench, kernel, FUSED[kernel]
        self.size = tuple(size) if isinstance(size, list) else (size,)
        self.tuning = [self.fitted(tiles) for tiles in self.fused.tuning]
        self.arrays = self.placed(small=False)
        self.small = self.placed(small=True)
        self.expected = self.fused.separate(bench.mesh)(*self.small)
        say("TRIED", "arrays")

    def fitted(self, tiles: Any) -> Any:
        """The tiles, with few blocks where there are no multiprocessors."""
        if not self.bench.interpret:
            return tiles
        more = {"steps": 2} if hasattr(tiles, "steps") else {}
        return dataclasses.replace(tiles, blocks=2, **more)

    def placed(self, *, small: bool) -> Any:
        """The arrays, made on their devices: normal numbers for times, small whole ones where sums are compared."""
        import jax
        import jax.numpy as jnp

        devices = self.bench.mesh.size
        keys = iter(jax.random.split(jax.random.key(3), 8))

        def array(
            spec: Any, shape: tuple[int, ...], dtype: Any = jnp.bfloat16, depth: int = 1, floor: float = 0
        ) -> Any:
            share = min(0.5, (LARGEST_VARIANCE / depth) ** 0.5)

            def made(key: Any) -> Any:
                values = jax.random.normal(key, shape, dtype)
                if floor:
                    return abs(values) + jnp.asarray(floor, dtype)
                if small:
                    return jnp.sign(values) * jax.random.bernoulli(jax.random.fold_in(key, 1), share, shape)
                return values

            sharding = jax.sharding.NamedSharding(self.bench.mesh, spec)
            return jax.jit(made, out_shardings=sharding)(next(keys))

        specs = self.fused.arguments
        if self.kernel == "adam":
            (n,) = self.size
            f32 = jnp.float32
            moments = tuple(array(spec, (n,), f32, floor=0.5) for spec in specs[2])
            corrections = jnp.array([10.0, 1000.0], f32)
            return array(specs[0], (n * devices,), f32), array(specs[1], (n,), f32), moments, corrections
        m, k, *n = self.size
        if self.kernel == "all-gather-matmul":
            return array(specs[0], (m, k), depth=k), array(specs[1], (k, n[0] * devices), depth=k)
        if self.kernel == "matmul-all-to-all":
            return array(specs[0], (m * devices, k), depth=k), array(specs[1], (k * devices, *n), depth=k)
        depth = k * devices
        return array(specs[0], (m, depth), depth=depth), array(specs[1], (depth, *n), depth=depth)

    def separate(self) -> Call:
        """What the kernel replaces."""
        from disco_hlo.kernels.catalog import AXIS

        def local(*arrays: Any) -> Any:
            return self.fused.reference(*arrays, AXIS)

        return Call(local, self.fused.arguments, self.fused.results, self.arrays)

    def with_tiles(self, tiles: Any) -> Call:
        """The kernel."""
        from disco_hlo.kernels.catalog import AXIS

        def local(*arrays: Any) -> Any:
            return self.fused.kernel(*arrays, AXIS, tiles)

        return Call(local, self.fused.arguments, self.fused.results, self.arrays)

    def alone(self) -> dict[str, Call]:
        """The limits: what it computes, and what it communicates, each alone."""
        import jax
        import jax.numpy as jnp
        from jax import lax

        from disco_hlo.kernels.adam import Adam
        from disco_hlo.kernels.catalog import AXIS, COLUMNS, ROWS, WHOLE

        arrays = self.arrays

        def product(lhs: Any, rhs: Any) -> Any:
            return jnp.dot(lhs, rhs, preferred_element_type=lhs.dtype)

        def scatter(x: Any) -> Any:
            return lax.psum_scatter(x, AXIS, tiled=True)

        def gather(x: Any) -> Any:
            return lax.all_gather(x, AXIS, tiled=True)

        def total(x: Any) -> Any:
            return lax.psum(x, AXIS)

        if self.kernel == "adam":

            def update(gradient: Any, parameters: Any, moments: Any, corrections: Any) -> Any:
                step, *new = Adam().update(gradient, moments, (corrections[0], corrections[1]))
                return parameters - step, *new

            shard = jax.device_put(arrays[1], jax.sharding.NamedSharding(self.bench.mesh, ROWS))
            shards = shard, shard, arrays[2], arrays[3]
            return {
                "compute alone": Call(update, (ROWS, ROWS, (ROWS, ROWS), WHOLE), (ROWS,) * 3, shards),
                "link alone": Call(lambda x: gather(scatter(x)), (ROWS,), WHOLE, arrays[:1]),
            }
        if self.kernel == "all-gather-matmul":
            gathered = jax.device_put(arrays[0], jax.sharding.NamedSharding(self.bench.mesh, WHOLE))
            return {
                "compute alone": Call(product, (WHOLE, COLUMNS), COLUMNS, (gathered, arrays[1])),
                "link alone": Call(gather, (ROWS,), WHOLE, arrays[:1]),
            }
        # What travels is a product of each device: M rows on each.
        compute = Call(product, self.fused.arguments, ROWS, arrays)
        partial = self.bench.in_a_row(compute, 1)(*arrays)
        collective, results = {
            "matmul-reduce-scatter": (scatter, ROWS),
            "matmul-all-to-all": (lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True), ROWS),
        }.get(self.kernel, (total, WHOLE))
        return {"compute alone": compute, "link alone": Call(collective, (ROWS,), results, (partial,))}

    def checked(self, tiles: Any) -> dict[str, Any]:
        """Whether the result is that of the reference: bit by bit, or nearly.

        Raises:
            ValueError: it is wrong.
        """
        import jax
        import numpy as np

        with self.bench.running():
            got = jax.block_until_ready(self.fused.fused(self.bench.mesh, tiles)(*self.small))
        pairs = [
            (np.asarray(a, np.float32), np.asarray(b, np.float32), TOLERANCE[b.dtype.name])
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(self.expected), strict=True)
        ]
        worst = max(float(np.max(np.abs(a - b)) / np.max(np.abs(b)) / allowed) for a, b, allowed in pairs)
        if not worst <= 1:
            raise ValueError(f"wrong: differs by {worst:.3g} times what one rounding may")
        return {"exact": all(np.array_equal(a, b) for a, b, _ in pairs), "roundings": worst}

    def point(self, tiles: Any, separate: float | None) -> dict[str, Any]:
        """A quick look at one point of the tuning range."""
        row = self.checked(tiles)
        say("TRIED", "checked")
        us = self.bench.time({"fused": self.with_tiles(tiles)})
        ratio = separate / us["fused"] if separate and us["fused"] else None
        return row | {"us": us | {"separate": separate}, "ratio": ratio}

    def final(self, best: dict[str, Any]) -> dict[str, Any]:
        """The best point, its other order, what it replaces and its limits, in turn."""
        tiles = next(one for one in self.tuning if dataclasses.asdict(one) == best)
        calls = {"fused": self.with_tiles(tiles), "separate": self.separate()}
        row = self.checked(tiles)
        if self.fused.has_order:
            other = dataclasses.replace(tiles, remote_first=not tiles.remote_first)
            self.checked(other)
            say("TRIED", "checked the other order")
            calls["fused in order of rows"] = self.with_tiles(other)
        us = self.bench.time(calls | self.alone(), REPEATS)
        ratio = us["separate"] / us["fused"] if us["separate"] and us["fused"] else None
        return row | {"tiles": best, "us": us, "ratio": ratio}


if __name__ == "__main__":
    main()
