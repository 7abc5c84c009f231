"""Memory of the host for copies, and copies to and from devices."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin.measuring.inputs.arguments import RealInputs, compile_changes
from disco_hlo.plugin.xla import gpu_copies, host_memory, own_programs
from disco_hlo.plugin.xla.executables import Parameter
from disco_hlo.plugin.xla.gpu_copies import Copy, GpuCopies
from disco_hlo.plugin.xla.host_memory import HostMemory
from tests.plugin.driver import FakeDriver, copied_by_driver

_SHAPE = (3, 512, 512)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    own = HostMemory()
    monkeypatch.setattr(host_memory, "MEMORY", own)
    return own


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Copies to and from all devices from now on."""
    return copied_by_driver(monkeypatch)


@pytest.fixture
def copies(driver: FakeDriver) -> GpuCopies:
    """By that driver."""
    found = host_memory.copies_of(None)
    assert found is not None
    return found


def ready(memory: HostMemory, size_bytes: int) -> int:
    return memory.get_ready(size_bytes, host_memory.copies_of(jax.devices()[0]), lambda: False)


def an_array(seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), _SHAPE).astype(dtype)


@pytest.mark.parametrize("dtype", ["int4", "float32"])
def test_nothing_of_a_copy_stays_with_the_trainings_own_arrays(dtype: str) -> None:
    """JAX keeps what numpy asked for as long as the array lives: a state that is read only lay on the host twice."""
    array = jnp.asarray([1, 2, 3], dtype)
    [copy] = host_memory.copied([array])
    assert copy.tolist() == [1, 2, 3]
    assert array._npy_value is None
    assert host_memory.copied([copy])[0] is copy


def test_copies_lie_in_memory_that_was_there_before_and_leave_it_to_the_next(memory: HostMemory) -> None:
    """What is got while a call is held takes three times as long to copy to."""
    arrays = [jnp.arange(6.0).reshape(2, 3), jnp.asarray(7, jnp.int8)]
    assert ready(memory, 512) == 512
    copies = host_memory.copied(arrays)
    assert [one.tolist() for one in copies] == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], 7]
    places = [one.ctypes.data for one in copies]
    assert [one - memory._address(0) for one in places] == [0, 256]
    [another] = host_memory.copied([arrays[0] + 1])
    assert not np.shares_memory(another, memory._bytes)
    cut = copies[0][1:].reshape(-1)
    del copies
    gc.collect()
    [third] = host_memory.copied([arrays[0] + 2])  # the first place has a reader yet, the second is too near
    assert third.ctypes.data == places[1]
    assert cut.tolist() == [3.0, 4.0, 5.0]
    del cut
    [fourth] = host_memory.copied([arrays[0] + 3])
    assert fourth.ctypes.data == places[0]


def test_memory_that_was_given_back_is_not_used_again(memory: HostMemory) -> None:
    ready(memory, 1 << 12)
    [copy] = host_memory.copied([jnp.arange(5.0)])
    memory.clear()
    assert copy.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    del copy
    ready(memory, 256)
    first, second = host_memory.copied([jnp.arange(5.0), jnp.arange(5.0)])
    assert [np.shares_memory(one, memory._bytes) for one in (first, second)] == [True, False]


