"""Change files and see that every command refuses them in one line, or works.

    python -m tests.mutate.run --count 20000 --seed 0 --workers 1 -o out.json

Each case has a number, from which everything about it follows: ``--only 1234`` runs that one here and shows what it
says. The cases run in processes of their own, whose memory is bounded; one that takes too long ends its process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from disco_hlo.cli import main as cli
from disco_hlo.errors import DiscoError
from tests.fuzz.worker import Worker
from tests.mutate import cases
from tests.mutate.cases import KINDS, Kind

MOST_BYTES = 1 << 30
"""What a command may take beyond what the process held before the first one."""
MOST_S = 600.0
"""And how long."""


@dataclass(frozen=True)
class Result:
    """How one case ended."""

    number: int
    kind: str
    command: str
    outcome: str
    """``0``, ``2``, or what it should not have been."""
    text: str
    cpu_s: float


@dataclass(frozen=True)
class Case:
    """One changed file and one reader of it."""

    number: int
    kind: Kind
    command: Sequence[str]

    @staticmethod
    def of(number: int, seed: int) -> tuple[Case, Random]:
        """The case with this number, and the random numbers that its file is changed by."""
        random = Random(f"{seed}/{number}")
        (kind,) = random.choices(KINDS, [one.weight for one in KINDS])
        return Case(number, kind, random.choice(kind.commands) if kind.commands else ()), random

    @property
    def label(self) -> str:
        """The command, without its arguments."""
        return self.command[0] if self.command else "read"


class Runner:
    """Runs cases in this process."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.seed = place, seed
        self.corpus = place / "corpus"
        if not self.corpus.exists():
            cases.build(self.corpus)

    def run(self, number: int) -> Result:
        """Change the file, call the command, look at how it ends."""
        case, random = Case.of(number, self.seed)
        kind = case.kind
        work = self.place / f"case{os.getpid()}"
        shutil.rmtree(work, ignore_errors=True)
        (work / "out").mkdir(parents=True)
        folder = work / "plans" / ("0" * 16) / "cpu"  # where ``disco list`` looks, too
        shutil.copytree(self.corpus / kind.folder, folder)
        original = (folder / kind.file).read_bytes()
        (folder / kind.file).write_bytes(kind.mutation(random, original))
        began = time.process_time()
        if kind.reader is not None:
            outcome, text = self._read(kind, folder / kind.file)
        else:
            outcome, text = self._command([self._place(word, folder, work) for word in case.command], work)
        return Result(number, kind.name, case.label, outcome, text, round(time.process_time() - began, 3))

    def _place(self, word: str, folder: Path, work: Path) -> str:
        for mark, there in (("@out", work / "out"), ("@corpus", self.corpus), ("@", folder)):
            if word.startswith(mark):
                return f"{there}{word.removeprefix(mark)}"
        return word

    @staticmethod
    def _read(kind: Kind, path: Path) -> tuple[str, str]:
        assert kind.reader is not None
        try:
            kind.reader(path)
        except DiscoError as error:
            return ("2" if str(error).strip() else "no message"), str(error)
        except Exception:  # noqa: BLE001  any other is what is looked for
            return "traceback", traceback.format_exc()
        return "0", ""

    @staticmethod
    def _command(arguments: list[str], work: Path) -> tuple[str, str]:
        out, err = io.StringIO(), io.StringIO()
        code: Any = 0
        with _called(["disco", *arguments], {"DISCO_DIR": str(work / "plans")}):
            try:
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    cli.main()
            except SystemExit as ended:
                code = ended.code
            except BaseException:  # noqa: BLE001  what is looked for
                return "traceback", traceback.format_exc()
        said = err.getvalue()
        if "Traceback" in said:
            return "traceback", said
        if code in (0, None):
            return "0", said
        errors = [line for line in said.splitlines() if line.startswith("disco: ")]
        one_line = (
            code == 2 and len(errors) >= 1 and said.splitlines()[-1] == errors[-1] and not out.getvalue()
        )
        return ("2" if one_line else f"code {code}"), said + out.getvalue()


