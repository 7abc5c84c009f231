"""Figures of the papers from our simulator: what each paper says (``configs/papers/*.toml``), what we find by the same
key, and the parameters that a paper leaves open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from pathlib import Path
from typing import Literal

import msgspec

from disco_hlo.whatif import coconet, fused, t3
from disco_hlo.whatif.machine import HALF, Machine, Matmul, collective_ns, load
from disco_hlo.whatif.t3 import Arbitration

ROOT = Path(__file__).resolve().parents[1]
FOUND_BITS = 14


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """A figure of a paper's."""

    figure: str
    what: str
    key: str
    paper: float
    is_fitted: bool = False


class Measurement(msgspec.Struct, forbid_unknown_fields=True):
    """What others measured of a part of the model; no figure of the paper's."""

    what: str
    key: str
    value: float
    unit: str
    is_fitted: bool = False


class Training(msgspec.Struct, forbid_unknown_fields=True):
    """A row of CoCoNet's table 1."""

    optimizer: coconet.Optimizer
    model: str
    micro_batches: tuple[int, int, int, int]
    speed_ups: tuple[float, float, float]


class Paper(msgspec.Struct, forbid_unknown_fields=True):
    """What a paper says."""

    title: str
    machine: str
    by: Literal["points", "factor"]
    tolerance: float
    row: list[Row]
    training: list[Training] = []
    measured: list[Measurement] = []


@dataclass(frozen=True)
class Open:
    """A parameter that a paper leaves open."""

    key: str
    parameter: str
    taken: float
    low: float
    high: float
    of: Callable[[float], float]
    """The figure for a value."""


def geometric_mean(values: list[float]) -> float:
    """Of speed-ups."""
    return exp(sum(map(log, values)) / len(values))


def is_within(paper: Paper, said: float, have: float) -> bool:
    """Whether a figure is reached."""
    off = abs(have - said) if paper.by == "points" else abs(have / said - 1)
    return off <= paper.tolerance + 1e-9


def solve(one: Open, target: float) -> float | None:
    """The value at which a figure becomes ``target``; None where it does not between the ends."""
    low, high = one.low, one.high
    at_low, at_high = one.of(low), one.of(high)
    if not min(at_low, at_high) <= target <= max(at_low, at_high):
        return None
    for _ in range(FOUND_BITS):
        middle = (low + high) / 2
        if (one.of(middle) < target) == (at_low < target):
            low = middle
        else:
            high = middle
    return low


def read(name: str) -> Paper:
    """What a paper says."""
    return msgspec.toml.decode((ROOT / "configs" / "papers" / f"{name}.toml").read_bytes(), type=Paper)


# --- T3 -------------------------------------------------------------------------------------------

SIZES = {"smaller": t3.SMALLER, "larger": t3.LARGER}


BY = {"mca": Arbitration.COMPUTE_FIRST, "t3": Arbitration.ROUND_ROBIN}


def t3_figures(
    machine: Machine, factor: float = 1.0, sizes: Collection[str] = ("larger", "smaller")
) -> dict[str, float]:
    """By key of ``configs/papers/t3.toml``, of models of these sizes; updates cost ``factor`` times as much."""
    found: dict[str, float] = {}
    cases = {size: t3.cases(machine, SIZES[size], factor) for size in sizes}
    for size, of in cases.items():
        results = [one.result for one in of]
        ideal = [one.sequential_ns / one.ideal_ns for one in results]
        _speed_ups(found, f"ideal {size}", ideal)
        for short, by in BY.items():
            _speed_ups(found, f"{short} {size}", [one.sequential_ns / one.t3_ns(by) for one in results])
        if size == "smaller":
            _traffic(found, of)
            found |= {
                f"ideal {c.model.name} {c.degree} {c.name}": s - 1 for c, s in zip(of, ideal, strict=True)
            }
    for phase in t3.MOST_COMMUNICATION if len(cases) == len(SIZES) else ():
        layers = {size: t3.layers(machine, of, phase) for size, of in cases.items()}
        rest = t3.element_ns(layers["smaller"], phase)
        for short, by in BY.items():
            _speed_ups(found, f"{phase} {short}", [one.speed_up(by, rest) for one in layers["smaller"]])
        faster = [one.speed_up(Arbitration.COMPUTE_FIRST, rest) for one in layers["larger"]]
        _speed_ups(found, f"larger {phase}", faster)
    return found


