"""What a step is called with: made-up arrays on its devices, or the arguments of one real call.

Made-up ones are made again where an execution takes them over. Real ones are kept in the host's memory, and candidates
are compared with XLA's default on them before they run a call: each run gets copies of its own, and no run ever takes
an array of the training's. Where the devices have no room for a second state beside the training's, runs take that
itself over (:meth:`RealInputs.taken_from`). It is what the call takes over anyway, and comes back bit by bit, whatever
became of the candidate, before the call goes on.
"""

from __future__ import annotations

import contextlib
import gc
import math
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from disco_hlo.backends import backend_of
from disco_hlo.errors import ActivationError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.measuring.inputs.decisions import Devices, equal_parameters
from disco_hlo.plugin.measuring.inputs.indices import index_bounds
from disco_hlo.plugin.measuring.inputs.made_up import (
    Draws,
    Floats,
    are_made_on_devices,
    coins_of,
    floats_at,
    floats_on_devices,
    keys,
    raised_and_lowered,
    synthetic_values,
)
from disco_hlo.plugin.measuring.inputs.signs import positive_parameters
from disco_hlo.plugin.xla.executables import Parameter, is_whole
from disco_hlo.plugin.xla.host_memory import copied
from disco_hlo.plugin.xla.jaxlink import CompileRequest, shards_of
from disco_hlo.plugin.xla.own_programs import (
    compile_for_copies,
    compile_for_each_device,
    on_devices,
    on_each_device,
)

SAMPLES = 1 << 10
"""Of the numbers of a large argument, how many are looked at."""
Together = Callable[[], contextlib.AbstractContextManager[None]]
"""In its body something is made on every rank; where any rank cannot, it raises on all."""


def share_memory(request: CompileRequest) -> bool:
    """Whether the devices have the host's memory."""
    return not backend_of(request.backend.platform).queues


