"""T3's figures from our simulator, and the parameters that the paper leaves open."""

from __future__ import annotations

from collections.abc import Collection

from disco_hlo.whatif import t3
from disco_hlo.whatif.machine import Machine
from disco_hlo.whatif.t3 import Arbitration
from paper_figures.rows import Open, geometric_mean

SIZES = {"smaller": t3.SMALLER, "larger": t3.LARGER}


def _figure(key: str, machine: Machine, update_cost: float = 1.0, other: float = t3.OTHER_SHARE) -> float:
    sizes = ["larger" if "larger" in key else "smaller"]
    return figures(machine, update_cost, sizes=sizes, other=other)[key]


def figures(
    machine: Machine,
    update_cost: float = 1.0,
    other: float = t3.OTHER_SHARE,
    sizes: Collection[str] = SIZES,
) -> dict[str, float]:
    """By key of ``configs/papers/t3.toml``, of models of these sizes."""
    found: dict[str, float] = {}
    for size in sizes:
        cases = t3.cases(machine, SIZES[size], update_cost)
        results = [one.result for one in cases]
        ideal = [one.sequential_ns / one.ideal_ns for one in results]
        _speed_ups(found, f"ideal {size}", ideal)
        for short, arbitration in (("mca", Arbitration.COMPUTE_FIRST), ("t3", Arbitration.ROUND_ROBIN)):
            _speed_ups(
                found, f"{short} {size}", [one.sequential_ns / one.t3_ns(arbitration) for one in results]
            )
            for phase in ("training", "prompt"):
                of_one = [
                    t3.iteration_speed_up(
                        machine,
                        [one for one in cases if (one.model, one.degree) == case],
                        arbitration,
                        training=phase == "training",
                        other_share=other,
                    )
                    for case in dict.fromkeys((one.model, one.degree) for one in cases)
                ]
                if size == "smaller":
                    _speed_ups(found, f"{phase} {short}", of_one)
                elif short == "mca":
                    _speed_ups(found, f"larger {phase}", of_one)
        if size == "smaller":
            _traffic(found, cases)
            found |= {
                f"ideal {c.model.name} {c.degree} {c.name}": s - 1 for c, s in zip(cases, ideal, strict=True)
            }
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


def opened(machine: Machine) -> list[Open]:
    """What T3 leaves open."""

    def cost(key: str) -> Open:
        name = "update_cost (time of an update near memory over that of a write; at most 2 by table 1)"
        return Open(key, name, 1, 1, 8, lambda value: _figure(key, machine, value))

    def other(key: str) -> Open:
        name = "transformers.OTHER_SHARE (what an iteration spends elsewhere; the paper: 0.40 to 0.45)"
        return Open(key, name, t3.OTHER_SHARE, 0.0, 0.9, lambda value: _figure(key, machine, other=value))

    def more_reads(times: float) -> float:
        saved = []
        for one in t3.cases(machine, t3.SMALLER):
            before, after = one.result.sequential_traffic, one.result.fused_traffic
            saved.append(1 - after.total / (before.total - before.matmul_reads + times * after.matmul_reads))
        return max(saved)

    def last(value: float) -> float:
        one = t3.cases(machine, t3.SMALLER)[0].result
        chunk = one.sequential_traffic.matmul_writes / 8
        return (
            one.scatter_ns + 3 * chunk / machine.gpu.memory_gb_per_s * (1 / value - 1)
        ) / one.near_memory_scatter_ns - 1

    keys = [
        *("mca smaller mean", "mca smaller most", "t3 smaller mean", "t3 smaller most"),
        *("mca larger mean", "mca larger most"),
    ]
    shares = [
        "prompt mca mean",
        "prompt mca most",
        "training mca most",
        "larger training most",
        "larger prompt most",
    ]
    return [
        *map(cost, keys),
        *map(other, shares),
        Open("traffic most", "reads of a matmul alone over its reads with T3, at most (the paper: 2.0 for 16 devices)",
             1.41, 1, 8, more_reads),
        Open("near memory 8", "share of the memory's bandwidth at which the last chunk is reduced", 1, 0.1, 1, last),
    ]  # fmt: skip