def test_no_more_memory_is_got_once_it_is_over(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(host_memory, "_WRITTEN_BYTES", 1 << 10)
    asked: list[bool] = []

    def over() -> bool:
        asked.append(len(asked) == 3)
        return asked[-1]

    assert memory.get_ready(10 << 10, None, over) == 3 << 10
    assert memory.empty((3 << 10,), np.dtype(np.uint8)).ctypes.data == memory._address(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_driver_copies_there_and_back_bit_by_bit(
    memory: HostMemory, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """It refuses to copy across the end of a piece (one H100: CUDA_ERROR_INVALID_VALUE)."""
    monkeypatch.setattr(host_memory, "_PIECE_BYTES", 1 << 20)
    ready(memory, 13 << 20)
    devices = tuple(jax.devices()[:2])
    arrays = [jax.device_put(an_array(number, dtype), device) for number, device in enumerate(devices)]
    expected = [np.asarray(one) for one in arrays]
    assert len(driver.registered) == 13
    copies = host_memory.copied(arrays)
    assert all(np.shares_memory(one, memory._bytes) for one in copies)
    assert {way for way, _ in driver.copied} == {"to the host"}
    assert sum(size for _, size in driver.copied) == sum(one.nbytes for one in arrays)
    driver.copied.clear()
    back = own_programs.on_devices(devices, copies)
    assert {way for way, _ in driver.copied} == {"to the GPU"}
    assert [one.devices() for one in back] == [{device} for device in devices]
    for copy, one, values in zip(copies, back, expected, strict=True):
        assert copy.tobytes() == values.tobytes() == np.asarray(one).tobytes()
    memory.clear()
    assert driver.registered == {}


@pytest.mark.parametrize("fails", ["cuMemHostRegister_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"])
def test_what_a_driver_refuses_is_copied_otherwise(
    memory: HostMemory, driver: FakeDriver, fails: str
) -> None:
    driver.fails = fails
    assert ready(memory, 4 << 20) == 4 << 20
    array = an_array()
    copies = host_memory.copied([array])
    [back] = own_programs.on_devices((jax.devices()[0],), copies)
    assert np.asarray(back).tobytes() == copies[0].tobytes() == np.asarray(array).tobytes()


def test_an_array_of_another_layout_is_copied_by_jax(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver copies bytes as they lie there."""
    monkeypatch.setattr(host_memory, "_are_in_order", lambda _: False)
    array = an_array()
    [copy] = host_memory.copied([array])
    assert copy.tobytes() == np.asarray(array).tobytes()
    assert driver.copied == []


def test_a_machine_without_a_driver_copies_by_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    class Gpu:
        platform, local_hardware_id = "gpu", 0

    monkeypatch.setattr(gpu_copies.ctypes, "CDLL", no_library)
    assert gpu_copies.copies_of(Gpu()) is None


def test_a_driver_says_what_it_refuses(driver: FakeDriver, copies: GpuCopies) -> None:
    driver.fails = "cuMemHostUnregister"
    with pytest.raises(UnsupportedError, match="refuses cuMemHostUnregister: CUDA_ERROR_INVALID_VALUE"):
        copies.unregister(256)


def test_what_was_begun_before_a_copy_is_refused_is_waited_for(driver: FakeDriver, copies: GpuCopies) -> None:
    """It writes to memory that is used again as soon as the error is known."""
    driver.fails = "cuMemcpyHtoDAsync_v2"
    source, to = np.ones(4, np.uint8), np.zeros(4, np.uint8)
    both = [Copy(to.ctypes.data, source.ctypes.data, 4, to_host) for to_host in (True, False)]
    assert isinstance(copies.begin(both, (source, to)).exception(), UnsupportedError)
    assert to.tolist() == [1, 1, 1, 1]
    assert driver.awaited == 1


def test_arrays_are_kept_until_they_are_copied_whoever_waits(driver: FakeDriver, copies: GpuCopies) -> None:
    """After Ctrl-C nobody waits, and the driver copies on."""
    source = np.ones(4, np.uint8)
    there, found = weakref.ref(source), list[bool]()

    def copy(*_: Any) -> int:
        found.append(there() is not None)
        return 0

    driver._to_host = copy  # type: ignore[method-assign]
    begun = copies.begin([Copy(0, source.ctypes.data, 4, True)], [source])
    del source
    begun.result()
    del begun
    copies.register(256, 1)  # the thread has let go of the task before
    assert found == [True]
    assert there() is None


def test_a_copy_in_another_order_comes_back_as_it_was(driver: FakeDriver) -> None:
    """Its bytes as they lie there would be another array."""
    copy = np.asfortranarray(np.asarray(an_array()))
    [back] = own_programs.on_devices((jax.devices()[0],), [copy])
    assert np.array_equal(np.asarray(back), copy)
    assert driver.copied == []


def test_what_a_driver_did_not_write_makes_room(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.fails = "cuMemcpyHtoDAsync_v2"
    blank: list[Any] = []
    overwrite = own_programs.overwrite
    monkeypatch.setattr(own_programs, "overwrite", lambda to, of: (blank.extend(to), overwrite(to, of)))
    own_programs.on_devices((jax.devices()[0],), [np.asarray(an_array())])
    assert [one.is_deleted() for one in blank] == [True]


def test_memory_is_given_back_at_the_end_of_the_interpreter(memory: HostMemory, copies: GpuCopies) -> None:
    """No thread takes anything any more; what GPUs reach yet must not become other memory."""
    ready(memory, 1 << 12)
    there = memory._address(0)
    copies._thread.shutdown()
    memory.clear()
    ready(memory, 1 << 12)
    assert memory._address(0) != there


def test_a_fork_of_the_training_gets_none_of_the_memory(memory: HostMemory) -> None:
    """Beside a fork the kernel copies all that GPUs reach, or has them write where this process reads no more."""
    ready(memory, 1 << 22)
    flags: dict[range, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            place = range(int(found[1], 16), int(found[2], 16))
        elif line.startswith("VmFlags:"):
            flags[place] = line
    [own] = [line for place, line in flags.items() if memory._address(0) in place]
    assert "wf" in own.split()


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_nothing_is_compiled_to_bring_a_parameter_back_while_a_call_is_held(dtype: str) -> None:
    """Of whole numbers nothing is changed, but they are copied, too."""
    devices, copy = tuple(jax.devices()[:2]), np.ones(_SHAPE, dtype)
    compile_changes(devices, Parameter(_SHAPE, copy.dtype, True))
    before = own_programs._compiled.cache_info().misses
    own_programs.on_devices(devices, [copy, copy])
    assert own_programs._compiled.cache_info().misses == before


@pytest.mark.usefixtures("driver")
def test_what_no_program_of_ours_makes_room_for_is_copied_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that did not come back ended the training."""

    def fails(*_: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(own_programs, "on_each_device", fails)
    array = an_array()
    [back] = own_programs.on_devices((jax.devices()[0],), [np.asarray(array)])
    assert np.asarray(back).tobytes() == np.asarray(array).tobytes()


@pytest.mark.parametrize("shape", [(), (3,)])
def test_an_argument_without_dimensions_is_changed_by_a_rounding(shape: tuple[int, ...]) -> None:
    """Its numpy scalar was no copy any more, and the search for a step with a rate in its state ended."""
    parameter = SimpleNamespace(shape=shape, dtype=np.dtype(np.float64))
    inputs: Any = SimpleNamespace(parameters=[parameter], seed=0)
    changed = RealInputs._changed(inputs, np.full(shape, 2.0), 0, 0.25, 0)
    assert host_memory.is_copy(changed)
    assert changed.shape == shape
    assert not np.any(changed == 2)
