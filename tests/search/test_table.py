"""A move is one file and one line of the table: every method proposes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import disco_hlo
from disco_hlo.search.moves.table import MOVES, NAMES
from disco_hlo.search.restart import BUCKET_MOVES, FIRST_MOVES, KERNEL_MOVES, ORDER_MOVES

ROOT = Path(__file__).parents[2]
SWAP = '''
"""Swap two adjacent kernels."""

from disco_hlo.compiled import inner
from disco_hlo.search import layout as at
from disco_hlo.search.state import has_room
from disco_hlo.search.moves.move import random_unit
from disco_hlo.search.moves.move import Move
from disco_hlo.search.ordering import shift


@inner
def swap(g, s, w, unit, slot):
    return has_room(g, w) and shift(g, s, w, unit, slot)


@inner
def random_adjacent(g, s, w, generator, pools):
    unit = random_unit(s, generator, pools.fusible, pools.fusibles)
    slot = s.place[unit] + 1
    while slot < s.total[at.SLOTS] and s.order[slot] == -1:
        slot += 1
    return (unit, slot) if slot < s.total[at.SLOTS] else (-1, -1)


MOVE = Move("order", 1, random_adjacent, swap, in_algorithm_1=True)
'''
SEARCHES = """
import sys
from random import Random
from pathlib import Path
import disco_hlo
assert Path(disco_hlo.__file__).is_relative_to(sys.argv[1]), disco_hlo.__file__
from disco_hlo.plan.baselines import unfused
from disco_hlo.search.api import SearchSettings
from disco_hlo.search import restart
from disco_hlo.search.backtracking import Backtracking
from disco_hlo.search.moves.table import NUMBERS
from disco_hlo.search.run import search
from tests.machines import GPU
from tests.search.cost_models import ResultCosts
from tests.search.random_steps import random_step

graph, swap = random_step(Random(5), 60, backend="gpu"), NUMBERS["swap"]
assert restart.ORDER_MOVES[swap] == 1
for others in (restart.KERNEL_MOVES, restart.BUCKET_MOVES, restart.FIRST_MOVES, restart.ORDER_MOVES):
    others.update(dict.fromkeys(others.keys() - {swap}, 0))
restart.FIRST_MOVES[swap] = restart.KERNEL_MOVES[swap] = 1
settings = SearchSettings(evaluations=200, seeds=1)
joint = search(graph, ResultCosts(), GPU, start=unfused(graph), settings=settings)
print("joint search:", joint.evaluations == 200)

methods = Backtracking(graph, ResultCosts(), GPU, unfused(graph), settings).methods.tolist()
print("methods of Algorithm 1:", methods == [NUMBERS[one] for one in ("fuse", "duplicate", "merge", "swap")])
alone = Backtracking(graph, ResultCosts(), GPU, unfused(graph), SearchSettings(moves=("swap",), unchanged=20))
alone.run()
print("Algorithm 1:", alone.made[0] > 0 and alone.moves[0, 0, 0] == swap)
"""


def test_a_move_of_one_file_and_one_line_is_proposed_by_every_method(tmp_path: Path) -> None:
    """Its number, its weight in the joint search and its name in Algorithm 1 were written down in three more files."""
    package = tmp_path / "disco_hlo"
    package.mkdir()
    for source in (*Path(disco_hlo.__file__).parent.iterdir(), ROOT / "profiler", ROOT / "estimator"):
        (package / source.name).symlink_to(source)
    shutil.copytree(ROOT / "search", package / "search")
    (package / "search" / "moves" / "swap.py").write_text(SWAP)
    table = package / "search" / "moves" / "table.py"
    table.write_text(table.read_text().replace('    "sibling",\n', '    "sibling",\n    "swap",\n'))
    environment = {
        **os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "0",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-c", SEARCHES, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "joint search: True", "methods of Algorithm 1: True", "Algorithm 1: True",
    ], done.stdout + done.stderr  # fmt: skip


def test_the_joint_search_proposes_every_move_and_the_paper_its_three() -> None:
    proposed = {**KERNEL_MOVES, **BUCKET_MOVES, **ORDER_MOVES}
    assert sorted(proposed) == list(range(len(MOVES)))
    assert min(proposed.values()) > 0
    assert set(FIRST_MOVES) == set(proposed)
    of_the_paper = [name for name, move in zip(NAMES, MOVES, strict=True) if move.in_algorithm_1]
    assert of_the_paper == ["fuse", "duplicate", "merge"]
