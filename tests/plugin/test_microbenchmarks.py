from __future__ import annotations

from types import SimpleNamespace

import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.plugin.measuring import microbenchmarks
from disco_hlo.profiler.calibrate import DeviceConstants

CONSTANTS = DeviceConstants(launch_ns=412, memory_bandwidth=21.5e9, flops_per_s=96.5e9, noise=0.02)


def test_between_the_steps_of_a_training_ranks_measure_again_where_rank_0_was_disturbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes part in the slices of the others, or they wait for each other."""
    said = iter([True, True, False])
    made: list[bool] = []

    def measure(_device: object, _backend: object, _repeat: object, beside: bool) -> DeviceConstants:
        made.append(beside)
        if len(made) == 3:
            raise ProfileError("the time of a copy does not grow with its size")
        return CONSTANTS

    monkeypatch.setattr(microbenchmarks, "_measure", measure)
    session = SimpleNamespace(
        request=SimpleNamespace(local_devices=["cpu"]), leads=False, between_steps=lambda _: None,
        tell=lambda _value, _tag: next(said), facts=SimpleNamespace(backend="gpu"),
    )  # fmt: skip
    assert microbenchmarks.measure_constants(session) == CONSTANTS  # type: ignore[arg-type]
    assert made == [True] * 3


@pytest.mark.parametrize(("rank", "disturbed"), [(0, 2), (1, 2), (1, 9)])
def test_a_disturbed_measurement_is_repeated_and_fails_on_rank_0_alone(
    rank: int, disturbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def measure(device: object, *_: object) -> DeviceConstants:
        calls.append(device)
        if len(calls) <= disturbed:
            raise ProfileError("the time of a copy does not grow with its size")
        return CONSTANTS

    monkeypatch.setattr(microbenchmarks, "_measure", measure)
    session = SimpleNamespace(
        request=SimpleNamespace(local_devices=["one"]),
        leads=rank == 0,
        between_steps=None,
        facts=SimpleNamespace(backend="cpu"),
    )
    found = microbenchmarks.measure_constants(session)  # type: ignore[arg-type]
    assert found == (CONSTANTS if disturbed == 2 else None)
    if rank == 0:
        calls.clear()
        disturbed = 9
        with pytest.raises(ProfileError, match="does not grow"):
            microbenchmarks.measure_constants(session)  # type: ignore[arg-type]
