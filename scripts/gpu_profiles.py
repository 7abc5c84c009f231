"""Make the profiles that ship with the package out of a probe, and hold the simulator against it.

    python scripts/gpu_profiles.py tests/data/h200_probe                              the table alone
    python scripts/gpu_profiles.py tests/data/h200_probe --write disco_hlo/data/profiles

The probe (scripts/gpu_probe.py) leaves step times of several plans on three links, all-reduce sweeps and
one traced run of some of the plans. Inside command buffers a trace says which kernel ran, not for which
instruction; but kernels run in the plan's order, and those that XLA generates carry the name of an
instruction of their kind. So events and plan are laid side by side; where they disagree, this stops.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import re
import sys
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import disco_hlo  # noqa: E402

for place in (str(ROOT), str(ROOT / "disco_hlo")):
    if place not in disco_hlo.__path__:
        disco_hlo.__path__.append(
            place
        )  # profiler/ and others lie beside disco_hlo where nothing is installed

from disco_hlo.profiler import profile as profiles  # noqa: E402
from disco_hlo.profiler.allreduce import SweepPoint, fit  # noqa: E402
from disco_hlo.profiler.costs import fused_key  # noqa: E402
from disco_hlo.profiler.keys import group_key, triton_emitter  # noqa: E402
from disco_hlo.profiler.profile import Contention, Link, OpTime, Platform, Profile  # noqa: E402

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize  # noqa: E402
from disco_hlo.plan.strategy import Strategy  # noqa: E402
from disco_hlo.plan.units import unit_graph  # noqa: E402
from disco_hlo.plugin.costing import costs_of, machine_of  # noqa: E402
from disco_hlo.simulator.build import build  # noqa: E402
from disco_hlo.simulator.timeline import simulate  # noqa: E402

LINKS = ("nvlink", "staged", "sockets")
JOINED = (("nvlink", "same"), ("nvlink", "list"), ("staged", "list"), ("sockets", "list"))
"""Traced runs whose plans can be written again: (link, variant)."""
COMPARED = ("default", "list", "separate", "ten", "all", "list_variadic", "ten_variadic", "unfused")
QUIET_BYTES = 1 << 24
"""From this size on the sweep went through NCCL; below, through kernels of XLA's that no plan contains."""
LONG_NS = 5_000
WAIT_NS = 20_000

_GENERATED = re.compile(r"(?:[gn]\d+|b\d+)_([a-z_]*[a-z])(?:_\d+)?$")


@dataclass(frozen=True)
class Kernel:
    """One kernel of the plan, with the memory it had to clear first."""

    keys: tuple[str, ...]
    """Cost keys; none for what is no op of the graph (packing a bucket)."""
    ns: int
    beside: float
    """Share of it that ran beside a transfer."""


@dataclass(frozen=True)
class Run:
    """One traced run of a plan on one device."""

    strategy: Strategy
    kernels: tuple[Kernel, ...]
    transfer_ns: Mapping[int, int]
    """By bucket."""


class Probe:
    """A folder that scripts/gpu_probe.py wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source: CanonicalModule = canonicalize(
            gzip.decompress((folder / "module.hlo.pb.gz").read_bytes())
        )
        self.graph = self.source.graph
        variants = _probe_script().Variants
        self._variants = {link: variants(link, self.source) for link in LINKS}
        self.steps: dict[str, Any] = {
            link: json.loads((folder / f"{link}.json").read_text())["steps"] for link in LINKS
        }
        self._traces = {
            link: json.loads(gzip.decompress((folder / f"trace_{link}.json.gz").read_bytes()))
            for link in LINKS
        }

    def strategy(self, link: str, variant: str) -> Strategy:
        """The plan of a variant; ``default`` is XLA's own, which ``same`` is as we write it."""
        found: Strategy = self._variants[link].strategy("same" if variant == "default" else variant)
        return found

    def events(self, link: str, variant: str) -> list[list[Any]]:
        """Kernels as (instruction or command buffer, kernel, stream, start ns, length ns), by start."""
        return sorted(self._traces[link][variant], key=lambda event: event[3])

    def result(self, link: str, step: str) -> Any:
        """What a step of the probe found."""
        return self.steps[link][step]["result"]

    def measured_ms(self, link: str, variant: str) -> float | None:
        """Median step time of a variant, of the round in which it ran."""
        for step in ("step times", "step times of risky variants"):
            found = self.steps[link].get(step, {}).get("result", {}).get(variant)
            if found:
                return float(found["median_ms"])
        return None


def _probe_script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_probe", ROOT / "scripts" / "gpu_probe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Joining ------------------------------------------------------------------------------------------


