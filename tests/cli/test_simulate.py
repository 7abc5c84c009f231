from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from disco_hlo.profiler.profile import to_json
from tests.cli.conftest import Disco
from tests.cli.large_steps import large_step
from tests.optimize.test_sends import pipeline
from tests.report import plans


def test_the_breakdown_adds_up(disco: Disco, vgg19_plan: Path) -> None:
    found = disco("simulate", plans.VGG19, "--plan", vgg19_plan, "--json").json
    for side in ("default", "plan"):
        times = found[side]
        assert times["step_ns"] == times["compute_ns"] + times["exposed_ns"]
        assert times["communication_ns"] == times["overlap_ns"] + times["exposed_ns"]
        assert found["bound"]["bound_ns"] <= times["step_ns"]
    assert found["bound"]["full_overlap_ns"] <= found["bound"]["bound_ns"]
    assert found["what_if"] is None
    assert found["costs"][0].startswith("no profile: taken instead: nvidia-h200-nvlink")


def test_the_table_shows_both_and_says_what_it_computed_with(disco: Disco, vgg19_plan: Path) -> None:
    outcome = disco("simulate", plans.VGG19, "--plan", vgg19_plan)
    assert "disco: no profile: taken instead: nvidia-h200-nvlink" in outcome.err
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert lines[0] == "XLA default plan"
    assert [line.split(" ")[0] for line in lines[1:7]] == [
        "step", "compute", "communication", "overlap", "exposed", "peak",
    ]  # fmt: skip
    assert "speed-up predicted:" in outcome.out


def test_a_loop_takes_as_many_executions_of_its_body_as_it_has_trips(disco: Disco) -> None:
    found = disco("simulate", plans.SCANNED, "--json").json
    entry, forward, backward = found["regions"]
    assert [one["what"] for one in (entry, forward, backward)] == [
        "entry computation", "loop body of n75, trips 16", "loop body of n182, trips 16",
    ]  # fmt: skip
    assert [one["executions"] for one in (entry, forward, backward)] == [1, 16, 16]
    assert entry["execution_ns"] == found["default"]["step_ns"]
    loops_ns = 16 * (forward["execution_ns"] + backward["execution_ns"])
    assert loops_ns < found["default"]["step_ns"] < 1.2 * loops_ns
    assert forward["share"] == pytest.approx(16 * forward["execution_ns"] / entry["execution_ns"])
    assert (backward["collectives"], backward["collective_bytes"]) == (14, 147 * 2**20 + 12288)
    assert found["collectives_not_simulated"] == 0
    assert found["bound"]["bound_ns"] <= found["default"]["step_ns"]


def test_one_region_is_shown_and_traced_alone(
    disco: Disco, refused: Callable[..., str], tmp_path: Path
) -> None:
    whole, one = tmp_path / "step.json", tmp_path / "loop.json"
    disco("simulate", plans.SCANNED, "--trace", whole)
    shown = disco("simulate", plans.SCANNED, "--region", "loop2", "--trace", one)
    assert "one execution of loop2" in shown.out
    assert processes(whole) == [f"jit_train_step: XLA default{end}" for end in ("", ", loop1", ", loop2")]
    assert processes(one) == ["jit_train_step: XLA default, loop2"]
    found = disco("simulate", plans.SCANNED, "--region", "loop2", "--json").json
    assert found["default"]["step_ns"] == found["regions"][2]["execution_ns"]
    assert found["bound"]["bound_ns"] <= found["default"]["step_ns"]
    message = refused("simulate", plans.SCANNED, "--region", "loop9")
    assert message == "disco: the step has no region 'loop9'; it has entry, loop1, loop2"


def processes(trace: Path) -> list[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    return [event["args"]["name"] for event in events if event["name"] == "process_name"]


def test_a_slower_network_exposes_more(disco: Disco) -> None:
    steps = [
        disco("simulate", plans.VGG19, "--gpus", gpus, "--bandwidth", rate, "--latency", "5", "--json").json
        for gpus, rate in (("2", "400"), ("1024", "3.125"))
    ]
    assert steps[0]["default"]["exposed_ns"] < steps[1]["default"]["exposed_ns"]
    # More of the kernels run beside a transfer, which slows them.
    assert steps[0]["default"]["compute_ns"] < steps[1]["default"]["compute_ns"]
    assert steps[-1]["what_if"] == {"gpus": 1024, "bandwidth_gb_per_s": 3.125, "latency_us": 5.0}
    assert "ring and two trees" in steps[-1]["costs"][-1]


def test_the_profile_beside_a_module_is_used_unless_another_is_named(disco: Disco, tmp_path: Path) -> None:
    shutil.copy(plans.VGG19, tmp_path / "default.hlo.pb.gz")
    profile = tmp_path / "profile.json"
    profile.write_text(to_json(plans.sockets_profile()))
    beside = disco("simulate", tmp_path, "--json").json
    named = disco("simulate", plans.VGG19, "--profile", profile, "--json").json
    assert beside["default"] == named["default"]
    assert beside["costs"][0].startswith("times from the profile of NVIDIA H200")


def test_the_trace_opens_in_perfetto(disco: Disco, vgg19_plan: Path, tmp_path: Path) -> None:
    trace = tmp_path / "deep" / "trace.json"
    outcome = disco("simulate", plans.VGG19, "--plan", vgg19_plan, "--trace", trace)
    assert outcome.code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"compute", "communication"}
    assert sum(event["ph"] == "X" for event in events) > 200
    assert list(trace.parent.iterdir()) == [trace]