def _speed_ups(found: dict[str, float], name: str, values: list[float]) -> None:
    found[f"{name} mean"], found[f"{name} most"] = geometric_mean(values) - 1, max(values) - 1


def _traffic(found: dict[str, float], cases: list[t3.Case]) -> None:
    saved = [1 - one.result.fused_traffic.total / one.result.sequential_traffic.total for one in cases]
    found["traffic mean"], found["traffic most"] = sum(saved) / len(saved), max(saved)
    for one in cases:
        before, after = one.result.sequential_traffic, one.result.fused_traffic
        found[f"scatter reads {one.degree}"] = before.scatter_reads / after.scatter_reads
        written = (before.matmul_writes + before.scatter_writes) / (
            after.matmul_writes + after.scatter_writes
        )
        found[f"writes {one.degree}"] = written - 1
        found[f"near memory {one.degree}"] = one.result.scatter_ns / one.result.near_memory_scatter_ns - 1


def t3_opened(machine: Machine) -> list[Open]:
    """What T3 leaves open."""

    def more_reads(times: float) -> float:
        saved = []
        for one in t3.cases(machine, t3.SMALLER):
            before, after = one.result.sequential_traffic, one.result.fused_traffic
            saved.append(1 - after.total / (before.total - before.matmul_reads + times * after.matmul_reads))
        return max(saved)

    # Of the figures that are not reached; another that is missed some day says nothing until it has a line here.
    return [
        Open("t3 smaller mean", "time that an update costs the memory, over what the channel gives", 1, 0.1, 8,
             lambda value: t3_figures(machine, value, ["smaller"])["t3 smaller mean"]),
        Open("traffic most", "reads of a matmul alone over its reads with T3, at most (the paper: 2.0 for 16 devices)",
             1.41, 1, 8, more_reads),
    ]  # fmt: skip


# --- CoCoNet --------------------------------------------------------------------------------------

LARGEST, LARGE = 1 << 30, range(26, 31)
PIPELINED = 8 * 2048 * 12288
"""Elements of a micro batch of 8 in figure 12: section 6.3.1 has it where a node has one layer, as there."""
INFERRED = 8
"""Sequences of section 6.2.1: ``BATCH_SIZE`` of the authors' ``coconet-experiments/MegatronLM-Model-Parallel``."""
PIPELINES = ((coconet.GPT2, 16, 5), (coconet.GPT3, 8, 1), (coconet.GPT3, 2, 6))
"""Model, micro batch and layers a node of section 6.3.1."""
INNER = 4096
"""``intermediate_size`` of the authors' ``bert_config_*.json``."""
BATCHES = {"Adam": 8192, "LAMB": 65536}
FUSED, ONE, OVERLAPPED, PIPED = "fuse(RS-Opt-AG)", "AR-Opt", "OL(MM,fuse(RS+C+AG))", "OL(RS+C,P2P,AG)"


