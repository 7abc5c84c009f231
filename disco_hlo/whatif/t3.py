"""T3 (Pati et al., ASPLOS 2024): a matmul whose output starts the ring's reduce-scatter as it is written.

Sections 4.1 to 4.5. The output is cut into one chunk a device. The first chunk is stored straight into the neighbour's
memory. Every other chunk is written to memory, where the neighbour's copy is added to it near the memory; once both
have come, a DMA sends it on, but for the last, which stays. All devices do the same at once, so one device is
simulated: what it sends is what it receives. An all-gather follows.

The event loop is this module's own, since the simulator's has tasks with a speed, and here two streams share the bytes
of one memory: the matmul's (reads while it multiplies, bursts of writes) and the communication's (reads of the DMA,
updates that arrive). Under round robin each gets half where both want all. Under T3's arbitration the matmul goes
first and communication gets what is left; in a stream of bytes no queue fills, so its threshold has nothing to do.

Bursts of communication fill the queues of the memory, so that the matmul's reads stall (section 4.5). How long depends
on how much latency its kernels tolerate, which the paper does not give. Here, under round robin, the matmul stands
still while the memory serves communication. But one whose operands stay in the cache, once read, has next to nothing
to wait for ("fit largely in the LLC ... little impact", section 6.1.2) and goes on. What an access to the result costs,
alone and in turn with others, is what a channel of the memory says (:mod:`~disco_hlo.whatif.dram`).

The models of table 2 follow, and what T3 makes of a whole iteration of theirs (sections 5.1.2 and 6.3).
The paper scales the breakdown of a measured iteration to each model's sizes (section 5.1.2; figure 4). Here it is
computed: all matmuls of a layer by the same model as the sub-layers', the all-reduces, and the rest, which passes
through memory and so grows with tokens times width. Of the model with the most communication it is as much as it takes
for the share that this has of figure 4 (section 2.4).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

from disco_hlo.whatif.dram import Access, ResultCost, access_cycles, result_cost
from disco_hlo.whatif.machine import Machine, Matmul, Stages, collective_ns, matmul_ns, stages

AT_BANDWIDTH = ResultCost(1.0, 1.0)
FEWEST_PIECES = 8
"""Of a chunk. The paper's tracker works by wavefronts, so that the link is busy while the next piece is read."""


class Arbitration(StrEnum):
    """Who gets the memory (section 4.5)."""

    ROUND_ROBIN = "round robin"
    COMPUTE_FIRST = "compute first"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes between a device and its memory (figure 18)."""

    matmul_reads: float
    matmul_writes: float
    scatter_reads: float
    scatter_writes: float
    gather_reads: float
    gather_writes: float

    @property
    def total(self) -> float:
        """All of it."""
        return (
            self.matmul_reads + self.matmul_writes + self.scatter_reads + self.scatter_writes
            + self.gather_reads + self.gather_writes
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SubLayer:
    """A matmul and the all-reduce of its result, in all of the paper's configurations (section 5.3); times in ns."""

    matmul_ns: float
    scatter_ns: float
    near_memory_scatter_ns: float
    gather_ns: float
    fused_ns: dict[Arbitration, float]
    """Matmul and reduce-scatter together."""
    sequential_traffic: Traffic
    fused_traffic: Traffic

    @property
    def sequential_ns(self) -> float:
        """One after the other."""
        return self.matmul_ns + self.scatter_ns + self.gather_ns

    @property
    def ideal_ns(self) -> float:
        """Matmul and reduce-scatter overlap without costing each other anything."""
        return max(self.matmul_ns, self.scatter_ns) + self.gather_ns

    def t3_ns(self, arbitration: Arbitration) -> float:
        """With T3."""
        return self.fused_ns[arbitration] + self.gather_ns


