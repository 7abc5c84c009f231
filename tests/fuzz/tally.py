"""What a run has counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

FINDINGS = ("different", "aborted", "hung", "lost", "uncompiled", "unverified", "broken", "default-gated")
"""Outcomes of a pair that are faults of ours."""
_OF_DEFAULTS = ("accepted", "default-gated")
"""Outcomes of XLA's default before the last gate: no strategy was tried."""
_SAID = ("accepted", "same", "repeated", "gated", "own-gated", "refused")


@dataclass
class Tally:
    """Counts of one run."""

    kinds: Counter[str] = field(default_factory=Counter)
    """Outcomes of pairs."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Programs no strategy of which was judged, by the first word of the reason."""
    programs: int = 0
    seconds: float = 0.0

    @property
    def pairs(self) -> int:
        """All pairs, those whose module was compared before included."""
        return sum(count for kind, count in self.kinds.items() if kind not in _OF_DEFAULTS)

    @property
    def found(self) -> int:
        """Pairs that show a fault of ours."""
        return sum(self.kinds[kind] for kind in FINDINGS)

    def line(self) -> str:
        """All counts on one line."""
        kinds = ", ".join(f"{self.kinds[kind]} {kind}" for kind in (*_SAID, *FINDINGS))
        skipped = ", ".join(f"{count} {why}" for why, count in sorted(self.skipped.items())) or "0"
        return (
            f"{self.pairs} pairs of {self.programs} programs in {self.seconds:.0f} s: {kinds}; "
            f"programs skipped: {skipped}"
        )
