"""Find out on real GPUs what XLA does with rewritten modules, and what the cost model has to know.

    python scripts/gpu_probe.py --out DIR                 2 GPUs, three link regimes, under 10 minutes
    JAX_PLATFORMS=cpu python scripts/gpu_probe.py --out DIR --size tiny    all of it on two CPU devices

One child process per link regime (NVLink; staged through the host; sockets). All children compile at
the same time, then measure one after another, so that nothing disturbs a measurement. The module of
the first child is what all of them rewrite: same matmul algorithms everywhere. Every step writes its
result or its error to DIR/<regime>.json before the next begins; a child that dies is started again
without the step that killed it.
"""

# A probe writes down every error, whatever it is, and goes on.
# ruff: noqa: BLE001, D102, D103, C901

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import disco_hlo  # noqa: E402

disco_hlo.__path__.append(str(ROOT))  # disco_hlo.profiler lies in profiler/ where nothing is installed

REGIMES: dict[str, dict[str, str]] = {
    "nvlink": {},
    "sockets": {
        "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
    },
    "staged": {"NCCL_P2P_DISABLE": "1"},
}  # fmt: skip
LINK_NS_PER_BYTE = {"nvlink": 0.0065, "staged": 0.04, "sockets": 0.2}
LINK_BASE_NS = {"nvlink": 20_000, "staged": 40_000, "sockets": 60_000}
SAFE = ("default", "list", "separate", "ten", "all")
RISKY = ("list_variadic", "ten_variadic")
VARIANTS = {
    "nvlink": (
        "default", "same", "list", "separate", "ten", "all", "unfused", "list_variadic", "merged_loop",
        "merged_input", "ten_variadic", "verbatim", "all_variadic",
    ),
    "sockets": (*SAFE, *RISKY),
    "staged": (*SAFE, *RISKY),
}  # fmt: skip
"""In order of importance: what is compiled while time lasts."""
STEP_LIMIT_S = 100
"""A step that takes longer hangs; its child is killed and started again without it."""
SWEEP_BYTES = [1 << k for k in range(8, 21)] + [1 << 22, 1 << 24, 1 << 26]
FAST = {"xla_gpu_autotune_level": 0}
GRAPHS_OFF = {"xla_gpu_enable_command_buffer": ""}


# --- report ---------------------------------------------------------------------------------------


class Report:
    """Steps of one child, on disk before and after each."""

    def __init__(self, path: Path, skip: set[str], deadline: float) -> None:
        self.path = path
        self.skip = skip
        self.deadline = deadline
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"steps": {}}
        self.steps: dict[str, Any] = self.data["steps"]

    def step(self, name: str, work: Callable[[], Any], *, late: float = 0.0) -> Any:
        """Do ``work`` unless it once killed the process or less than ``late`` seconds are left."""
        if name in self.skip:
            return None
        if time.time() + late > self.deadline:
            self.steps.setdefault(name, {"status": "no time"})
            self.write()
            return None
        self.steps[name] = {"status": "running", "started": time.time()}
        self.write()
        started = time.perf_counter()
        value = None
        try:
            value = work()
            record: dict[str, Any] = {"status": "ok"}
            if isinstance(value, dict | list | int | float | str):
                record["result"] = value
        except Exception as error:
            record = {"status": "error", "error": f"{type(error).__name__}: {error}"[:3000]}
            record["traceback"] = traceback.format_exc()[-3000:]
        record["seconds"] = round(time.perf_counter() - started, 3)
        self.steps[name] = record
        self.write()
        print(f"[{self.path.stem}] {name}: {record['status']} {record['seconds']} s", flush=True)
        return value

    def write(self) -> None:
        write_atomically(self.path, json.dumps(self.data, indent=1).encode())


def write_atomically(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".tmp")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


# --- parent ---------------------------------------------------------------------------------------


