"""Calls of candidates that hang end the job; what only takes long ends nothing."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from disco_hlo.activation.channel import LocalChannel
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.store import PlanStore
from disco_hlo.plugin import hangs
from disco_hlo.plugin.calls import hanging, watch
from disco_hlo.plugin.calls.observing import Observation
from disco_hlo.plugin.calls.watch import UnderWay, Watch
from disco_hlo.plugin.xla import executables
from tests.plugin.calls.hanging import PLACES, end_where_it_hangs
from tests.plugin.calls.hanging_rank import STANDS_STILL
from tests.plugin.calls.training import compiled_again, jitted, train, trial_of
from tests.plugin.two_ranks import run_by

ROOT = Path(__file__).parents[3]
_QUEUED_S = 0.1


class Tried:
    """In the place of a trial, one of whose calls is under way."""

    channel = LocalChannel()
    tag = "t"
    outcome = None

    def __init__(self, name: str, call_ns: int, module: bytes | None = None) -> None:
        self.call_ns = call_ns
        self.marks: dict[str, Any] = {}
        self.watch: Any = SimpleNamespace(
            module_name="jit_step", module=module or compiled(jnp.tanh), ended=3
        )
        self.watch.under_way = UnderWay(self.watch, 3, name)

    def name_of(self, _: int) -> str:
        return self.watch.under_way.name  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Exception in thread disco-endless")
@pytest.mark.parametrize(
    ("name", "call_s", "hangs_s"),
    [("plan", 0.001, 0.1), ("plan", 0.05, 0.9), (DEFAULT, 0.001, None), ("plan", 0.0, None)],
    ids=["a candidate", "of a large model", "XLA's default", "beside what nobody has timed"],
)
def test_a_call_hangs_that_takes_as_long_as_many_of_the_default(
    name: str, call_s: float, hangs_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = end_where_it_hangs(monkeypatch)
    monkeypatch.setattr(hangs, "_HANGS_S", 0.1)
    monkeypatch.setattr(hangs, "_CALLS", 18)
    tried, closing = Tried(name, round(1e9 * call_s)), threading.Event()
    began = time.monotonic()
    looking = threading.Thread(target=hanging._look_after, args=(weakref.ref(tried), closing))
    looking.start()
    try:
        assert ended.wait(60 if hangs_s else 0.5) == (hangs_s is not None)
        assert time.monotonic() - began >= (hangs_s or 0.0)
    finally:
        closing.set()
        looking.join()


def compiled(function: Callable[..., Any]) -> bytes:
    executable = jax.jit(function).lower(jnp.ones((8, 8))).compile().runtime_executable()
    return executables.read_executable(executable)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.while_loop(lambda y: y.sum() < 1e6, lambda y: y @ y, x),
        lambda x: jax.lax.cond(x.sum() > 0, lambda y: y @ y, lambda y: y, x),
        lambda x: (jax.debug.callback(lambda _: None, x.sum()), x @ x),
    ],
    ids=["a loop", "a branch", "the script's function"],
)
def test_a_call_that_may_take_any_time_does_not_hang(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation every hundred steps, or a function of the script's that saves the training."""
    ended = end_where_it_hangs(monkeypatch)
    tried = Tried("plan", 1, compiled(function))
    hanging._look_after(weakref.ref(tried), threading.Event())
    assert not ended.is_set()


def test_loops_of_so_many_turns_take_about_as_long_each_time() -> None:
    def scanned(x: jax.Array) -> Any:
        return jax.lax.scan(lambda y, _: (jnp.tanh(y @ y), None), x, None, length=7)

    assert hangs.lasts_alike(compiled(scanned))
    assert hangs.lasts_alike(
        compiled(lambda x: x + jax.random.normal(jax.random.key(x[0, 0].astype(int)), (8,)))
    )


def followed(observation: Observation, monkeypatch: pytest.MonkeyPatch) -> tuple[Watch, Callable[[], object]]:
    """The watch of a step that a candidate runs, and what makes a call of it and says which was under way in it."""
    call = jitted("followed")
    _, state = train(call, 3)
    own = trial_of(observation.trials, "jit_followed").watch
    own.offer("again", compiled_again(own))
    own.swap(lambda _: "again")
    seen, states = list[object](), [state]

    def once() -> object:
        execute = executables.execute

        def executed(executable: Any, arguments: Any) -> Any:
            seen.append(own.under_way)
            return execute(executable, arguments)

        own.drain()
        jax.block_until_ready(states)
        with monkeypatch.context() as patch:
            patch.setattr(executables, "execute", executed)
            states[:] = [train(call, 1, states[0])[1]]
        return seen.pop()

    return own, once