@contextlib.contextmanager
def _called(arguments: list[str], environment: dict[str, str]) -> Iterator[None]:
    before = sys.argv, dict(os.environ)
    sys.argv = arguments
    os.environ.update(environment)
    try:
        yield
    finally:
        sys.argv = before[0]
        os.environ.clear()
        os.environ.update(before[1])


# In processes of their own ------------------------------------------------------------------------


def _work(place: Path, seed: int) -> None:
    """Run the cases that standard input names; the memory is bounded once some have been run."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    runner = Runner(place, seed)
    out.write(json.dumps({"ready": True}) + "\n")
    for position, line in enumerate(sys.stdin):
        if position == 20:
            _bound_memory()
        result = runner.run(json.loads(line)["number"])
        out.write(json.dumps(asdict(result) | {"done": True}) + "\n")


def _bound_memory() -> None:
    fields = Path("/proc/self/status").read_text().split("VmData:")[1].split()
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(fields[0]) + MOST_BYTES,) * 2)


def run_all(place: Path, seed: int, numbers: Sequence[int]) -> Iterator[Result]:
    """Run the cases in one process after the other, begun anew after one that ended it."""
    command = (sys.executable, "-m", "tests.mutate.run", "--work", str(place), "--seed", str(seed))
    with Worker("cpu", 1, pair_limit_s=MOST_S, tasks=2000, command=command) as worker:
        for number in numbers:
            heard: list[dict[str, Any]] = []
            end = worker.ask({"number": number}, heard.append)
            if end.how == "done":
                del heard[0]["done"]
                yield Result(**heard[0])
            else:
                case, _ = Case.of(number, seed)
                yield Result(number, case.kind.name, case.label, end.how, end.said, 0.0)


def summary(results: Sequence[Result]) -> str:
    """Counts by kind and command."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for one in results:
        counts.setdefault((one.kind, one.command), Counter())[one.outcome] += 1
    lines = [f"{'file':18} {'command':10} {'files':>6} {'exit 0':>7} {'exit 2':>7} {'else':>5}"]
    for (kind, command), found in sorted(counts.items()):
        other = found.total() - found["0"] - found["2"]
        lines.append(f"{kind:18} {command:10} {found.total():6} {found['0']:7} {found['2']:7} {other:5}")
    total = Counter(one.outcome for one in results)
    slowest = max(results, key=lambda one: one.cpu_s)
    lines.append(f"{len(results)} files: {dict(total)}; slowest {slowest.cpu_s} s (case {slowest.number})")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--without", default="", help="a command to leave out: search takes longest")
    parser.add_argument("--work", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    if given.work is not None:
        _work(given.work, given.seed)
        return
    with tempfile.TemporaryDirectory(prefix="disco_mutate_") as folder:
        if given.only is not None:
            print(Case.of(given.only, given.seed)[0])
            print(Runner(Path(folder), given.seed).run(given.only).text)
            return
        cases.build(Path(folder) / "corpus")
        results: list[Result] = []
        numbers = range(given.first, given.first + given.count)
        kept = [number for number in numbers if Case.of(number, given.seed)[0].label != given.without]
        for one in run_all(Path(folder), given.seed, kept):
            results.append(one)
            if one.outcome not in ("0", "2"):
                last = one.text.strip().splitlines()[-1:] or [""]
                print(f"{one.number}: {one.kind}, {one.command}: {one.outcome}: {last[0][:300]}", flush=True)
            if given.output is not None and len(results) % 200 == 0:
                given.output.write_text(json.dumps([asdict(each) for each in results]))
        print(summary(results))
        if given.output is not None:
            given.output.write_text(json.dumps([asdict(each) for each in results]))


if __name__ == "__main__":
    main()
