"""The search phase that does not hold the training up: ``ENABLE_SEARCH=1`` as ``DISCO_WHEN=training`` has it.

Nothing is searched while a step compiles. Calls are watched (:mod:`disco_hlo.plugin.calls`); a search begins for the
module that is the step by them. What the search is made of is imported then, as that takes seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import weakref
from collections import Counter

from disco_hlo.activation.channel import Channel
from disco_hlo.elsewhere import quick_switches
from disco_hlo.plugin.calls.observing import Observation
from disco_hlo.plugin.calls.trial import Trial
from disco_hlo.plugin.calls.watch import join_uninterrupted
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.refusals import may_be_run
from disco_hlo.plugin.session import join, leave
from disco_hlo.plugin.settings import Settings, before_first_step
from disco_hlo.plugin.switched import is_alone, lacks_ranks
from disco_hlo.plugin.xla.jaxlink import CompileRequest, keep_tuner_results
from disco_hlo.printable import counted

_FEW_LOADS = 3
"""More often JAX loads a module only where a script has it compiled anew again and again."""
_one_at_a_time = threading.Lock()
"""A step's search begins once that of the one before has saved what it found."""
_BEGINS_S = 20.0
"""What a search takes at most until it can end with the process by itself: it imports much, on a busy host for more
than 5 s."""
_process_ends = threading.Event()


def handle(request: CompileRequest, _: Settings) -> None:
    """Note who compiles; every compile is XLA's, and keeps what the autotuner picks for those of ours."""
    if may_be_run(request):
        keep_tuner_results(request)


@functools.cache
def observe(settings: Settings) -> Observation:
    """The calls of this process, watched from now on, before JAX makes the first.

    Raises:
        UnsupportedError: as :meth:`Observation.start`.
    """

    def channel_of(request: CompileRequest) -> Channel:
        try:
            return join(request, settings).channel
        finally:
            leave()

    def wanted(request: CompileRequest) -> bool:
        if lacks_ranks(request):
            return False
        if settings.names(request.module_name):
            return True
        return (len(request.devices) > 1 or is_alone()) and (settings.module is None or settings.may_be_key)

    def search(trial: Trial) -> None:
        trains = threading.current_thread()
        arguments = (weakref.ref(trial), settings, trains)
        thread = threading.Thread(target=_search, args=arguments, name="disco-search", daemon=True)
        with contextlib.suppress(RuntimeError):  # the process ends
            # Left to a dying interpreter, the thread would end the process by SIGABRT.
            getattr(threading, "_register_atexit", atexit.register)(_wait_for, thread)
            thread.start()

    observation = Observation(channel_of, settings.timeout_s, wanted, search)
    observation.start()
    return observation


def say_if_not_begun(settings: Settings) -> None:
    """One line at the end of a script with which no search has begun, on rank 0."""
    observation = observe(settings)
    if observation.searched:
        return
    given_back = observation.given_back
    if watched := Counter({name: n for name, n in observation.calls.items() if name not in given_back}):
        [(name, calls)] = watched.most_common(1)
        loads = observation.most_loads
        anew = f"JAX loaded it {loads} times, as it does for each new jit: one that is kept"
        LOGGER.info(
            "the script ended after %s of %s, before a search for it began: nothing is saved; %s is searched "
            "while it trains, %s searches before the first step",
            counted(calls, "call"), name, anew if loads > _FEW_LOADS else "a longer job",
            before_first_step(name, observation.device_counts[name]),
        )  # fmt: skip
        return
    ran = "nothing that ran" if is_alone() else "nothing that ran on several devices"
    why = "; ".join(f"calls of {name} are left alone ({reason})" for name, reason in given_back.items())
    helps = not given_back or bool(given_back.keys() - observation.unjoined)
    LOGGER.warning(
        "no training step was found: %s%s",
        why or f"{ran} returns the state that it takes",
        "; DISCO_WHEN=compile goes by collectives, or by DISCO_MODULE, instead" if helps else "",
    )


def _wait_for(search: threading.Thread) -> None:
    _process_ends.set()
    join_uninterrupted(search, _BEGINS_S)


def _search(trial: weakref.ref[Trial], settings: Settings, trains: threading.Thread) -> None:
    with _one_at_a_time, quick_switches():
        from disco_hlo.plugin.phases.search_in_training import SearchInTraining

        SearchInTraining(trial, settings, trains, _process_ends).run()
