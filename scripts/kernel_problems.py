"""What scripts/bench_kernels.py measures in its child processes: the problem of each kernel, how a call is timed, and
what it is compared with.

Every call of a fused kernel stands beside what it replaces (XLA's separate operations) and its two limits: computing
alone, communicating alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from time import monotonic, perf_counter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from disco_hlo.kernels.adam import Adam
from disco_hlo.kernels.catalog import AXIS, COLUMNS, FUSED, ROWS, WHOLE
from disco_hlo.kernels.lamb import Lamb

REPEATS, CHOICE_REPEATS, QUICK_REPEATS = 50, 20, 10
FEW, MANY = 3, 11
"""Calls in the two programs whose difference is timed; a quick look times the longer one only."""
LARGEST_VARIANCE = 1000.0
"""Of a sum of small whole products: some 180 at most among millions, and bfloat16 counts to 256."""
TOLERANCE = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 1e-5}
"""Of the largest number of a result: one rounding."""
COLUMNS_OF_A_TABLE = 256
TRACED_RUNS, MOST_KERNELS = 5, 8
UNROLLED = " without a loop"
CHOICES = "choices"
"""In place of a kernel: the fused and the separate ones of many, side by side."""
COMPILED_AT_ONCE = 8


def say(kind: str, content: Any) -> None:
    """Tell the parent."""
    print(kind, json.dumps(content), flush=True)


def measure(
    kernel: str,
    sizes: Sequence[Any],
    seconds: float,
    done: list[dict[str, Any]],
    points: int | None,
    *,
    interpret: bool,
) -> None:
    """Measure a kernel at all sizes, the first ones first, as long as there is time; then leave."""
    end = monotonic() + seconds
    say("TRYING", {"size": sizes[0], "kind": "start"})
    bench = Bench(interpret)
    say("TRIED", "devices")
    if kernel == CHOICES:
        measure_choices(bench, sizes, end)
        os._exit(0)
    for index, size in enumerate(sizes):
        if index and monotonic() > end:
            break
        if kernel == "floor":
            us = bench.time({"floor": bench.floor()}, REPEATS)
            say("ROW", {"kernel": kernel, "size": size, "kind": "final", "us": us, **bench.about})
        else:
            measure_size(bench, kernel, size, [row for row in done if row["size"] == size], points)
    os._exit(0)  # nothing is left to write, and an interpreter's threads may still wait


def measure_size(
    bench: Bench, kernel: str, size: Any, done: list[dict[str, Any]], points: int | None
) -> None:
    """Try the first points of the tuning range that are not done, then measure the best, then trace it."""
    about = {"kernel": kernel, "size": size}
    say("TRYING", {"size": size, "kind": "final"})
    problem = Problem(bench, kernel, size)
    separate = bench.time({"separate": problem.separate()})["separate"]
    times = {json.dumps(row["tiles"]): row["us"]["fused"] for row in done if "us" in row}
    tried = {json.dumps(row.get("tiles")) for row in done}
    for tiles in problem.tuning[:points]:
        described = {"size": size, "kind": "point", "tiles": dataclasses.asdict(tiles)}
        key = json.dumps(described["tiles"])
        if key in tried:
            continue
        say("TRYING", described)
        row = about | described | guarded(functools.partial(problem.point, tiles, separate))
        if "us" in row:
            times[key] = row["us"]["fused"]
        say("ROW", row)
    say("TRYING", {"size": size, "kind": "final"})
    if not times:
        say("ROW", about | {"kind": "final", "error": "no point worked"} | bench.about)
        return
    best = json.loads(min(times, key=lambda key: times[key] or 0.0))
    row = guarded(lambda: problem.final(best))
    say("ROW", about | {"kind": "final"} | row | bench.about)
    if "us" in row and not bench.interpret:
        say("TRYING", {"size": size, "kind": "trace"})
        say("ROW", about | {"kind": "trace"} | guarded(lambda: problem.traced(best)))


def measure_choices(bench: Bench, sizes: Sequence[Any], end: float) -> None:
    """Measure kernels of one point each, what they replace, and the limits: all compiled first, several at once.

    Args:
        sizes: kernel, whether its link is measured alone as well, and size.
    """

    def prepared(kernel: str, with_link: bool, size: Any) -> tuple[Problem, dict[str, Call]]:
        problem = Problem(bench, kernel, size)
        alone = problem.alone()
        calls = {"fused": problem.with_tiles(problem.tuning[0]), "separate": problem.separate(), **alone}
        if not with_link:
            del calls["link alone"]
        for name, call in calls.items():
            bench.compile_ahead(call)
            say("TRIED", [kernel, size, name])
        return problem, calls

    pool = ThreadPoolExecutor(COMPILED_AT_ONCE)
    made = [(one, pool.submit(prepared, *one)) for one in sizes]
    pool.shutdown()
    for (kernel, with_link, size), problem in made:
        if monotonic() > end:
            return
        say("TRYING", {"size": [kernel, with_link, size], "kind": "final"})

        def row(problem: Any = problem) -> dict[str, Any]:
            its, calls = problem.result()
            return {"roundings": its.alike(calls["fused"], calls["separate"])} | {
                "us": bench.time(calls, CHOICE_REPEATS)
            }

        about = {"kernel": CHOICES, "size": [kernel, with_link, size], "kind": "final"}
        say("ROW", about | guarded(row) | bench.about)


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
    arguments: tuple[Any, ...]
    results: Any
    arrays: Any


class Bench:
    """The devices, and how calls on them are timed."""

    def __init__(self, interpret: bool) -> None:
        self.interpret = interpret
        self.programs: dict[Any, Callable[..., Any]] = {}
        self.loops: dict[Any, Callable[..., Any]] = {}
        """Of each call a program that takes the number of calls before the arrays."""
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

        around: AbstractContextManager[None] = interpreted(detect_races=False)
        return around

    def time(self, calls: dict[str, Call], repeats: int = QUICK_REPEATS) -> dict[str, float | None]:
        """Microseconds of one call of each, measured in turn; without a loop where the name says so.

        What is fused was checked before, so the interpreter need not run it again.
        """
        if self.interpret:
            for name, call in calls.items():
                if not name.startswith("fused"):
                    with self.running():
                        jax.block_until_ready(self.in_a_row(call, FEW)(*call.arrays))
                    say("TRIED", name)
            return dict.fromkeys(calls)
        programs = {}
        for (name, call), count in itertools.product(calls.items(), (FEW, MANY)):
            kept = call.local, count, not name.endswith(UNROLLED)
            if kept not in self.programs:
                self.programs[kept] = self.in_a_row(call, count, in_a_loop=kept[-1])
            programs[name, count] = self.programs[kept]
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
        return {name: (medians[name, MANY] - medians[name, FEW]) / (MANY - FEW) * 1e6 for name in calls}

    def in_a_row(self, call: Call, count: int, *, in_a_loop: bool = True) -> Callable[..., Any]:
        """A program that calls `count` times, each time after the call before."""

        def after(arrays: Any, result: Any) -> Any:
            """The arrays, one element of each set by the result, all of which must be there."""
            firsts = [leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves(lax.optimization_barrier(result))]
            sign = jnp.sign(sum(firsts[1:], firsts[0]))
            return jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(sign.astype(leaf.dtype)), arrays)

        once = jax.jit(call.local)  # a kernel is lowered once, not for every call

        def looped(calls: Any, *arrays: Any) -> Any:
            return once(*lax.fori_loop(0, calls - 1, lambda _, now: after(now, once(*now)), arrays))

        def unrolled(*arrays: Any) -> Any:
            for _ in range(count - 1):
                arrays = after(arrays, once(*arrays))
            return once(*arrays)

        if not in_a_loop:
            return self.compiled(call, unrolled)
        if call.local not in self.loops:  # one program for all numbers of calls
            self.loops[call.local] = self.compiled(call, looped, before=(WHOLE,))
        return functools.partial(self.loops[call.local], jnp.int32(count))

    def compile_ahead(self, call: Call) -> None:
        """Compile the program that calls in a loop, once."""
        program: Any = self.in_a_row(call, FEW)
        if not self.interpret and not isinstance(program.func, jax.stages.Compiled):
            self.loops[call.local] = program.func.lower(*program.args, *call.arrays).compile()

    def compiled(
        self, call: Call, local: Callable[..., Any], results: Any = None, before: tuple[Any, ...] = ()
    ) -> Callable[..., Any]:
        """A program of a function of one device's arrays, with others `before` them."""
        results = call.results if results is None else results
        specs = (*before, *call.arguments)
        return jax.jit(
            jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=results, check_vma=False)
        )

    def both_signs(self, call: Call, arrays: Any) -> Any:
        """The results of two calls in a loop, the second with its first array negated."""

        def local(first: Any, *others: Any) -> Any:
            def one(_: None, sign: Any) -> tuple[None, Any]:
                return None, call.local(first * sign.astype(first.dtype), *others)

            return lax.scan(one, None, jnp.array([1, -1], jnp.int32))[1]

        def stacked(spec: Any) -> Any:
            return jax.sharding.PartitionSpec(None, *spec)

        return self.compiled(call, local, jax.tree.map(stacked, call.results))(*arrays)

    def kernels(self, call: Call) -> dict[str, list[float]]:
        """Microseconds that each kernel of one call takes on each device, of a profiler's trace; the longest first."""
        from disco_hlo.plugin.xla.jaxlink import OwnTrace
        from disco_hlo.profiler import trace

        program = self.in_a_row(call, MANY)
        taken = trace.read(
            trace.collect(
                OwnTrace(), lambda: jax.block_until_ready(program(*call.arrays)), TRACED_RUNS, warmup=1
            )
        )
        sums: dict[str, list[float]] = {}
        for item in taken.executions:
            of_devices = sums.setdefault(item.kernel[:60] or item.op, [0.0] * self.mesh.size)
            of_devices[item.device] += (item.end_ns - item.start_ns) / 1e3 / TRACED_RUNS / MANY
        longest = sorted(sums, key=lambda kernel: -sum(sums[kernel]))[:MOST_KERNELS]
        return {kernel: [round(us, 2) for us in sums[kernel]] for kernel in longest}

    def floor(self) -> Call:
        """A kernel that raises a flag on every other device and waits for theirs."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        devices = self.mesh.size

        def body(x: Any, y: Any) -> None:
            flag = pl.get_global(plgpu.SemaphoreType.REGULAR((1,))).at[0]
            for offset in range(1, devices):
                other = lax.rem(lax.axis_index(AXIS) + offset, jnp.int32(devices))
                pl.semaphore_signal(flag, device_id={AXIS: other})
            pl.semaphore_wait(flag, devices - 1, decrement=False)
            y[...] = x[...]

        def local(x: Any) -> Any:
            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return plgpu.kernel(body, out_type=like, grid=(1,), grid_names=("block",))(x)

        return Call(local, (WHOLE,), WHOLE, (jnp.zeros(128, jnp.float32),))


class Problem:
    """One kernel on arrays of one size."""

    def __init__(self, bench: Bench, kernel: str, size: Any) -> None:
        self.bench, self.kernel, self.fused = bench, kernel, FUSED[kernel]
        self.size = tuple(size) if isinstance(size, list) else (size,)
        self.tuning = [self.fitted(tiles) for tiles in self.fused.tuning]
        self.arrays = self.placed(small=False)
        say("TRIED", "arrays")

    @functools.cached_property
    def small(self) -> Any:
        """Arrays of small whole numbers."""
        return self.placed(small=True)

    @functools.cached_property
    def expected(self) -> Any:
        """What becomes of them."""
        return self.bench.both_signs(self.separate(), self.small)

    def fitted(self, tiles: Any) -> Any:
        """The tiles, with few blocks where there are no multiprocessors."""
        if not self.bench.interpret:
            return tiles
        more = {"steps": 2} if hasattr(tiles, "steps") else {}
        # The interpreter runs blocks in turn; LAMB's wait for each other.
        blocks = 1 if self.kernel == "lamb" else 2
        return dataclasses.replace(tiles, blocks=blocks, **more)

    def placed(self, *, small: bool) -> Any:
        """The arrays, made on their devices: normal numbers for times, small whole ones where sums are compared."""
        devices = self.bench.mesh.size
        keys = iter(jax.random.split(jax.random.key(3), 8))

        def made_by(make: Callable[[Any], Any], spec: Any) -> Any:
            sharding = jax.sharding.NamedSharding(self.bench.mesh, spec)
            return jax.jit(make, out_shardings=sharding)(next(keys))

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

            return made_by(made, spec)

        specs, f32 = self.fused.arguments, jnp.float32
        if self.kernel in ("adam", "lamb"):
            (n,) = self.size
            moments = tuple(array(spec, (n,), f32, floor=0.5) for spec in specs[2])
            corrections = jnp.array([10.0, 1000.0], f32)
            return array(specs[0], (n * devices,), f32), array(specs[1], (n,), f32), moments, corrections
        if self.kernel == "all-reduce-norm":
            m, n = self.size
            vectors = [array(spec, (n,)) for spec in specs[2:]]
            return array(specs[0], (m * devices, n)), array(specs[1], (m, n)), *vectors
        if self.kernel == "embedding-all-to-all":
            samples, tables, bag, rows = self.size
            tables *= devices
            indices = made_by(lambda key: jax.random.randint(key, (tables, samples, bag), 0, rows), specs[1])
            return array(specs[0], (tables, rows, COLUMNS_OF_A_TABLE), f32), indices
        m, k, *n = self.size
        if self.kernel == "all-gather-matmul":
            return array(specs[0], (m, k), depth=k), array(specs[1], (k, n[0] * devices), depth=k)
        if self.kernel == "matmul-all-to-all":
            return array(specs[0], (m * devices, k), depth=k), array(specs[1], (k * devices, *n), depth=k)
        depth = k * devices
        return array(specs[0], (m, depth), depth=depth), array(specs[1], (depth, *n), depth=depth)

    @functools.cache  # noqa: B019 it lives as long as its process
    def separate(self) -> Call:
        """What the kernel replaces."""

        def local(*arrays: Any) -> Any:
            return self.fused.reference(*arrays, AXIS)

        return Call(local, self.fused.arguments, self.fused.results, self.arrays)

    @functools.cache  # noqa: B019 it lives as long as its process
    def with_tiles(self, tiles: Any) -> Call:
        """The kernel."""

        def local(*arrays: Any) -> Any:
            return self.fused.kernel(*arrays, AXIS, tiles)

        return Call(local, self.fused.arguments, self.fused.results, self.arrays)

    def alone(self) -> dict[str, Call]:
        """The limits: what it computes, and what it communicates, each alone."""
        from disco_hlo.kernels import embedding, norm

        arrays = self.arrays

        def product(lhs: Any, rhs: Any) -> Any:
            return jnp.dot(lhs, rhs, preferred_element_type=lhs.dtype)

        def scatter(x: Any) -> Any:
            return lax.psum_scatter(x, AXIS, tiled=True)

        def gather(x: Any) -> Any:
            return lax.all_gather(x, AXIS, tiled=True)

        def exchange(x: Any) -> Any:
            return lax.all_to_all(x, AXIS, 0, 0, tiled=True)

        if self.kernel in ("adam", "lamb"):

            def update(gradient: Any, parameters: Any, moments: Any, corrections: Any) -> Any:
                factors = corrections[0], corrections[1]
                if self.kernel == "adam":
                    step, *new = Adam().update(gradient, moments, factors)
                    return parameters - step, *new
                step, *new = Lamb().direction(gradient, parameters, moments, factors)
                scale = Lamb().scale(jnp.sum(parameters * parameters), jnp.sum(step * step))
                return parameters - scale * step, *new

            shard = jax.device_put(arrays[1], jax.sharding.NamedSharding(self.bench.mesh, ROWS))
            shards = shard, shard, arrays[2], arrays[3]
            return {
                "compute alone": Call(update, (ROWS, ROWS, (ROWS, ROWS), WHOLE), (ROWS,) * 3, shards),
                "link alone": Call(lambda x: gather(scatter(x)), (ROWS,), WHOLE, arrays[:1]),
            }
        if self.kernel == "all-reduce-norm":
            return {
                "compute alone": Call(norm.pointwise, (WHOLE,) * 4, WHOLE, (arrays[1], *arrays[1:])),
                "link alone": Call(lambda x: lax.psum(x, AXIS), (ROWS,), WHOLE, arrays[:1]),
            }
        if self.kernel == "all-gather-matmul":
            gathered = jax.device_put(arrays[0], jax.sharding.NamedSharding(self.bench.mesh, WHOLE))
            return {
                "compute alone": Call(product, (WHOLE, COLUMNS), COLUMNS, (gathered, arrays[1])),
                "link alone": Call(gather, (ROWS,), WHOLE, arrays[:1]),
            }
        # What travels is what each device has computed: as many rows on each.
        computed = embedding.pooled if self.kernel == "embedding-all-to-all" else product
        compute = Call(computed, self.fused.arguments, ROWS, arrays)
        self.bench.compile_ahead(compute)
        partial = self.bench.in_a_row(compute, 1)(*arrays)
        collective, results = {
            "matmul-reduce-scatter": (scatter, ROWS),
            "matmul-all-to-all": (exchange, ROWS),
            "embedding-all-to-all": (exchange, ROWS),
        }.get(self.kernel, (lambda x: lax.psum(x, AXIS), WHOLE))
        return {"compute alone": compute, "link alone": Call(collective, (ROWS,), results, (partial,))}

    def checked(self, tiles: Any) -> dict[str, Any]:
        """Whether the results of two calls are those of the reference: bit by bit, or nearly.

        Raises:
            ValueError: it is wrong.
        """
        with self.bench.running():
            got = jax.block_until_ready(self.bench.both_signs(self.with_tiles(tiles), self.small))
        exact, worst = within_a_rounding(got, self.expected)
        return {"exact": exact, "roundings": worst}

    def alike(self, one: Call, other: Call) -> float:
        """By how many roundings two calls on the arrays differ at most.

        Raises:
            ValueError: by more than one.
        """
        with self.bench.running():
            results = [jax.block_until_ready(self.bench.in_a_row(c, 1)(*c.arrays)) for c in (one, other)]
        return within_a_rounding(*results)[1]

    def point(self, tiles: Any, separate: float | None) -> dict[str, Any]:
        """A quick look at one point of the tuning range."""
        row = self.checked(tiles)
        say("TRIED", "checked")
        us = self.bench.time({"fused": self.with_tiles(tiles)})
        ratio = separate / us["fused"] if separate and us["fused"] else None
        return row | {"us": us | {"separate": separate}, "ratio": ratio}

    def orders(self, best: dict[str, Any]) -> dict[str, Any]:
        """The tiles of the best point, and the same in the other order where the kernel has one."""
        tiles = next(one for one in self.tuning if dataclasses.asdict(one) == best)
        if not self.fused.has_order:
            return {"fused": tiles}
        other = dataclasses.replace(tiles, remote_first=not tiles.remote_first)
        return {"fused": tiles, "fused in order of rows": other}

    def final(self, best: dict[str, Any]) -> dict[str, Any]:
        """The best point, its other order, what it replaces and its limits, in turn."""
        orders = self.orders(best)
        row: dict[str, Any] = {}
        for tiles in reversed(orders.values()):
            row = self.checked(tiles)
            say("TRIED", "checked")
        calls = {name: self.with_tiles(tiles) for name, tiles in orders.items()} | {
            "separate": self.separate()
        }
        unrolled = {f"{name}{UNROLLED}": calls[name] for name in ("fused", "separate")}
        us = self.bench.time(calls | self.alone() | unrolled, REPEATS)
        ratio = us["separate"] / us["fused"] if us["separate"] and us["fused"] else None
        return row | {"tiles": best, "us": us, "ratio": ratio}

    def traced(self, best: dict[str, Any]) -> dict[str, Any]:
        """The kernels of the best point, of its other order and of what it replaces, on each device."""
        calls = {name: self.with_tiles(tiles) for name, tiles in self.orders(best).items()}
        traced = {}
        for name, call in {**calls, "separate": self.separate()}.items():
            traced[name] = self.bench.kernels(call)
            say("TRIED", ["traced", name])
        return {"kernels": traced}


def within_a_rounding(got: Any, expected: Any) -> tuple[bool, float]:
    """Whether arrays are equal, and by how much of what one rounding may they differ at most.

    Raises:
        ValueError: by more than one rounding.
    """
    worst, exact = 0.0, True
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        same, difference, largest = map(float, compared(a, b))
        worst = max(worst, difference / largest / TOLERANCE[b.dtype.name])
        exact = exact and bool(same)
    if not worst <= 1:
        raise ValueError(f"wrong: differs by {worst:.3g} times what one rounding may")
    return exact, worst


@jax.jit
def compared(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether two arrays are equal, how far they are apart at most, and the largest number of the second."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.all(a == b), jnp.max(jnp.abs(a - b)), jnp.max(jnp.abs(b))
