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
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from random import Random
from typing import Any

from disco_hlo.cli import main as cli
from disco_hlo.errors import DiscoError
from tests.mutate import corpus
from tests.mutate.cases import KINDS, Kind

MOST_BYTES = 1 << 30
"""What a command may take beyond what the process held before the first one."""
MOST_CPU_S = 60.0
"""And how long, in processor time."""


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
            corpus.build(self.corpus)

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


def _work(place: Path, seed: int, numbers: Sequence[int]) -> None:
    """Run cases here, a line of JSON each; the memory is bounded once the first has been run."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    runner = Runner(place, seed)
    for position, number in enumerate(numbers):
        out.write(json.dumps({"begins": number}) + "\n")
        out.flush()
        if position == 20:
            _bound_memory()
        out.write(json.dumps(asdict(runner.run(number))) + "\n")
        out.flush()


def _bound_memory() -> None:
    fields = Path("/proc/self/status").read_text().split("VmData:")[1].split()
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(fields[0]) + MOST_BYTES,) * 2)


class _Worker:
    """A process that runs cases; begun anew after one that ended it."""

    def __init__(self, place: Path, seed: int, numbers: Sequence[int]) -> None:
        command = [sys.executable, "-m", "tests.mutate.run", "--work", str(place), "--seed", str(seed)]
        self.left = list(numbers)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(self.left))
        self.process.stdin.close()
        self.lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def results(self) -> Iterator[Result]:
        """Until none are left or the process has ended; what ended it is a result, too."""
        current, since = None, self._cpu_s()
        while self.left:
            try:
                line = self.lines.get(timeout=1.0)
            except Empty:
                if current is not None and self._cpu_s() - since > MOST_CPU_S:
                    self.process.kill()
                    yield self._ended(current, "too long")
                    return
                continue
            if not line:
                if current is None:
                    self.errors.seek(0)
                    raise RuntimeError(self.errors.read().decode()[-2000:])
                yield self._ended(current, f"process ended ({self.process.wait()})")
                return
            body = json.loads(line)
            if "begins" in body:
                current, since = body["begins"], self._cpu_s()
                continue
            self.left.remove(body["number"])
            yield Result(**body)

    def _ended(self, number: int, outcome: str) -> Result:
        self.left.remove(number)
        case, _ = Case.of(number, 0)
        self.errors.seek(0)
        return Result(
            number,
            case.kind.name,
            case.label,
            outcome,
            self.errors.read().decode(errors="replace")[-4000:],
            0.0,
        )

    def _cpu_s(self) -> float:
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_all(place: Path, seed: int, numbers: Sequence[int]) -> Iterator[Result]:
    """Run the cases in one process after the other."""
    left = list(numbers)
    while left:
        worker = _Worker(place, seed, left[:2000])
        left = left[2000:]
        try:
            yield from worker.results()
        finally:
            worker.process.kill()
            worker.process.wait()
        left = worker.left + left


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
        _work(given.work, given.seed, json.load(sys.stdin))
        return
    with tempfile.TemporaryDirectory(prefix="disco_mutate_") as folder:
        if given.only is not None:
            print(Case.of(given.only, given.seed)[0])
            print(Runner(Path(folder), given.seed).run(given.only).text)
            return
        corpus.build(Path(folder) / "corpus")
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
