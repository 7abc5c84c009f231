"""What the fuzzer found: made smaller while it still goes wrong in the same way, saved, and run again."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from msgspec import to_builtins

from tests.fuzz.grammar import is_stable
from tests.fuzz.interpret import check_types
from tests.fuzz.program import Argument, Body, Op, Program, ProgramError, Type, check
from tests.fuzz.strategies import KINDS, Wanted
from tests.fuzz.tally import FINDINGS
from tests.fuzz.worker import DEFAULT, WRITING, Worker

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
        text = json.dumps([to_builtins(self.program.body), self.kind], sort_keys=True)
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
    path.write_text(_readable(to_builtins(replace(finding, detail=finding.detail[:600]))) + "\n")
    return path


def _readable(raw: Any, indent: str = "") -> str:
    """JSON with what is short on one line."""
    text = json.dumps(raw)
    if len(indent) + len(text) < 120 or not isinstance(raw, dict | list | tuple) or not raw:
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
    try:
        finding = msgspec.json.decode(path.read_bytes(), type=Finding)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProgramError(f"{path}: no finding: {error}") from None
    if finding.kind not in FINDINGS or finding.strategy.kind not in KINDS:
        raise ProgramError(
            f"{path}: a finding of kind {finding.kind!r} with strategy {finding.strategy.kind!r}"
        )
    check(finding.program)
    return finding


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

        end = worker.ask(task(program, left, until=until, **asked), hear, deadline)
        found += [(one, *outcome) for one, outcome in zip(left, heard, strict=False)]
        left = left[len(heard) :]
        if end.how in ("done", "stopped"):
            break
        if end.trying in (WRITING, DEFAULT):
            skipped.append(f"default: {end.how}: {end.said}")
        elif left:
            found.append((left.pop(0), end.how if end.how in FINDINGS else "broken", end.said))
    return found, "".join(skipped[:1])


def task(
    program: Program | int,
    strategies: Sequence[Wanted],
    devices: int = 4,
    until: str = "",
    regions: bool = False,
) -> dict[str, Any]:
    """What a worker is asked to do; a program is given as data or by its seed. No pair is tried behind one whose
    outcome is ``until``; with ``regions`` no program without loops and branches that can be written anew."""
    return {
        "do": "pairs",
        "program": program if isinstance(program, int) else to_builtins(program),
        "devices": devices,
        "strategies": [(one.kind, one.seed) for one in strategies],
        "by_hand": not until,
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


# Smaller programs -------------------------------------------------------------------------------


def shrink(program: Program, still_wrong: Callable[[Program], bool], go_on: Callable[[], bool]) -> Program:
    """The smallest program found that is still wrong, by one cut after the other.

    Args:
        go_on: asked before each try; the best so far is returned once it answers False.
    """
    tried = {repr(program)}
    shrinking = True
    while shrinking:
        shrinking, place = False, 0
        # What was cut off makes no earlier cut possible, as a rule: the next is tried in the same place.
        while (smaller := next(itertools.islice(cuts(program), place, None), None)) is not None:
            place += 1
            text = repr(smaller)
            if text in tried:
                continue
            tried.add(text)
            if not go_on():
                return program
            if is_sound(smaller) and still_wrong(smaller):
                program, shrinking = smaller, True
                place -= 1
    return program


def is_sound(program: Program) -> bool:
    """Whether jax takes a program, and nothing in it depends on how something was rounded."""
    try:
        check(program)
        check_types(program)
    except ProgramError:
        return False
    return is_stable(program.body, [True] * len(program.arguments))


def cuts(program: Program) -> Iterator[Program]:
    """Programs that are smaller by a little, what cuts off most first."""
    body = program.body
    count = len(body.results)
    for i in range(count if count > 2 else 0):
        yield _with_results(program, [i])
    for i in range(count if count > 1 else 0):
        yield _with_results(program, [j for j in range(count) if j != i])
    yield from _earlier_results(program)
    if program.devices > 1:
        yield pruned(replace(program, devices=1, mode="jit"))
        yield pruned(replace(program, mode="jit"))
        yield pruned(replace(program, devices=2))
    for smaller in _shorter(body):
        yield pruned(replace(program, body=smaller))
    for k in range(len(body.ops) - 1, -1, -1):
        yield pruned(_behind_an_argument(program, k))
    yield from _plainer_arguments(program)
    for k in range(len(body.ops) - 1, -1, -1):
        for smaller in _smaller_op(body, k):
            yield pruned(replace(program, body=smaller))


def _with_results(program: Program, kept: Sequence[int]) -> Program:
    body = replace(program.body, results=tuple(program.body.results[i] for i in kept))
    return pruned(replace(program, body=body, sharded=tuple(program.sharded[i] for i in kept)))


def _earlier_results(program: Program) -> Iterator[Program]:
    """Programs that return what an op reads in the place of what it gives."""
    body, starts, types = program.body, _first_results(program.body), program.body.types
    made_by = {start + j: k for k, start in enumerate(starts) for j in range(len(body.ops[k].results))}
    for i, x in enumerate(body.results):
        for operand in dict.fromkeys(body.ops[made_by[x]].operands if x in made_by else ()):
            if operand not in made_by:
                continue
            results = (*body.results[:i], operand, *body.results[i + 1 :])
            sharded = list(program.sharded)
            sharded[i] = sharded[i] and types[operand].shape[:1] == types[x].shape[:1]
            yield pruned(replace(program, body=replace(body, results=results), sharded=tuple(sharded)))


def _plainer_arguments(program: Program) -> Iterator[Program]:
    for i, one in enumerate(program.arguments):
        for plainer in (replace(one, donated=False), replace(one, sharded=False)):
            arguments = (*program.arguments[:i], plainer, *program.arguments[i + 1 :])
            yield replace(program, arguments=arguments)


def _shorter(body: Body) -> Iterator[Body]:
    """Bodies without one of the ops, which give an earlier value of the type in its place."""
    starts = _first_results(body)
    types = body.types
    for k in range(len(body.ops) - 1, -1, -1):
        op = body.ops[k]
        choices: list[list[int]] = []
        for one in op.results:
            near = [x for x in op.operands if types[x] == one]
            choices.append(near or [x for x in range(starts[k]) if types[x] == one][-1:])
        if all(choices):
            for variant in range(max(map(len, choices))):
                chosen = [options[min(variant, len(options) - 1)] for options in choices]
                yield substituted(body, {starts[k] + j: x for j, x in enumerate(chosen)})


def _behind_an_argument(program: Program, k: int) -> Program:
    """What op ``k`` gives is an argument instead."""
    body = program.body
    first, gives = _first_results(body)[k], body.ops[k].results
    at, more = len(body.parameters), len(gives)

    def moved(x: int) -> int:
        if first <= x < first + more:
            return at + x - first
        return x if x < at else x + more

    ops = tuple(replace(op, operands=tuple(map(moved, op.operands))) for op in body.ops)
    grown = Body((*body.parameters, *gives), ops, tuple(map(moved, body.results)))
    arguments = (*program.arguments, *(Argument() for _ in gives))
    return replace(program, body=grown, arguments=arguments)


def _smaller_op(body: Body, k: int) -> Iterator[Body]:
    """Bodies in which a branch or loop is smaller."""
    op = body.ops[k]
    for smaller in _smaller_bodies(op):
        yield replace(body, ops=(*body.ops[:k], smaller, *body.ops[k + 1 :]))
    if op.attributes.get("most", 0) > 2:
        shorter = replace(op, attributes={**op.attributes, "most": 2})
        yield replace(body, ops=(*body.ops[:k], shorter, *body.ops[k + 1 :]))


def _smaller_bodies(op: Op) -> Iterator[Op]:
    for i, inner in enumerate(op.bodies):
        variants = [*_shorter(inner)]
        variants += [one for k in range(len(inner.ops)) for one in _smaller_op(inner, k)]
        for smaller in variants:
            swept, _ = swept_body(smaller, keep_parameters=True)
            yield replace(op, bodies=(*op.bodies[:i], swept, *op.bodies[i + 1 :]))
    if op.name == "cond" and len(op.bodies) > 2:
        yield replace(op, bodies=op.bodies[:2])
    if op.name == "scan" and op.attributes["unroll"] != 1:
        yield replace(op, attributes={**op.attributes, "unroll": 1})


# Rewriting --------------------------------------------------------------------------------------


def _first_results(body: Body) -> list[int]:
    starts = []
    at = len(body.parameters)
    for op in body.ops:
        starts.append(at)
        at += len(op.results)
    return starts


def substituted(body: Body, by: Mapping[int, int]) -> Body:
    """The body in which other values are read in the place of some."""

    def instead(x: int) -> int:
        return by.get(x, x)

    ops = tuple(replace(op, operands=tuple(map(instead, op.operands))) for op in body.ops)
    return Body(body.parameters, ops, tuple(map(instead, body.results)))


def pruned(program: Program) -> Program:
    """The program without ops and arguments that nobody reads."""
    body, kept = swept_body(program.body, keep_parameters=False)
    arguments = tuple(program.arguments[x] for x in kept)
    return replace(program, body=body, arguments=arguments)


def swept_body(body: Body, *, keep_parameters: bool) -> tuple[Body, list[int]]:
    """The body without ops that nobody reads, and the numbers of the parameters that are left."""
    starts = _first_results(body)
    read = set(body.results)
    alive: list[bool] = [False] * len(body.ops)
    for k in range(len(body.ops) - 1, -1, -1):
        op = body.ops[k]
        if any(starts[k] + j in read for j in range(len(op.results))):
            alive[k] = True
            read.update(op.operands)
    kept = [x for x in range(len(body.parameters)) if keep_parameters or x in read]
    new: dict[int, int] = {x: i for i, x in enumerate(kept)}
    ops: list[Op] = []
    for k, op in enumerate(body.ops):
        if not alive[k]:
            continue
        for j in range(len(op.results)):
            new[starts[k] + j] = len(new)
        ops.append(replace(op, operands=tuple(new[x] for x in op.operands)))
    parameters: tuple[Type, ...] = tuple(body.parameters[x] for x in kept)
    return Body(parameters, tuple(ops), tuple(new[x] for x in body.results)), kept