def parent(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.go", "*.ready", "*.log", "module.pb", "autotune.pbtxt"):
        for stale in args.work.glob(pattern):
            stale.unlink()
    started = time.time()
    deadline = started + args.budget_s
    compile_until = started + args.compile_s
    children = {regime: start_child(regime, args, deadline, compile_until, set()) for regime in args.regimes}
    notes: dict[str, Any] = {"exits": [], "platforms": os.environ.get("JAX_PLATFORMS", "")}
    skipped: dict[str, set[str]] = {regime: set() for regime in args.regimes}
    waiting = list(args.regimes)
    measuring = ""
    try:
        while children and time.time() < deadline:
            time.sleep(0.2)
            for regime, child in list(children.items()):
                if child.poll() is None and not hangs(args.out / f"{regime}.json"):
                    continue
                child.kill()
                child.wait()
                del children[regime]
                crashed = crashed_step(args.out / f"{regime}.json") if child.returncode else ""
                notes["exits"].append([regime, child.returncode, crashed, round(time.time() - started, 1)])
                if child.returncode and crashed and len(skipped[regime]) < 4 and time.time() + 60 < deadline:
                    skipped[regime].add(crashed)
                    until = max(compile_until, min(time.time() + 120, deadline - 60))
                    children[regime] = start_child(regime, args, deadline, until, skipped[regime])
                    continue
                measuring = "" if measuring == regime else measuring
            ready = [r for r in waiting if r not in children or (args.work / f"{r}.ready").exists()]
            if not measuring and waiting and (len(ready) == len(waiting) or time.time() > compile_until + 45):
                measuring = waiting.pop(0)
                (args.work / f"{measuring}.go").touch()
                measuring = measuring if measuring in children else ""
            notes["seconds"] = round(time.time() - started, 1)
            write_atomically(args.out / "probe.json", json.dumps(notes, indent=1).encode())
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    notes["killed"] = list(children)
    notes["logs"] = {regime: log_tail(args.work / f"{regime}.log") for regime in args.regimes}
    write_atomically(args.out / "probe.json", json.dumps(notes, indent=1).encode())


def start_child(
    regime: str, args: argparse.Namespace, deadline: float, compile_until: float, skip: set[str]
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **REGIMES[regime], "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment.pop("ENABLE_SEARCH", None)
    if environment.get("JAX_PLATFORMS") == "cpu":
        flags = environment.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=2"
    else:
        environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "")
    command = [sys.executable, str(Path(__file__).resolve()), "--child", regime, "--out", str(args.out)]
    command += [
        "--work",
        str(args.work),
        "--examples",
        str(args.examples),
        "--model",
        args.model,
        "--size",
        args.size,
    ]
    command += [
        "--deadline",
        str(deadline),
        "--compile-until",
        str(compile_until),
        "--rounds",
        str(args.rounds),
    ]
    command += [
        "--measure-s",
        str(args.measure_s),
        "--skip",
        ",".join(sorted(skip)),
        "--regimes",
        ",".join(args.regimes),
    ]
    with (args.work / f"{regime}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def hangs(path: Path) -> bool:
    if not path.exists():
        return False
    steps = json.loads(path.read_text())["steps"].values()
    return any(s["status"] == "running" and time.time() - s["started"] > STEP_LIMIT_S for s in steps)


def crashed_step(path: Path) -> str:
    """The step that was running when the child died; its record says so from now on."""
    if not path.exists():
        return ""
    data = json.loads(path.read_text())
    running = [name for name, step in data["steps"].items() if step["status"] == "running"]
    for name in running:
        data["steps"][name]["status"] = "crashed the process"
    write_atomically(path, json.dumps(data, indent=1).encode())
    return running[-1] if running else ""


def log_tail(path: Path) -> str:
    return path.read_bytes()[-4000:].decode("utf-8", "replace") if path.exists() else ""


# --- child ----------------------------------------------------------------------------------------


def child(args: argparse.Namespace) -> None:
    report = Report(args.out / f"{args.child}.json", set(filter(None, args.skip.split(","))), args.deadline)
    sys.path.insert(0, str(args.examples))
    import jax

    from disco_hlo.plugin import jaxlink

    report.step("environment", lambda: environment_facts(jax))
    found: list[Any] = []

    def handler(request: Any) -> None:
        if "train_step" not in request.module_name or found:
            return None
        found.append(request)
        Probe(args, report, request).run()
        return os._exit(0)  # nothing of the training itself is wanted

    jaxlink.install(handler)
    lower_step(args)


def environment_facts(jax: Any) -> dict[str, Any]:
    return {
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "devices": [str(device.device_kind) for device in jax.devices()],
        "platform_version": jax.devices()[0].client.platform_version,
        "cores": os.cpu_count(),
        "nccl": {name: value for name, value in os.environ.items() if name.startswith("NCCL")},
    }


def lower_step(args: argparse.Namespace) -> None:
    """Make JAX compile the model's training step; the handler takes over from there."""
    import jax
    import parallel
    import train
    from models.training import abstract_arguments

    made = train.load(args.model, args.size)
    shardings = parallel.data_parallel()
    step = parallel.compile_step(made.step, shardings)
    step.lower(*abstract_arguments(made, made.batch_per_device * jax.device_count())).compile()


class Variants:
    """The strategies that are compared, for one link: XLA's own kernels under other buckets and orders."""

    def __init__(self, regime: str, source: Any) -> None:
        from disco_hlo.plan.read import read

        self.regime = regime
        self.graph = source.graph
        self.xla = read(source)
        self.notes: dict[str, Any] = {}

    def strategy(self, variant: str) -> Any:
        from disco_hlo.plan.strategy import Bucket, Strategy

        if variant == "same":
            return self.xla
        separate = tuple(Bucket((n,)) for n in self.graph.all_reduces)
        if variant == "unfused":
            return self.scheduled(Strategy((), self.xla.buckets))
        if variant.startswith("merged"):
            return self.scheduled(replace(self.xla, groups=self.merged(variant.removeprefix("merged_"))))
        form = "variadic" if variant.endswith("_variadic") else "concat"
        kind = variant.removesuffix("_variadic")
        if kind == "list":
            buckets = tuple(
                Bucket(b.all_reduces, form if len(b.all_reduces) > 1 else "concat") for b in self.xla.buckets
            )
        elif kind == "separate":
            buckets = separate
        else:
            buckets = self.chunked(separate, 10 if kind == "ten" else 10**9, form)
        return self.scheduled(replace(self.xla, buckets=buckets))

    def chunked(self, separate: Any, size: int, form: str) -> Any:
        """Buckets of ``size`` all-reduces that are produced one after another."""
        from disco_hlo.plan.strategy import Bucket

        order = self.scheduled(replace(self.xla, buckets=separate)).order
        produced = [
            separate[int(t[1:].split(".")[0])].all_reduces[0]
            for t in order
            if t[0] == "b" and not t.endswith(".done")
        ]
        late = self.depend_on_all_reduces()
        kinds: dict[Any, list[int]] = {}
        for node in produced:
            kinds.setdefault(
                (self.graph.nodes[node].collective, self.graph.nodes[node].shape.dtype, node in late), []
            ).append(node)
        chunks = [nodes[i : i + size] for nodes in kinds.values() for i in range(0, len(nodes), size)]
        return tuple(Bucket(tuple(chunk), form if len(chunk) > 1 else "concat") for chunk in chunks)

    def depend_on_all_reduces(self) -> set[int]:
        """All-reduces that wait for another one: they cannot travel with it."""
        after: set[int] = set()
        for node in self.graph.nodes:
            if any(o in after or o in self.graph.all_reduces for o in node.operands):
                after.add(node.id)
        return after & set(self.graph.all_reduces)

    def merged(self, kind: str) -> Any:
        """XLA's groups, but up to 8 pairs of one kind that share an operand merged into one kernel each."""
        from disco_hlo.hlo.legality import external_reads

        groups = list(self.xla.groups)
        reads = [
            set(external_reads(self.graph, {*g.nodes, *g.duplicates})) if g.kind == kind else set()
            for g in groups
        ]
        pairs: list[Any] = []
        free = set(range(len(groups)))
        tries = 400
        for i in range(len(groups)):
            partners = [j for j in range(i + 1, len(groups)) if reads[i] & reads[j] and len(pairs) < 8]
            for j in partners[:8]:
                if not {i, j} <= free or tries == 0:
                    break
                tries -= 1
                joined = self.joined(groups, i, j)
                if joined is None:
                    continue
                groups[i], free = joined, free - {i, j}
                pairs.append((i, j))
        if not pairs:
            raise LookupError(f"no two neighbouring {kind} groups may be merged")
        self.notes[f"merged {kind} pairs"] = [
            [f"{self.graph.nodes[n].opcode} {self.graph.nodes[n].shape}" for n in groups[i].nodes]
            for i, _ in pairs
        ]
        gone = {j for _, j in pairs}
        return tuple(group for j, group in enumerate(groups) if j not in gone)

    def joined(self, groups: list[Any], i: int, j: int) -> Any:
        """Groups i and j as one with several results, or None where that is not legal."""
        from disco_hlo.errors import IllegalStrategyError
        from disco_hlo.hlo.legality import group_refusal
        from disco_hlo.plan.strategy import Group, Strategy
        from disco_hlo.plan.units import unit_graph

        nodes = {*groups[i].nodes, *groups[j].nodes}
        duplicates = {*groups[i].duplicates, *groups[j].duplicates} - nodes
        joined = Group(tuple(sorted(nodes)), tuple(sorted(duplicates)), groups[i].kind)
        owned: set[int] = set()
        others = []
        for k, group in enumerate(groups):
            if k not in (i, j) and not owned & set(group.nodes):
                others.append(group)
                owned |= set(group.nodes)
        if owned & nodes:
            return None
        try:
            units = unit_graph(self.graph, Strategy((joined, *others), self.xla.buckets))
        except IllegalStrategyError:
            return None
        results = [value.node for value in units.values if value.producer == 0]
        refused = len(results) < 2 or group_refusal(self.graph, nodes | duplicates, results)
        return None if refused else joined

    def scheduled(self, strategy: Any) -> Any:
        from disco_hlo.plan.schedule import list_schedule
        from disco_hlo.plan.units import unit_graph

        units = unit_graph(self.graph, strategy)
        durations, transfers = [], []
        for unit in units.units:
            nodes = [self.graph.nodes[n] for n in unit.nodes]
            size = sum(node.shape.size_bytes for node in nodes)
            arithmetic = sum(node.flops for node in nodes) / 4e5
            durations.append(int(3000 + max(2 * size / 4e3, 0 if unit.is_bucket else arithmetic)))
            transfers.append(
                int(LINK_BASE_NS[self.regime] + size * LINK_NS_PER_BYTE[self.regime]) if unit.is_bucket else 0
            )
        order = list_schedule(units, durations, transfers, asynchronous=self.graph.backend == "gpu")
        return replace(strategy, order=order)


class Probe:
    """All steps of one regime."""

    def __init__(self, args: argparse.Namespace, report: Report, request: Any) -> None:
        self.args = args
        self.report = report
        self.request = request
        self.regime: str = args.child
        self.first = self.regime == args.regimes[0]
        self.compiled: dict[str, Any] = {}
        self.modules: dict[str, bytes] = {}
        self.given: dict[str, bytes] = {}
        self.inputs: Any = None

    def run(self) -> None:
        self.compile_phase()
        (self.args.work / f"{self.regime}.ready").touch()
        go = self.args.work / f"{self.regime}.go"
        while not go.exists():
            time.sleep(0.1)
        share = self.args.measure_s * (1.6 if self.first else 1)
        self.measure_until = min(time.time() + share, self.report.deadline - 5)
        self.report.deadline = self.measure_until
        self.measure_phase()

    # Compiling ------------------------------------------------------------------------------

    def compile_phase(self) -> None:
        from disco_hlo.plugin import jaxlink

        path = self.args.work / "module.pb"
        if self.first and not path.exists():
            module = self.report.step("capture", lambda: jaxlink.capture(self.request))
            if module is None:
                return
            write_atomically(path, module)
            write_atomically(self.args.out / "module.hlo.pb.gz", gzip.compress(module))
        while not path.exists():
            time.sleep(0.2)
        self.source_bytes = path.read_bytes()
        if self.report.step("canonicalize", self.canonicalize) is None:
            return
        final = self.report.deadline
        self.report.deadline = self.args.compile_until
        for variant in VARIANTS[self.regime]:
            self.report.step(f"compile {variant}", lambda variant=variant: self.compile(variant))
        self.report.step("sweep compile", self.compile_sweep)
        self.report.step("microbenchmarks compile", self.compile_micro)
        if self.first:
            self.report.step("autotune results", self.autotune)
        self.report.deadline = final

    def canonicalize(self) -> dict[str, Any]:
        from disco_hlo.hlo.canonical import canonicalize

        self.source = canonicalize(self.source_bytes)
        self.graph = self.source.graph
        self.variants = Variants(self.regime, self.source)
        return {
            "nodes": len(self.graph),
            "backend": self.graph.backend,
            "fingerprint": self.graph.fingerprint,
            "groups": len(self.variants.xla.groups),
            "buckets": len(self.variants.xla.buckets),
            "all_reduces": len(self.graph.all_reduces),
            "all_reduce_bytes": sum(self.graph.nodes[n].shape.size_bytes for n in self.graph.all_reduces),
            "dropped_aliases": len(self.source.dropped_aliases),
        }

    def compile(self, variant: str) -> dict[str, Any]:
        from disco_hlo.plan.apply import apply
        from disco_hlo.plugin import jaxlink
        from disco_hlo.plugin.runner import memory

        started = time.perf_counter()
        if variant == "default":
            module = None if self.first else self.source_bytes
        elif variant == "verbatim":
            module = self.source_bytes
        else:
            module = apply(self.variants.strategy(variant), self.source)
            for name, pairs in self.variants.notes.items():
                self.report.steps[name] = {"status": "ok", "result": pairs}
        applied = time.perf_counter()
        slow = self.first and variant in ("default", "same")
        note = ""
        try:
            executable = jaxlink.compile_module(self.request, module, {} if slow else FAST)
        except Exception as error:
            if slow or "option" not in str(error):
                raise
            note = f"without autotune option: {error}"[:300]
            executable = jaxlink.compile_module(self.request, module)
        self.compiled[variant] = executable
        self.given[variant] = self.source_bytes if module is None else module
        self.modules[variant] = jaxlink.read_executable(executable)
        cost = memory(executable)
        return {
            "apply_s": round(applied - started, 3),
            "compile_s": round(time.perf_counter() - applied, 3),
            "read_back": attempt(lambda: self.read_back(variant)),
            "arguments_bytes": cost.arguments_bytes,
            "outputs_bytes": cost.outputs_bytes,
            "temporaries_bytes": cost.temporaries_bytes,
            "aliased_bytes": cost.aliased_bytes,
            "peak_bytes": getattr(executable.get_compiled_memory_stats(), "peak_memory_in_bytes", None),
            "note": note,
        }

    def read_back(self, variant: str) -> str:
        """How the executed module differs from the one given to XLA; empty where it does not."""
        from disco_hlo.plan.executed import executed_difference

        return executed_difference(self.given[variant], self.modules[variant]) or ""

    def autotune(self) -> dict[str, Any]:
        from disco_hlo.plugin import jaxlink

        results = self.args.work / "autotune.pbtxt"
        times = {}
        started = time.perf_counter()
        jaxlink.compile_module(self.request, None, {"xla_gpu_dump_autotune_results_to": str(results)})
        times["dump_s"] = round(time.perf_counter() - started, 2)
        size = results.stat().st_size if results.exists() else -1
        if size > 0:
            started = time.perf_counter()
            jaxlink.compile_module(self.request, None, {"xla_gpu_load_autotune_results_from": str(results)})
            times["load_s"] = round(time.perf_counter() - started, 2)
        head = results.read_text(errors="replace")[:600] if size > 0 else ""
        return {**times, "bytes": size, "head": head}

    # Small programs -------------------------------------------------------------------------

    def compile_sweep(self) -> dict[str, Any]:
        from disco_hlo.plugin.runner import all_reduce_runner

        self.sweep = {}
        note = ""
        for size in SWEEP_BYTES:
            many = 17 if size <= 1 << 20 else 5
            try:
                pair = [all_reduce_runner(self.request, size, "f32", repeats) for repeats in (1, many)]
            except Exception as error:
                note = f"{type(error).__name__}: {error}"[:500]
                pair = [PsumChain(self.request, size, repeats) for repeats in (1, many)]
            self.sweep[size] = (many, *pair)
        return {"sizes": len(self.sweep), "all_reduce_runner": note or "works"}

    def compile_micro(self) -> dict[str, Any]:
        """Chains of kernels that XLA may not fuse, alone and beside an all-reduce."""
        import jax
        import jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        cpu = self.graph.backend == "cpu"
        mesh = Mesh(self.request.devices, ("d",))
        small = 256 if cpu else 4096
        elements = (1 << 16) if cpu else (1 << 26)

        def chain(length: int) -> Callable[[Any], Any]:
            def launches(x: Any) -> Any:
                for _ in range(length):
                    x = jax.lax.optimization_barrier(x * 1.0001)
                return x

            return launches

        def matmuls(x: Any) -> Any:
            y = x
            for _ in range(24):
                y = jax.lax.optimization_barrier(y @ x)
            return y

        def streams(x: Any) -> Any:
            for _ in range(60):
                x = jax.lax.optimization_barrier(x * 1.0001)
            return x

        def reduce(g: Any) -> Any:
            return jax.lax.psum(g, "d")

        spread = NamedSharding(mesh, PartitionSpec("d"))

        def on_mesh(function: Callable[..., Any], arguments: int) -> Any:
            specs = (PartitionSpec("d"),) * arguments
            return jax.shard_map(
                function, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("d"), check_vma=False
            )

        def both(compute: Callable[[Any], Any]) -> Any:
            def run(x: Any, g: Any) -> Any:
                return compute(x), reduce(g)

            specs = (PartitionSpec("d"),) * 2
            return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)

        devices = len(self.request.devices)
        tiny = jax.ShapeDtypeStruct((256 * devices,), jnp.float32, sharding=spread)
        square = jax.ShapeDtypeStruct((small * devices, small), jnp.float32, sharding=spread)
        flat = jax.ShapeDtypeStruct((elements * devices,), jnp.float32, sharding=spread)
        short, long = (10, 60) if cpu else (100, 1100)
        off = {} if cpu else GRAPHS_OFF
        programs: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
            "launch short": (on_mesh(chain(short), 1), (tiny,), {}),
            "launch long": (on_mesh(chain(long), 1), (tiny,), {}),
            "launch short, graphs off": (on_mesh(chain(short), 1), (tiny,), off),
            "launch long, graphs off": (on_mesh(chain(long), 1), (tiny,), off),
            "all-reduce alone": (on_mesh(reduce, 1), (flat,), {}),
            "matmuls alone": (on_mesh(matmuls, 1), (square,), {}),
            "matmuls and all-reduce": (both(matmuls), (square, flat), {}),
            "streams alone": (on_mesh(streams, 1), (flat,), {}),
            "streams and all-reduce": (both(streams), (flat, flat), {}),
        }
        self.micro = {}
        for name, (function, arguments, options) in programs.items():
            compiled = jax.jit(function).lower(*arguments).compile(compiler_options=options)
            self.micro[name] = (compiled, arguments)
        self.micro_lengths = (short, long)
        return {"programs": list(programs)}

    # Measuring ------------------------------------------------------------------------------

    def measure_phase(self) -> None:
        """What is unlikely to crash comes first, so that a crash loses little."""
        risky = {v: self.compiled.pop(v) for v in list(self.compiled) if "variadic" in v or "merged" in v}
        self.report.step("inputs", self.make_inputs)
        self.first_runs()
        self.report.step("step times", lambda: self.step_times(0.3))
        self.report.step("numbers", self.numbers)
        for variant in ("default", "same", "list") if self.first else ("default", "list", "all"):
            if variant in self.compiled:
                self.report.step(f"trace {variant}", lambda variant=variant: self.trace(variant), late=5)
        self.report.step("slow-down", self.slow_down)
        self.report.step("sweep", self.run_sweep, late=5)
        self.report.step("microbenchmarks", self.run_micro, late=5)
        self.compiled = {
            v: self.compiled[v] for v in ("default", "list", "ten") if v in self.compiled
        } | risky
        self.first_runs()
        self.report.step("step times of risky variants", lambda: self.step_times(0.7), late=5)
        self.report.step("numbers of risky variants", self.numbers, late=5)
        self.report.step("device memory", self.device_memory)

    def make_inputs(self) -> str:
        from disco_hlo.plugin.runner import Runner

        self.inputs = Runner(self.request, self.compiled[next(iter(self.compiled))])
        self.inputs.run()
        return "made"

    def once(self, executable: Any) -> int:
        """Wall nanoseconds of one run. All variants share one set of inputs: a set takes gigabytes."""
        from disco_hlo.plugin import jaxlink

        arguments = self.inputs._inputs.fresh()
        started = time.perf_counter_ns()
        result = jaxlink.execute(executable, arguments)
        jaxlink.wait(result)
        return time.perf_counter_ns() - started

    def first_runs(self) -> None:
        """Warm up. Each is a step of its own: a hang or crash names its variant."""
        for variant, executable in list(self.compiled.items()):
            name = f"first run {variant}"
            self.report.step(
                name, lambda executable=executable: [self.once(executable) / 1e6 for _ in range(2)]
            )
            if self.report.steps.get(name, {}).get("status") != "ok":
                del self.compiled[variant]

    def numbers(self) -> dict[str, Any]:
        """Outputs of each variant on the first device against XLA's default; the default against itself."""
        import numpy as np

        from disco_hlo.plugin import jaxlink

        def outputs(executable: Any) -> list[Any]:
            arrays = jaxlink.result_arrays(jaxlink.execute(executable, self.inputs._inputs.fresh()))
            # Of the large arrays (parameters and their moments) one third has to do.
            return [
                np.asarray(output[0])
                for i, output in enumerate(arrays)
                if i % 3 == 0 or output[0].nbytes < 1 << 22
            ]

        reference = outputs(self.compiled["default"])
        scales = [float(np.max(np.abs(a.astype(np.float64)))) if a.size else 0.0 for a in reference]
        found: dict[str, Any] = {}
        for variant in self.compiled:
            if time.time() + 10 > self.measure_until:
                break
            worst, where, equal, finite = 0.0, -1, 0, True
            for i, (a, b) in enumerate(zip(reference, outputs(self.compiled[variant]), strict=True)):
                if np.array_equal(a, b):
                    equal += 1
                    continue
                finite = finite and bool(np.all(np.isfinite(b.astype(np.float32))))
                error = float(np.max(np.abs(a.astype(np.float32) - b.astype(np.float32)))) / (
                    scales[i] or 1.0
                )
                worst, where = (error, i) if not error <= worst else (worst, where)
            found[variant] = {
                "worst_relative": worst,
                "output": where,
                "bit_equal": equal,
                "of": len(reference),
                "finite": finite,
            }
        return found

    def step_times(self, share: float) -> dict[str, Any]:
        """All variants in turn, round after round, for this share of the time that is left."""
        times: dict[str, list[float]] = {variant: [] for variant in self.compiled}
        started = time.time()
        until = started + share * (self.measure_until - started)
        for _ in range(self.args.rounds):
            for variant, executable in self.compiled.items():
                times[variant].append(self.once(executable) / 1e6)
            if time.time() > until:
                break
        base = statistics.median(times["default"])
        return {
            variant: {
                "median_ms": round(statistics.median(values), 3),
                "of_default": round(statistics.median(values) / base, 4),
                "minimum_ms": round(min(values), 3),
                "all_ms": [round(v, 2) for v in values],
            }
            for variant, values in times.items()
        }

    def trace(self, variant: str) -> dict[str, Any]:
        from disco_hlo.profiler import trace as traces

        from disco_hlo.hlo import proto

        data = traces.collect(lambda: self.once(self.compiled[variant]), repeats=2)
        read = traces.read(data)
        module = proto.parse(self.modules[variant])
        entry = next(c for c in module.computations if c.id == module.entry_computation_id)
        everything = {i.name for c in module.computations for i in c.instructions}
        running = {
            i.name: i.opcode
            for i in entry.instructions
            if i.opcode in ("fusion", "custom-call", "async-start", "copy")
        }
        own = [e for e in read.executions if e.module == module.name]
        seen = Counter(e.op for e in own)
        unseen = [name for name in running if name not in seen]
        last = max((e.run for e in own), default=0)
        self.events = getattr(self, "events", {})
        self.events[variant] = [e for e in own if e.run == last and e.device == 0]
        self.save_events()
        return {
            "xspace_bytes": len(data),
            "executions": len(read.executions),
            "of_module": len(own),
            "modules": dict(Counter(e.module for e in read.executions).most_common(8)),
            "runs": sorted({e.run for e in own}),
            "devices": sorted({e.device for e in own}),
            "tracks": dict(Counter(e.track for e in own).most_common(12)),
            "names_not_in_module": [name for name in seen if name not in everything][:20],
            "instructions": len(running),
            "instructions_without_event": len(unseen),
            "without_event": [f"{name} {running[name]}" for name in unseen[:20]],
            "opcodes_without_event": dict(Counter(running[name] for name in unseen)),
            "names_with_most_events": seen.most_common(8),
            "overlap_ms": overlap(self.events[variant]),
        }

    def save_events(self) -> None:
        saved = {
            variant: [
                [e.op, e.kernel, e.track, e.start_ns - events[0].start_ns, e.end_ns - e.start_ns]
                for e in events
            ]
            for variant, events in self.events.items()
            if events
        }
        write_atomically(
            self.args.out / f"trace_{self.regime}.json.gz", gzip.compress(json.dumps(saved).encode())
        )

    def slow_down(self) -> dict[str, Any]:
        """How much longer a kernel takes while a collective runs: the list schedule against XLA's order."""
        events = getattr(self, "events", {})
        quiet_name = "same" if "same" in events else "all"
        if "list" not in events or quiet_name not in events:
            return {"note": "traces are missing"}
        quiet = durations(events[quiet_name], overlapped=False)
        busy = durations(events["list"], overlapped=True)
        again = durations(events["list"], overlapped=False)
        result: dict[str, Any] = {}
        for label, other in (("while a collective runs", busy), ("while none runs", again)):
            ratios: dict[str, list[tuple[float, float]]] = {}
            for op, value in other.items():
                if op in quiet and quiet[op] > 5000:
                    ratios.setdefault(kernel_class(op), []).append((quiet[op], value))
            result[label] = {
                name: {
                    "kernels": len(pairs),
                    "median_ratio": round(statistics.median(b / a for a, b in pairs), 4),
                    "total_ratio": round(sum(b for _, b in pairs) / sum(a for a, _ in pairs), 4),
                }
                for name, pairs in ratios.items()
            }
        return result

    def run_sweep(self) -> list[Any]:
        from disco_hlo.profiler import trace as traces

        rows = []
        for size, (many, one, chain) in getattr(self, "sweep", {}).items():
            if time.time() + 5 > self.measure_until:
                break
            for runner in (one, chain):
                for _ in range(3):
                    runner.run()
            single, several = [], []
            for _ in range(15):
                single.append(one.run())
                several.append(chain.run())
            each = (statistics.median(several) - statistics.median(single)) / (many - 1)
            row: dict[str, Any] = {
                "bytes": size,
                "one_us": statistics.median(single) / 1e3,
                "each_us": each / 1e3,
            }
            if math.log2(size) % 4 == 2 or size in (1 << 20, 1 << 24, 1 << 17, 1 << 19):
                events = traces.read(traces.collect(lambda chain=chain: chain.run(), repeats=2)).executions
                row["kernels"] = {
                    name[:120]: [
                        count,
                        statistics.median(e.end_ns - e.start_ns for e in events if e.kernel == name) / 1e3,
                    ]
                    for name, count in Counter(e.kernel for e in events).most_common(4)
                }
                row["ops"] = dict(Counter(e.op for e in events).most_common(3))
                row["tracks"] = dict(Counter(e.track for e in events).most_common(4))
            rows.append(row)
        return rows

    def run_micro(self) -> dict[str, Any]:
        import jax
        import jax.numpy as jnp
        from disco_hlo.profiler import trace as traces

        result: dict[str, Any] = {}
        for name, (compiled, arguments) in getattr(self, "micro", {}).items():
            if time.time() + 3 > self.measure_until:
                break
            values = [jax.device_put(jnp.full(a.shape, 1e-3, a.dtype), a.sharding) for a in arguments]
            times = []
            for _ in range(12):
                started = time.perf_counter()
                jax.block_until_ready(compiled(*values))
                times.append(1e3 * (time.perf_counter() - started))
            result[name] = {
                "median_ms": round(statistics.median(times[2:]), 4),
                "minimum_ms": round(min(times), 4),
            }
            if "launch" not in name:
                data = traces.collect(lambda c=compiled, v=values: jax.block_until_ready(c(*v)), repeats=2)
                events = [e for e in traces.read(data).executions if e.device == 0]
                result[name]["overlap_ms"] = overlap(events)
                result[name]["kernel_us"] = {
                    when: round(statistics.median(found.values()) / 1e3, 2)
                    for when, found in (
                        ("alone", durations(events, False)),
                        ("beside", durations(events, True)),
                    )
                    if found
                }
            self.report.steps["microbenchmarks so far"] = {"status": "ok", "result": result}
        short, long = getattr(self, "micro_lengths", (0, 1))
        for suffix in ("", ", graphs off"):
            if f"launch long{suffix}" in result:
                spent = (
                    result[f"launch long{suffix}"]["median_ms"] - result[f"launch short{suffix}"]["median_ms"]
                )
                result[f"launch_us{suffix}"] = round(1e3 * spent / (long - short), 3)
        return result

    def device_memory(self) -> list[Any]:
        return [
            {
                key: value
                for key, value in (device.memory_stats() or {}).items()
                if "peak" in key or "limit" in key or "in_use" in key
            }
            for device in self.request.local_devices
        ]


