"""Change files and see that every command refuses them in one line, or works.

    python -m tests.mutate.run --count 20000 --seed 0

Each case has a number, from which everything about it follows: ``--first 1234 --count 1`` runs that one. The memory of
the process is bounded; where a case ends it, the number of that case is the last that it said.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from disco_hlo.cli import main as cli
from disco_hlo.errors import DiscoError
from tests.mutate import cases
from tests.mutate.cases import KINDS, Kind

MOST_BYTES = 1 << 30
"""What a command may take beyond what the process held after the first twenty."""


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


# Many -----------------------------------------------------------------------------------------------


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="disco_mutate_") as folder:
        runner = Runner(Path(folder), given.seed)
        for number in range(given.first, given.first + given.count):
            print(f"case {number}", end="\r", file=sys.stderr, flush=True)  # where it ends the process
            if len(results) == 20:
                held = Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]
                resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(held) + MOST_BYTES,) * 2)
            one = runner.run(number)
            results.append(one)
            if one.outcome not in ("0", "2"):
                print(f"{number}: {one.kind}, {one.command}: {one.outcome}\n{one.text}")
    print(Counter((one.kind, one.command, one.outcome) for one in results))


if __name__ == "__main__":
    main()
