"""Paper 004's figures from our simulator, and the parameters that the paper leaves open."""

from __future__ import annotations

from dataclasses import replace

from disco_hlo.whatif import fused
from disco_hlo.whatif.machine import Machine, Matmul, load
from paper_figures.rows import Open

BATCH_SIZES, TABLES = (256, 512, 1024, 2048), (64, 128, 256)
"""Of figures 8 and 12: assumed but for {1024 | 256} and {2048 | 256}."""
GEMV = [(rows * 1024, depth * 1024) for rows in (8, 16, 32, 64) for depth in (2, 4, 8)]
MATMULS = [Matmul(tokens, width, 4 * width) for tokens in (2048, 4096, 8192) for width in (1024, 2048, 4096)]
"""Of figures 9 and 10: assumed, of the sizes of Transformers; only 64 k rows are named."""


def figures(_: Machine) -> dict[str, float]:
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


def opened(_: Machine) -> list[Open]:
    """What paper 004 leaves open."""
    pair, node = load("mi210-pair"), load("mi210-node")

    def started(value: float) -> float:
        quick = replace(node, network=replace(node.network, kernel_us=value))
        return max(fused.gemv_all_reduce(quick, *size).saved for size in GEMV)

    def pooled(value: float) -> float:
        return fused.embedding_all_to_all(pair, fused.Embedding(1024, 256, pooling=round(value))).saved

    return [
        Open("gemv most", "network.kernel_us", 12.0, 0.0, 12.0, started),
        Open("pair mean", "Embedding.pooling, which is stated for the simulation only", 70, 45, 200, pooled),
        Open(
            "occupancy 25 to 75", "share of occupancy at which memory is saturated", 1.0, 0.26, 1.0,
            lambda value: 1 - 0.25 / min(0.75, value),
        ),
        Open(
            "occupancy 75 to 87.5", "memory bandwidth at 87.5 % occupancy over that at 75 %", 7 / 6, 0.5, 1.5,
            lambda value: 1 - 1 / value,
        ),
    ]  # fmt: skip