class PsumChain:
    """``repeats`` all-reduces one after another, by public means alone."""

    def __init__(self, request: Any, size_bytes: int, repeats: int) -> None:
        import jax
        import jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        def chain(x: Any) -> Any:
            for _ in range(repeats):
                x = jax.lax.optimization_barrier(jax.lax.psum(x, "d") * 0.5)
            return x

        mesh, spread = Mesh(request.devices, ("d",)), PartitionSpec("d")
        mapped = jax.shard_map(chain, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=False)
        shape = (size_bytes // 4 * len(request.devices),)
        self.value = jax.device_put(jnp.ones(shape, jnp.float32), NamedSharding(mesh, spread))
        self.compiled = jax.jit(mapped).lower(self.value).compile()

    def run(self) -> int:
        import jax

        started = time.perf_counter_ns()
        jax.block_until_ready(self.compiled(self.value))
        return time.perf_counter_ns() - started


def attempt(work: Callable[[], str]) -> str:
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:1000]


# --- reading traces -------------------------------------------------------------------------------


def is_collective(event: Any) -> bool:
    return "nccl" in event.kernel.lower() or "all-reduce" in event.op or "all_reduce" in event.kernel.lower()


def kernel_class(op: str) -> str:
    if "custom-call" in op or "cublas" in op:
        return "gemm"
    return "fusion" if "fusion" in op or "wrapped" in op else "other"