def test_a_call_that_may_wait_for_a_program_of_the_scripts_on_cpu_does_not_hang(
    observation: Observation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU devices have no queue, but a call waits for a long evaluation that reads what the call takes over."""
    own, once = followed(observation, monkeypatch)
    assert once() == UnderWay(own, 3, "again")
    x, done = (
        jnp.ones((1024, 1024)),
        jax.jit(lambda y: jax.lax.fori_loop(0, 60, lambda _, z: z @ y * 1e-3, y)),
    )
    evaluated = done(x)
    assert not evaluated.is_ready()
    assert once() is None
    evaluated.block_until_ready()
    assert once() == UnderWay(own, 5, "again")


def test_a_call_does_not_hang_while_a_signal_handler_of_the_scripts_runs_in_it(
    observation: Observation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that computes in the caller's thread hears of most signals there, and the script saves its training."""
    own, once = followed(observation, monkeypatch)
    seen: list[object] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(own.under_way))
    execute = executables.execute

    def executed(executable: Any, arguments: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return execute(executable, arguments)

    monkeypatch.setattr(executables, "execute", executed)
    try:
        assert once() == UnderWay(own, 3, "again")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [None]


def test_a_call_that_the_default_runs_in_the_place_of_a_candidate_is_not_the_candidates(
    observation: Observation, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, once = followed(observation, monkeypatch)
    execute, failed = executables.execute, list[Any]()

    def executed(executable: Any, arguments: Any) -> Any:
        if not failed:
            failed.append(executable)
            raise RuntimeError("no memory")
        return execute(executable, arguments)

    monkeypatch.setattr(executables, "execute", executed)
    assert once() is None
    assert own.failures == {"again": "RuntimeError: no memory"}


def test_a_call_whose_begin_cannot_be_told_does_not_hang(
    observation: Observation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no memory")

    _, once = followed(observation, monkeypatch)
    monkeypatch.setattr(watch, "run_nothing", fail)
    own = trial_of(observation.trials, "jit_followed").watch
    monkeypatch.setattr(own, "_queues", True)
    assert once() is None


def test_a_program_of_the_scripts_that_is_queued_before_a_call_is_not_the_calls(
    observation: Observation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long evaluation, for instance, whose results nobody has read yet."""
    monkeypatch.setattr(watch, "backend_of", lambda _: SimpleNamespace(queues=True))
    call = jitted("queued")
    _, state = train(call, 3)
    own = trial_of(observation.trials, "jit_queued").watch
    own.drain_queue()
    own.offer("again", compiled_again(own))
    own.swap(lambda _: "again")
    done = threading.Event()
    token = SimpleNamespace(block_until_ready=lambda: done.wait(60))
    monkeypatch.setattr(watch, "run_nothing", lambda _: token)
    train(call, 1, state)
    time.sleep(_QUEUED_S)
    assert (own.under_way, own.ended) == (None, 3)
    done.set()
    observation.drain()
    assert (own.under_way, own.ended) == (None, 4)


@pytest.mark.slow
@pytest.mark.product_only  # the older jax takes no turns with a plan
@pytest.mark.parametrize(
    ("fault", "carrier"),
    [
        (PLACES[0], "key-value store"),
        (PLACES[1], "key-value store"),  # the other process is past the call by then
        pytest.param(PLACES[1], "MPI", marks=pytest.mark.mpi),
        ("sleeps", "key-value store"),
        (STANDS_STILL, "key-value store"),
    ],
)
def test_a_plan_that_hangs_in_a_call_of_one_of_two_processes_ends_both_and_a_rank_that_sleeps_none(
    fault: str, carrier: str, tmp_path: Path
) -> None:
    codes, errors = run_by(carrier, "tests.plugin.calls.hanging_rank", tmp_path, fault, longest_s=100)
    lines = [line for one in errors for line in one.splitlines() if "has not ended" in line]
    bans = [ban.reason for one in PlanStore(tmp_path).list_plans() for ban in one.bans]
    assert carrier in errors[0]
    if fault not in PLACES:
        assert (codes, lines, bans) == ([0, 0], [], []), errors
        return
    assert 0 not in codes
    [line], [ban] = lines, bans
    assert "a call of jit_tried that no fusion ran has not ended after " in line
    assert line.endswith("; the candidate is banned, and the next job goes on without it")
    assert " hung while it was run (" in ban