def sub_layer(machine: Machine, matmul: Matmul, devices: int, update_factor: float = 1.0) -> SubLayer:
    """Simulate one sub-layer; updates cost so many times what the channel says."""
    size = matmul.output_bytes
    cost = result_cost(matmul.rows, matmul.columns, machine.gpu.compute_units, devices).times(update_factor)
    alone, fused = stages(machine.gpu, matmul), stages(machine.gpu, matmul, around_cache=True)
    near_memory_ns = collective_ns(machine, "reduce-scatter", size, devices)
    return SubLayer(
        alone.ns,
        near_memory_ns + last_sum_ns(machine, size, devices),
        near_memory_ns,
        collective_ns(machine, "all-gather", size, devices),
        {one: fused_ns(machine, fused, devices, one, cost) for one in Arbitration},
        _sequential_traffic(alone, size, devices),
        _fused_traffic(fused, size, devices),
    )


def last_sum_ns(machine: Machine, size_bytes: float, devices: int) -> float:
    """What a ring's reduce-scatter takes besides its messages where nothing is reduced near memory: at last a kernel
    adds what came to its own copy. During a step its memory is busy for less time than the link."""
    cycles = access_cycles((Access.READ, Access.READ, Access.WRITE))
    return cycles * size_bytes / devices / machine.gpu.memory_gb_per_s


def _sequential_traffic(alone: Stages, size: float, devices: int) -> Traffic:
    chunk = size / devices
    return Traffic(
        alone.read_bytes * alone.count, size,
        (2 * devices - 1) * chunk, devices * chunk, (devices - 1) * chunk, (devices - 1) * chunk,
    )  # fmt: skip


def _fused_traffic(fused: Stages, size: float, devices: int) -> Traffic:
    chunk = size / devices
    return Traffic(
        fused.read_bytes * fused.count, (devices - 1) * chunk,
        (devices - 2) * chunk, (devices - 1) * chunk, (devices - 1) * chunk, (devices - 1) * chunk,
    )  # fmt: skip


def fused_ns(
    machine: Machine, matmul: Stages, devices: int, arbitration: Arbitration, cost: ResultCost = AT_BANDWIDTH
) -> float:
    """From the start of the matmul until its last chunk is reduced."""
    run = _Run(machine, matmul, devices, arbitration, cost)
    for _ in range(100 * (matmul.count + len(run.local) + 10)):
        if run.is_over:
            return run.now_ns
        run.advance()
    raise AssertionError("the devices wait for each other")