def joined(probe: Probe, link: str, variant: str) -> Run:
    """The kernels of a traced run with the ops they computed.

    Raises:
        SystemExit: kernels and plan do not match one to one.
    """
    strategy = probe.strategy(link, variant)
    events = [event for event in probe.events(link, variant) if "partition-id" not in event[0]]
    transfers = [event for event in events if _is_transfer(event)]
    kernels = [event for event in events if not _is_transfer(event) and not event[1].startswith("Memset")]
    expected = list(_expected(probe, strategy))
    names = [_kind_of(event[1]) for event in kernels]
    if names != [kind for _, kind in expected]:
        raise SystemExit(f"{link} {variant}: {len(names)} kernels do not match the plan's {len(expected)}")
    cleared = _cleared_ns(events, [event[3] for event in kernels])
    busy = [(event[3], event[3] + event[4]) for event in transfers]
    return Run(
        strategy,
        tuple(
            Kernel(keys, event[4] + cleared[i], _beside(event, busy))
            for i, ((keys, _), event) in enumerate(zip(expected, kernels, strict=True))
        ),
        {int(event[0].split(".")[0][1:]): event[4] for event in transfers},
    )


def _is_transfer(event: Sequence[Any]) -> bool:
    return str(event[1]).startswith("nccl")


def _kind_of(kernel: str) -> str:
    """What a kernel does, by its name: the end of an instruction's name, or ``call`` for a library's."""
    match = _GENERATED.match(kernel)
    return match[1] if match else "call"


def _expected(probe: Probe, strategy: Strategy) -> Iterable[tuple[tuple[str, ...], str]]:
    """(cost keys, kind) of each kernel on the compute stream, in the plan's order."""
    graph, units = probe.graph, unit_graph(probe.graph, strategy)
    for token in strategy.order:
        name, _, part = token.partition(".")
        number = int(name[1:])
        if name[0] == "b":
            bucket = strategy.buckets[number]
            if part == "start" and len(bucket.all_reduces) > 1 and bucket.form == "concat":
                yield (), "pack"
        elif name[0] == "g":
            group = strategy.groups[number]
            results = [value.node for value in units.values_of[units.index[name]]]
            main = graph.nodes[results[0]].opcode
            emitter = triton_emitter(group.config) if group.kind == "triton" else ""
            kernel = group_key(graph, {*group.nodes, *group.duplicates}, results, emitter)
            single = len(group.nodes) + len(group.duplicates) == 1
            kind = f"wrapped_{main}" if single else f"{main}_fusion"
            yield tuple(dict.fromkeys((fused_key(graph, group), kernel))), kind.replace("-", "_")
        elif graph.nodes[number].opcode != "partition-id":
            opcode = graph.nodes[number].opcode
            kind = {"custom-call": "call", "fusion": "fusion"}.get(opcode, f"wrapped_{opcode}")
            yield (graph.nodes[number].key,), kind.replace("-", "_")


def _cleared_ns(events: Sequence[Sequence[Any]], starts: Sequence[int]) -> Counter[int]:
    """Time spent clearing memory, by the kernel that comes next and needs it."""
    found: Counter[int] = Counter()
    for event in events:
        if event[1].startswith("Memset"):
            found[min(bisect_left(starts, event[3]), len(starts) - 1)] += event[4]
    return found


def _beside(event: Sequence[Any], busy: Sequence[tuple[int, int]]) -> float:
    start, end = event[3], event[3] + event[4]
    shared = sum(max(0, min(end, b) - max(start, a)) for a, b in busy)
    return shared / max(end - start, 1)


# Profiles -----------------------------------------------------------------------------------------


def op_times(runs: Iterable[Run]) -> dict[str, OpTime]:
    """Times of kernels that ran beside no transfer, by cost key."""
    times: dict[str, list[int]] = defaultdict(list)
    for run in runs:
        for kernel in run.kernels:
            if kernel.beside == 0:
                for key in kernel.keys:
                    times[key].append(kernel.ns)
    return {
        key: OpTime(round(median(found)), round(_spread(found)), len(found))
        for key, found in sorted(times.items())
    }


def _spread(values: Sequence[float]) -> float:
    middle = median(values)
    return float(median(abs(value - middle) for value in values))


def sweep_points(probe: Probe, link: str, run: Run) -> tuple[SweepPoint, ...]:
    """All-reduce times by size: the sweep where it went through NCCL, and below that the traced step."""
    points = [
        SweepPoint(row["bytes"], round(1e3 * row["each_us"]), 0, 15)
        for row in probe.result(link, "sweep")
        if row["bytes"] >= QUIET_BYTES
    ]
    alone = probe.result(link, "microbenchmarks")["all-reduce alone"]
    points.append(SweepPoint(1 << 28, round(1e6 * alone["minimum_ms"]), 0, 12))
    small: dict[int, list[int]] = defaultdict(list)
    for bucket, ns in run.transfer_ns.items():
        if _bucket_bytes(probe, run.strategy, bucket) < QUIET_BYTES:
            small[_bucket_bytes(probe, run.strategy, bucket)].append(ns)
    points += [SweepPoint(size, round(median(ns)), 0, len(ns)) for size, ns in small.items()]
    return tuple(sorted(points, key=lambda point: point.size_bytes))