def fit_inputs(request: CompileRequest, source: CanonicalModule) -> None:
    """Say on the request what its step, ``source``, the same on every rank, asks of its made-up inputs; before any
    of them is made. Raises UnsupportedError: no inputs could be sure not to leave devices waiting for each other."""
    replicas = int(request.options.num_replicas)
    request.equal = equal_parameters(source, Devices(replicas, len(request.devices) // replicas))
    request.positive = positive_parameters(source)
    request.index_bounds = index_bounds(source)


@dataclass(eq=False)
class Inputs:
    """Made-up values for the parameters of a step, on its devices. Runners of equal parameters share them:
    a large model's take gigabytes and seconds to make."""

    request: CompileRequest
    parameters: Sequence[Parameter]
    seed: int
    together: Together
    positive: Collection[int] | None
    index_bounds: Mapping[int, int]
    equal: Collection[int] = frozenset()
    permuted: bool = False
    diverges: bool | None = None
    """Whether a state that steps hand on does not stay near what it was; None as long as nobody looked."""
    is_lent: ClassVar[bool] = False
    """Whether what a run takes over must be replaced by what it returns."""

    def __post_init__(self) -> None:
        """Make the values."""
        self._taken: set[int] = set()
        """Parameters whose storage some executable takes over; these are handed out as copies."""
        self._values = self._all()

    def _all(self) -> list[Any]:
        """What lies on the devices between runs."""
        return [self._make(index) for index in range(len(self.parameters))]

    @property
    def beside(self) -> bool:
        """Whether arguments are made, and results compared, by the host alone, while a training goes on."""
        return False

    def check_goes_on(self) -> None:
        """Raise ActivationError where whoever made them wants no more runs or looks at results."""

    def fresh(self) -> list[Any]:
        """Arguments for one execution."""
        return self.several(1)[0]

    def several(self, count: int, handed_on: Collection[int] = ()) -> list[list[Any]]:
        """Arguments for so many executions, once every rank has its own. Parameters that are ``handed_on`` each
        execution but the first has from the one before; None stands there."""
        import jax

        with self.together():
            prepared = [self._arguments(handed_on if number else ()) for number in range(count)]
            jax.block_until_ready(prepared)
        return prepared

    def _arguments(self, handed_on: Collection[int]) -> list[Any]:
        import jax

        arguments = [None if index in handed_on else value for index, value in enumerate(self._values)]
        taken = sorted(self._taken.difference(handed_on))
        values = [self._values[index] for index in taken]
        # In one call: for each by itself that takes a step's time where there are hundreds.
        with jax.enable_x64(True):  # else 64 bits become 32
            copies = jax.device_put(values, [one.sharding for one in values], may_alias=False)
        for index, copy in zip(taken, copies, strict=True):
            arguments[index] = copy
        return arguments

    def like(self, index: int) -> Any:
        """An array as parameter ``index`` is."""
        return self._values[index]

    def both(self, index: int) -> tuple[list[Any], list[Any]]:
        """What parameter ``index`` holds on each local device when nothing is changed, and what it holds now."""
        return self.made(index), [shard.data for shard in self.like(index).addressable_shards]

    def nudge(self, by: float, change: int = 0) -> None:
        """Make the floats again, each changed by this part of itself, up or down by the draw number ``change``; 0
        makes what they were. One takes the place of the other: a second set may not have room."""
        for index, parameter in enumerate(self.parameters):
            if not is_whole(parameter.dtype):
                self._values[index] = None
                self._values[index] = self._make(index, by, change)

    def floats(self, index: int, device: int, places: NDArray[np.int64]) -> NDArray[Any]:
        """What parameter ``index`` holds on a local device at some places of the flat array, when nothing is
        changed."""
        place = self._places(index)[device]
        return floats_at(places, self.parameters[index], self.seed, index, place, self._floats(index))

    def _places(self, index: int) -> list[int]:
        """By local device the place of the one whose values a parameter has there: its own, or everywhere the first."""
        here = self.request.backend.process_index()
        local = [place for place, one in enumerate(self.request.devices) if one.process_index == here]
        return [0] * len(local) if index in self.equal else local

    def _floats(self, index: int, nudge: float = 0.0, change: int = 0) -> Floats:
        return Floats(self.positive is not None and index not in self.positive, nudge, change)

    def donated_bytes(self, handed_on: Collection[int] = ()) -> int:
        """What the copies for one more execution take on each device, as far as runs have shown."""
        taken = [self.parameters[index] for index in self._taken.difference(handed_on)]
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in taken)

    def take_back(self, returned: Mapping[int, Any]) -> None:
        """What the last run returned in the place of what it took over, by parameter; where inputs are lent."""

    def learn_donation(self, arguments: Sequence[Any]) -> None:
        """A run shows which inputs XLA takes over; those are made again, and copied from then on."""
        for index, value in enumerate(arguments):
            if index not in self._taken and value.is_deleted():
                self._taken.add(index)
                self._values[index] = self._make(index)

    def _make(self, index: int, nudge: float = 0.0, change: int = 0) -> Any:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        parameter, devices = self.parameters[index], self.request.devices
        buffers = self.made(index, nudge, change)
        # The executable looks at the per-device buffers alone; how they would join is of no account to it.
        stacked = parameter.shape and (parameter.shape[0] * len(devices), *parameter.shape[1:])
        mesh = Mesh(np.array(devices, dtype=object), ("device",))
        sharding = NamedSharding(mesh, PartitionSpec("device") if stacked else PartitionSpec())
        return jax.make_array_from_single_device_arrays(stacked, sharding, buffers)

    def made(self, index: int, nudge: float = 0.0, change: int = 0) -> list[Any]:
        """What parameter ``index`` holds on each local device, made anew, changed as by :meth:`nudge`."""
        if are_made_on_devices(self.parameters[index]) and not self.request.trains:
            how, places = self._floats(index, nudge, change), self._places(index)
            local = self.request.local_devices
            return floats_on_devices(local, self.parameters[index], self.seed, index, places, how)
        return self._made_on_host(index, nudge, change)

    def _made_on_host(self, index: int, nudge: float, change: int) -> list[Any]:
        import jax

        parameter, how = self.parameters[index], self._floats(index, nudge, change)
        differ = parameter.sharded and index not in self.equal and not is_whole(parameter.dtype)
        made: NDArray[Any] | None = None
        buffers = []
        for device, place in zip(self.request.local_devices, self._places(index), strict=True):
            if made is None or differ:
                bound = self.index_bounds.get(index, 2)
                made = synthetic_values(
                    parameter, self.seed, index, place, how, bound=bound, permuted=self.permuted
                )
            with jax.enable_x64(True):  # else 64 bits become 32
                buffers.append(jax.device_put(made, device, may_alias=False))
        return buffers


class RealInputs(Inputs):
    """Arguments of a call, copied to the host (:meth:`take`). Nothing of them lies on the devices between runs.

    Args:
        together: as for :class:`~disco_hlo.plugin.measuring.runner.Runner`.
        stop: asked before each run and look at a result; once it answers True none begins any more.
    """

    def __init__(
        self,
        request: CompileRequest,
        parameters: Sequence[Parameter],
        seed: int,
        together: Together,
        stop: Callable[[], bool],
    ) -> None:
        self._given: list[list[Any]] = []
        """By parameter, on each local device."""
        self._own: dict[int, Any] = {}
        """Arrays of the call itself, by parameter, that the first run takes over."""
        self._stop = stop
        self._beside = share_memory(request)
        self._change = (0.0, 0)
        super().__init__(request, parameters, seed, together, None, {})

    def take(self, arguments: Sequence[Any]) -> None:
        """Copy the arguments of a call, as the executable takes them, in the place of those of another."""
        self._given = []  # whose memory these may have
        self._given = _on_host(arguments, self.request.local_devices, alike=self._beside)

    @contextlib.contextmanager
    def taken_from(self, arguments: list[Any], taken: Collection[int]) -> Iterator[None]:
        """:meth:`take` them, and have the first run of the body take over what the call does, ``taken``, which runs
        after the body: so much of the devices is free for it, and the copies are what comes back."""
        self.take(arguments)
        devices = self.request.local_devices
        kept = Kept(arguments, {one: dict(zip(devices, self._given[one], strict=True)) for one in taken})
        self._own = {index: arguments[index] for index in taken}
        with coming_back_to(arguments, kept, taken):
            try:
                yield
            finally:
                for one in self._own.values():  # where nothing took it over
                    one.delete()
                self._own = {}

    @property
    def beside(self) -> bool:
        """As of :class:`Inputs`."""
        return self._beside

    def check_goes_on(self) -> None:
        """As of :class:`Inputs`."""
        if self._stop():
            raise ActivationError("it was interrupted")

    def nudge(self, by: float, change: int = 0) -> None:
        """As of :class:`Inputs`, from the next run on."""
        self._change = by, change

    def like(self, index: int) -> Any:
        """An array as parameter ``index`` is."""
        return self._make(index, *self._change)

    def both(self, index: int) -> tuple[list[Any], list[Any]]:
        """As of :class:`Inputs`; on the host where results are compared there."""
        given = self._given[index] if self.beside else self.made(index)
        nudge, change = self._change
        if not nudge or is_whole(self.parameters[index].dtype):
            return given, given
        if self.beside:
            return given, [self._changed(one, index, nudge, change) for one in given]
        if are_made_on_devices(self.parameters[index]):
            return given, self._changed_on_devices(given, index, nudge, change)
        return given, self.made(index, nudge, change)

    def floats(self, index: int, device: int, places: NDArray[np.int64]) -> NDArray[Any]:
        """As of :class:`Inputs`."""
        found: NDArray[Any] = self._given[index][device].reshape(-1)[places]
        return found

    def learn_donation(self, arguments: Sequence[Any]) -> None:
        """Nothing: what a run takes over is its own."""

    def made(self, index: int, nudge: float = 0.0, change: int = 0) -> list[Any]:
        """What parameter ``index`` holds on each local device, made anew, changed as by :meth:`nudge`."""
        parameter, values = self.parameters[index], self._given[index]
        changed = bool(nudge) and not is_whole(parameter.dtype)
        by_host = self.beside or not are_made_on_devices(parameter)
        if changed and by_host:
            values = [self._changed(one, index, nudge, change) for one in values]
        arrays = on_devices(self.request.local_devices, values)
        if changed and not by_host:
            return self._changed_on_devices(arrays, index, nudge, change)
        return arrays

    def _all(self) -> list[Any]:
        return []

    def _arguments(self, handed_on: Collection[int]) -> list[Any]:
        self.check_goes_on()
        return [
            None if index in handed_on else self._argument(index) for index in range(len(self.parameters))
        ]

    def _argument(self, index: int) -> Any:
        own = self._own.get(index)
        return self.like(index) if own is None or own.is_deleted() or self._change[0] else own

    def _changed(self, values: NDArray[Any], index: int, nudge: float, change: int) -> NDArray[Any]:
        up, down = raised_and_lowered(self.parameters[index], nudge)
        raised = Draws(np.arange(values.size, dtype=np.uint32), keys([self.seed, index])).coin(
            coins_of(change)
        )
        changed = values * np.where(raised, up, down).reshape(values.shape)
        return np.asarray(changed, values.dtype)  # numpy makes a scalar of an array without dimensions

    def _changed_on_devices(self, arrays: list[Any], index: int, nudge: float, change: int) -> list[Any]:
        local = self.request.local_devices
        told = _told(self.parameters[index], self.seed, index, nudge, change)
        return on_each_device(local, _changed, (), arrays, *([one] * len(local) for one in told))[0]


class LentInputs(Inputs):
    """Arguments of a call themselves. What a run takes over is replaced by what it returns, as in a training, so the
    devices hold no second state.

    Args:
        arguments: of which those that runs take over are to be replaced afterwards (:func:`coming_back_to`).
        copied_ns: about what it takes to copy what runs take over, and to bring it back.
    """

    is_lent = True

    def __init__(
        self,
        request: CompileRequest,
        parameters: Sequence[Parameter],
        arguments: Sequence[Any],
        copied_ns: int = 0,
    ) -> None:
        self._lent, self.copied_ns = list(arguments), copied_ns
        super().__init__(request, parameters, 0, contextlib.nullcontext, None, {}, diverges=False)

    def _all(self) -> list[Any]:
        return self._lent

    def _arguments(self, handed_on: Collection[int]) -> list[Any]:
        # Nobody asks here whether this rank was interrupted: ranks do not meet before each run, and the others would
        # wait for this one in a collective. They hear of it together when the call goes on.
        return [None if index in handed_on else one for index, one in enumerate(self._values)]

    def take_back(self, returned: Mapping[int, Any]) -> None:
        """As of :class:`Inputs`."""
        for index, one in returned.items():
            self._values[index] = one

    def learn_donation(self, arguments: Sequence[Any]) -> None:
        """Nothing: what a run takes over comes back."""

    def leave(self, taken: Collection[int]) -> None:
        """Free what the last run returned."""
        for index in taken:
            self._values[index].delete()
        self._lent.clear()


class Kept:
    """Copies of the arguments that a call takes over, until they are given back."""

    def __init__(self, arguments: Sequence[Any], copies: Mapping[int, Mapping[Any, Any]]) -> None:
        """For these of the ``arguments``, by number; ``copies`` by number and device."""
        self._like = {index: (arguments[index].shape, arguments[index].sharding) for index in copies}
        self._copies = copies

    @staticmethod
    def of(arguments: Sequence[Any], taken: Collection[int]) -> Kept:
        """What a call takes over, ``taken``, copied to the host's memory."""
        shards = {index: shards_of(arguments[index]) for index in taken}
        copies = iter(copied([one.data for own in shards.values() for one in own]))
        return Kept(
            arguments, {index: {one.device: next(copies) for one in own} for index, own in shards.items()}
        )

    def given(self, index: int) -> Any:
        """Argument ``index`` as it was, made anew."""
        import jax

        shape, sharding = self._like[index]
        devices, copies = zip(*self._copies[index].items(), strict=True)
        arrays = on_devices(devices, copies)
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


@contextlib.contextmanager
def coming_back_to(arguments: list[Any], kept: Kept, taken: Collection[int]) -> Iterator[None]:
    """After the body, which may take them over, these ``arguments`` are replaced by what they were. The training
    cannot go on without them, so whatever else lies on the devices makes room."""
    try:
        yield
    except BaseException as error:
        let_go(error)
        raise
    finally:
        for index in taken:
            try:
                arguments[index] = kept.given(index)
            except Exception as error:
                LOGGER.debug(
                    "an argument does not come back before garbage is collected: %s", one_line(error)
                )
                gc.collect()
                arguments[index] = kept.given(index)


def let_go(error: BaseException | None) -> None:
    """Free what the frames that an error has ended still hold: inputs and outputs of what failed."""
    left, done = [error], set[int]()
    while left:
        one = left.pop()
        if one is not None and id(one) not in done:  # one of them may have been raised again after another
            done.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]