def coconet_figures(machine: Machine) -> dict[str, float]:
    """By key of ``configs/papers/coconet.toml``."""
    found: dict[str, float] = {}
    for optimizer in coconet.UPDATE_BYTES:
        of = [coconet.update_schedules(machine, optimizer, 1 << bits) for bits in LARGE]
        found[f"{optimizer} most"] = of[-1][ONE] / of[-1][FUSED]
        found[f"{optimizer} over GShard"] = geometric_mean([one["GShard-Eq"] / one[FUSED] for one in of])
    plain = [
        coconet.matmul_schedules(machine, Matmul(batch * 1024, 3072, 768), 16, pointwise=False)
        for batch in (8, 16, 32, 64)
    ]
    found["figure 1 most"] = max(one["MM+AR+C"] / one[OVERLAPPED] for one in plain)
    of = [
        coconet.matmul_schedules(machine, Matmul(batch * 1024, 3072, depth), 16)
        for batch in (8, 16)
        for depth in (192, 768)
    ]
    _range(found, "GShard", [one["MM+AR+C"] / one["GShard-Eq"] for one in of])
    _range(found, "overlap", [one["MM+AR+C"] / one[OVERLAPPED] for one in of])
    _range(found, "overlap over GShard", [one["GShard-Eq"] / one[OVERLAPPED] for one in of])
    one = coconet.pipeline_schedules(machine, PIPELINED)
    _range(found, "pipeline", [one["AR+P2P+C"] / one[PIPED]])
    _range(found, "pipeline over GShard", [one["GShard-Eq"] / one[PIPED]])
    found["pipeline over sliced"] = one["AR+P2P+C+AG"] / one[PIPED]
    for model in (coconet.BERT, coconet.GPT2):
        found[f"inference {model.name}"] = coconet.tensor_parallel_speed_up(machine, model, INFERRED)
    for model, batch, layers in PIPELINES:
        key = f"pipelined {model.name} {layers}"
        found[key] = coconet.pipeline_speed_up(machine, model, batch, layers)
    return found | _measured(machine)


def _measured(machine: Machine) -> dict[str, float]:
    """What others measured, as the model has it."""
    script = {
        f"script {micro} {length}": coconet.sequences_per_s(machine, coconet.BERTS[0], micro, length)
        for micro, length in ((16, 128), (64, 128), (4, 512), (8, 512))
    }
    update_ms = {
        bits: coconet.UPDATE_BYTES["Adam"] * (1 << bits) / machine.gpu.memory_gb_per_s / 1e6
        for bits in (28, 30)
    }
    ring_ms, half_ms = (
        coconet.fused_ring_ns(machine, size, 128) / 1e6 for size in (4 * (1 << 30), 2 * (1 << 28))
    )
    return (
        script
        | {f"Adam 2^{bits}": ms for bits, ms in update_ms.items()}
        | {
            f"all-reduce 2^{bits}, 128 GPUs": collective_ns(machine, "all-reduce", 4 << bits, 128) / 1e6
            for bits in (24, 26, 28, 30)
        }
        | {
            "fused Adam 2^30, 128 GPUs": ring_ms + update_ms[30] / 128,
            "fused Adam 2^28, 16 bits, 128 GPUs": half_ms + update_ms[28] / 128,
        }
    )


def _range(found: dict[str, float], name: str, values: list[float]) -> None:
    found[f"{name} least"], found[f"{name} most"] = min(values), max(values)


def training_rows(machine: Machine, paper: Paper) -> tuple[list[Row], dict[str, float]]:
    """Table 1: what the paper has, and what we have, by system; systems without memory must have none here either."""
    rows, found = [], {}
    for one in paper.training:
        model = next(model for model in coconet.BERTS if model.name == one.model)
        for system, micro_batch in zip(coconet.STATE_BYTES, one.micro_batches, strict=True):
            fits = coconet.has_memory(machine, system, one.optimizer, model)
            if fits != bool(micro_batch):
                key = f"{one.optimizer} {one.model} {system}"
                rows.append(Row("table 1", f"{key}: out of memory", key, float(not micro_batch)))
                found[key] = float(not fits)
        factors = trained(machine, one, model)
        for system, said in zip(coconet.STATE_BYTES, one.speed_ups, strict=False):
            if said:
                key = f"{one.optimizer} {one.model} {system}"
                rows.append(Row("table 1", f"CoCoNet over {system}, {one.optimizer}, {one.model}", key, said))
                found[key] = factors[system]
    return rows, found


def trained(machine: Machine, one: Training, model: coconet.Bert) -> dict[str, float]:
    """What CoCoNet gains over each system that has memory."""
    times = {
        system: coconet.training_ns(
            machine, system, one.optimizer, model, micro_batch, BATCHES[one.optimizer]
        )
        for system, micro_batch in zip(coconet.STATE_BYTES, one.micro_batches, strict=True)
        if micro_batch
    }
    return {system: time / times["CoCoNet"] for system, time in times.items()}


