"""What a run has counted, and how counts of several runs are added up in a file."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.program import ProgramError

FORMAT = "disco-hlo fuzz counts"
VERSION = 1
FINDINGS = ("different", "aborted", "hung", "lost", "uncompiled", "unverified", "broken", "default-gated")
"""Outcomes of a pair that are faults of ours."""
_OF_DEFAULTS = ("accepted", "default-gated")
"""Outcomes of XLA's default before the last gate: no strategy was tried."""
_SAID = ("accepted", "same", "repeated", "gated", "gated-right", "own-gated", "refused")
_MOST_BYTES = 16 << 20


@dataclass
class Tally:
    """Counts of one run, or of all that were added to a file."""

    kinds: Counter[str] = field(default_factory=Counter)
    """Outcomes of pairs."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Programs no strategy of which was judged, by the first word of the reason."""
    programs: int = 0
    seconds: float = 0.0
    done: list[tuple[int, int]] = field(default_factory=list)
    """Seeds of programs that were tried, from and up to; ascending, apart from each other."""

    @property
    def pairs(self) -> int:
        """All pairs, those whose module was compared before included."""
        return sum(count for kind, count in self.kinds.items() if kind not in _OF_DEFAULTS)

    @property
    def found(self) -> int:
        """Pairs that show a fault of ours."""
        return sum(self.kinds[kind] for kind in FINDINGS)

    def note_done(self, seed: int) -> None:
        """Note that a program was tried."""
        self.programs += 1
        self.done = merged([*self.done, (seed, seed + 1)])

    def add(self, other: Tally) -> None:
        """Add what another run counted."""
        self.kinds.update(other.kinds)
        self.skipped.update(other.skipped)
        self.programs += other.programs
        self.seconds += other.seconds
        self.done = merged([*self.done, *other.done])

    def is_done(self, seed: int) -> bool:
        """Whether the program of a seed was tried."""
        return any(first <= seed < end for first, end in self.done)

    def line(self) -> str:
        """All counts on one line."""
        kinds = ", ".join(f"{self.kinds[kind]} {kind}" for kind in (*_SAID, *FINDINGS))
        skipped = ", ".join(f"{count} {why}" for why, count in sorted(self.skipped.items())) or "0"
        return (
            f"{self.pairs} pairs of {self.programs} programs in {self.seconds:.0f} s: {kinds}; "
            f"programs skipped: {skipped}"
        )


def merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that touch or overlap as one."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found


def load(path: Path, subject: str) -> Tally:
    """The counts in a file; none where there is no file yet.

    Args:
        subject: what the counts are of: platform and devices.

    Raises:
        ProgramError: the file holds something else, or counts of another subject.
    """
    if not path.exists():
        return Tally()
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        raw: Any = json.loads(path.read_bytes())
        if raw["format"] != FORMAT or raw["version"] != VERSION:
            raise ValueError(f"expected format {FORMAT!r}, version {VERSION}")
        if raw["subject"] != subject:
            raise ValueError(f"counts of {raw['subject']!r}, not of {subject!r}: add to another file")
        return Tally(
            Counter({str(kind): int(count) for kind, count in raw["kinds"].items()}),
            Counter({str(why): int(count) for why, count in raw["skipped"].items()}),
            int(raw["programs"]),
            float(raw["seconds"]),
            merged([(int(first), int(end)) for first, end in raw["done"]]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ProgramError(f"{path}: no counts of the fuzzer: {type(error).__name__}: {error}") from None


def save(path: Path, subject: str, tally: Tally) -> None:
    """Write the counts, whole or not at all."""
    text = json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "subject": subject,
            "programs": tally.programs,
            "pairs": tally.pairs,
            "seconds": round(tally.seconds, 1),
            "kinds": dict(sorted(tally.kinds.items())),
            "skipped": dict(sorted(tally.skipped.items())),
            "done": tally.done,
        },
        indent=1,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    beside.write_text(text + "\n")
    beside.replace(path)
