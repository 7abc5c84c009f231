"""What the fuzzer found: shrunk, saved under a name that says what it is, and run again."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.fuzz.processes import End, Worker
from tests.fuzz.program import Body, Program, ProgramError, decode, from_json, to_json
from tests.fuzz.shrink import shrink
from tests.fuzz.strategies import KINDS, Wanted
from tests.fuzz.tally import FINDINGS
from tests.fuzz.worker import DEFAULT, PAST_GATE, WRITING

FOUND = Path(__file__).parent / "found"
"""Where findings lie; every file there is a test."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A program with a strategy that goes wrong."""

    program: Program
    strategy: Wanted
    kind: str
    """One of ``tally.FINDINGS``."""
    detail: str
    seed: int = -1
    """Of the program as it was before it was shrunk; -1 where it came from elsewhere."""

    @property
    def name(self) -> str:
        """Of its file: how it goes wrong, and with what."""
        ops = list(dict.fromkeys(_names(self.program.body)))[:6]
        text = json.dumps([to_json(self.program)["body"], self.kind], sort_keys=True)
        digest = blake2b(text.encode(), digest_size=3).hexdigest()
        return "-".join([self.kind, *ops, digest]).replace("_", "-")

    @property
    def alike(self) -> str:
        """Equal for findings that are probably one fault."""
        detail = "" if self.kind == "different" else re.sub(r"[0-9]+|fuzz\S*", "#", self.detail)[:160]
        return f"{self.kind} {detail}"


def _names(body: Body) -> Iterator[str]:
    for op in body.ops:
        yield op.name
        for inner in op.bodies:
            yield from _names(inner)


def save(finding: Finding, folder: Path) -> Path:
    """Write a finding; the path of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{finding.name}.json"
    raw = {
        "kind": finding.kind,
        "detail": finding.detail[:600],
        "strategy": {"kind": finding.strategy.kind, "seed": finding.strategy.seed},
        "found_with_seed": finding.seed,
        "program": to_json(finding.program),
    }
    path.write_text(_readable(raw) + "\n")
    return path


def _readable(raw: Any, indent: str = "") -> str:
    """JSON with what is short on one line."""
    text = json.dumps(raw)
    if len(indent) + len(text) < 120 or not isinstance(raw, dict | list) or not raw:
        return text
    inner = indent + " "
    if isinstance(raw, dict):
        parts = [f"{json.dumps(key)}: {_readable(value, inner)}" for key, value in raw.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _readable(one, inner) for one in raw) + f"\n{indent}]"


def load(path: Path) -> Finding:
    """Read a finding.

    Raises:
        ProgramError: the file holds something else; says what.
    """
    raw = decode(path.read_bytes(), str(path))
    try:
        strategy = Wanted(str(raw["strategy"]["kind"]), int(raw["strategy"]["seed"]))
        kind, detail, seed = str(raw["kind"]), str(raw["detail"]), int(raw["found_with_seed"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProgramError(f"{path}: no finding: {type(error).__name__}: {error}") from None
    if kind not in FINDINGS or strategy.kind not in KINDS:
        raise ProgramError(f"{path}: a finding of kind {kind!r} with strategy {strategy.kind!r}")
    return Finding(from_json(raw["program"]), strategy, kind, detail, seed)


def panel(strategy: Wanted) -> list[Wanted]:
    """Strategies to try on a program that was changed: what a seed stands for changes with it."""
    plain = [Wanted("default"), Wanted("unfused"), Wanted("one-kernel"), Wanted("xla")]
    more = [Wanted(strategy.kind, seed) for seed in (1, 2, 3)] if strategy.seed else []
    return list(dict.fromkeys([strategy, *plain, *more, Wanted("random", 1), Wanted("order", 2)]))


def outcomes(
    worker: Worker,
    program: Program | int,
    strategies: Sequence[Wanted],
    deadline: float = float("inf"),
    until: str = "",
    **asked: Any,
) -> tuple[list[tuple[Wanted, str, str]], str]:
    """What comes of each pair, each with its detail, and why the program was skipped; pairs behind one that aborts
    are tried, too, but none behind one whose outcome is ``until``. What else is ``asked`` for goes to ``task``."""
    found: list[tuple[Wanted, str, str]] = []
    skipped: list[str] = []
    left = list(strategies)
    while left and not skipped and not (until and any(kind == until for _, kind, _ in found)):
        heard: list[tuple[str, str]] = []

        def hear(message: dict[str, Any], heard: list[tuple[str, str]] = heard) -> None:
            if "pair" in message:
                heard.append((message["kind"], message["detail"]))
            if "skipped" in message:
                skipped.append(message["skipped"])

        end = worker.ask(task(program, left, until=until, **{"by_hand": not until, **asked}), hear, deadline)
        found += [(one, *outcome) for one, outcome in zip(left, heard, strict=False)]
        left = left[len(heard) :]
        if end.how in ("done", "stopped"):
            break
        if end.trying in (WRITING, DEFAULT):
            skipped.append(f"default: {end.how}: {end.said}")
        elif left:
            found.append((left.pop(0), kind_of(end), end.said))
    return found, "".join(skipped[:1])


def kind_of(end: End) -> str:
    """The outcome of a pair whose worker ended."""
    if end.trying.endswith(PAST_GATE):
        return "gated"
    return end.how if end.how in FINDINGS else "broken"


def task(
    program: Program | int,
    strategies: Sequence[Wanted],
    by_hand: bool = True,
    devices: int = 4,
    past_gate: bool = False,
    until: str = "",
    regions: bool = False,
) -> dict[str, Any]:
    """What a worker is asked to do; a program is given as data or by its seed. No pair is tried behind one whose
    outcome is ``until``; with ``regions`` no program without loops and branches that can be written anew."""
    return {
        "do": "pairs",
        "program": program if isinstance(program, int) else to_json(program),
        "devices": devices,
        "strategies": [(one.kind, one.seed) for one in strategies],
        "by_hand": by_hand,
        "past_gate": past_gate,
        "until": until,
        "regions": regions,
    }


def shrunk(
    finding: Finding, worker: Worker, deadline: float, ended: Callable[[], bool] = lambda: False
) -> Finding:
    """The smallest finding of the same kind that is reached by ``deadline`` (on ``time.monotonic``), or before
    ``ended`` says True."""
    best = finding

    def still_wrong(program: Program) -> bool:
        nonlocal best
        found, skipped = outcomes(worker, program, panel(best.strategy), deadline, finding.kind)
        wrong = [one for one in found if one[1] == finding.kind and not ended()]
        if wrong and not skipped:
            strategy, kind, detail = wrong[0]
            best = Finding(program, strategy, kind, detail, finding.seed)
        return bool(wrong) and not skipped

    shrink(finding.program, still_wrong, lambda: time.monotonic() < deadline and not ended())
    return best