def compile_changes(devices: tuple[Any, ...], parameter: Parameter) -> None:
    """Compile what :class:`RealInputs` runs on the devices; nothing where the host does it."""
    given = parameter.shape, parameter.dtype
    compile_for_copies(devices, given)
    if not is_whole(parameter.dtype) and are_made_on_devices(parameter):
        told = [(one.shape, one.dtype) for one in _told(parameter, 0, 0, 1.0, 0)]
        compile_for_each_device(devices, _changed, (), given, *told)


def _told(parameter: Parameter, seed: int, index: int, nudge: float, change: int) -> list[NDArray[Any]]:
    factors = map(np.atleast_1d, (*raised_and_lowered(parameter, nudge), coins_of(change)))
    return [keys([seed, index]), *factors]


def _changed(values: Any, own: Any, up: Any, down: Any, coin: Any) -> tuple[Any]:
    import jax.numpy as jnp

    raised = Draws(jnp.arange(math.prod(values.shape), dtype=np.uint32), own).coin(coin)
    by = jnp.where(raised, up, down).reshape(values.shape)
    return ((values * by).astype(values.dtype),)


def _on_host(arrays: Sequence[Any], devices: Sequence[Any], *, alike: bool) -> list[list[Any]]:
    """Copies of each by local device; those that are ``alike`` on several are there once, where that is asked for."""
    shards = [{shard.device: shard for shard in shards_of(one)} for one in arrays]
    copies = iter(copied([own[device].data for own in shards for device in devices]))
    found = []
    for own in shards:
        kept: list[tuple[Any, Any]] = []
        for device in devices:
            where, values = own[device].index, next(copies)
            same = (one for index, one in kept if alike and index == where and _are_same(one, values))
            kept.append((where, next(same, values)))
        found.append([values for _, values in kept])
    return found


def _are_same(one: Any, other: Any) -> bool:
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
