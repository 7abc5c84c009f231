"""What Python asks of the rules: why nodes may not be one kernel, and how XLA labels it where they may."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from disco_hlo.backends import BACKENDS
from disco_hlo.core.legality import kernel_refusal, results_refusal
from disco_hlo.core.legality_gpu import find_heroes, is_input_fusion
from disco_hlo.core.reasons import LEGAL, sentence
from disco_hlo.core.rows import plain_rows
from disco_hlo.hlo.graph import Graph

_INSIDE = 1
"""What marks the members."""


def _row() -> defaultdict[int, int]:
    return defaultdict(int)


@dataclass(slots=True)
class Kernel:
    """One kernel as the rules see it: working space of its own, as large as the kernel."""

    members: Sequence[int]
    """Ascending."""
    results: Sequence[int]
    inside: dict[int, int]
    number: list[int] = field(default_factory=lambda: [_INSIDE])
    about: list[int] = field(default_factory=lambda: [0, 0, 0])
    mark: dict[int, int] = field(default_factory=_row)
    value: dict[int, int] = field(default_factory=_row)
    evaluated: dict[int, int] = field(default_factory=_row)
    heroes: dict[int, int] = field(default_factory=_row)
    queue: dict[int, int] = field(default_factory=_row)
    queue_back: dict[int, int] = field(default_factory=_row)


def kernel(members: Collection[int], results: Sequence[int]) -> Kernel:
    """The kernel that computes ``members`` and returns ``results``."""
    return Kernel(sorted(members), results, defaultdict(int, dict.fromkeys(members, _INSIDE)))


def group_refusal(
    graph: Graph, members: Collection[int], results: Sequence[int], kind: str = "loop"
) -> str | None:
    """Why these nodes may not run as one kernel, or None where they may.

    Args:
        graph: the step.
        members: all nodes computed inside, owned and duplicated.
        results: the owned members whose value leaves the kernel, at least one.
        kind: the emitter, as in ``plan.strategy.Group``. XLA chooses between its own by what is inside.
    """
    g, w = plain_rows(graph), kernel(members, results)
    tiled = kind == "triton"
    reason = results_refusal(g, w, len(results), tiled)
    if reason == LEGAL:
        reason = kernel_refusal(g, w, len(w.members), len(results), _INSIDE, tiled)
    return None if reason == LEGAL else sentence(graph, reason, w.about)


def emitter_kind(graph: Graph, members: Collection[int], results: Sequence[int]) -> Literal["loop", "input"]:
    """XLA's label of the kernel that computes ``members`` and returns ``results``.

    ``input`` (kInput) on GPU where a result comes from a block reduction, a tiled transpose or a scatter, else
    ``loop`` (``ChooseFusionKind``). The label names the emitter, it does not choose it.
    """
    if not BACKENDS[graph.backend].has_heroes:
        return "loop"
    g, w = plain_rows(graph), kernel(members, results)
    find_heroes(g, w, len(w.members), len(results), _INSIDE)
    return "input" if is_input_fusion(g, w, len(results)) else "loop"
