"""Whatever moves are made, the strategy stays one that XLA could execute, and can be undone; a move is one file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import disco_hlo
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.read import read
from disco_hlo.search import layout as at
from disco_hlo.search.moves.table import MOVES, NAMES
from disco_hlo.search.restart import BUCKET_MOVES, FIRST_MOVES, KERNEL_MOVES, ORDER_MOVES
from disco_hlo.search.state import MAXIMUM_MEMBERS
from tests.captured import captured
from tests.graphs import graph_of
from tests.machines import GPU
from tests.search.states import (
    FUSE,
    MACHINES,
    SPLIT,
    UNFUSE,
    Bench,
    check_consistent,
    check_legal,
    moved,
    snapshot,
    undo,
)
from tests.search.steps import random_step

SEEDS = st.integers(0, 2**32)
MACHINE = st.sampled_from(MACHINES)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 60), machine=MACHINE)
def test_any_sequence_of_moves_leaves_a_legal_strategy(seed: int, count: int, machine) -> None:
    bench, _ = moved(seed, count, machine, moves=3 * count)
    check_legal(bench)
    check_consistent(bench)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 60), machine=MACHINE)
def test_moves_that_are_priced_one_by_one_leave_a_legal_strategy(seed: int, count: int, machine) -> None:
    # As in a climb: a move that knows what every unit returned before looks at fewer of them.
    bench, random = moved(seed, count, machine, moves=0)
    for _ in range(3 * count):
        bench.random_moves(random, 1)
    check_legal(bench)
    check_consistent(bench)


def test_an_op_amid_a_group_stays() -> None:
    graph = graph_of("param\nnegate 0\nexponential 1\nnegate 2\ntuple 3")
    bench = Bench(graph, start=Strategy((Group((1, 2, 3)),)))
    assert not bench.move(UNFUSE, 1, 2)
    assert bench.move(UNFUSE, 1, 3)


@pytest.mark.parametrize("last_is_first", [False, True])
def test_cutting_a_bucket_in_two_writes_no_gradient_anew_for_each_other_one(last_is_first: bool) -> None:
    """The log has room for one move, and a bucket may hold a thousand gradients: squared, they ended the process."""
    count = 200
    gradients = range(count, 0, -1) if last_is_first else range(1, count + 1)
    lines = ["param", *(f"negate {x}" for x in range(count)), *(f"all-reduce {x}" for x in gradients)]
    reduces = range(count + 1, 2 * count + 1)
    graph = graph_of("\n".join([*lines, "tuple " + " ".join(map(str, reduces))]))
    bench = Bench(graph, start=Strategy((), (Bucket(tuple(reduces)),)))
    for rank in (1, count // 2, count - 1):
        before = snapshot(bench)
        assert bench.move(SPLIT, count + 1, rank)
        assert bench.scratch.number[at.LOGGED] < 40 * count
        bench.costs.price_changed(bench.state, bench.scratch)
        check_consistent(bench)
        undo(bench.step, bench.state, bench.scratch, 0)
        assert snapshot(bench) == before


def test_a_kernel_beyond_the_limit_neither_grows_nor_ends_up_beyond_it() -> None:
    lines = ["param", *(f"negate {x}" for x in range(MAXIMUM_MEMBERS + 3))]
    graph = graph_of("\n".join([*lines, f"tuple {len(lines) - 1}"]))
    last = MAXIMUM_MEMBERS + 2
    for first, leaves in ((1, False), (2, True)):
        bench = Bench(graph, start=Strategy((Group(tuple(range(first, last + 1))),)))
        assert not bench.move(FUSE, last + 1, first)
        assert bench.move(UNFUSE, first, last) == leaves
        assert bench.move(FUSE, last, first) == leaves


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 60))
def test_undoing_every_move_gives_the_start(seed: int, count: int) -> None:
    bench, random = moved(seed, count)
    bench.scratch.number[at.LOGGED] = 0
    before = snapshot(bench)
    bench.random_moves(random, count)
    undo(bench.step, bench.state, bench.scratch, 0)
    assert snapshot(bench) == before


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 60))
def test_a_refused_move_changes_nothing(seed: int, count: int) -> None:
    bench, random = moved(seed, count)
    for _ in range(count):
        method = random.randrange(len(MOVES))
        before, logged = snapshot(bench), int(bench.scratch.number[at.LOGGED])
        if not bench.move(method, *bench.random_arguments(random, method)):
            assert snapshot(bench) == before
            assert bench.scratch.number[at.LOGGED] == logged
            assert bench.scratch.number[at.CHANGES] == 0
        bench.costs.price_changed(bench.state, bench.scratch)


@pytest.mark.parametrize(
    ("step", "groups", "unit", "node"),
    [
        # The second group recomputes 2 for 3 and 5; taken out, 3 reads it from the first, whose result it becomes.
        ("negate 0\nexponential 1\nnegate 2\nexponential 3\nmultiply 2 4\nnegate 2\ntuple 5 6",
            (Group((1, 2, 6)), Group((3, 4, 5), (1, 2))), 3, 3),
        # 5 recomputes 4 and reads 3 for it; reading 4 from its owner, who recomputes 3, it leaves 3 to its own kernel.
        ("negate 0\nexponential 1\nnegate 2\nexponential 3\nnegate 4\nexponential 4\nnegate 3\ntuple 5 6 7",
            (Group((1, 2, 3, 7)), Group((4, 6), (3,)), Group((5,), (4,))), 5, 4),
    ],
    ids=["an op taken out makes what it reads one", "a copy given up rids it of one"],
)  # fmt: skip
def test_results_of_a_third_kernel_follow(step: str, groups: tuple[Group, ...], unit: int, node: int) -> None:
    bench = Bench(graph_of(f"param\n{step}"), start=Strategy(groups))
    assert bench.move(UNFUSE, unit, node)
    bench.costs.price_changed(bench.state, bench.scratch)
    check_consistent(bench)
    check_legal(bench)


def test_a_unit_that_takes_in_another_runs_behind_what_that_waited_for() -> None:
    # The unit taken in recomputes what a third overwrites, and stood before everything the move was about.
    random = Random(6540)
    bench = Bench(random_step(random, random.randrange(12, 40)))
    bench.random_moves(random, 60, methods=3)
    assert bench.makespan_ns() > 0
    check_consistent(bench)


def test_a_kernel_of_xla_cannot_lose_the_op_before_a_copy_that_keeps_its_own_buffer() -> None:
    """What was left of it began with that copy, and was taken for an op that is in no kernel and needs no check."""
    module = captured("h200_models/rnnlm")
    bench = Bench(module.graph, GPU, start=read(module))
    flags, owner = bench.step.node[at.FLAGS], bench.state.word[at.OWNER]
    broadcast = next(
        x
        for x in bench.heads()
        if bench.state.word[at.COUNT, x] > 2 and not flags[bench.state.word[at.NEXT, x]] & at.FUSIBLE
        if flags[x] & at.FUSIBLE
    )
    assert owner[broadcast] == broadcast
    assert not bench.move(UNFUSE, broadcast, broadcast)


ROOT = Path(__file__).parents[2]
SWAP = '''
"""Swap two adjacent kernels."""

from disco_hlo.compiled import inner
from disco_hlo.search import layout as at
from disco_hlo.search.moves.move import Move, random_unit
from disco_hlo.search.ordering import shift


@inner
def swap(g, s, w, unit, slot):
    return shift(g, s, w, unit, slot)


@inner
def random_adjacent(g, s, w, generator, pools):
    unit = random_unit(s, generator, pools.fusible, pools.fusibles)
    slot = s.place[unit] + 1
    while slot < s.total[at.SLOTS] and s.order[slot] == -1:
        slot += 1
    return (unit, slot) if slot < s.total[at.SLOTS] else (-1, -1)


MOVE = Move("order", 1, random_adjacent, swap, in_algorithm_1=True)
'''
PROPOSES = """
import sys
from random import Random
from pathlib import Path
import numpy as np
import disco_hlo
assert Path(disco_hlo.__file__).is_relative_to(sys.argv[1]), disco_hlo.__file__
from disco_hlo.compiled import compiled
from disco_hlo.plan.variants import unfused
from disco_hlo.search import restart
from disco_hlo.search.hashing import seeded
from disco_hlo.search.layout import open_draws, open_views
from disco_hlo.search.moves.table import NUMBERS, in_algorithm_1, random_apply
from disco_hlo.search.state import new_scratch
from disco_hlo.search.strategies import prepare
from tests.search.steps import random_step