def spans(events: list[Any]) -> list[tuple[int, int]]:
    """Union of the events' times."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted((e.start_ns, e.end_ns) for e in events):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def common(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> int:
    total = i = j = 0
    while i < len(left) and j < len(right):
        total += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def overlap(events: list[Any]) -> dict[str, float]:
    """Milliseconds of compute, communication and both at once, on one device in one run."""
    compute = spans([e for e in events if not is_collective(e)])
    communication = spans([e for e in events if is_collective(e)])
    everything = spans(events)
    return {
        "compute": round(sum(b - a for a, b in compute) / 1e6, 3),
        "communication": round(sum(b - a for a, b in communication) / 1e6, 3),
        "hidden": round(common(compute, communication) / 1e6, 3),
        "span": round((everything[-1][1] - everything[0][0]) / 1e6, 3) if everything else 0.0,
    }


def durations(events: list[Any], overlapped: bool) -> dict[str, float]:
    """Time of each compute instruction whose kernels run wholly beside a collective, or beside none."""
    communication = spans([e for e in events if is_collective(e)])
    found: dict[str, float] = {}
    for event in events:
        if is_collective(event):
            continue
        shared = common([(event.start_ns, event.end_ns)], communication)
        length = event.end_ns - event.start_ns
        if (shared > 0.98 * length) if overlapped else (shared == 0):
            found[event.op] = found.get(event.op, 0.0) + length
    return found


# --- command line ---------------------------------------------------------------------------------


def main() -> None:
    """Parse the command line and run the parent or a child."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/gpu_probe"), help="folder for what is passed around"
    )
    parser.add_argument("--examples", type=Path, default=ROOT / "examples", help="folder with train.py")
    parser.add_argument("--model", default="gpt12")
    parser.add_argument("--size", default="full")
    parser.add_argument("--regimes", type=lambda text: text.split(","), default=list(REGIMES))
    parser.add_argument("--budget-s", type=float, default=580)
    parser.add_argument("--compile-s", type=float, default=320, help="no compile starts later than this")
    parser.add_argument("--measure-s", type=float, default=65, help="measuring time of each regime")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--compile-until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--skip", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
    else:
        parent(args)


if __name__ == "__main__":
    main()