def of_the_authors_files(machine: Machine, paper: Paper) -> list[str]:
    """Table 1 with the inner width of the authors' configuration files, where it is another."""
    lines = []
    for one in paper.training:
        model = next(model for model in coconet.BERTS if model.name == one.model)
        if model.inner == INNER or not any(one.speed_ups):
            continue
        less = 2 * model.layers * model.width * (model.inner - INNER)
        other = replace(model, inner=INNER, parameters=model.parameters - less)
        factors = trained(machine, one, other)
        told = [f"{factors[of]:.2f}x over {of}" for of in factors if of != "CoCoNet"]
        lines.append(
            f"* With an inner width of {INNER} ({other.parameters / 1e9:.2f} B), {one.optimizer}, {one.model}: "
            f"{', '.join(told)}."
        )
    return lines


def winners(machine: Machine) -> str:
    """Who is fastest where."""
    lines = []
    for optimizer in coconet.UPDATE_BYTES:
        best = []
        for bits in range(10, 31):
            times = coconet.update_schedules(machine, optimizer, 1 << bits)
            bound = times.pop("UB")
            best.append(min(times, key=times.__getitem__))
        change = 10 + best.index(FUSED) if FUSED in best else 31
        lines.append(
            f"Figure 10, {optimizer}: {best[0]} is fastest up to 2^{change - 1} elements, then {best[-1]} "
            f"(the paper: AR-Opt for small, {FUSED} for large tensors). For the largest it takes "
            f"{min(times.values()) / bound:.3f} times UB, the all-reduce alone (the paper: near optimal)."
        )
    return "\n".join(lines)


def coconet_opened(machine: Machine) -> list[Open]:
    """What CoCoNet leaves open."""
    paper = read("coconet")

    def apart(optimizer: coconet.Optimizer, share: float) -> float:
        times = coconet.update_schedules(machine, optimizer, LARGEST)
        return times["GShard-Eq"] / share / times[FUSED]

    def sliced(share: float) -> float:
        times = coconet.pipeline_schedules(machine, PIPELINED)
        sent = coconet.send_ns(machine, HALF * PIPELINED / machine.network.node_devices)
        return (times["AR+P2P+C+AG"] - sent + sent / share) / times[PIPED]

    def piped(bandwidth: float) -> float:
        slow = replace(machine, network=replace(machine.network, node_gb_per_s=bandwidth))
        return coconet.pipeline_speed_up(slow, *PIPELINES[0])

    def slower(one: Training, at: int, times: float = 1.0, besides_ms: float = 0.0) -> float:
        model = next(model for model in coconet.BERTS if model.name == one.model)
        micro, batch, system = one.micro_batches, BATCHES[one.optimizer], list(coconet.STATE_BYTES)[at]
        have, best = (
            coconet.training_ns(machine, name, one.optimizer, model, micro[place], batch)
            for name, place in ((system, at), ("CoCoNet", 3))
        )
        have += (times - 1) * coconet.computing_ns(machine, model, micro[at], batch) + 1e6 * besides_ms
        return have / best

    tables = []
    for one in paper.training:
        for at, system in enumerate(list(coconet.STATE_BYTES)[:3]):
            key, micro = f"{one.optimizer} {one.model} {system}", one.micro_batches[at]
            if micro and micro == one.micro_batches[3]:
                name = f"ms that an iteration of {system} takes besides"
                tables.append(Open(key, name, 0.0, 0.0, 1e3, partial(slower, one, at, 1.0)))
            elif micro:
                name = f"compute of micro batches of {micro}, over what the matmuls' stages give"
                tables.append(Open(key, name, 1.0, 1.0, 4.0, partial(slower, one, at)))
    sent = "share of the ports' bandwidth that a sliced send reaches"
    share = "bandwidth of NCCL's reduce-scatter and all-gather over that of the fused kernel"
    return [
        *(
            Open(f"{optimizer} over GShard", share, 1.0, 0.5, 1.0, partial(apart, optimizer))
            for optimizer in coconet.UPDATE_BYTES
        ),
        Open(
            "pipelined GPT-2 8.3B 5",
            "network.node_gb_per_s",
            machine.network.node_gb_per_s,
            10.0,
            100.0,
            piped,
        ),
        Open("pipeline over sliced", sent, 1.0, 0.1, 1.0, sliced),
        *tables,
    ]


