"""What can go wrong around a training run, arranged inside its process before JAX starts."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.abc
import importlib.metadata
import itertools
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


def not_installed() -> None:
    """The plugin's package cannot be found."""
    entry_points = importlib.metadata.entry_points

    def without_us(**kwargs: Any) -> Any:
        found = entry_points(**kwargs)
        return importlib.metadata.EntryPoints(one for one in found if "disco_hlo" not in one.value)

    class Hide(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.partition(".")[0] == "disco_hlo":
                raise ModuleNotFoundError(name)

    importlib.metadata.entry_points = without_us  # type: ignore[assignment]
    sys.meta_path.insert(0, Hide())


def hook_never_called() -> None:
    """A jaxlib that takes the hook and forgets it."""
    import jax.extend.xla as extension

    extension.register_hlo_module_transformation = lambda *args, **kwargs: None


def disk_full() -> None:
    """Small files can still be written to the plan directory, larger ones not."""
    write = os.write

    def write_small(descriptor: int, data: Any) -> int:
        if len(data) > 4096 and _in_plan_directory(os.readlink(f"/proc/self/fd/{descriptor}")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    os.write = write_small


def read_only() -> None:
    """Nothing can be written to the plan directory, though it is there."""
    for name in ("mkdir", "link", "replace", "unlink"):
        setattr(os, name, _refusing(getattr(os, name)))
    really_open = os.open

    @functools.wraps(really_open)
    def open_for_reading(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and _in_plan_directory(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return really_open(path, flags, *args, **kwargs)

    os.open = open_for_reading


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
        if _in_plan_directory(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return function(path, *args, **kwargs)

    return refuse


def _in_plan_directory(path: Any) -> bool:
    return os.fspath(path).startswith(os.environ["DISCO_DIR"])


def no_memory() -> None:
    """There is no room for made-up inputs."""
    from disco_hlo.plugin.measuring import comparing

    def refuse(*args: Any, **more: Any) -> None:
        raise MemoryError("no room")

    comparing.Runner = refuse  # type: ignore[assignment,misc]


def one_element_off() -> None:
    """Whatever is compared with XLA's default computes one element of one result otherwise."""
    from disco_hlo.plugin.measuring.comparing import Reference

    first_unlike = Reference._first_unlike

    def changed(array: Any) -> Any:
        import jax
        import numpy as np

        values = np.array(array)
        values.reshape(-1)[:1] *= 1.001
        return jax.device_put(values, next(iter(array.devices())))

    def off(every: list[list[Any]]) -> list[list[Any]]:
        return [list(map(changed, output)) for output in every]

    Reference._first_unlike = lambda self, every: first_unlike(self, off(every))  # type: ignore[method-assign]


def plan_wins() -> None:
    """Not a fault: the clock is taken out, and the search's own plan counts as the fastest."""
    _let_win("plan")


def chunk_wins() -> None:
    """The step in two parts counts as the fastest, by so much that its gain is in no doubt when it is enacted."""
    _let_win("chunk-2")


def unroll_wins() -> None:
    """The step whose loops are written out counts as the fastest."""
    _let_win("unroll")


def default_wins() -> None:
    """XLA's default counts as the fastest."""
    _let_win("XLA default")


def _let_win(name: str) -> None:
    """It took half of what XLA's default did, without noise: its gain is in no doubt when it is enacted."""
    from disco_hlo.plugin.phases import finalists

    def first(trials: Any, _forced: object) -> int:
        found = [i for i, trial in enumerate(trials) if trial.name == name and not trial.error]
        if not found or not found[0]:
            return 0
        default = trials[0].times_ns
        default[:] = [sorted(default)[len(default) // 2]] * len(default)
        trials[found[0]].times_ns[:] = [one // 2 for one in default]
        return found[0]

    finalists.chosen = first


def plan_crashes_xla() -> None:
    """XLA aborts when it compiles the search's own plan."""
    from disco_hlo.plugin.measuring import candidates, room
    from disco_hlo.plugin.xla import compiles

    compile_one, compile_module = candidates._compile, compiles.compile_module
    plans: list[Any] = []

    def noting_the_plan(session: Any, source: Any, trial: Any, *more: Any) -> Any:
        plans.extend([trial] if trial.name == "plan" else [])
        return compile_one(session, source, trial, *more)

    def crashing(request: Any, module: Any, *more: Any) -> Any:
        if module is not None and any(trial.module == module for trial in plans):
            os.abort()
        return compile_module(request, module, *more)

    candidates._compile = noting_the_plan
    room.fewest_cores = lambda _: 1
    compiles.compile_module = crashing


def enacting(what: str) -> None:
    """XLA aborts when it compiles the plan that is enacted (``crashes``), or never comes to an end (``lasts``)."""
    from disco_hlo.plugin.xla import compiles

    def finish(*_: Any) -> Any:
        if what == "crashes":
            os.abort()
        sys.stderr.write("compiling\n")
        sys.stderr.flush()
        time.sleep(3600)

    compiles.Halted.finish = finish  # type: ignore[method-assign]


def no_timeline() -> None:
    """A trace that was taken to be shown cannot be read."""
    from disco_hlo.plugin.measuring import traced_modules

    def refuse(*_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    traced_modules.measured_step = refuse


def dies_at(stage: str) -> None:
    """The process is killed where it comes to ``stage``."""
    _once_at(stage, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stops_at(stage: str) -> None:
    """The process stands still from ``stage`` on, until somebody sends SIGCONT."""
    _once_at(stage, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def disk_fills_at(stage: str) -> None:
    """From ``stage`` on the plan directory takes no large files, as under :func:`disk_full`."""
    _once_at(stage, disk_full)


def directory_gone_at(stage: str) -> None:
    """Somebody removes the plan directory while the process is at ``stage``."""
    _once_at(stage, lambda: shutil.rmtree(os.environ["DISCO_DIR"]))


def clock_moves_at(told: str) -> None:
    """The wall clock moves, back or forth, while the process is at a stage (``STAGE:SECONDS``).

    Under moved_clock.c, which reads CLOCK_OFFSET_FILE, it does for all that the process is made of; else for
    what Python reads.
    """
    stage, _, seconds = told.partition(":")

    def move() -> None:
        if "CLOCK_OFFSET_FILE" in os.environ:
            with open(os.environ["CLOCK_OFFSET_FILE"], "w") as file:
                file.write(f"{float(seconds):.0f}\n")
            return
        really, really_ns = time.time, time.time_ns
        time.time = lambda: really() + float(seconds)
        time.time_ns = lambda: really_ns() + int(float(seconds) * 1e9)

    _once_at(stage, move)


def coordinator_gone_at(stage: str) -> None:
    """jax.distributed's coordinator ends while the process, which is rank 0, is at ``stage`` and lives on."""

    def end() -> None:
        from jax._src import distributed

        service = distributed.global_state.service
        distributed.global_state.service = None
        # It waits for all to leave; meanwhile nobody is answered.
        threading.Thread(target=service.shutdown, daemon=True).start()

    _once_at(stage, end)


def fails_at(stage: str) -> None:
    """The device has no room where the process comes to ``stage``."""

    def fail(_session: Any) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    _at(stage, fail)


def dies_in_run(number: str) -> None:
    """The process is killed where it is to execute something of ours for the so-manieth time."""
    from disco_hlo.plugin.xla import executables

    really, executed = executables.execute, itertools.count(1)

    def execute(*args: Any) -> Any:
        if next(executed) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return really(*args)

    executables.execute = execute


def hurries_from(stage: str) -> None:
    """Not a fault: once at ``stage`` the process waits for the others for seconds, however long it did before."""
    from disco_hlo.plugin.session import Session

    def hurry(_session: Any) -> None:
        Session.timeout_s = 3.0  # type: ignore[method-assign,assignment]

    _at(stage, hurry)


def _at(stage: str, act: Callable[[Any], None]) -> None:
    """Do something where the process comes to a stage whose name, with hyphens for spaces, begins so."""
    from disco_hlo.plugin.session import Session

    really = Session.stage

    @contextlib.contextmanager
    def acting(session: Any, name: str, **more: Any) -> Iterator[None]:
        with really(session, name, **more):
            if name.replace(" ", "-").startswith(stage):
                act(session)
            yield

    Session.stage = acting  # type: ignore[method-assign,assignment]


MEASURED_RUN = "a-measured-run"
"""The stage of a candidate that is timed, after a few of its runs."""


def _once_at(stage: str, act: Callable[[], None]) -> None:
    """Do something the first time that the process comes to a stage, and say when, by a clock that nobody moves."""
    left = [act]

    def once(_session: Any) -> None:
        if left:
            sys.stderr.write(f"fault at {time.monotonic():.3f} in process {os.getpid()}\n")
            sys.stderr.flush()
            left.pop()()

    if stage == MEASURED_RUN:
        _in_a_measured_run(once)
    else:
        _at(stage, once)


def _in_a_measured_run(act: Callable[[Any], None]) -> None:
    from disco_hlo.plugin.measuring import candidates

    really, timed = candidates.time_once, itertools.count()

    def time_once(*args: Any) -> Any:
        if next(timed) >= 3:
            act(None)
        return really(*args)

    candidates.time_once = time_once


def arrange(fault: str) -> None:
    """Let a fault happen: its name, and behind a colon what it is told; ``1/`` before it: in rank 1 alone."""
    rank, alone, rest = fault.partition("/")
    if alone and rank not in (os.environ.get("TRAIN_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
        return
    name, _, told = (rest if alone else fault).partition(":")
    FAULTS[name](*([told] if told else []))


FAULTS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        not_installed, hook_never_called, disk_full, read_only,
        no_memory, one_element_off, plan_wins, chunk_wins, unroll_wins, default_wins, no_timeline, plan_crashes_xla,
        enacting,
        dies_at, stops_at, fails_at, dies_in_run, hurries_from, disk_fills_at, directory_gone_at, clock_moves_at,
        coordinator_gone_at,
    )
}  # fmt: skip