def _bucket_bytes(probe: Probe, strategy: Strategy, bucket: int) -> int:
    return sum(probe.graph.nodes[node].shape.size_bytes for node in strategy.buckets[bucket].all_reduces)


def profile_of(probe: Probe, link: str, run: Run, ops: Mapping[str, OpTime]) -> Profile:
    """Everything measured on one link."""
    line = fit(sweep_points(probe, link, run))
    beside = [
        (kernel.ns, ops[key].median_ns)
        for kernel in run.kernels
        for key in kernel.keys[:1]
        if kernel.beside > 0.98 and key in ops and ops[key].median_ns > LONG_NS
    ]
    compute = sum(ns for ns, _ in beside) / sum(alone for _, alone in beside)
    sizes = [_bucket_bytes(probe, run.strategy, bucket) for bucket in run.transfer_ns]
    communication = sum(run.transfer_ns.values()) / int(line.predict_ns(sizes).sum())
    default_ms = probe.result(link, "step times")["default"]["all_ms"]
    environment = probe.result(link, "environment")
    return Profile(
        platform=Platform(
            environment["devices"][0],
            "gpu",
            environment["platform_version"],
            environment["jax"],
            environment["jax"],
        ),
        ops=ops,
        launch_ns=launch_ns(probe),
        memory_bandwidth=_bandwidth(probe),
        flops_per_s=_flops_per_s(probe, ops),
        all_reduce=line,
        link=Link(len(environment["devices"]), 1, link),
        contention=Contention(round(max(1.0, compute), 4), round(max(1.0, communication), 4)),
        noise=round(_spread(default_ms) / median(default_ms), 4),
    )


def launch_ns(probe: Probe) -> int:
    """Mean gap between two kernels of XLA's own plan, waits left out."""
    gaps = []
    end = 0
    for event in probe.events("nvlink", "same"):
        if _is_transfer(event):
            continue
        gaps += [event[3] - end] if end and 0 <= event[3] - end < WAIT_NS else []
        end = max(end, event[3] + event[4])
    return round(sum(gaps) / len(gaps))


def _bandwidth(probe: Probe) -> float:
    """Bytes a second of a kernel that reads and writes a quarter of a gigabyte (60 of them, two runs)."""
    streams = probe.result("nvlink", "microbenchmarks")["streams alone"]
    return round(2 * 60 * 2 * (1 << 28) / (streams["overlap_ms"]["compute"] / 1e3), -9)


def _flops_per_s(probe: Probe, ops: Mapping[str, OpTime]) -> float:
    rates = [
        node.flops / ops[node.key].median_ns * 1e9
        for node in probe.graph.nodes
        if node.opcode == "custom-call" and node.key in ops
    ]
    return round(max(rates), -12)


# Simulator against device -------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One plan on one link."""

    link: str
    variant: str
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ms / self.measured_ms - 1


def comparison(probe: Probe, made: Mapping[str, Profile], variants: Sequence[str] = COMPARED) -> list[Row]:
    """Step times as the simulator predicts them from the profiles, and as measured."""
    rows = []
    for link, profile in made.items():
        costs, machine = costs_of(profile, [probe.graph]), machine_of(profile)
        for variant in variants:
            measured = probe.measured_ms(link, variant)
            if measured is None:
                continue
            problem = build(probe.graph, probe.strategy(link, variant), costs, machine).problem
            rows.append(Row(link, variant, simulate(problem).makespan_ns / 1e6, measured))
    return rows


def make(probe: Probe) -> dict[str, Profile]:
    """The profile of each link."""
    runs = {key: joined(probe, *key) for key in JOINED}
    ops = op_times(runs.values())
    return {link: profile_of(probe, link, runs[link, "list"], ops) for link in LINKS}


def main() -> None:
    """Parse the command line, print the table, write the profiles where asked."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("probe", type=Path, help="folder that scripts/gpu_probe.py wrote")
    parser.add_argument("--write", type=Path, help="folder for nvidia-h200-LINK.json")
    args = parser.parse_args()
    probe = Probe(args.probe)
    made = make(probe)
    for row in comparison(probe, made):
        print(
            f"{row.link:8} {row.variant:14} predicted {row.predicted_ms:7.2f} ms, "
            f"measured {row.measured_ms:7.2f} ms, {100 * row.error:+5.1f} %"
        )
    if args.write:
        for link, profile in made.items():
            kind = profile.platform.device_kind.lower().replace(" ", "-")
            profiles.save(profile, args.write / f"{kind}-{link}.json")


if __name__ == "__main__":
    main()