class _Run:
    """One device, as time goes on. A piece is a part of a chunk, at least as fine as a stage of the matmul."""

    def __init__(
        self, machine: Machine, matmul: Stages, devices: int, arbitration: Arbitration, cost: ResultCost
    ) -> None:
        self.matmul = replace(matmul, write_ns=cost.update * matmul.write_ns)
        self.arbitration, self.cost = arbitration, cost
        self.memory, self.link = machine.gpu.memory_gb_per_s, machine.network.link_gb_per_s
        self.latency_ns = machine.network.link_latency_us * 1e3
        self.per_chunk = max(FEWEST_PIECES, ceil(matmul.count / devices))
        pieces = devices * self.per_chunk
        self.piece_bytes = matmul.write_bytes * matmul.count / pieces
        self.local, self.arrived, self.queued = [False] * pieces, [False] * pieces, [False] * pieces
        self.now_ns = 0.0
        self.stage, self.is_writing, self.left_ns = 0, False, matmul.products_ns
        self.jobs: deque[tuple[int, bool]] = deque()
        """What communication wants of the memory, in turn: a piece, and whether it arrived (else it is sent)."""
        self.job_left = 0.0
        self.sending: deque[tuple[int, float]] = deque()
        """Pieces on the link in turn, and when the neighbour's copy of the next chunk arrives here."""
        self.link_free_ns = 0.0

    @property
    def is_over(self) -> bool:
        return self.stage == self.matmul.count and all(self.local) and all(self.arrived[self.per_chunk :])

    def advance(self) -> None:
        """To the next event: the end of a phase of the matmul, of a job of the memory, or of a message."""
        compute, communication = self._rates()
        steps = [self.left_ns / compute] if compute > 0 else []
        steps += [self.job_left / communication] if self.jobs and communication > 0 else []
        steps += [max(0.0, self.sending[0][1] - self.now_ns)] if self.sending else []
        step = min(steps)
        self.now_ns += step
        self.left_ns -= step * compute
        self.job_left -= step * communication
        if self.sending and self.sending[0][1] <= self.now_ns + 1e-9:
            self._add_job(self.sending.popleft()[0] + self.per_chunk, True)
        if self.jobs and self.job_left <= 1e-6:
            self._end_job()
        if self.stage < self.matmul.count and self.left_ns <= 1e-9:
            self._end_phase()

    def _rates(self) -> tuple[float, float]:
        """How fast the matmul's phase goes (1: as alone), and bytes per ns for communication."""
        if self.stage == self.matmul.count:
            return 0.0, self.memory
        if not self.jobs:
            return 1.0, 0.0
        if self.is_writing and self._stored_remotely():
            return 1.0, self.memory
        is_unhindered = self.matmul.reads_once and not self.is_writing
        if self.arbitration is Arbitration.COMPUTE_FIRST or is_unhindered:
            wanted = self.memory if self.is_writing else self.matmul.read_bytes / self.matmul.products_ns
            return 1.0, self.memory - min(wanted, self.memory)
        return (0.5, self.memory / 2) if self.is_writing else (0.0, self.memory)

    def _stored_remotely(self) -> bool:
        return (self.stage + 1) * self.matmul.write_bytes <= self.per_chunk * self.piece_bytes

    def _end_phase(self) -> None:
        if not self.is_writing:
            self.is_writing, self.left_ns = True, self.matmul.write_ns
            return
        self.stage, self.is_writing, self.left_ns = self.stage + 1, False, self.matmul.products_ns
        done = len(self.local) * self.stage // self.matmul.count
        for piece in range(self.local.index(False), done):
            self.local[piece] = True
            if piece < self.per_chunk:
                self._send(piece)
            else:
                self._forward(piece)

    def _forward(self, piece: int) -> None:
        """Once both copies are in memory, read it for the next device; the last chunk stays."""
        ready = self.local[piece] and self.arrived[piece] and not self.queued[piece]
        if ready and piece < len(self.local) - self.per_chunk:
            self.queued[piece] = True
            self._add_job(piece, False)

    def _add_job(self, piece: int, is_arrival: bool) -> None:
        self.jobs.append((piece, is_arrival))
        if len(self.jobs) == 1:
            self._start_job()

    def _start_job(self) -> None:
        updating = self.cost.update if self.stage == self.matmul.count else self.cost.mixed
        self.job_left = self.piece_bytes * (updating if self.jobs[0][1] else self.cost.read)

    def _end_job(self) -> None:
        piece, is_arrival = self.jobs.popleft()
        if self.jobs:
            self._start_job()
        if is_arrival:
            self.arrived[piece] = True
            self._forward(piece)
        else:
            self._send(piece)

    def _send(self, piece: int) -> None:
        self.link_free_ns = max(self.link_free_ns, self.now_ns) + self.piece_bytes / self.link
        self.sending.append((piece, self.link_free_ns + self.latency_ns))


FORWARD, BACKWARD = ("OP", "FC-2"), ("FC-1", "IP")
MOST_COMMUNICATION = {"training": 0.34, "prompt": 0.43}
"""T3, section 2.4: of the smaller models' time, at most."""


@dataclass(frozen=True, slots=True)
class Model:
    """A row of table 2."""

    name: str
    width: int
    tokens: int
    """Sequence length times batch."""
    degrees: tuple[int, ...]
    """Devices that slice a layer."""