swap = NUMBERS["swap"]
assert restart.ORDER_MOVES == {swap: 1}, "the joint search's"
assert in_algorithm_1() == ("merge", "swap")

@compiled
def proposed(step, state, scratch, generator, pools, number, made):
    g, s, w = open_views(step, state, scratch)
    word, listed = open_draws(generator, pools)
    return random_apply(g, s, w, word, listed, number, len(made), made)

graph = random_step(Random(5), 60, backend="gpu")
starts, made = prepare(graph, [unfused(graph)]), np.zeros((8, 3), np.int64)
pools = np.arange(len(graph)), np.array(graph.collectives, np.int64)
count = proposed(starts.step, starts.states[0], new_scratch(starts.step), seeded(1), pools, swap, made)
print("made:", count > 0 and set(made[:count, 0].tolist()) == {swap})
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
    # The others take long to compile.
    names, lines = '"merge",\n    "swap",\n', table.read_text()
    table.write_text(re.sub(r'"fuse",\n(    "\w+",\n)+', names, lines))
    environment = {
        **os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "0",
    }  # fmt: skip
    script = tmp_path / "proposes.py"
    script.write_text(PROPOSES)
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.stdout == "made: True\n", done.stdout + done.stderr


def test_the_joint_search_proposes_every_move_and_the_paper_its_three() -> None:
    proposed = {**KERNEL_MOVES, **BUCKET_MOVES, **ORDER_MOVES}
    assert sorted(proposed) == list(range(len(MOVES)))
    assert min(proposed.values()) > 0
    assert set(FIRST_MOVES) == set(proposed)
    of_the_paper = [name for name, move in zip(NAMES, MOVES, strict=True) if move.in_algorithm_1]
    assert of_the_paper == ["fuse", "duplicate", "merge"]
