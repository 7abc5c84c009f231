"""Measured steps as records: lanes without overlaps, instructions by graph node, and files that lie."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.xla import compiles, executables
from disco_hlo.plugin.xla.jaxlink import CompileRequest, OwnTrace
from disco_hlo.profiler import trace as tracing
from disco_hlo.profiler.timeline import MeasuredStep, decode, encode, measured_step
from disco_hlo.profiler.trace import Execution, Trace
from tests.captured import captured, stored
from tests.steps import models
from tests.steps.intercept import intercept

SHA, STEP_OF_A_GPU = "a" * 64, "h200_models/rnnlm"
STEP = MeasuredStep(
    "plan", 30, ("compute", "communication"), (("g0_add", 4), ("b0_all-reduce", -1)),
    ((0, 0, 10, 0), (1, 5, 20, 1), (0, 10, 20, 0)),
)  # fmt: skip


def measured(request: CompileRequest) -> MeasuredStep:
    """XLA's default of a step on two CPU devices, as it ran."""
    executable = compiles.compile_module(request, None)
    runner = Runner(request, executable)
    trace = tracing.read(tracing.collect(OwnTrace(), lambda: runner.run() and None, 3))
    return measured_step("XLA default", trace, executables.read_executable(executable))


def test_a_step_on_cpu_is_recorded_with_its_all_reduces_and_the_nodes_it_computes() -> None:
    step: MeasuredStep = intercept(*models.mlp(), measured)
    names = [name for name, _ in step.instructions]
    talking = {names[number] for number, *_, lane in step.spans if step.lanes[lane] == "communication"}
    assert talking == {name for name in names if name.startswith("all-reduce")} != set()
    assert len(names) > 10
    known = [node for _, node in step.instructions if node >= 0]
    assert len(known) > 0.8 * len(names)
    assert max(start + length for _, start, length, _ in step.spans) == step.step_ns > 0
    assert decode(encode(SHA, [step]), "file").steps == (step,)


def test_a_record_comes_back_as_it_was() -> None:
    record = decode(encode(SHA, [STEP]), "file")
    assert (record.module_sha256, record.steps) == (SHA, (STEP,))


def edited(change: Callable[[dict[str, Any]], object]) -> bytes:
    fields = json.loads(gzip.decompress(encode(SHA, [STEP])))
    change(fields)
    return gzip.compress(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "expected|truncated|malformed|Input data"),
        (b"\x1f\x8b nothing", "damaged gzip"),
        (gzip.compress(b"[" * 100_000), "file: "),
        (edited(lambda fields: fields.update(version=2)), '"version": 1'),
        (edited(lambda fields: fields.update(run="rm")), "unknown field"),
        (edited(lambda fields: fields["steps"][0]["spans"].append([9, 40, 1, 0])), "not there"),
        (edited(lambda fields: fields["steps"][0]["spans"].append([0, 40, 1, 9])), "not there"),
        (edited(lambda fields: fields["steps"][0]["spans"].append([0, 1, 1, 0])), "overlap in lane 0"),
        (edited(lambda fields: fields["steps"][0]["spans"].append([0, -1, 1, 0])), "Expected `int` >= 0"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ProfileError, match=reason):
        decode(data, "file")


def test_a_file_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disco_hlo.profiler.timeline.MAX_BYTES", 100)
    with pytest.raises(ProfileError, match="unzips to more than 100 bytes"):
        decode(encode(SHA, [STEP]), "file")


def test_kernels_of_a_gpu_are_joined_to_their_instructions_on_one_device() -> None:
    module = captured(STEP_OF_A_GPU)
    fusion = next(one for one in module.origins if one.role == "fusion")
    start = next(one for one in module.origins if one.role == "start")

    def kernel(op: str, start_ns: int, end_ns: int, device: int = 0, run: int = 0) -> Execution:
        name = module.graph.module_name
        return Execution(op, name, run, device, start_ns, end_ns, f"{op}_kernel")

    executions = [
        kernel(fusion.name, 100, 140),
        kernel(start.name, 120, 200),
        kernel("memset", 145, 150),
        kernel(fusion.name, 90, 130, device=1),
    ]
    step = measured_step("plan", Trace(tuple(executions), ()), stored(STEP_OF_A_GPU))
    assert step.lanes == ("compute", "communication")
    assert step.instructions == (
        (fusion.name, (*fusion.results, *fusion.nodes)[0]),
        (start.name, (*start.results, *start.nodes)[0]),
        ("memset", -1),
    )
    assert step.spans == ((0, 0, 40, 0), (1, 20, 80, 1), (2, 45, 5, 0))
    assert step.step_ns == 100
