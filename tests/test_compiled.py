"""Where compiled functions are kept, and that importing compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from disco_hlo import compiled
from disco_hlo.compiled import compiled as compiled_function
from disco_hlo.compiled import inner

PROGRAM = """
import sys
import numpy as np
import disco_hlo.simulator
assert "numba" not in sys.modules, "importing the package imports numba"
from disco_hlo.compiled import is_cached
from disco_hlo.simulator.timeline import evaluate
import disco_hlo.search.kernels
from disco_hlo.simulator.bound import _behind_ns  # a small one: the engine takes seconds to compile
assert not evaluate.signatures, "importing the engine compiles it"
assert len(sys.argv) < 2 or is_cached("disco_hlo.simulator.timeline") == (sys.argv[1] == "cached")
behind = _behind_ns(np.array([4, 9, 5]), np.array([2]), np.array([0, 0, 0, 2]), np.array([0, 1]))
assert behind == 13
assert is_cached("disco_hlo.simulator.timeline") == bool(_behind_ns.stats.cache_path)
assert not is_cached("disco_hlo.search.kernels"), "another package's code is no code of the search"
print("uncached" if not _behind_ns.stats.cache_path else "cached" if _behind_ns.stats.cache_hits else "compiled")
"""


def outcome(*expected: str, **environment: str) -> str:
    """How the program compiled; ``expected`` is what it should find, ``cached`` or ``uncached``."""
    dropped = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *expected],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_the_cache_lies_where_numba_is_told_to_keep_it_and_what_is_damaged_is_compiled_anew(
    tmp_path: Path,
) -> None:
    assert outcome("uncached", NUMBA_CACHE_DIR=str(tmp_path)) == "compiled"
    assert list(tmp_path.rglob("bound._behind_ns*.nbi"))
    assert not list(Path(compiled.__file__).parent.rglob("*.nbi")), "the package may be read-only"
    for suffix in ("nbi", "nbc"):
        assert outcome("cached", NUMBA_CACHE_DIR=str(tmp_path)) == "cached"
        for file in tmp_path.rglob(f"*.{suffix}"):
            file.write_bytes(file.read_bytes()[:50])
        assert outcome("cached", NUMBA_CACHE_DIR=str(tmp_path)) == "compiled"
    assert outcome("cached", NUMBA_CACHE_DIR=str(tmp_path)) == "cached"


def test_without_a_place_to_write_everything_works_uncached(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    assert outcome(HOME=str(blocked)) == "uncached"
    assert outcome(NUMBA_CACHE_DIR=str(blocked)) == "uncached"


def test_on_a_full_disk_everything_works_uncached(tmp_path: Path) -> None:
    """A search ended with "OSError: [Errno 28] No space left on device"; files of at most 1 KiB stand for that disk."""
    program = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))" + PROGRAM.replace(
        "bool(_behind_ns.stats.cache_path)", "False"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, "uncached"], env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout.strip()) == (0, "compiled"), run.stderr
    assert not list(tmp_path.rglob("*.nbc"))


@compiled_function
def _add(a: int, b: int) -> int:
    return a + b


@inner
def _twice(a: int) -> int:
    return _add(a, a) + _add(a, 0) + _add(0, 1)


@compiled_function
def _outer(a: int) -> int:
    return _twice(a) + _twice(3)


def test_a_numba_told_to_compile_nothing_is_said_in_one_line() -> None:
    """Every command was a traceback, and a search one line about ``get_call_template``."""
    run = subprocess.run(
        [sys.executable, "-c", "from disco_hlo.cli.main import main; main()", "list"],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert run.stderr.startswith("disco: NUMBA_DISABLE_JIT is set")


def test_a_function_is_compiled_once_for_a_type_whatever_constants_it_is_called_with() -> None:
    assert _outer(2) == 2 * 2 + 2 + 1 + 2 * 3 + 3 + 1
    _outer.recompile()  # what an earlier run of the tests left in the cache compiles nothing
    assert len(_add.signatures) == 1
    assert len(_twice.signatures) == 1


LEVELS = """
import sys
import numpy as np
import disco_hlo.compiled
from disco_hlo.compiled import compiled, inner
if sys.argv[1] == "unknown numba":
    disco_hlo.compiled._KNOWN_NUMBA = ((0, 1), (0, 2))

@inner
def lowest(x, limit):
    if x > limit:
        raise ValueError("too large")
    return 2 * x

@inner
def total(values, limit):
    return sum([lowest(value, limit) for value in values])

@compiled
def within(values, limit):
    return total(values, limit)

@compiled
def twice(values):
    return within(values, 9.0) + total(values, 9.0)

assert ("disco_hlo.inner_code" in sys.modules) == (sys.argv[1] == "known numba")
print(within(np.arange(4.0), 9.0), twice(np.arange(3.0)), sum(within.stats.cache_hits.values()))
try:
    within(np.arange(40.0), 9.0)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("numba", ["known numba", "unknown numba"])
def test_what_only_compiled_functions_call_works_and_is_cached_in_what_calls_it(
    numba: str, tmp_path: Path
) -> None:
    program = tmp_path / "levels.py"
    program.write_text(LEVELS)
    for cached in (0, 1):
        run = subprocess.run(
            [sys.executable, program, numba], env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert (run.stdout, run.stderr) == (f"12.0 12.0 {cached}\ntoo large\n", "")
    assert {file.name.split("-")[0] for file in tmp_path.rglob("*.nbi")} == {"levels.within", "levels.twice"}


AT_ONCE = """
import numpy as np
from disco_hlo.compiled import compiled

def first(values):
    return values[0]

# Of two processes both have read that nothing is cached; the one that began to save first ends last.
slow, fast, later = compiled(first), compiled(first), compiled(first)
file, waiting = slow._cache._cache_file, []
save_data, save_index = file._save_data, file._save_index
file._save_data = lambda *of: waiting.append((save_data, of))
slow(np.arange(3) + 1)
fast._cache._cache_file._load_index = dict
fast(np.arange(3.0) + 1)
for save, of in waiting:
    save(*of)
print(later(np.arange(3.0) + 1), later(np.arange(3) + 1), compiled(first)(np.arange(3.0) + 1))
"""


def test_processes_that_compile_for_different_types_at_once_never_get_each_other_s_code(
    tmp_path: Path,
) -> None:
    """Numba numbers its files: the second process would have run the code for integers on floats."""
    program = tmp_path / "at_once.py"
    program.write_text(AT_ONCE)
    run = subprocess.run(
        [sys.executable, program], env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (run.stdout, run.stderr) == ("1.0 1 1.0\n", "")


def test_a_change_in_anything_that_compiled_code_may_call_makes_another_cache() -> None:
    here = Path(compiled.__file__).parent
    called = {
        here / "compiled.py",
        here / "hlo/cost_model.py",
        here / "simulator/timeline.py",
        here.parent / "estimator/network.py",
        here.parent / "profiler/keys.py",
        here.parent / "search/moves/table.py",
    }
    for package in (here.parent / "search", Path(__file__).parent):
        assert {*called, *package.rglob("*.py")} <= {*compiled._sources(package)}
