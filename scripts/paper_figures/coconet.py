"""CoCoNet's figures from our simulator, and the parameters that the paper leaves open."""

from __future__ import annotations

from functools import partial

from disco_hlo.whatif import coconet
from disco_hlo.whatif.machine import Machine, Matmul
from paper_figures.rows import Open, Paper, Row, Training, geometric_mean, read

LARGEST, LARGE = 1 << 30, range(26, 31)
PIPELINED = 8 * 2048 * 12288
"""Elements of a micro batch of 8 in figure 12: section 6.3.1 has it where a node has one layer, as there."""
BATCHES = {"Adam": 8192, "LAMB": 65536}
FUSED, ONE, OVERLAPPED, PIPED = "fuse(RS-Opt-AG)", "AR-Opt", "OL(MM,fuse(RS+C+AG))", "OL(RS+C,P2P,AG)"


def figures(machine: Machine) -> dict[str, float]:
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
    return found


def _range(found: dict[str, float], name: str, values: list[float]) -> None:
    found[f"{name} least"], found[f"{name} most"] = min(values), max(values)


def training_rows(machine: Machine, paper: Paper) -> tuple[list[Row], dict[str, float]]:
    """Table 1: what the paper has, and what we have, by system; systems without memory must have none here either."""
    rows, found = [], {}
    for one in paper.training:
        model = next(model for model in coconet.BERTS if model.name == one.model)
        times = {}
        for system, micro_batch in zip(coconet.STATE_BYTES, one.micro_batches, strict=True):
            fits = coconet.has_memory(machine, system, one.optimizer, model)
            key = f"{one.optimizer} {one.model} {system}"
            if fits != bool(micro_batch):
                rows.append(Row("table 1", f"{key}: out of memory", key, float(not micro_batch)))
                found[key] = float(not fits)
            elif fits:
                batch = BATCHES[one.optimizer]
                times[system] = coconet.training_ns(machine, system, one.optimizer, model, micro_batch, batch)
        for system, said in zip(coconet.STATE_BYTES, one.speed_ups, strict=False):
            if said and system in times:
                key = f"{one.optimizer} {one.model} {system}"
                rows.append(Row("table 1", f"CoCoNet over {system}, {one.optimizer}, {one.model}", key, said))
                found[key] = times[system] / times["CoCoNet"]
    return rows, found


def winners(machine: Machine) -> str:
    """Who is fastest where."""
    lines = []
    for optimizer in coconet.UPDATE_BYTES:
        best = []
        for bits in range(10, 31):
            times = coconet.update_schedules(machine, optimizer, 1 << bits)
            del times["UB"]
            best.append(min(times, key=times.__getitem__))
        change = 10 + best.index(FUSED) if FUSED in best else 31
        lines.append(
            f"Figure 10, {optimizer}: {best[0]} is fastest up to 2^{change - 1} elements, then {best[-1]} "
            f"(the paper: AR-Opt for small, {FUSED} for large tensors)."
        )
    return "\n".join(lines)


def opened(machine: Machine) -> list[Open]:
    """What CoCoNet leaves open."""
    paper = read("coconet")

    def apart(optimizer: coconet.Optimizer, share: float) -> float:
        times = coconet.update_schedules(machine, optimizer, LARGEST)
        return times["GShard-Eq"] / share / times[FUSED]

    def sliced(share: float) -> float:
        times = coconet.pipeline_schedules(machine, PIPELINED)
        sent = coconet.send_ns(machine, coconet.HALF * PIPELINED / machine.network.node_devices)
        return (times["AR+P2P+C+AG"] - sent + sent / share) / times[PIPED]

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
    share = "bandwidth of NCCL's reduce-scatter and all-gather over that of the fused kernel"
    return [
        *(
            Open(f"{optimizer} over GShard", share, 1.0, 0.5, 1.0, partial(apart, optimizer))
            for optimizer in coconet.UPDATE_BYTES
        ),
        Open(
            "pipeline over sliced",
            "share of the ports' bandwidth that a sliced send reaches",
            1.0,
            0.1,
            1.0,
            sliced,
        ),
        *tables,
    ]
