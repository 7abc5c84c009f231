from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from disco_hlo.plan.read import read
from disco_hlo.plan.variants import one_bucket
from tests.captured import captured
from tests.cli.conftest import Disco
from tests.report import plans
from tests.steps.strategies import random_strategy


def test_equal_plans_execute_the_same(disco: Disco, cpu_plan: Path) -> None:
    assert "A and B execute the same" in disco("diff", cpu_plan, cpu_plan).out
    assert disco("diff", cpu_plan, cpu_plan, "--json").json["same"] is True


def test_two_plans_of_a_step_differ_in_what_is_listed(disco: Disco, cpu_plan: Path, tmp_path: Path) -> None:
    source = plans.cpu()
    other = plans.save_plan(tmp_path, source, plans.cpu_module(), random_strategy(source, seed=4))
    found = disco("diff", cpu_plan, other, "--json").json
    assert found["same"] is False
    assert found["groups_a"] or found["groups_b"]
    nodes = {node for change in found["groups_b"] for node in change["group"]["nodes"]}
    assert nodes
    assert set(found["fields"]) == {"module_sha256"}
    text = disco("diff", cpu_plan, other).out
    assert f"{len(found['groups_a'])} only in A, {len(found['groups_b'])} only in B" in text


def test_a_plan_is_compared_with_xlas_own(disco: Disco, vgg19_plan: Path) -> None:
    xla = read(captured("h200_models/vgg19"))
    found = disco("diff", vgg19_plan, "--default", "--json").json
    assert (found["a"], found["b"]) == ("XLA default", "plan")
    assert found["common_groups"] == len(xla.groups) > 50
    assert (found["groups_a"], found["groups_b"]) == ([], [])
    assert found["common_buckets"] == len(xla.buckets) > 3
    assert 0 < len(found["moved_units"]) < found["common_units"]
    text = disco("diff", vgg19_plan, "--default").out
    assert f"groups: {len(xla.groups)} in both, 0 only in XLA default, 0 only in plan" in text
    assert f"order: {len(found['moved_units'])} of {found['common_units']} common units moved" in text


def test_moved_collectives_are_listed(disco: Disco, cpu_plan: Path, tmp_path: Path) -> None:
    source = plans.cpu()
    strategy = one_bucket(source.graph, form="concat")
    folder = plans.save_plan(tmp_path, source, plans.cpu_module(), strategy)
    found = disco("diff", folder, "--default", "--json").json
    regrouped = {node for bucket in found["buckets_b"] for node in bucket["collectives"]}
    assert {move["collective"] for move in found["moved_collectives"]} == regrouped


def test_plans_of_two_steps_do_not_compare(
    refused: Callable[..., str], cpu_plan: Path, vgg19_plan: Path
) -> None:
    message = refused("diff", cpu_plan, vgg19_plan)
    assert "these plans do not compare: one is for 'jit_mlp_step'" in message
    assert "'jit_train_step'" in message


def test_it_takes_two_plans_or_one_and_default(refused: Callable[..., str], cpu_plan: Path) -> None:
    expected = "disco: expected two plans, or one plan and --default"
    assert refused("diff", cpu_plan) == expected
    assert refused("diff", cpu_plan, cpu_plan, "--default") == expected


def test_xlas_plan_cannot_be_had_without_the_module(
    refused: Callable[..., str], cpu_plan: Path, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_bytes((cpu_plan / "plan.json").read_bytes())
    assert "XLA's own plan cannot be read" in refused("diff", tmp_path, "--default")
