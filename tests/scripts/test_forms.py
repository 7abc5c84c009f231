"""The forms of the Llama step: their names, random orders, what a device says of its memory, and their tables."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from evaluation import fidelity, measure, step
from evaluation.commands import is_form, unrolled
from evaluation.strategies import in_random_order

from disco_hlo.plan.apply import apply
from disco_hlo.plan.legal import check_order
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.units import unit_graph
from disco_hlo.plugin.xla.executables import Memory
from tests.captured import captured

# --- names ----------------------------------------------------------------------------------------


def test_forms_are_named_by_what_the_example_is_told() -> None:
    assert [name for name in ("llama-dp-scan", "llama-fsdp-unroll-x12", "llama-tp-scan", "llama-dp-scan-x1", "bert")
            if is_form(name)] == ["llama-dp-scan", "llama-fsdp-unroll-x12"]  # fmt: skip
    assert unrolled("llama-fsdp-scan-x4") == "llama-fsdp-unroll-x4"


def test_the_step_of_a_form_is_the_example_s() -> None:
    assert step.request_of("llama-dp-scan", "tiny").module_name == "jit_train_step"
    text = step.lowered_form("llama-fsdp-scan-x2", "tiny").as_text()
    assert re.search(r"tensor<2x\d+x33xi32>", text), "two microbatches of rows of 33 tokens"
    assert text.count("stablehlo.while") > step.lowered_form("llama-fsdp-unroll", "tiny").as_text().count(
        "stablehlo.while"
    )


# --- random orders --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp_scan", "dp_scan"])
def test_random_orders_are_legal_in_entry_and_loops_and_a_function_of_their_seed(name: str) -> None:
    source = captured(f"h100_llama/{name}")
    xla = read(source)
    made = [in_random_order(source, xla, seed) for seed in (1, 2)]
    assert made[0] == in_random_order(source, xla, 1) != made[1]
    for strategy in made:
        assert (strategy.groups, strategy.buckets) == (xla.groups, xla.buckets)
        assert [name for name, _ in strategy.regions] == ["loop1", "loop2"]
        for (region, own), (_, theirs) in zip(strategy.regions, xla.regions, strict=True):
            assert own.order != theirs.order
            check_order(unit_graph(source.computations[region].graph, own), own.order, asynchronous=True)
        verify(source, apply(strategy, source), strategy)


# --- memory ---------------------------------------------------------------------------------------


class FakeDevice:
    """A device of which 100 bytes are in use, 900 were once; and a step that takes 300 more while it runs."""

    def __init__(self, takes_bytes: int) -> None:
        self.in_use, self.peak, self.takes = 100, 900, takes_bytes

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": self.in_use, "peak_bytes_in_use": self.peak}

    def allocate(self, size: int) -> Any:
        self.in_use += size
        self.peak = max(self.peak, self.in_use)

        def delete() -> None:
            self.in_use -= size

        array = SimpleNamespace(delete=delete)
        array.block_until_ready = lambda: array
        return array

    def run(self) -> None:
        self.allocate(self.takes).delete()


def test_a_device_is_filled_until_one_run_tells_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(takes_bytes: int) -> int | None:
        device: Any = FakeDevice(takes_bytes)
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        monkeypatch.setattr(jax.numpy, "zeros", lambda size, _dtype, device: device.allocate(size))
        # 80 bytes of arguments, 50 of which the results take over: 300 for the run, 30 are there all the time
        monkeypatch.setattr(
            measure,
            "memory",
            lambda _: Memory(arguments_bytes=80, outputs_bytes=50, aliased_bytes=50, temporaries_bytes=250),
        )
        return measure.device_peak_bytes(None, device)

    assert said(300) == 330
    assert said(310) == 340
    with pytest.raises(RuntimeError, match="takes at most 315 bytes"):
        said(200)


def test_what_the_allocator_gives_beyond_what_was_asked_for_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device: Any = FakeDevice(0)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    runs_on = SimpleNamespace(donated_bytes=lambda: 50)
    runner: Any = SimpleNamespace(inputs=lambda: device.allocate(70), runs_on=runs_on)
    assert measure.unasked_bytes(runner) == 20
    memory, predicted = {"total_bytes": 200 << 20}, {"peak_bytes": 198 << 20}
    peak = {"bytes": 220 << 20, "unasked_bytes": 20 << 20}
    row = {"status": "ok", "memory": memory, "predicted": predicted, "device_peak": peak}
    cell = {"model": "llama-dp-scan", "size": "full", "link": "nvlink", "devices": 2}
    _, rows = fidelity.memory([{"cell": cell, "rows": {"plan": row}}])
    assert rows == [("llama-dp-scan, nvlink, 2", "plan", "198", "200", "220", "20", "-1.0 %")]
