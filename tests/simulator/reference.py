"""The simulator again, slow and obvious, for the fast engines to be compared with; and the paper's ready queue.

A heap of events as in SimPy, objects and lists instead of arrays, every running task followed for
itself. It shares nothing with the engines but the problem. docs/simulator.md has the rules.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from disco_hlo.simulator.problem import Problem

FULL_SPEED = 1_000_000


@dataclass
class Running:
    """A task on its resource."""

    task: int
    left: int
    """Millionths of a nanosecond of work still to do."""
    held: bool = False
    """Whether it has its resource but does nothing yet."""
    since: int = 0
    """When it got its resource."""
    is_first: bool = False
    """Of a product: whether it began before the transfers beside it."""
    lost: int = 0
    """Of a product that held a transfer, what it has to do besides."""


@dataclass
class Simulation:
    """The state of one simulated step."""

    problem: Problem
    ready_queue: bool = False
    """Whether the ready queue decides, not the problem's order."""
    now: int = 0
    running: dict[int, Running] = field(default_factory=dict)
    """By resource."""
    start: dict[int, int] = field(default_factory=dict)
    end: dict[int, int] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    """(time, version): something ends at that time, unless the version is an old one."""
    version: int = 0

    def run(self) -> Simulation:
        policy = self.policy()
        policy.finished([])
        self.begin(policy)
        while self.events:
            time, version = heapq.heappop(self.events)
            if version != self.version:
                continue
            self.advance(time)
            policy.finished(self.retire())
            self.begin(policy)
        return self

    def policy(self) -> ReadyQueue | InOrder:
        return ReadyQueue(self) if self.ready_queue else InOrder(self)

    def begin(self, policy: ReadyQueue | InOrder) -> None:
        """Let every idle resource take what the policy has for it, then foresee what ends when."""
        op_before = self.running.get(0)
        for resource in (0, 1):
            if resource in self.running:
                continue
            task = policy.next_task(resource)
            if task is not None:
                self.start[task] = self.now
                self.started.append(task)
                work = int(self.problem.duration_ns[task]) * FULL_SPEED
                self.running[resource] = Running(task, work, held=resource > 0, since=self.now)
        self.let_go()
        op = self.running.get(0)
        if op is not None and op is not op_before:
            op.is_first = self.is_product(op.task) and self.transfers() == 0
        self.version += 1
        for resource, running in self.running.items():
            if not running.held:
                needed = -(-running.left // self.speed(resource))
                heapq.heappush(self.events, (self.now + max(needed, 0), self.version))
        if any(running.held for running in self.running.values()) and self.hold_left() > 0:
            needed = -(-self.hold_left() // self.speed(0))
            heapq.heappush(self.events, (self.now + needed, self.version))

    def let_go(self) -> None:
        """Held transfers begin once the compute stream idles, or what it runs has done its hold."""
        for running in self.running.values():
            if not running.held:
                continue
            if 0 not in self.running:
                running.held = False
            elif self.running[0].left > 0 and self.hold_left() <= 0:
                running.held = False
                running.left += self.problem.transfer_wait_ns * FULL_SPEED
                self.charge(self.running[0], since=running.since)
            if not running.held:
                self.start[running.task] = self.now

    def charge(self, op: Running, since: int) -> None:
        """A product has held a transfer, which on half of the devices had begun and waited beside it: that cost it."""
        if op.is_first and since < self.now and not op.lost:
            slower = FULL_SPEED - int(self.problem.speed_ppm[3, 1])
            op.lost = int(self.problem.hold_ns[op.task]) * slower // 2
            op.left += op.lost

    def is_product(self, task: int) -> bool:
        return bool(self.problem.products[task])

    def transfers(self) -> int:
        """Number of those under way."""
        return sum(1 for resource, running in self.running.items() if resource > 0 and not running.held)

    def hold_left(self) -> int:
        """Of the task on the compute stream, what it must still do before a transfer begins beside it."""
        if 0 not in self.running:
            return 0
        op = self.running[0]
        behind_ns = int(self.problem.duration_ns[op.task] - self.problem.hold_ns[op.task])
        return op.left - behind_ns * FULL_SPEED - op.lost

    def speed(self, resource: int) -> int:
        row = 0 if resource == 0 else 2 if 0 in self.running else 1
        if resource == 0 and self.is_product(self.running[0].task):
            row = 3
        if resource == 0 and self.running[0].is_first:
            return FULL_SPEED
        return int(self.problem.speed_ppm[row, self.transfers()])

    def advance(self, time: int) -> None:
        speeds = {resource: self.speed(resource) for resource in self.running}
        for resource, running in self.running.items():
            if not running.held:
                running.left -= (time - self.now) * speeds[resource]
        self.now = time

    def retire(self) -> list[int]:
        """End every task whose work is done."""
        over = [
            resource for resource, running in self.running.items() if running.left <= 0 and not running.held
        ]
        tasks = [self.running.pop(resource).task for resource in over]
        self.end.update(dict.fromkeys(tasks, self.now))
        return tasks


class ReadyQueue:
    """DisCo, section 4.4: what is ready waits in the queue of its resource."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.queued: set[int] = set()
        self.queues: dict[int, deque[int]] = {}

    def finished(self, tasks: list[int]) -> None:
        del tasks
        problem, ended = self.simulation.problem, self.simulation.end
        for task in range(len(problem)):
            if task not in self.queued and all(p in ended for p in problem.predecessors[task].tolist()):
                self.queued.add(task)
                self.queues.setdefault(int(problem.resource[task]), deque()).append(task)

    def next_task(self, resource: int) -> int | None:
        queue = self.queues.get(resource)
        return queue.popleft() if queue else None


class InOrder:
    """The compute stream goes through the order, issues transfers and waits for them."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.order = deque(simulation.problem.order.tolist())
        self.queue: deque[int] = deque()

    def finished(self, tasks: list[int]) -> None:
        """Nothing becomes ready: the order says what comes next."""

    def next_task(self, resource: int) -> int | None:
        if resource > 0:
            return self.queue.popleft() if self.queue else None
        while self.order:
            entry = self.order[0]
            if entry < 0 and ~entry not in self.simulation.end:
                return None
            self.order.popleft()
            if entry < 0:
                continue
            if self.simulation.problem.resource[entry] == 0:
                return entry
            self.queue.append(entry)
        return None


def simulate_slowly(problem: Problem, *, ready_queue: bool = False) -> Simulation:
    """Start and end of every task, by tasks."""
    return Simulation(problem, ready_queue).run()


def simulate_tick_by_tick(problem: Problem, *, ready_queue: bool = False) -> dict[int, int]:
    """End of every task, found by going through the nanoseconds one by one: no foresight to get wrong."""
    simulation = Simulation(problem, ready_queue)
    policy = simulation.policy()
    policy.finished([])
    simulation.begin(policy)
    while simulation.running:
        simulation.let_go()  # before what ends: a transfer without duration does so in the instant in which it begins
        while any(running.left <= 0 and not running.held for running in simulation.running.values()):
            policy.finished(simulation.retire())
            simulation.begin(policy)
        simulation.advance(simulation.now + 1)
    return simulation.end


def peak_bytes_slowly(problem: Problem) -> int:
    """Peak memory by asking at every moment which buffers live."""
    buffers = [
        (
            int(problem.buffers.size_bytes[i]),
            int(problem.buffers.producer[i]),
            [int(problem.buffers.producer[i]), *problem.buffers.readers[i].tolist()],
            bool(problem.buffers.returned[i]),
        )
        for i in range(len(problem.buffers.size_bytes))
    ]
    order = problem.order.tolist()
    born = {task: order.index(task) for task in range(len(problem))}
    last = {entry: place for place, entry in enumerate(order)}
    done = {t: last[~t] if problem.resource[t] else last[t] for t in range(len(problem))}
    live = [
        sum(
            size
            for size, producer, users, returned in buffers
            if born[producer] <= moment and (returned or moment <= max(done[user] for user in users))
        )
        for moment in range(len(order))
    ]
    return problem.resident_bytes + max(live, default=0)
