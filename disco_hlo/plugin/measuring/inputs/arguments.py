"""What a step is called with: made-up arrays on its devices, made again where an execution takes them over."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.plugin.measuring.inputs.decisions import equal_parameters
from disco_hlo.plugin.measuring.inputs.device_values import Devices
from disco_hlo.plugin.measuring.inputs.indices import index_bounds
from disco_hlo.plugin.measuring.inputs.made_up import (
    are_made_on_devices,
    floats_at,
    floats_on_devices,
    is_integer,
    synthetic_values,
)
from disco_hlo.plugin.measuring.inputs.scrambled import table
from disco_hlo.plugin.measuring.inputs.signs import positive_parameters
from disco_hlo.plugin.xla.executables import Parameter
from disco_hlo.plugin.xla.jaxlink import CompileRequest

Together = Callable[[], contextlib.AbstractContextManager[None]]
"""In its body something is made on every rank; where any rank cannot, it raises on all."""


def fit_inputs(request: CompileRequest, source: CanonicalModule) -> None:
    """Say on the request what the step asks of its made-up inputs; before any of them is made.

    Args:
        source: the request's step, the same on every rank.

    Raises:
        UnsupportedError: no inputs could be sure not to leave devices waiting for each other.
    """
    replicas = int(request.options.num_replicas)
    request.equal = equal_parameters(source, Devices(replicas, len(request.devices) // replicas))
    request.positive = positive_parameters(source)
    request.index_bounds = index_bounds(source)


class Inputs:
    """Made-up values for the parameters of a step, on its devices. Runners of equal parameters share them:
    a large model's take gigabytes and seconds to make."""

    def __init__(
        self,
        request: CompileRequest,
        parameters: Sequence[Parameter],
        seed: int,
        together: Together,
        positive: Collection[int] | None,
        index_bounds: Mapping[int, int],
        equal: Collection[int] = frozenset(),
        permuted: bool = False,
    ) -> None:
        self.request = request
        self._together = together
        self.parameters = parameters
        self.seed = seed
        self.positive = positive
        self.index_bounds = index_bounds
        self.equal = equal
        self.permuted = permuted
        self._tables: list[Any] = []
        """What the devices make their numbers of."""
        self._values = self._all()
        self._taken: set[int] = set()
        """Parameters whose storage some executable takes over; these are handed out as copies."""
        self.diverges: bool | None = None
        """Whether a state that steps hand on does not stay near what it was; None as long as nobody looked."""

    def _all(self) -> list[Any]:
        """What lies on the devices between runs."""
        return [self._make(index) for index in range(len(self.parameters))]

    def fresh(self) -> list[Any]:
        """Arguments for one execution."""
        return self.several(1)[0]

    def several(self, count: int, handed_on: Collection[int] = ()) -> list[list[Any]]:
        """Arguments for so many executions, once every rank has its own.

        Args:
            handed_on: parameters that each execution but the first has from the one before; None stands there.
        """
        import jax

        with self._together():
            with jax.transfer_guard("allow"):
                prepared = [self._arguments(handed_on if number else ()) for number in range(count)]
            jax.block_until_ready(prepared)
        return prepared

    def _arguments(self, handed_on: Collection[int]) -> list[Any]:
        import jax

        arguments: list[Any] = []
        for index, value in enumerate(self._values):
            if index in handed_on:
                arguments.append(None)
            elif index in self._taken:
                arguments.append(jax.device_put(value, value.sharding, may_alias=False))
            else:
                arguments.append(value)
        return arguments

    def like(self, index: int) -> Any:
        """An array as parameter ``index`` is."""
        return self._values[index]

    def arrays(self, index: int) -> list[Any]:
        """What parameter ``index`` holds on each local device, as it is now."""
        return [shard.data for shard in self.like(index).addressable_shards]

    def nudge(self, by: float, change: int = 0) -> None:
        """Make the floats again, each changed by this part of itself; 0 makes what they were. One takes the place of
        the other: a second set may not have room.

        Args:
            change: which of them are raised, which lowered: the number of a draw.
        """
        for index, parameter in enumerate(self.parameters):
            if not is_integer(parameter):
                self._values[index] = None
                self._values[index] = self._make(index, by, change)

    def floats(
        self, index: int, device: int, places: NDArray[np.int64], nudge: float = 0.0, change: int = 0
    ) -> NDArray[Any]:
        """What parameter ``index`` holds on a local device at some places of the flat array, changed as by
        :meth:`nudge`."""
        return floats_at(
            places,
            self.parameters[index],
            self.seed,
            index,
            self._as_at(index, self._local_places()[device]),
            signed=self._signed(index),
            nudge=nudge,
            change=change,
        )

    def _local_places(self) -> list[int]:
        here = self.request.backend.process_index()
        return [place for place, one in enumerate(self.request.devices) if one.process_index == here]

    def _as_at(self, index: int, place: int) -> int:
        """The device whose values a parameter has at a place: its own, or everywhere those of the first."""
        return 0 if index in self.equal else place

    def _signed(self, index: int) -> bool:
        return self.positive is not None and index not in self.positive

    def donated_bytes(self, handed_on: Collection[int] = ()) -> int:
        """What the copies for one more execution take on each device, as far as runs have shown."""
        taken = [self.parameters[index] for index in self._taken.difference(handed_on)]
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in taken)

    def hand_out_copies(self, taken: Collection[int]) -> None:
        """Of parameters that executions are going to take over: nothing has to be made again."""
        self._taken.update(taken)

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
            return self._made_on_devices(index, nudge, change)
        return self._made_on_host(index, nudge, change)

    def _made_on_devices(self, index: int, nudge: float, change: int) -> list[Any]:
        import jax

        local = self.request.local_devices
        if not self._tables:
            with jax.transfer_guard("allow"):
                self._tables = [jax.device_put(table(), device) for device in local]
        places = [self._as_at(index, place) for place in self._local_places()]
        return floats_on_devices(
            local, self._tables, self.parameters[index], self.seed, index, places,
            signed=self._signed(index), nudge=nudge, change=change,
        )  # fmt: skip

    def _made_on_host(self, index: int, nudge: float, change: int) -> list[Any]:
        import jax

        parameter, devices = self.parameters[index], self.request.devices
        with jax.transfer_guard("allow"):
            made: NDArray[Any] | None = None
            buffers = []
            for place in self._local_places():
                if made is None or (
                    parameter.sharded and index not in self.equal and not is_integer(parameter)
                ):
                    made = synthetic_values(
                        parameter, self.seed, index, self._as_at(index, place), signed=self._signed(index), nudge=nudge,
                        change=change, bound=self.index_bounds.get(index, 2), permuted=self.permuted,
                    )  # fmt: skip
                buffers.append(jax.device_put(made, devices[place], may_alias=False))
        return buffers
