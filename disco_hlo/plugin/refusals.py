"""What keeps a step from being run on made-up inputs: said before the work starts, with the way out where there is one.

* It waits for Python, which would be called there as well.
* The script has switched something on in JAX that makes another step of it, or has the one profiler.
* Another step may run meanwhile. What ranks run together they must run alone, and all of them the same: the collectives
  of whatever else runs would meet those of the search. Several threads of a script may compile, each in an order of its
  own on each rank, and train while another one compiles.
"""

from __future__ import annotations

import threading
from weakref import WeakSet

from disco_hlo.activation.agree import Proposal, agree
from disco_hlo.errors import ActivationError, UnsupportedError, shared
from disco_hlo.hlo.attributes import is_callback
from disco_hlo.hlo.graph import Shape
from disco_hlo.hlo.proto import parse, shape_of
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.jaxlink import CompileRequest


def waits_for_python(module: bytes) -> bool:
    """Whether a serialized module needs what Python returns (``pure_callback``), or the token that keeps calls in order
    (``ordered=True``). A call that returns nothing, as of ``jax.debug.print``, is left out where we run the step."""
    return b"callback" in module and any(
        is_callback(one) and shape_of(one.shape) != Shape("tuple")
        for body in parse(module).computations
        for one in body.instructions
    )


def refuse_callbacks(module: bytes, name: str) -> None:
    """Raise UnsupportedError where :func:`waits_for_python`: such a step is not run beside the training."""
    if waits_for_python(module):
        raise shared(
            UnsupportedError(
                f"{name} waits for Python (pure_callback, io_callback, ordered=True), and runs of ours could have "
                "effects there; search it without that call"
            )
        )


def switched_on(request: CompileRequest) -> str:
    """What makes another step of the script's own, and the way out; empty where nothing does."""
    import jax

    with request.as_user():
        debugs = jax.config.jax_debug_nans
    if debugs:
        return (
            "jax_debug_nans is on, with which JAX donates no buffers: that is another step, with a plan of its own; "
            "switch it off (JAX_DEBUG_NANS=0)"
        )
    return ""


def refuse_switched_on(request: CompileRequest) -> None:
    """Refuse to search a step that is not the one that trains, or while the script takes a trace of its own.

    Raises:
        UnsupportedError: naming the switch, and the way out.
    """
    if jaxlink.profiler_runs():
        raise UnsupportedError(
            "the script's own profiler trace (jax.profiler) is under way, and there is one profiler, which the search "
            "needs: start the trace after the first step, or train without ENABLE_SEARCH"
        )
    if reason := switched_on(request):
        raise UnsupportedError(reason)


_out_of_step: set[tuple[int, tuple[int, ...]]] = set()
"""Jobs, and processes of theirs that were about to run different steps at once. What one of them then takes for the
largest step so far may be known to another, which leaves it alone: it would wait in vain."""
_threads: WeakSet[threading.Thread] = WeakSet()
"""Those that compiled something for several processes, and so may run it."""


def may_be_run(request: CompileRequest) -> bool:
    """Whether these processes have been in step so far. To be asked of every compile: it notes who compiles."""
    if len(request.process_indices) > 1:
        _threads.add(threading.current_thread())
    return (jaxlink.job_number(), request.process_indices) not in _out_of_step


def refuse_others(session: Session, fingerprint: str) -> None:
    """Go on only where all ranks are about to run this step, and no thread of theirs another one.

    Raises:
        ActivationError: they are about to run different ones; from now on they run none.
        UnsupportedError: a thread may run another one meanwhile.
    """
    same = agree(session.channel, Proposal(fingerprint, fingerprint), session.timeout_s, tag="step")
    if not same.enact:
        _out_of_step.add((jaxlink.job_number(), session.request.process_indices))
        raise shared(ActivationError(f"{same.reason}; no other step is run on made-up inputs"))
    with session.stage("threads"):
        refuse_other_threads(session.request, threading.current_thread())


def refuse_other_threads(request: CompileRequest, here: threading.Thread) -> None:
    """Refuse to run a step while a thread that is not held may run another one; ``here`` is.

    Raises:
        UnsupportedError: naming the threads.
    """
    others = sorted(thread.name for thread in _threads if thread.is_alive() and thread is not here)
    if others and len(request.process_indices) > 1:
        raise UnsupportedError(
            f"another thread ({', '.join(others)}) may run another step meanwhile, and processes could mix up its "
            "collectives with those of this step, which runs on made-up inputs"
        )
