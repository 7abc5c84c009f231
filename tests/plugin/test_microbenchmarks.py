from __future__ import annotations

from types import SimpleNamespace

import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.plugin.measuring import microbenchmarks
from disco_hlo.plugin.measuring.microbenchmarks import as_times, constants_in, gap_as_times, is_constant
from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.profile import Link

NVLINK, SOCKETS = Link(2, 1, "nvlink"), Link(2, 1, "sockets")
CONSTANTS = DeviceConstants(launch_ns=412, memory_bandwidth=21.5e9, flops_per_s=96.5e9, noise=0.02)


def test_constants_come_back_from_a_store_of_times() -> None:
    times = as_times(CONSTANTS)
    assert all(map(is_constant, times))
    found = constants_in(times)
    assert found is not None
    assert found.launch_ns == 412
    assert found.memory_bandwidth == pytest.approx(21.5e9, rel=1e-6)
    assert found.flops_per_s == pytest.approx(96.5e9, rel=1e-6)
    assert found.noise == pytest.approx(0.02, rel=1e-6)


def test_constants_read_back_are_stored_alike() -> None:
    """So that a second search computes with the very numbers of the first."""
    found = constants_in(as_times(CONSTANTS))
    assert found is not None
    assert constants_in(as_times(found)) == found


def test_constants_are_there_whole_or_not_at_all() -> None:
    times = as_times(CONSTANTS)
    for key in times:
        assert constants_in({name: time for name, time in times.items() if name != key}) is None
    assert constants_in({}) is None
    assert not is_constant("dot f32[8,8]")


@pytest.mark.parametrize(("rank", "disturbed"), [(0, 2), (1, 2), (1, 9)])
def test_a_disturbed_measurement_is_repeated_and_fails_on_rank_0_alone(
    rank: int, disturbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def measure(device: object) -> DeviceConstants:
        calls.append(device)
        if len(calls) <= disturbed:
            raise ProfileError("the time of a copy does not grow with its size")
        return CONSTANTS

    monkeypatch.setattr(microbenchmarks, "_measure", measure)
    session = SimpleNamespace(request=SimpleNamespace(local_devices=["cpu"]), leads=rank == 0)
    found = microbenchmarks.measure_constants(session)  # type: ignore[arg-type]
    assert found == (CONSTANTS if disturbed == 2 else None)
    if rank == 0:
        calls.clear()
        disturbed = 9
        with pytest.raises(ProfileError, match="does not grow"):
            microbenchmarks.measure_constants(session)  # type: ignore[arg-type]


@pytest.mark.parametrize("gap_ns", [100, 900])
def test_the_launch_cost_of_a_timed_step_takes_the_place_of_a_chains(gap_ns: int) -> None:
    times = as_times(CONSTANTS) | gap_as_times(NVLINK, "f00d" * 16, gap_ns)
    assert all(is_constant(key) for key in times)
    for fingerprint in ("", "f00d" * 16):
        found = constants_in(times, NVLINK, fingerprint)
        assert found is not None
        assert found.launch_ns == gap_ns
    assert constants_in(gap_as_times(NVLINK, "f00d" * 16, gap_ns)) is None


def test_the_launch_cost_is_that_of_the_step_before_it_is_any_others() -> None:
    times = as_times(CONSTANTS)
    for link, fingerprint, gap_ns in ((NVLINK, "f00d", 100), (SOCKETS, "f00d", 300), (NVLINK, "cafe", 700)):
        times |= gap_as_times(link, 16 * fingerprint, gap_ns)

    def launch_ns(link: Link, fingerprint: str) -> int:
        found = constants_in(times, link, 16 * fingerprint)
        return 0 if found is None else found.launch_ns

    steps = (NVLINK, "f00d"), (SOCKETS, "f00d"), (NVLINK, "cafe"), (NVLINK, "beef"), (SOCKETS, "cafe")
    assert [launch_ns(*step) for step in steps] == [100, 300, 700, 700, 700]
