"""Runs compiled modules on made-up inputs, on the step's devices, and times them (DisCo, section 5.2: the profiler's
runs).

The user's arrays are never touched. What the values are is said in ``made_up``, and which of them have to be positive
or are indices, or equal on all devices, by the request (``positive``, ``index_bounds`` and ``equal`` of
:class:`~disco_hlo.plugin.xla.jaxlink.CompileRequest`).

On GPU a step is timed as a training loop runs it: several one after the other without waiting. A loop that looks at its
loss now and then dispatches the next step while the last one runs, and the way from the host to the devices (0.3 to
2.9 ms on an H200, 4 ms on two GPUs, more the more arrays a step takes) is hidden. A single run that is waited for shows
it whole: of a step of 17 ms it was a tenth. Several show it once, unless the clock starts when the devices are at work:
steps of gpt12, three at once on two H100s, were 1.3 % too long by it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from disco_hlo.backends import backend_of
from disco_hlo.errors import UnsupportedError
from disco_hlo.hlo.collectives import ALL_REDUCE
from disco_hlo.plugin.hangs import coming_back
from disco_hlo.plugin.measuring.inputs.arguments import Inputs, Together
from disco_hlo.plugin.refusals import refuse_callbacks
from disco_hlo.plugin.xla import executables, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.plugin.xla.own_programs import Chain, compile_chain

Result = TypeVar("Result")
_SMALL_BYTES = 1 << 20
_GROWN = 100.0
"""So many times as large as it was a number of the state is no training's any more."""
AT_ONCE_NS = 300_000_000
"""About what one measurement should take: a hundred times what the host adds to it, and more."""
MOST_AT_ONCE = 20
COPIES_BYTES = 16 << 30
"""The most that copies of donated inputs may take on each device."""
_COPIES_SHARE = 8
"""And the part of the free memory, at most: one in so many."""
LOOKS = 3
"""Runs that are waited for, of which the shortest counts."""


