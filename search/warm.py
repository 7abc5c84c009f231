"""Compile the search, the first time on a machine, before its clock runs or as long as there is time.

Nothing ends the compiler early. Where time is short it runs in a process of its own, which goes on where nobody waits
for it any more: the next search finds what it made.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from disco_hlo.compiled import can_be_ready, is_ready, note_ready
from disco_hlo.elsewhere import command, environment
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph, Kind, Node, Shape
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.search import run
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.interpreter import without_collector
from disco_hlo.search.restart import FEWEST_PROPOSALS
from disco_hlo.search.run import search
from disco_hlo.simulator.costs import MachineModel

_ARRAY = Shape("f32", (8,), (0,))
_CANDIDATES = FEWEST_PROPOSALS + 100
"""More than the climbs that come first can look at: those of everything, with their orders, are met as well."""
_LONGEST_S = 900
"""After which a process that compiles gives up: five times what it takes on a busy machine."""
_LOOK_S = 0.05
LEFT_BEHIND: list[subprocess.Popen[bytes]] = []
"""Those that compile though nobody waits for them any more."""


def warm_up_in_time(
    graph: Graph,
    costs: CostModel,
    machine: MachineModel,
    settings: SearchSettings,
    seconds: float | None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """:func:`warm_up` as long as ``seconds`` allow, or until somebody wants an end; whether all code exists now."""
    what = f"{settings.method} {graph.backend} {bool(graph.collectives)} {machine.speed_ppm().shape}"
    if seconds is not None and can_be_ready(run.__name__) and not is_ready(run.__name__, what):
        small = small_step(graph.backend, transfers=bool(graph.collectives))
        try:
            task = pickle.dumps((small, costs, machine, settings, what))
        except (pickle.PicklingError, AttributeError, TypeError):
            task = b""  # no other process can have these costs
        if task and not _compiled_elsewhere(task, seconds, stop):
            return False
    warm_up(graph, costs, machine, settings)
    note_ready(run.__name__, what)
    return True


def _compiled_elsewhere(task: bytes, seconds: float, stop: Callable[[], bool]) -> bool:
    """Whether another process has compiled everything, or could not, before the time was up."""
    until = time.monotonic() + seconds
    try:
        process = subprocess.Popen(
            command(__name__), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=environment(), start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(task)
        process.stdin.close()
    except OSError:
        return True
    while process.poll() is None:
        if time.monotonic() >= until or stop():
            LEFT_BEHIND.append(process)
            return False
        time.sleep(_LOOK_S)
    return True


def warm_up(graph: Graph, costs: CostModel, machine: MachineModel, settings: SearchSettings) -> None:
    """Search a step of a few ops as ``settings`` say, so that all code exists for one like ``graph``."""
    few = replace(settings, evaluations=_CANDIDATES, seconds=None, seeds=1, memory_limit_bytes=None)
    small = small_step(graph.backend, transfers=bool(graph.collectives))
    with without_collector():  # the compiler makes much that lives on
        search(small, costs, machine, start=small_plan(small), settings=few)


def small_plan(small: Graph) -> Strategy:
    """A plan of :func:`small_step` with a kernel of two ops."""
    return Strategy((Group((2,), (1,)),), tuple(Bucket((x,)) for x in small.collectives))


def small_step(backend: str, *, transfers: bool) -> Graph:
    """A step with two all-reduces, or without: a profile of one device does not know what one takes."""
    nodes = [
        Node(0, "parameter", _ARRAY, (), Kind.PARAMETER, key="parameter"),
        Node(1, "negate", _ARRAY, (0,), Kind.FUSIBLE, key="negate"),
        Node(2, "exponential", _ARRAY, (1,), Kind.FUSIBLE, key="exponential"),
        Node(3, "negate", _ARRAY, (1,), Kind.FUSIBLE, key="negate"),
    ]
    if transfers:
        nodes += [
            Node(4, "all-reduce", _ARRAY, (2,), Kind.COLLECTIVE, key="all-reduce", collective="sum"),
            Node(5, "all-reduce", _ARRAY, (3,), Kind.COLLECTIVE, key="all-reduce", collective="sum"),
        ]
    root = len(nodes)
    nodes.append(Node(root, "tuple", Shape("tuple"), (root - 2, root - 1), Kind.FREE, key="tuple"))
    return Graph(tuple(nodes), root, (), backend, "jit_step", "warm")


def main() -> None:
    """Compile what the step and the settings on stdin need."""
    signal.alarm(_LONGEST_S)
    graph, costs, machine, settings, what = pickle.load(sys.stdin.buffer)  # noqa: S301  our own parent
    warm_up(graph, costs, machine, settings)
    note_ready(run.__name__, what)
