"""What real traces of two H100s tell (``tests/data/h100_traces``)."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from disco_hlo.profiler.command_buffers import with_names
from disco_hlo.profiler.contention import contention
from disco_hlo.profiler.instructions import instruction_times
from disco_hlo.profiler.trace import Execution, RunWindow, Trace, is_transfer, unit_of

TRACES = Path(__file__).parents[1] / "data" / "h100_traces"
PRODUCTS = ("custom-call", "convolution", "dot")


def read(name: str, module: str) -> Trace:
    """A kept trace: rows of instruction, kernel, run, device, start and duration in ns."""
    rows = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    executions = [
        Execution(op, module, run, device, start, start + ns, "stream", start + ns, kernel)
        for op, kernel, run, device, start, ns in rows
    ]
    executions.sort(key=lambda one: one.start_ns)
    return Trace(tuple(executions), (RunWindow(0, 1),) * len({one.run for one in executions}))


def named(step: str) -> Trace:
    found = with_names(read(f"{step}-buffered", "jit_a"), "jit_a", read(f"{step}-named", "jit_b"), "jit_b")
    assert found.unnamed_ns == 0
    return found.trace


@pytest.mark.parametrize(
    ("step", "events"), [("vgg19-alone", 1168), ("vgg19-beside", 1168), ("rnnlm-alone", 1228)]
)
def test_every_kernel_in_a_command_buffer_finds_its_name(step: str, events: int) -> None:
    """Copies are kernels in a command buffer and have streams of their own outside, in the loops of rnnlm."""
    found = named(step)
    assert len(found.executions) == events
    assert not any(one.op.startswith("command_buffer") for one in found.executions)
    outside = read(f"{step}-named", "jit_b")
    runs = len({one.run for one in found.executions})
    names, expected = (Counter(one.op for one in trace.executions) for trace in (found, outside))
    assert names == {op: runs * count for op, count in expected.items()}


def test_kernels_take_less_in_command_buffers() -> None:
    inside, outside = (
        sum(
            time.median_ns
            for op, time in instruction_times(trace, "jit_b", {}, minimum_runs=1).items()
            if not op.startswith("b")
        )
        for trace in (named("rnnlm-alone"), read("rnnlm-alone-named", "jit_b"))
    )
    assert (inside, outside) == (18_998_119, 20_272_152)


def test_what_vgg19_s_kernels_and_transfers_cost_each_other() -> None:
    alone, beside = named("vgg19-alone"), named("vgg19-beside")
    products = {unit_of(one) for one in alone.executions if any(word in one.op for word in PRODUCTS)}
    assert sum(is_transfer(one) for one in alone.executions) == 108
    found = contention(alone, beside, "jit_b", products=products)
    assert found is not None
    assert (found.compute, found.communication) == pytest.approx((1.806, 2.029), abs=5e-4)
    assert found.products == 2.0, "twice its time at most; as read 3.3"
    assert found.others == pytest.approx(1.125, abs=5e-4)
