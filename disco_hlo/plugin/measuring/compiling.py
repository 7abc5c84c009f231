"""Modules that all ranks compile, beside a training, too.

XLA:GPU's autotuner runs kernels on arrays of its own. Where the devices have no room for these beside a step, a call of
the training is held for each compile (:meth:`Session.compiling`). What the autotuner has picked for other modules it
finds again: a compile that may only use such picks takes no device, and holds nothing. The modules that measure a
structure, and its plan, have no other kernels. The structure itself mostly has new ones when it is compiled for the
first time: that is not tried by known picks, as XLA writes an error for each new kernel to the training's stderr.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import DiscoError, XlaRefusalError
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring.room import in_turn
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla import compiles, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink.requests import CompileOptionValue

_TAKES_S = 300.0
"""How much longer than for other things ranks wait for rank 0's compile."""
Compiled = TypeVar("Compiled")
Compile = Callable[[Mapping[str, CompileOptionValue]], Compiled]
"""A compile with debug options, besides those of its own."""


class CompileBatch(Generic[Compiled]):
    """Compiles of new modules, begun on all ranks; to be finished on all at once."""

    def __init__(
        self,
        session: Session,
        what: str,
        compiles: Sequence[Compile[Compiled]],
        pool: Executor,
        at_once: int,
        are_tuned: Sequence[bool] | None = None,
    ) -> None:
        """Begin, ``what`` in words, in the threads of ``pool``; ``at_once`` are compiled while a call is held.
        ``are_tuned``: whether the autotuner has seen the kernels of each, all where it is not said."""
        self._session, self._what, self._compiles, self._pool = session, what, compiles, pool
        self._at_once = at_once
        held = session.compiles_between_steps
        options = BACKENDS[session.facts.backend].by_known_picks if held else {}
        waits = [held and are_tuned is not None and not are_tuned[number] for number in range(len(compiles))]
        self.begun = [
            _new_to_the_tuner() if waiting else pool.submit(one, options)
            for one, waiting in zip(compiles, waits, strict=True)
        ]

    def finish(self) -> list[Future[Compiled]]:
        """All of them, done, but for those whose error that is. What XLA could not compile by known picks on some rank
        is compiled anew while a call is held; what we refuse on any is not. Raises ActivationError: ranks were silent,
        or no call comes."""
        session, what, found = self._session, self._what, list(self.begun)
        wait(found)
        if not found or not session.compiles_between_steps:
            return found
        errors = [(number, one.exception()) for number, one in enumerate(found)]
        mine = [[number, _is_ours(error)] for number, error in errors if error is not None]
        told = [pair for one in session.gathered(mine, f"{what}: picks") for pair in one]
        failed, refused = {number for number, _ in told}, {number for number, ours in told if ours}
        anywhere = sorted(failed - refused)
        LOGGER.debug("%s: %d of %d compiled by known picks", what, len(found) - len(failed), len(found))
        for some in in_turn(session, anywhere, self._at_once):
            with session.compiling(what):
                for number in some:
                    found[number] = self._pool.submit(self._compiles[number], {})
                wait([found[number] for number in some])
        return found


def compile_default(session: Session, what: str, early: bytes) -> LoadedExecutable:
    """XLA's default of an early module, ``what`` in words, on all ranks at once.

    Raises:
        Exception: it cannot be compiled, on whichever rank; on all alike.
    """

    def compiled(options: Mapping[str, CompileOptionValue]) -> LoadedExecutable:
        with jaxlink.ours():
            return compiles.compile_module(session.request, None, options, early)

    with ThreadPoolExecutor(1, "disco-compile") as pool:
        [executing] = CompileBatch(session, what, [compiled], pool, 1).finish()
    with session.stage(what, takes_s=_TAKES_S):
        return executing.result()


def _new_to_the_tuner() -> Future[Compiled]:
    found = Future[Compiled]()
    found.set_exception(XlaRefusalError("its kernels are new to XLA's autotuner"))
    return found


def _is_ours(error: BaseException) -> bool:
    """Whether it is an error of ours, as ``verify`` raises, and not XLA's, as of a module with a new kernel."""
    return isinstance(error, DiscoError) and not isinstance(error, XlaRefusalError)
