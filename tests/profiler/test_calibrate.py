"""Device constants from handed-in measurements."""

import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.profiler.calibrate import DeviceConstants, device_constants


def test_rates_are_recovered():
    found = device_constants(
        copy=lambda size: [5_000 + size // 4],  # 4 bytes a ns, after 5 microseconds of launch
        matmul=lambda width: [1_000 + 2 * width**3 // 100],  # approaches 100 flops a ns
        chain=lambda length: [10_000 + 750 * length],
    )
    assert found.memory_bandwidth == pytest.approx(4e9)
    assert found.flops_per_s == pytest.approx(1e11, rel=1e-3)
    assert found.launch_ns == 750
    assert found.noise == 0.0


def test_noise_is_the_largest_relative_spread():
    found = device_constants(
        copy=lambda size: [size, size * 1.1, size * 0.9],
        matmul=lambda width: [width**3] * 3,
        chain=lambda length: [length * 100] * 3,
    )
    assert found.noise == pytest.approx(0.1)
    assert isinstance(found, DeviceConstants)


def test_work_that_takes_no_longer_when_larger_is_refused():
    with pytest.raises(ProfileError, match="the time of a copy does not grow"):
        device_constants(lambda size: [1000], lambda width: [width], lambda length: [length])


@pytest.mark.parametrize("times", [[], [0], [float("nan")]])
def test_non_times_are_refused(times):
    with pytest.raises(ProfileError, match="expected positive times"):
        device_constants(lambda size: times, lambda width: [width], lambda length: [length])
