"""A strategy: what XLA shall execute, as a value (DisCo, section 3.2, and the order beyond it).

A strategy speaks of the nodes of one :class:`~disco_hlo.hlo.graph.Graph` by number. It is
complete: ``apply(strategy, module)`` leaves XLA nothing to decide. Its execution *units* are

* ``g3``  op group 3 (one fusion kernel),
* ``b2``  all-reduce bucket 2; where collectives are asynchronous ``b2.start`` and ``b2.done``,
* ``n17`` a single node that is in no group (wrapped as a one-op kernel where the backend needs it).

A strategy names ops only. Parameters, constants, tuples, get-tuple-elements and bitcasts are not units; the bitcasts
through which the ops of a group read are in its kernel, unnamed (:mod:`disco_hlo.hlo.flat_graph`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """Ops that run as one kernel."""

    nodes: tuple[int, ...]
    """Ops this group owns, ascending. An op has at most one owner. The group's results are
    the owned ops that anything outside reads (or the entry root returns)."""
    duplicates: tuple[int, ...] = ()
    """Ops recomputed inside, ascending; what else needs their value takes it from their owner."""
    kind: str = "loop"
    """Emitter: ``loop`` (kLoop), ``input`` (kInput), ``output`` (kOutput, CPU), ``triton`` (GPU)."""
    config: str = ""
    """Emitter settings as canonical JSON (Triton tiles); empty where the emitter has none."""

    @property
    def ops(self) -> tuple[int, ...]:
        """All that it computes, ascending."""
        return tuple(sorted((*self.nodes, *self.duplicates)))


@dataclass(frozen=True, slots=True)
class Bucket:
    """All-reduces that travel together."""

    all_reduces: tuple[int, ...]
    """All-reduce nodes in transfer order."""
    form: str = "concat"
    """``concat``: one all-reduce over the concatenation. ``variadic``: one instruction with several
    operands (on GPU one NCCL group). A bucket of one is always ``concat``."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """Op groups, buckets and the order of their execution, in the entry of a step and in its regions."""

    groups: tuple[Group, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    """Every all-reduce of the graph is in exactly one bucket."""
    order: tuple[str, ...] = ()
    """Every unit once, in execution order; empty means the deterministic default order of ``apply``."""
    regions: tuple[tuple[str, Strategy], ...] = ()
    """Of the entry: the strategies of loop bodies, branches and called computations, ascending by name
    (:class:`disco_hlo.hlo.regions.Region`). A region that is not named stays as XLA compiled it."""