# --- paper 004, fused computation-collective operators --------------------------------------------

BATCH_SIZES, TABLES = (256, 512, 1024, 2048), (64, 128, 256)
"""Of figures 8 and 12: assumed but for {1024 | 256} and {2048 | 256}."""
GEMV = [(rows * 1024, depth * 1024) for rows in (8, 16, 32, 64) for depth in (2, 4, 8)]
MATMULS = [Matmul(tokens, width, 4 * width) for tokens in (2048, 4096, 8192) for width in (1024, 2048, 4096)]
"""Of figures 9 and 10: assumed, of the sizes of Transformers; only 64 k rows are named."""


def fused_figures(_: Machine) -> dict[str, float]:
    """By key of ``configs/papers/fused.toml``."""
    node, pair, torus = map(load, ("mi210-node", "mi210-pair", "mi210-torus"))
    tables = [fused.Embedding(batch, count) for batch in BATCH_SIZES for count in TABLES]
    found: dict[str, float] = {}
    for name, machine in (("node", node), ("pair", pair)):
        _saved(found, name, [fused.embedding_all_to_all(machine, one) for one in tables])
    _saved(found, "gemv", [fused.gemv_all_reduce(node, *size) for size in GEMV])
    _saved(found, "matmul", [fused.matmul_all_to_all(node, one) for one in MATMULS])
    one = fused.Embedding(1024, 256)
    quarter, three, most = (fused.pooling_ns(pair, one, share) for share in (0.25, 0.75, 0.875))
    found["occupancy 25 to 75"], found["occupancy 75 to 87.5"] = 1 - three / quarter, 1 - most / three
    one = fused.Embedding(2048, 256)
    found["skew"] = fused.skew(pair, one, aware=False)
    found["skew aware"] = fused.skew(pair, one, aware=True)
    found["dlrm"] = fused.dlrm(torus, fused.Dlrm()).saved
    return found


def _saved(found: dict[str, float], name: str, of: list[fused.Compared]) -> None:
    saved = [one.saved for one in of]
    found[f"{name} mean"], found[f"{name} most"] = sum(saved) / len(saved), max(saved)


def fused_opened(_: Machine) -> list[Open]:
    """What paper 004 leaves open."""
    pair, node = load("mi210-pair"), load("mi210-node")

    def started(value: float) -> float:
        quick = replace(node, network=replace(node.network, kernel_us=value))
        return max(fused.gemv_all_reduce(quick, *size).saved for size in GEMV)

    def pooled(value: float) -> float:
        return fused.embedding_all_to_all(pair, fused.Embedding(1024, 256, pooling=round(value))).saved

    def waited(value: float) -> float:
        slow = replace(pair, gpu=replace(pair.gpu, latency_ns=value))
        quarter, three = (fused.pooling_ns(slow, fused.Embedding(1024, 256), share) for share in (0.25, 0.75))
        return 1 - three / quarter

    return [
        Open("gemv most", "network.kernel_us", 12.0, 0.0, 12.0, started),
        Open("pair mean", "Embedding.pooling, which is stated for the simulation only", 70, 45, 200, pooled),
        Open("occupancy 25 to 75", "gpu.latency_ns", pair.gpu.latency_ns, 100.0, 1000.0, waited),
        Open(
            "occupancy 75 to 87.5", "memory bandwidth at 87.5 % occupancy over that at 75 %", 1.0, 0.5, 1.5,
            lambda value: 1 - 1 / value,
        ),
    ]  # fmt: skip


FIGURES = {
    "t3": (t3_figures, t3_opened),
    "coconet": (coconet_figures, coconet_opened),
    "fused": (fused_figures, fused_opened),
}
"""By paper: its figures by key, and what it leaves open."""
