"""What the check of command buffers says of two traces, and the step that it takes them of."""

from __future__ import annotations

import check_command_buffers
import jax
import pytest

from tests.profiler.test_command_buffers import llama, trace

pytestmark = pytest.mark.product_only


def test_the_json_says_what_has_no_name() -> None:
    said = check_command_buffers.judged(
        trace("jit_a", *[llama(2, buffered=True)] * 5), trace("jit_b", *[llama(2, buffered=False)] * 3)
    )
    assert (said["accepted"], said["why"]) == (True, "")
    assert said["unnamed_us_a_run"] == 6
    assert said["lanes"]["memsets"]["unnamed_ms"] == {"Memset 0": 0.03}
    assert said["events_a_run"] == {
        "timed": {"copies D2D": 2, "kernels": 12, "memsets": 6},
        "named": {"copies D2D": 2, "copies D2H": 2, "kernels": 12, "memsets": 2},
    }


def test_a_trace_of_other_kernels_is_not_accepted() -> None:
    other = [(op, kernel.replace("nvjet", "cutlass"), *at) for op, kernel, *at in llama(2, buffered=True)]
    said = check_command_buffers.judged(trace("jit_a", other), trace("jit_b", llama(2, buffered=False)))
    assert not said["accepted"]
    assert said["lanes"]["kernels"]["unnamed_ms"] == {"cutlass_tst_splitK": 0.6}
    assert "most of the rest is cutlass_tst_splitK" in said["why"]


def test_a_step_that_runs_in_no_command_buffer_shows_nothing() -> None:
    named = trace("jit_b", llama(2, buffered=False))
    said = check_command_buffers.judged(named, named)
    assert (said["accepted"], said["why"]) == (False, "no kernel of the step runs in a command buffer")


@pytest.mark.parametrize("form", check_command_buffers.FORMS)
def test_the_step_can_be_traced_by_jax(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"WIDTH": 64, "FEED_FORWARD": 96, "HEADS": 2, "LENGTH": 32, "VOCABULARY": 128}.items():
        monkeypatch.setattr(check_command_buffers, name, size)
    step, shapes = check_command_buffers.llama_step(2, scan=form == "scan", attention="xla")
    weights, _, _, value = jax.eval_shape(step, *shapes)
    assert weights == shapes[0]
    assert value.shape == ()


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["check_command_buffers.py"])
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert check_command_buffers.main() == 2
    assert "needs a GPU, and jax has cpu" in capsys.readouterr().err