class Runner:
    """One executable with synthetic inputs on its devices. In a multi-process job every process has its own,
    and runs it when the others do.

    Args:
        inputs_of: another runner of the same step, whose inputs are used where the parameters and the seed
            are equal, and so is which of them have to be positive or are indices.
        together: how inputs are made where a rank that cannot must not leave the others in a collective; of no
            account where they are another runner's.
        of_step: the executable takes what the request's step takes, so that some inputs may be negative, or indices;
            else all are positive, and integers 0 or 1.
        permuted: indices are permutations of the rows that they choose from (``made_up``).
        inputs: what it runs on in the place of all these.
        module: what the executable runs, where that has been read.

    Raises:
        UnsupportedError: the module waits for Python, or takes arguments that cannot be made here
            (:func:`disco_hlo.plugin.xla.executables.parameters`).
    """

    def __init__(
        self,
        request: CompileRequest,
        executable: LoadedExecutable,
        seed: int = 0,
        *,
        inputs_of: Runner | None = None,
        together: Together = contextlib.nullcontext,
        of_step: bool = True,
        permuted: bool = False,
        inputs: Inputs | None = None,
        module: bytes = b"",
    ) -> None:
        module = self.module = module or executables.read_executable(executable)
        """What it runs, read once: of 14,000 instructions that takes up to a second."""
        refuse_callbacks(module, request.module_name)
        self._executable = executable
        self._outputs = executables.count_results(module)
        known = inputs_of is not None and inputs_of.runs_on.request is request
        like = inputs_of.runs_on.parameters if inputs_of is not None and known and of_step else ()
        parameters = executables.parameters(executable, module, like)
        positive = request.positive if of_step else None
        index_bounds = request.index_bounds if of_step else {}
        equal = request.equal if of_step else frozenset()
        shared = inputs_of.runs_on if inputs_of is not None and inputs is None else inputs
        if inputs is not None and inputs.parameters != parameters:
            raise UnsupportedError(
                f"it takes other arguments than the step: expected {inputs.parameters}, got {parameters}"
            )
        if inputs is None and (
            shared is None
            or shared.request is not request
            or (shared.parameters, shared.seed) != (parameters, seed)
            or (shared.positive, shared.index_bounds, shared.equal) != (positive, index_bounds, equal)
            or shared.permuted != permuted
        ):
            shared = Inputs(request, parameters, seed, together, positive, index_bounds, equal, permuted)
        assert shared is not None
        self.runs_on: Inputs = shared
        """Perhaps with other runners of the step: what changes them holds for all."""
        self._meeting: _Meeting = inputs_of._meeting if inputs_of and known else _Meeting(request)
        self._has_run = False
        self.took_ns = 0
        """Of the last run whose outputs somebody had."""
        self._next_of: dict[int, int] = executables.storage_taken(executable, module) if of_step else {}
        """By parameter, the output that a training loop hands on as the next step's."""

    def inputs(self) -> list[Any]:
        """Arguments for one execution; what an execution takes over is not among those of the next."""
        return self.runs_on.fresh()

    def run(self) -> int:
        """Run once; returns wall nanoseconds from dispatch until every local device has finished.

        Where collectives block (CPU processes), all ranks begin together.
        """
        handlers = self._handlers(self._next_of) if self.runs_on.is_lent else None
        arguments = self.runs_on.fresh()
        self._meeting.wait()
        coming = contextlib.nullcontext() if self._has_run else coming_back(self.runs_on.request)
        with coming, self._silently():
            start = time.perf_counter_ns()
            result = executables.execute(self._executable, arguments)
            executables.wait(result)
            elapsed_ns = time.perf_counter_ns() - start
        if handlers is not None:
            self._take_back(executables.chosen_outputs(result, handlers))
        self.runs_on.learn_donation(arguments)
        self._has_run = True
        return elapsed_ns

    def run_in_a_row(self, count: int, *, awaited: bool = False) -> int:
        """Run ``count`` times as a training loop does, which hands on what a step returns in the storage of its
        arguments, and does not wait for a step before it starts the next, unless it is ``awaited``; returns wall
        nanoseconds of one.

        The clock starts when one more run ahead of them ends, with the next one under way: the devices never wait
        for the host, unless they do in every step. Arguments that lie elsewhere each time make a GPU's command
        buffers be written anew. All others are there before the first run, ``count + 1`` times :meth:`donated_bytes`
        of them.
        """
        self.learn_handing_on(count + 1)
        handed_on = self._handed_on()
        prepared = self.runs_on.several(count + 1, handed_on)
        outputs, first_ended_ns = self._run_all(prepared, handed_on, awaited=awaited)
        if self.runs_on.is_lent:
            self._take_back(outputs)
        return (time.perf_counter_ns() - first_ended_ns) // count

    def learn_handing_on(self, count: int) -> None:
        """See, where nobody has, whether ``count`` steps in a row leave their state near what it was.

        Made-up inputs are no training: without normalization a few updates may leave numbers that are not finite. A GPU
        computes faster with those (they take less power), so such a step does not hand its state on.
        """
        if not self._has_run:  # What a step takes over must be known before it is handed out more than once.
            self.run()
        if self.runs_on.diverges is not None or not self._next_of or count < 2:
            return
        like = {index: self.runs_on.like(index) for index in self._next_of}
        small = [index for index, array in like.items() if array.nbytes <= _SMALL_BYTES]
        looked_at = small or [min(like, key=lambda index: int(like[index].nbytes))]
        prepared = self.runs_on.several(count, self._next_of)
        outputs, _ = self._run_all(prepared, self._next_of)
        before = _largest(like[index] for index in looked_at)
        after = _largest(outputs[self._next_of[index]] for index in looked_at)
        self.runs_on.diverges = not after <= _GROWN * max(1.0, before)

    @contextlib.contextmanager
    def _silently(self) -> Iterator[None]:
        """Around runs, until they have ended: Python functions that the step calls do nothing, as no call of the
        training's is under way."""
        silent = self.runs_on.request.silent
        silent.set()
        try:
            yield
        finally:
            silent.clear()

    def _handlers(self, handed_on: Mapping[int, int]) -> list[Any]:
        like = self.runs_on.like
        chosen = {output: jaxlink.array_handler(like(index)) for index, output in handed_on.items()}
        return [chosen.get(output, lambda _: None) for output in range(self._outputs)]

    def _take_back(self, outputs: Sequence[Any]) -> None:
        self.runs_on.take_back({index: outputs[output] for index, output in self._next_of.items()})

    def _handed_on(self) -> Mapping[int, int]:
        return {} if self.runs_on.diverges else self._next_of

    def _run_all(
        self,
        prepared: Sequence[list[Any]],
        handed_on: Mapping[int, int],
        *,
        awaited: bool = False,
    ) -> tuple[list[Any], int]:
        """Run at least twice, once with each of these arguments; returns what the last run hands on, when all have
        ended, and the moment at which the first one had, on ``time.perf_counter_ns``.

        A thread of its own looks at the clock: to dispatch a step takes up to 30 ms, and may begin when the one before
        has ended.
        """
        handlers = self._handlers(handed_on)
        tokens: list[Any] = []
        outputs: list[Any] = []
        with ThreadPoolExecutor(1) as clock, self._silently():
            first_ended_ns: Future[int] | None = None
            for number, arguments in enumerate(prepared):
                if number:
                    for index, output in handed_on.items():
                        arguments[index] = outputs[output]
                result = executables.execute(self._executable, arguments)
                tokens.append(executables.token_of(result))
                first_ended_ns = first_ended_ns or clock.submit(_ended_ns, tokens[0])
                outputs = executables.chosen_outputs(result, handlers)
                if awaited:
                    tokens[-1].block_until_ready()
                elif number == 1:
                    tokens[0].block_until_ready()
            for token in tokens:
                token.block_until_ready()
            assert first_ended_ns is not None
            return outputs, first_ended_ns.result()

    def donated_bytes(self) -> int:
        """Device memory that the arguments of one more run in a row take, as the runs so far have shown."""
        return self.runs_on.donated_bytes(self._handed_on())

    def output_arrays(self, arguments: list[Any] | None = None) -> list[list[Any]]:
        """Run once, on ``arguments`` of :meth:`inputs` where these are made before; returns the outputs where they lie,
        ``[output][local device]``."""
        import jax

        arguments = self.runs_on.fresh() if arguments is None else arguments
        with coming_back(self.runs_on.request), self._silently():
            started_ns = time.perf_counter_ns()
            arrays = executables.result_arrays(executables.execute(self._executable, arguments))
            jax.block_until_ready(arrays)
            self.took_ns = time.perf_counter_ns() - started_ns
        self.runs_on.learn_donation(arguments)
        return arrays


