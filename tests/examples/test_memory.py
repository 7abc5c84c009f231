"""The predicted peak memory of a step is that of XLA's own buffer assignment."""

from __future__ import annotations

import functools

import jax
import llama
import numpy as np
import pytest
from jax.sharding import Mesh

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.optimize.costs import costs_for
from disco_hlo.optimize.regions import step_times
from disco_hlo.plan.read import read
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.phases.keeping import prices_of
from disco_hlo.plugin.structure import early_module
from disco_hlo.plugin.xla import compiles, executables
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.structure.moves import to_json
from disco_hlo.structure.propose_loops import KEPT_IN_PART, kept_in_part
from tests.captured import captured
from tests.outputs import outputs_of
from tests.steps.intercept import intercept

LONG = llama.load("tiny")._replace(
    layers=4, width=64, hidden=176, length=256, rows_per_device=8, vocabulary=512
)


def _module_and_memory(request: CompileRequest) -> tuple[bytes, int]:
    """XLA's module of a step, and the bytes that its executable takes on a device."""
    executable, module = compiles.compile_seen(request)
    return module, executables.memory(executable).total_bytes


@pytest.mark.parametrize(
    "form",
    [
        llama.Form("fsdp", "scan", "dots"),
        llama.Form("dp", "scan", "dots", accumulate=2),
        llama.Form("dp", "unroll", "none"),
    ],
    ids=str,
)
def test_the_predicted_peak_is_what_xla_allocates(form: llama.Form) -> None:
    """Within 5 %: XLA places buffers at offsets, and may leave gaps."""
    where = llama.Layout(Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "model")), form)
    config = LONG._replace(layers=2) if form.layers == "unroll" else LONG
    arguments = llama.abstract_arguments(config, where)
    module, allocated = intercept(llama.compile_step(config, where), arguments, _module_and_memory)
    source = canonicalize(module)
    times = step_times(source, read(source), costs_for(source, None, None), as_compiled=True)
    assert times.predicted[ENTRY].timeline.peak_bytes == pytest.approx(allocated, rel=0.05)


def test_a_scanned_step_on_gpus_needs_what_it_was_measured_to() -> None:
    """14,466,400,768 bytes were in use at most on each of two H100s, in three trainings (2026-11-26). The module is of
    another day: its kernels are not quite the same. What the loop saves for the backward pass lives in both loops."""
    source = captured("h100_llama/fsdp_scan")
    times = step_times(source, read(source), costs_for(source, None, None), as_compiled=True)
    assert times.predicted[ENTRY].timeline.peak_bytes == pytest.approx(14_466_400_768, rel=0.05)


def test_what_is_kept_in_half_the_room_needs_no_more_and_computes_the_same() -> None:
    """float32, as XLA:CPU has no kernel for some matmuls of a rewritten bfloat16 step. Compared with XLA's step before
    it fuses: the moves add nothing to what differs from then on."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "model"))
    where = llama.Layout(mesh, llama.Form("fsdp", "scan", "all"))
    config = llama.load("tiny")._replace(dtype="float32", rows_per_device=8)

    def look(request: CompileRequest) -> None:
        early = early_module(request)
        prices = functools.partial(prices_of, costs_for(canonicalize(early.module), None, None))
        everything = kept_in_part(early.module, prices, 1 << 40, copies=early.copies).chosen
        room_bytes = everything.held_bytes // 2
        part = kept_in_part(early.module, prices, room_bytes, copies=early.copies)
        assert 0 < part.chosen.held_bytes <= room_bytes
        assert 0 < part.chosen.saved_ns < everything.saved_ns
        moved = early.moved(to_json(part.schedules[KEPT_IN_PART]))
        plain, kept = (compiles.compile_module(request, None, None, one) for one in (early.module, moved))
        needed = [executables.memory(one).total_bytes for one in (plain, kept)]
        assert needed[1] <= 1.05 * (needed[0] + part.chosen.held_bytes)
        runner = Runner(request, plain)
        expected, got = outputs_of(runner), outputs_of(Runner(request, kept, inputs_of=runner))
        for one, other in zip(expected, got, strict=True):
            np.testing.assert_array_equal(one, other)

    intercept(llama.compile_step(config, where), llama.abstract_arguments(config, where), look)
