"""The arguments of one real call of a step, kept in the host's memory, on which candidates are compared with XLA's
default before they run a call.

Each run gets copies of its own: no run ever takes an array of the training's. Where the devices have no room for a
second state beside the training's, that leaves them for the time of the comparison (:func:`off_devices`). It is what
the call takes over anyway, and comes back bit by bit, whatever became of the candidate, before the call goes on.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.backends import backend_of
from disco_hlo.errors import ActivationError
from disco_hlo.plugin.measuring.inputs.arguments import Inputs, Together
from disco_hlo.plugin.measuring.inputs.made_up import (
    are_made_on_devices,
    coins_of,
    is_integer,
    raised_and_lowered,
)
from disco_hlo.plugin.measuring.inputs.scrambled import Scrambled, table, turns
from disco_hlo.plugin.xla.executables import Parameter
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.plugin.xla.own_programs import compile_for_each_device, on_each_device


@dataclass(frozen=True)
class _Argument:
    shape: tuple[int, ...]
    sharding: Any
    values: list[NDArray[Any]]
    """By local device; those that are equal on several are there once."""


class RealInputs(Inputs):
    """Arguments of a call, copied to the host. Nothing of them lies on the devices between runs.

    Args:
        arguments: as the executable takes them; not kept.
        together: as for :class:`~disco_hlo.plugin.measuring.runner.Runner`.
        stop: asked before each run; once it answers True none begins any more.
    """

    def __init__(
        self,
        request: CompileRequest,
        parameters: Sequence[Parameter],
        arguments: Sequence[Any],
        seed: int,
        together: Together,
        stop: Callable[[], bool],
    ) -> None:
        self._given = [_on_host(one, request.local_devices) for one in arguments]
        self._stop = stop
        self._change = (0.0, 0)
        super().__init__(request, parameters, seed, together, None, {})

    def given(self, index: int) -> Any:
        """Argument ``index`` as the training gave it, made anew."""
        import jax

        one = self._given[index]
        return jax.make_array_from_single_device_arrays(one.shape, one.sharding, self.made(index))

    def nudge(self, by: float, change: int = 0) -> None:
        """As of :class:`Inputs`, from the next run on."""
        self._change = by, change

    def like(self, index: int) -> Any:
        """An array as parameter ``index`` is."""
        return self._make(index, *self._change)

    def arrays(self, index: int) -> list[Any]:
        """What parameter ``index`` holds on each local device, as it is now."""
        return self.made(index, *self._change)

    def floats(
        self, index: int, device: int, places: NDArray[np.int64], nudge: float = 0.0, change: int = 0
    ) -> NDArray[Any]:
        """As of :class:`Inputs`."""
        values = self._given[index].values[device].reshape(-1)[places]
        return self._changed(values, places, index, nudge, change)

    def learn_donation(self, arguments: Sequence[Any]) -> None:
        """Nothing: what a run takes over is its own."""

    def made(self, index: int, nudge: float = 0.0, change: int = 0) -> list[Any]:
        """What parameter ``index`` holds on each local device, made anew, changed as by :meth:`nudge`."""
        import jax

        parameter, values = self.parameters[index], self._given[index].values
        changed = bool(nudge) and not is_integer(parameter)
        if changed and not are_made_on_devices(parameter):
            places = np.arange(math.prod(parameter.shape))
            values = [
                self._changed(one.reshape(-1), places, index, nudge, change).reshape(one.shape)
                for one in values
            ]
        local = self.request.local_devices
        with jax.enable_x64(True), jax.transfer_guard("allow"):
            pairs = zip(values, local, strict=True)
            arrays = [jax.device_put(one, device, may_alias=False) for one, device in pairs]
            if changed and are_made_on_devices(parameter):
                return self._changed_on_devices(arrays, index, nudge, change)
        return arrays

    def _all(self) -> list[Any]:
        return []

    def _arguments(self, handed_on: Collection[int]) -> list[Any]:
        if self._stop():
            raise ActivationError("it was interrupted")
        return [None if index in handed_on else self.like(index) for index in range(len(self.parameters))]

    def _changed(
        self, values: NDArray[Any], places: NDArray[np.int64], index: int, nudge: float, change: int
    ) -> NDArray[Any]:
        if not nudge:
            return values
        up, down = raised_and_lowered(self.parameters[index], nudge)
        raised = Scrambled.at(places, [self.seed, index]).coin(coins_of(change))
        changed: NDArray[Any] = (values * np.where(raised, up, down)).astype(values.dtype)
        return changed

    def _changed_on_devices(self, arrays: list[Any], index: int, nudge: float, change: int) -> list[Any]:
        local = self.request.local_devices
        told = _told(self.parameters[index], self.seed, index, nudge, change)
        return on_each_device(local, _changed, (), arrays, *([one] * len(local) for one in told))[0]


def compile_changes(devices: tuple[Any, ...], parameter: Parameter) -> None:
    """Compile what :meth:`RealInputs.nudge` runs on the devices; nothing where the host does it."""
    if not is_integer(parameter) and are_made_on_devices(parameter):
        told = [(one.shape, one.dtype) for one in _told(parameter, 0, 0, 1.0, 0)]
        compile_for_each_device(devices, _changed, (), (parameter.shape, parameter.dtype), *told)


def _told(parameter: Parameter, seed: int, index: int, nudge: float, change: int) -> list[NDArray[Any]]:
    factors = map(np.atleast_1d, (*raised_and_lowered(parameter, nudge), coins_of(change)))
    return [table(), turns([seed, index], math.prod(parameter.shape)), *factors]


def _changed(values: Any, table: Any, turns: Any, up: Any, down: Any, coin: Any) -> tuple[Any]:
    import jax.numpy as jnp

    raised = Scrambled.of_all(table, turns, math.prod(values.shape)).coin(coin)
    by = jnp.where(raised, up, down).reshape(values.shape)
    return ((values * by).astype(values.dtype),)


@contextlib.contextmanager
def off_devices(inputs: RealInputs, arguments: list[Any], taken: Collection[int]) -> Iterator[None]:
    """For the body the devices are without some arguments of a call; then these are replaced by equal ones.

    Args:
        arguments: of the call, which runs after the body.
        taken: numbers of those that it takes over.
    """
    try:
        for index in taken:
            arguments[index].delete()
        yield
    finally:
        for index in taken:
            arguments[index] = inputs.given(index)


def _on_host(array: Any, devices: Sequence[Any]) -> _Argument:
    shards = {shard.device: shard for shard in array.addressable_shards}
    for shard in shards.values():
        shard.data.copy_to_host_async()
    kept: list[tuple[Any, NDArray[Any]]] = []
    for device in devices:
        shard = shards[device]
        values = np.asarray(shard.data)
        if not backend_of(device.platform).queues:
            values = values.copy()  # it was the array itself, which the call takes over
        same = (one for index, one in kept if index == shard.index and _are_same(one, values))
        kept.append((shard.index, next(same, values)))
    return _Argument(tuple(array.shape), array.sharding, [values for _, values in kept])


def _are_same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