def steps_at_once(
    step_ns: int, donated_bytes: int, free_bytes: int | None = None, within_ns: int = AT_ONCE_NS
) -> int:
    """How many runs of a step one measurement takes.

    Args:
        step_ns: of one run that is waited for.
        donated_bytes: what the copies for one more run take on each device.
        free_bytes: what is free there; None where nobody says.
        within_ns: about what one measurement should take.
    """
    count = min(MOST_AT_ONCE, round(within_ns / max(1, step_ns)))
    if donated_bytes:
        room = COPIES_BYTES if free_bytes is None else min(COPIES_BYTES, free_bytes // _COPIES_SHARE)
        count = min(count, room // donated_bytes - 1)  # and one ahead of them
    return max(1, count)


def at_once_of(
    runner: Runner, step_ns: int, free_bytes: int | None = None, within_ns: int = AT_ONCE_NS
) -> int:
    """:func:`steps_at_once` of a runner that has run; it runs a few times more, on all ranks as often, since
    ``step_ns`` is the same there."""
    count = steps_at_once(step_ns, 0, None, within_ns)
    if count > 1:
        runner.learn_handing_on(count + 1)
    return steps_at_once(step_ns, runner.donated_bytes(), free_bytes, within_ns)


def time_once(runner: Runner, at_once: int) -> int:
    """Nanoseconds of a step by one measurement: dispatched and waited for, or several in a row."""
    return runner.run() if at_once == 1 else runner.run_in_a_row(at_once)


class _Meeting:
    """Where the ranks of a CPU job wait for each other before a clock starts.

    Copying the donated inputs takes one rank milliseconds longer than the other. The earlier one would spend them in
    its step's first collective, which blocks, and count them as the step's: of a step of 9 ms it was up to a half. On
    GPU the devices wait, and steps are timed several in a row.
    """

    def __init__(self, request: CompileRequest) -> None:
        self._executable: LoadedExecutable | None = None
        if backend_of(request.backend.platform).asynchronous or len(request.process_indices) == 1:
            return
        self._executable = compile_chain(request, ALL_REDUCE, 1, np.dtype(np.float32), 1, Chain.TIGHT)
        parameters = executables.parameters(self._executable)
        self._arguments = Inputs(request, parameters, 0, contextlib.nullcontext, None, {}).fresh()

    def wait(self) -> None:
        """Return once every rank is here: when a tiny all-reduce has ended."""
        if self._executable is not None:
            executables.wait(executables.execute(self._executable, self._arguments))


def _ended_ns(token: Any) -> int:
    """When what a token stands for has ended."""
    token.block_until_ready()
    return time.perf_counter_ns()


def _largest(arrays: Iterable[Any]) -> float:
    """The largest number on this process's first device, by its size; not finite where any is not."""
    values = [np.asarray(array.addressable_data(0)) for array in arrays]
    return float(np.max([np.abs(one).astype(np.float32).max(initial=0.0) for one in values]))
