"""A strategy on the way to being measured, and rank 0's marks of what may crash."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.plan.bans import Stage
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.store import PlanSlot
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.structure import Restructured
from disco_hlo.plugin.xla import jaxlink


@dataclass
class Trial:
    """One strategy on the way to being measured."""

    name: str
    strategy: Strategy | None
    """None: XLA's default, untouched."""
    predicted_ns: int
    """Its step time; with what launching its kernels singly takes, once it is handed out."""
    module: bytes = b""
    """What XLA is handed: of XLA's default of another structure, the early module."""
    marks: PlanSlot | None = None
    """Where rank 0 notes that this candidate is being tried; None notes it nowhere."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Debug options for this compile alone."""
    launched_singly: bool = False
    """As of :class:`~disco_hlo.plan.plan.Plan`; the same on all ranks once it is handed out."""
    restructured: Restructured | None = None
    """What the strategy is for, where it is not the step with the structure XLA gives it."""
    finer: Trial | None = None
    """What it is compared with where it adds up in float32 what the step adds up in 16 bits: XLA's default of that."""
    executable: Any = None
    executed: bytes = b""
    """The module that the executable runs, where that was read."""
    runner: Runner | None = None
    """On the inputs that it ran on last."""
    times_ns: list[int] = field(default_factory=list)
    compared: bool = False
    """Whether it was seen to compute what XLA's default computes; its times do not say so."""
    error: str = ""
    differs: bool = False
    """Whether its numbers were seen to be others, or nobody could say in the end."""

    @property
    def digest(self) -> str:
        """Of its module."""
        return hashlib.sha256(self.module).hexdigest()

    @property
    def running(self) -> Runner:
        """Its runner, once it has one."""
        assert self.runner is not None
        return self.runner

    @property
    def median_ns(self) -> int:
        """Median step time; 0 where it did not run."""
        return int(statistics.median(self.times_ns)) if self.times_ns else 0

    @property
    def spread_ns(self) -> int:
        """Half the distance between the quartiles."""
        if len(self.times_ns) < 2:
            return 0
        low, _, high = statistics.quantiles(self.times_ns, n=4)
        return int((high - low) / 2)

    def source(self, whole: CanonicalModule) -> CanonicalModule:
        """The module whose nodes the strategy speaks of; ``whole`` is the step as XLA has it."""
        return whole if self.restructured is None else self.restructured.source

    @property
    def structure(self) -> bytes | None:
        """What takes the place of the step's early module."""
        if self.restructured is not None:
            return self.restructured.early
        return self.module or None if self.strategy is None else None


def marked(session: Session, trial: Trial, stage: Stage) -> contextlib.AbstractContextManager[None]:
    """Rank 0's mark of a candidate under way: what it tells of a process that died may ban the candidate."""
    if trial.marks is None or not session.leads or not trial.module:
        return contextlib.nullcontext()
    return trial.marks.bans.trying(trial.digest, stage, jaxlink.process_count())
