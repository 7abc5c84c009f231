"""A tensor-parallel step whose structure a plan changes: found, enacted, refused where it does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.read import describe_difference, read
from tests.e2e.conftest import new_job
from tests.e2e.executed import assert_same_losses, copies, edited, plan_in, slot_of
from tests.e2e.jobs import Job, Run
from tests.known_times import know_all

CHUNKED = {"ENABLE_SEARCH": "1", "DISCO_STRUCTURE": "chunk-2", "DISCO_FINALISTS": "1", "DISCO_BUDGET_S": "10"}


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Run]:
    """A search that takes the chunked step, whatever the clock says; not to be changed."""
    job = new_job(tmp_path_factory.mktemp("chunked"))
    know_all(job.directory, devices=2, processes=1)
    return job, job.train("--kind", "tensor", fault="chunk_wins", **CHUNKED)


@pytest.fixture(scope="module")
def tensor_default(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same training with XLA's default."""
    return new_job(tmp_path_factory.mktemp("tensor")).train("--kind", "tensor")


def opcodes(run: Run) -> Counter[str]:
    [module] = run.modules
    return Counter(node.opcode for node in canonicalize(module).graph.nodes)


def test_the_chunked_step_is_searched_and_enacted(chunked: tuple[Job, Run], tensor_default: Run) -> None:
    job, search = chunked
    plan = plan_in(job.directory)
    assert plan.chosen == "chunk-2"
    assert plan.structure is not UNSET
    assert [move["move"] for move in plan.structure.moves] == ["chunk"]
    enacted = job.train("--kind", "tensor", ENABLE_SEARCH="0")
    assert len(enacted.lines("enacts the plan of jit_train_step: chunk-2, ")) == 1
    for run in (search, enacted):
        [module] = run.modules
        found = canonicalize(module)
        assert found.graph.key == plan.structure.result
        assert describe_difference(found.graph, read(found), plan.strategy) is None
        assert_same_losses(run, tensor_default)
    default = opcodes(tensor_default)
    assert default["all-reduce"] == 3
    assert opcodes(enacted)["all-reduce"] == 6
    assert opcodes(enacted)["dot"] > default["dot"]


@pytest.mark.product_only  # on jax 0.10.2 a plan loses donation, so it cannot take turns with what keeps it
def test_a_chunked_step_of_another_version_is_compared_and_takes_turns(
    chunked: tuple[Job, Run], tensor_default: Run, tmp_path: Path
) -> None:
    """The compile that showed the step waited for its end with the step's name, and XLA's default for that name."""
    job = new_job(tmp_path, chunked[0].directory)
    edited(lambda plan: plan["versions"].update(jax="0.0.1"))(slot_of(job.directory))
    run = job.train("--kind", "tensor", ENABLE_SEARCH="0")
    assert len(run.lines("the plan computes what XLA's default computes")) == 1
    [line] = run.lines("enacts the plan of jit_train_step: chunk-2, ")
    assert line.endswith("at first it takes turns with XLA's default, and goes on if it pays")
    assert len(run.modules) == 2
    assert_same_losses(run, tensor_default)


def structure(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes what a plan says of the step's structure."""
    return edited(lambda plan: change(plan["structure"]))


def moves(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda structure: change(structure["moves"])


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "other step": (
        lambda structure: structure.update(key="0" * 64), "were made for another step",
    ),
    "other result": (
        lambda structure: structure.update(result="0" * 64), "XLA makes another step of the plan's moves",
    ),
    "unknown move": (
        moves(lambda found: found[0].update(move="melt")), "structural moves: Invalid value 'melt'",
    ),
    "other opcode": (
        moves(lambda found: found[0]["opcodes"].__setitem__(0, "cosine")), "move 0 (chunk) is illegal",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def misfits(chunked: tuple[Job, Run], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run with each of the bad structures, one after the other in one process."""
    job, plans = new_job(tmp_path_factory.mktemp("misfit")), tmp_path_factory.mktemp("misfits")
    copies(chunked[0].directory, plans, {name: structure(change) for name, (change, _) in BAD.items()})
    return job.train_with_each(plans, "--kind", "tensor", ENABLE_SEARCH="0")


@pytest.mark.product_only
@pytest.mark.parametrize("name", BAD)
def test_a_structure_that_does_not_fit_is_one_line_and_the_default(
    name: str, misfits: dict[str, Run], tensor_default: Run
) -> None:
    run, reason = misfits[name], BAD[name][1]
    [line] = [line for line in run.lines("disco: warning:") if "loses buffer donation" not in line]
    assert "jit_train_step runs as XLA compiles it" in line
    assert reason in line
    assert opcodes(run) == opcodes(tensor_default)
    assert_same_losses(run, tensor_default)


@pytest.mark.product_only
def test_every_rank_makes_the_chunked_step_itself(
    chunked: tuple[Job, Run], tensor_default: Run, tmp_path: Path
) -> None:
    """test_scanned.py has two that search for a structure, too."""
    job = new_job(tmp_path, chunked[0].directory)
    slot = slot_of(job.directory)
    edited(lambda plan: plan["target"].update(process_count=2))(slot)
    slot.rename(slot.with_name(f"{slot.name}-p2"))
    plan = plan_in(job.directory)
    assert plan.structure is not UNSET
    for run in job.train_ranks("--kind", "tensor", ENABLE_SEARCH="0"):
        [module] = run.modules
        assert canonicalize(module).graph.key == plan.structure.result
        assert_same_losses(run, tensor_default)


def test_a_data_parallel_step_is_left_with_the_structure_it_has(searched: tuple[Job, Run]) -> None:
    assert plan_in(searched[0].directory).structure is UNSET
    assert b'"structure"' not in (slot_of(searched[0].directory) / "plan.json").read_bytes()
    assert searched[1].lines("structures to measure") == []