SMALLER = (Model("Mega-GPT-2", 3072, 16 * 1024, (8, 16)), Model("T-NLG", 4256, 8 * 1024, (8, 16)))
LARGER = (
    Model("GPT-3", 12 * 1024, 2 * 1024, (32,)),
    Model("PALM", 18 * 1024, 2 * 1024, (32,)),
    Model("MT-NLG", 20 * 1024, 2 * 1024, (32,)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One sub-layer of one model."""

    model: Model
    degree: int
    name: str
    result: SubLayer


def sliced(model: Model, name: str, degree: int) -> Matmul:
    """The matmul of a sub-layer on one of ``degree`` devices; its result is to be all-reduced."""
    depth = {"OP": 1, "IP": 3, "FC-2": 4, "FC-1": 4}[name] * model.width // degree
    return Matmul(model.tokens, model.width, depth)


def cases(machine: Machine, models: tuple[Model, ...], update_factor: float = 1.0) -> list[Case]:
    """All sub-layers of these models; updates cost so many times what the channel says."""
    return [
        Case(model, degree, name, sub_layer(machine, sliced(model, name, degree), degree, update_factor))
        for model in models
        for degree in model.degrees
        for name in (*FORWARD, *BACKWARD)
    ]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of one model in one phase, without what is neither matmul nor communication; times in ns."""

    sequential_ns: float
    """Its sub-layers, one after the other."""
    communication_ns: float
    """Of these."""
    matmuls_ns: float
    """All others."""
    t3_ns: dict[Arbitration, float]
    """The sub-layers with T3."""
    elements: int
    """Tokens times width."""

    @property
    def communication(self) -> float:
        """Its share, where there is nothing else."""
        return self.communication_ns / (self.sequential_ns + self.matmuls_ns)

    def speed_up(self, arbitration: Arbitration, element_ns: float) -> float:
        """How much faster an iteration is where the rest takes so long for each token and unit of width."""
        total = self.sequential_ns + self.matmuls_ns + element_ns * self.elements
        return total / (total - self.sequential_ns + self.t3_ns[arbitration])


def layers(machine: Machine, found: list[Case], phase: str) -> list[Layer]:
    """One for each model and degree; ``training`` with the backward pass, ``prompt`` without."""
    made = []
    for model, degree in dict.fromkeys((one.model, one.degree) for one in found):
        results = [
            one.result
            for one in found
            if (one.model, one.degree) == (model, degree) and (phase == "training" or one.name in FORWARD)
        ]
        made.append(
            Layer(
                sum(one.sequential_ns for one in results),
                sum(one.scatter_ns + one.gather_ns for one in results),
                _other_matmuls_ns(machine, model, degree, training=phase == "training"),
                {by: sum(one.t3_ns(by) for one in results) for by in Arbitration},
                model.tokens * model.width,
            )
        )
    return made


def element_ns(smaller: list[Layer], phase: str) -> float:
    """What is neither matmul nor communication, for each token and unit of width: of these, one has the most
    communication, and this is then as much as T3 says."""
    most = max(smaller, key=lambda one: one.communication)
    total = most.communication_ns / MOST_COMMUNICATION[phase]
    return (total - most.sequential_ns - most.matmuls_ns) / most.elements


def _other_matmuls_ns(machine: Machine, model: Model, degree: int, *, training: bool) -> float:
    """The matmuls of a layer that no all-reduce follows: IP and FC-1 forward; backward OP, FC-2 and all weights'."""
    wide = [model.width * many // degree for many in (3, 4)]
    found = [Matmul(model.tokens, columns, model.width) for columns in wide]
    if training:
        found += [Matmul(model.tokens, model.width * many // degree, model.width) for many in (1, 4)]
        found += [Matmul(model.width, model.width * many // degree, model.tokens) for many in (3, 1, 4, 4)]
    return sum(matmul_ns(machine.gpu, one) for one in found)
