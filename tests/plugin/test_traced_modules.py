"""A module under the profiler: on a GPU in command buffers for the times and without for the names."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from disco_hlo.backends import BACKENDS
from disco_hlo.elsewhere import here
from disco_hlo.errors import ModuleError, ProfileError
from disco_hlo.plugin.measuring import room, traced_modules
from disco_hlo.plugin.measuring.traced_modules import (
    Findings,
    NamedTrace,
    Traceable,
    as_all_have_it,
    findings,
    take,
    tell_of_uneven_devices,
    traceable,
)
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.xla.executables import Memory
from disco_hlo.profiler.trace import Trace, moved_ns
from tests.plugin.sessions import fake_session
from tests.profiler.test_command_buffers import BUFFERED, NAMED, trace

without = trace("jit_b", *[NAMED] * 3)
said: list[str] = []
others: list[Any] = []
"""What ranks beside this one say."""


def session(backend: str = "gpu") -> Any:
    def say(text: str, *values: object) -> None:
        said.append(text % values)

    return fake_session(
        facts=SimpleNamespace(backend=backend, process_count=2), say=say, say_failed=say,
        gathered=lambda mine, _tag: [mine, *others],
    )  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NamedTrace]:
    """Take a module that ran these kernels in command buffers, and :data:`NAMED` without."""
    said.clear()
    others.clear()
    asked: list[tuple[str, int, bool]] = []

    def of(
        kernels: Any = BUFFERED, *, timed: bool = True, untraced: Any = lambda: 40_000, in_a_row: int = 3
    ) -> NamedTrace:
        traces = {"step": trace("jit_a", *[kernels] * 5), "step, by name": without}

        def posed(name: str, function: Any) -> None:
            monkeypatch.setattr(traced_modules, name, function)

        def traced_on_all(
            _session: Any, name: str, _runner: Any, runs: int, _first: Any, *, warm: bool = True, **_: Any
        ) -> tuple[Trace, list[int]]:
            asked.append((name, runs, warm))
            return traces[name], [70_000]

        posed("traced_on_all", traced_on_all)
        posed("repeated", lambda _session, _what, run, count, _guard: [run() for _ in range(count)])
        posed("time_once", lambda _runner, _at_once: untraced())
        posed("steps_in_a_row", lambda _session, _runner, run_ns: in_a_row * (run_ns == 70_000))
        monkeypatch.setattr(traced_modules.tracing, "read", lambda collected: collected)
        posed(
            "runner_with", lambda _session, trial, _inputs, _first: SimpleNamespace(module=trial.executable)
        )
        posed("marked", lambda _session, _trial, _stage: contextlib.nullcontext())
        posed("module_name", lambda executed: executed)
        module = traceable(session(), Trial("step", None, 0))
        assert module.by_name is not None
        module.trial.executable, module.by_name.executable = "jit_a", "jit_b"
        agreed: list[float] = []
        first_runs: Any = SimpleNamespace(begin=lambda runs=math.inf: agreed.append(runs))
        found = take(session(), module, None, first_runs, timed=timed)
        # Ranks agree on the inputs of whatever is timed: one without memory for copies must not leave the others.
        assert agreed == ([math.inf] if timed else [])
        assert asked == [("step", 5, True), ("step, by name", 3, False)]
        return found

    return of


def test_on_a_gpu_a_module_is_compiled_without_command_buffers_too() -> None:
    module = traceable(session(), Trial("step", None, 0))
    assert [(one.name, one.options) for one in module.trials] == [
        ("step", {}),
        ("step, by name", BACKENDS["gpu"].singly_options),
    ]
    assert [one.options for one in traceable(session("cpu"), Trial("step", None, 0)).trials] == [{}]


def test_what_cannot_be_compiled_either_way_cannot_be_traced() -> None:
    module = Traceable(Trial("step", None, 0), Trial("step, by name", None, 0, error="no room"))
    assert module.error == "no room"
    assert Traceable(Trial("step", None, 0)).error == ""


def test_what_is_compiled_is_read_once_and_its_names_graph_made_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traced_modules.executables, "read_executable", lambda executable: executable)
    monkeypatch.setattr(traced_modules, "canonicalize", lambda executed: f"graph of {executed}")
    alone = traceable(session(), Trial("step", None, 0))
    beside, called = replace(alone, by_itself=False), replace(alone, is_called=True)
    told: dict[str, list[Any]] = {}
    for name, module in {"alone": alone, "beside": beside, "called": called}.items():
        for one in module.trials:
            one.executable = one.name
            module.read(one, here)
        told[name] = [module.written, *(one.executed for one in module.trials)]
        module.let_go()
        assert [module.written, *((one.executable, one.executed) for one in module.trials)] == [
            None, *[(None, b"")] * len(module.trials)
        ]  # fmt: skip
    both = ["step", "step, by name"]
    assert told == {
        "alone": ["graph of step, by name", *both],
        "beside": [None, *both],
        "called": ["graph of step, by name", both[1]],
    }  # fmt: skip


def test_a_module_without_a_graph_fails_where_its_trace_is_read_and_not_its_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compile of XLA's default, which a training calls, ends the search where it fails."""
    monkeypatch.setattr(traced_modules.executables, "read_executable", lambda _: b"\n\x04step")
    module = Traceable(Trial("step", None, 0))
    module.read(module.trial, here)
    assert (module.trial.executed, module.written) == (b"\n\x04step", None)
    taken = NamedTrace(Trace((), ()), (), b"\n\x04step", None)
    with pytest.raises(ModuleError):
        findings(SimpleNamespace(graph=SimpleNamespace(backend="cpu")), module, taken, 0)  # type: ignore[arg-type]