def test_bad_input_is_refused(refused: Callable[..., str], tmp_path: Path, cpu_plan: Path) -> None:
    assert "no such file" in refused("simulate", tmp_path / "nothing")
    assert "has no default.hlo.pb.gz" in refused("simulate", tmp_path)
    garbage = tmp_path / "garbage.hlo.pb"
    garbage.write_bytes(b"\x0a\xff" * 1000)
    assert f"{garbage}: expected a serialized HloModuleProto" in refused("simulate", garbage)
    assert "both --gpus and --bandwidth" in refused("simulate", plans.VGG19, "--gpus", "8")
    assert "Invalid value for '--bandwidth'" in refused(
        "simulate", plans.VGG19, "--gpus", "8", "--bandwidth", "nan"
    )
    (tmp_path / "profile.json").write_text('{"format": "disco-hlo profile", "version": 1, "platform": {}}')
    message = refused("simulate", plans.VGG19, "--profile", tmp_path / "profile.json")
    assert str(tmp_path / "profile.json") in message


def test_a_plan_of_another_step_is_refused(refused: Callable[..., str], cpu_plan: Path) -> None:
    message = refused("simulate", plans.VGG19, "--plan", cpu_plan)
    assert "is a plan for 'jit_mlp_step'" in message
    assert "this module is 'jit_train_step'" in message


def test_a_module_and_a_plan_may_be_named_by_links(disco: Disco, cpu_plan: Path, tmp_path: Path) -> None:
    module, plan = tmp_path / "step", tmp_path / "latest.json"
    module.symlink_to(cpu_plan / "default.hlo.pb.gz")
    plan.symlink_to(cpu_plan / "plan.json")
    named = disco("simulate", cpu_plan, "--plan", cpu_plan, "--json")
    linked = disco("simulate", module, "--plan", plan, "--json")
    assert linked.code == 0
    assert linked.json == named.json


def test_a_link_to_nothing_names_what_is_missing(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "step").symlink_to(tmp_path / "gone")
    assert refused("simulate", tmp_path / "step") == f"disco: {tmp_path / 'gone'}: no such file"


def test_a_step_without_collectives_says_that_no_network_matters(disco: Disco, tmp_path: Path) -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x)

    compiled = step.lower(jnp.ones((8, 8))).compile().runtime_executable()
    module = tmp_path / "alone.hlo.pb"
    module.write_bytes(compiled.hlo_modules()[0].as_serialized_hlo_module_proto())
    outcome = disco("simulate", module, "--gpus", "8", "--bandwidth", "10")
    assert outcome.code == 0
    assert "the step has no collective that a bucket could have: no network changes its time" in outcome.err


def test_a_network_too_slow_to_simulate_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    module = tmp_path / "step.hlo.pb"
    module.write_bytes(large_step(512, width=16384))  # 137 billion parameters
    message = refused("simulate", module, "--gpus", "64", "--bandwidth", "0.000001", "--latency", "5")
    assert "Durations add up to 1.08e+18 ns, expected at most 8e+17." in message
    assert message.endswith("Is 64 GPUs at 1e-06 GB/s, 5 µs a message what you meant?")


def test_a_machine_says_what_would_be_gained_on_it(disco: Disco) -> None:
    outcome = disco("simulate", plans.VGG19, "--machine", "h200", "--gpus", "1024")
    rows = [" ".join(line.split()) for line in outcome.out.splitlines()]
    names = ("order", "rotation", "fused kernels", "T3")
    assert [
        name for name in names if any(row.removeprefix("entry ").startswith(name) for row in rows)
    ] == list(names)
    assert (
        "what if: 1024 GPUs of h200 (Nodes of 8 H200, 400 Gb/s a device); collectives by switch"
        in outcome.err
    )
    found = disco("simulate", plans.VGG19, "--machine", "coconet", "--json").json
    assert found["machine"] == {"name": "coconet", "gpus": 256, "assumed": ["gpu.launch_us"]}
    assert all(0 < step_ns <= found["default"]["step_ns"] for step_ns in found["gains"].values())


def test_a_loop_s_body_gains_as_often_as_the_loop_turns(disco: Disco) -> None:
    found = disco("simulate", plans.SCANNED, "--machine", "h200", "--gpus", "8", "--json").json
    now = {one["name"]: one["execution_ns"] for one in found["regions"]}
    by_region = found["gains_by_region"]
    assert set(by_region) == {"entry", "loop1", "loop2"}
    assert found["gains"] == by_region["entry"]
    for mechanism, step_ns in found["gains"].items():
        saved = {name: 16 * (now[name] - by_region[name][mechanism]) for name in ("loop1", "loop2")}
        assert now["entry"] - step_ns >= sum(saved.values()), mechanism
        assert saved["loop1"] > 0, mechanism
    rows = disco("simulate", plans.SCANNED, "--machine", "h200", "--region", "loop2").out.splitlines()
    table = next(number for number, row in enumerate(rows) if "what would be gained on" in row)
    assert [row.split()[0] for row in rows[table + 1 : table + 5]] == ["loop2", "rotation", "fused", "T3"]


def test_a_pipeline_s_sends_have_a_row_and_what_slicing_them_gives(disco: Disco, tmp_path: Path) -> None:
    module = tmp_path / "step.hlo.pb"
    module.write_bytes(pipeline().module.SerializeToString())
    shown = disco("simulate", module, "--machine", "h200", "--gpus", "16", "--region", "loop1").out
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert "sends 684.7 µs" in rows
    assert any(row.startswith("sliced sends 1 of 1 sends in shards") for row in rows)


def test_a_machine_and_a_link_are_not_given_together(refused: Callable[..., str]) -> None:
    assert "leave out --bandwidth" in refused(
        "simulate", plans.VGG19, "--machine", "h200", "--bandwidth", "10"
    )
    assert "no machine 'laptop'" in refused("simulate", plans.VGG19, "--machine", "laptop")