def test_times_are_those_of_command_buffers_and_names_those_without(run: Callable[..., NamedTrace]) -> None:
    found = run()
    assert found.executed == "jit_b"
    assert {one.module for one in found.trace.executions} == {"jit_b"}
    assert len({one.run for one in found.trace.executions}) == 5
    assert (found.step_ns, found.walls_ns, found.runner.module) == (40_000, [70_000], "jit_a")
    assert not said


def test_of_a_module_with_transfers_beside_kernels_only_what_moved_when_is_told(
    run: Callable[..., NamedTrace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels' times are of two things at once, so no canonical graph says whose they are."""
    taken = run()
    source: Any = SimpleNamespace(graph=SimpleNamespace(backend="gpu"))
    monkeypatch.setattr(traced_modules, "canonicalize", None)
    module = Traceable(Trial("step", None, 0), by_itself=False)
    shown = findings(source, module, taken, 0)
    assert (shown.trace, shown.by_name, shown.module_name) == (taken.trace, without, "jit_b")
    assert (shown.step_ns, shown.times, shown.issued) == (40_000, {}, ())
    assert shown.moved == moved_ns(taken.trace, "jit_b")
    assert set(shown.moved_by_name) == {(at, unit, 0) for at in range(3) for _, unit, _ in shown.moved}


def test_a_trace_that_the_other_cannot_name_is_done_without(run: Callable[..., NamedTrace]) -> None:
    other = [(op, "cutlass_gemm", *at) for op, _, *at in BUFFERED]
    found = run(other, timed=False)
    assert found.trace is found.by_name is without
    assert found.step_ns == 0
    assert len(said) == 1
    assert said[0].startswith(
        "step: its kernels are timed without command buffers, and these times are not stored: "
    )


def test_a_step_that_cannot_be_timed_untraced_is_traced_nevertheless(run: Callable[..., NamedTrace]) -> None:
    def fails() -> int:
        raise ProfileError("no memory for the copies")

    assert run(untraced=fails).step_ns == 0
    assert said == ["step: not timed: no memory for the copies"]


def test_a_step_that_is_too_long_to_be_run_several_times_in_a_row_has_the_way_from_the_host_in_it(
    run: Callable[..., NamedTrace],
) -> None:
    """Over 200 ms one was timed, and what lay between its kernels was the host's time."""
    assert run(in_a_row=1).step_ns == 0
    assert not said


def test_what_has_no_name_is_no_launch(run: Callable[..., NamedTrace]) -> None:
    """Of an untraced step it was left over, and shared out among the kernels that have one."""
    copied = [*BUFFERED[:3], ("command_buffer_1", "MemcpyD2D", 51, 52), *BUFFERED[3:]]
    assert run(copied).step_ns == 39_000


def test_where_one_rank_finds_no_names_all_go_without(run: Callable[..., NamedTrace]) -> None:
    others.append(True)
    assert run(timed=False).trace is without
    assert said == ["step: its kernels are timed without command buffers, and these times are not stored"]


def test_ranks_tell_each_other_how_long_transfers_move_data() -> None:
    mine = Findings(moved={(0, "b0", 0): 170_000, (0, "b1", 0): 40_000}, moved_by_name={(0, "b0", 0): 9})
    others[:] = [[[0, "b0", 0, 120000], [0, "b1", 0, 50000]]]
    found = as_all_have_it(session(), mine)
    assert found.moved == {(0, "b0", 0): 120_000, (0, "b1", 0): 40_000}
    assert found.moved_by_name == {(0, "b0", 0): 9}
    assert as_all_have_it(session("cpu"), mine) is mine


def test_a_device_of_another_rank_that_holds_up_the_step_is_named() -> None:
    """One of two GPUs had lowered its clock, and nothing said so: rounds were twice as long or not, and a plan lost."""
    said.clear()
    mine = Findings(computed={"device 0": [45_400_000, 45_300_000]})
    others[:] = [{"device 0": [47000000, 80000000]}]
    tell_of_uneven_devices(session(), mine)
    assert said == [
        "the step's kernels take 47 ms to 80 ms on device 0 of rank 1, 45.3 ms to 45.4 ms on device 0 of rank 0: "
        "this device is hot, short of power, or shared with another job; the times measured now are right only "
        "while that lasts"
    ]
    others[:] = [{"device 0": [45500000, 45300000]}]
    tell_of_uneven_devices(session(), mine)
    tell_of_uneven_devices(session("cpu"), mine)
    assert len(said) == 1


def test_inputs_that_are_there_already_need_no_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were counted for every module of a step, and the second and third had no room."""
    monkeypatch.setattr(room, "memory", lambda _executable: Memory(100 << 20, 0, 20 << 20, 0))
    monkeypatch.setattr(room, "room_bytes", lambda _session: 54 << 20)
    others.clear()
    assert "needs 120 MiB" in room.lack_of_memory(session(), "step", None)  # type: ignore[arg-type]
    for donated_mib, lacks in ((0, False), (30, False), (40, True)):
        runner: Any = SimpleNamespace(donated_bytes=lambda mib=donated_mib: mib << 20)
        found = room.lack_of_memory(session(), "step", None, runner)  # type: ignore[arg-type]
        assert bool(found) == lacks


@pytest.mark.parametrize(
    ("backend", "step_ns", "runs"),
    [("gpu", 100_000_000, 10), ("gpu", 1_000_000, 30), ("gpu", 3_000_000_000, 0), ("cpu", 1_000_000, 0)],
)
def test_a_gpu_computes_for_a_second_before_it_is_traced(
    backend: str, step_ns: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = SimpleNamespace(run=lambda: step_ns)
    first_runs: Any = SimpleNamespace(begin=lambda _runs: None)
    monkeypatch.setattr(traced_modules, "run_on_all", lambda _session, _what, run, _guard: run())
    monkeypatch.setattr(
        traced_modules, "repeated", lambda _session, _what, run, count, _guard: [run()] * count
    )
    monkeypatch.setattr(traced_modules, "collected", lambda _runner, _runs, warm_ups: warm_ups)
    warm_ups: Any = traced_modules.traced_on_all(session(backend), "a step", runner, 5, first_runs)
    assert warm_ups == runs
