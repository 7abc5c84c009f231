"""Facts about devices, the job, and how much memory devices, host and control groups leave."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from disco_hlo.plugin.xla import jaxlink, job
from disco_hlo.plugin.xla.job import free_host_bytes
from tests.plugin.handled import seen

GIB = 1 << 30


def test_facts_name_backend_devices_and_versions() -> None:
    facts = seen(job.device_facts, lambda x: x + 1, np.zeros(2, np.float32))
    assert (facts.backend, facts.device_kind) == ("cpu", "cpu")
    assert facts.device_count == 1
    assert (facts.process_index, facts.process_count) == (0, 1)
    assert facts.jax_version == jax.__version__
    assert facts.runtime_version == "cpu"


def test_a_host_says_how_much_memory_is_left() -> None:
    # A CPU device has no memory of its own, the host has.
    assert seen(job.free_device_bytes, lambda x: x + 1, np.zeros(2, np.float32)) is None
    free = free_host_bytes()
    assert free is not None
    assert free > 1 << 20


def test_memory_may_rise_to_a_part_above_the_most_that_was_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "MAY_RISE", 0.1)

    def device(peak: int, now: int) -> Any:
        return SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": peak, "bytes_in_use": now})

    devices = [device(1000, 700), device(1000, 900)]
    request: Any = SimpleNamespace(local_devices=devices, training_peaks_bytes=())
    assert job.may_rise_bytes(request) == 200
    request.training_peaks_bytes = (800, 900)  # what is above that is ours
    assert job.may_rise_bytes(request) == 90
    request.training_peaks_bytes = ()
    request.local_devices = [SimpleNamespace(memory_stats=lambda: None)]
    assert job.may_rise_bytes(request) is None


def test_beside_a_step_memory_may_rise_by_what_is_left_at_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "MAY_RISE", 0.05)
    devices = [SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1200})] * 2
    request: Any = SimpleNamespace(local_devices=devices, training_peaks_bytes=(800, 1100))
    assert job.may_rise_at_peak_bytes(request) == 40
    monkeypatch.setattr(job, "MAY_RISE", 0.15)
    assert job.may_rise_at_peak_bytes(request) == 100
    request.training_peaks_bytes = (0, 0)
    assert job.may_rise_at_peak_bytes(request) is None
    request.training_peaks_bytes = (800, 1000)
    request.local_devices = [SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 1000})] * 2
    assert job.may_rise_at_peak_bytes(request) == 120


def test_the_log_says_how_the_most_memory_in_use_has_grown(caplog: pytest.LogCaptureFixture) -> None:
    peaks = [1000 << 20, 900 << 20]

    def device(number: int) -> Any:
        return SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": peaks[number]})

    request: Any = SimpleNamespace(local_devices=[device(0), device(1)])
    caplog.set_level(logging.DEBUG, "disco_hlo")
    with job.peak_told(request, "profile"):
        peaks[1] = 1234 << 20
    request.local_devices = [SimpleNamespace(memory_stats=lambda: None)]
    with job.peak_told(request, "on CPU"):
        pass
    assert caplog.messages == ["profile: peak memory of each device went from 1000 to 1000, 900 to 1234 MiB"]


def test_who_initializes_again_is_in_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import distributed

    def number_with(client: object) -> int:
        monkeypatch.setattr(distributed.global_state, "client", client)
        monkeypatch.setattr(distributed.global_state, "coordinator_address", "host:1234")
        return jaxlink.job_number()

    first, second = object(), object()
    before = number_with(first)
    assert [number_with(one) - before for one in (first, second, second)] == [0, 1, 1]
    assert number_with(None) == 0
    assert number_with(second) == before + 1


def system(root: Path, groups: str, **files: str) -> int | None:
    """What is free on a system with 8 GiB available, and such files of control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {9 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return free_host_bytes(root)


def test_a_host_without_limits_has_what_is_available(tmp_path: Path) -> None:
    assert system(tmp_path, "0::/\n", memory_dot_max="max\n", memory_dot_current="5\n") == 8 * GIB
    assert free_host_bytes(tmp_path / "nothing here") is None


def test_a_control_group_leaves_less_than_the_host(tmp_path: Path) -> None:
    """Its files' cache counts as used, and is given back when memory is asked for."""
    free = system(
        tmp_path, "0::/job/step\n", job__memory_dot_max=f"{4 * GIB}\n", job__memory_dot_current=f"{3 * GIB}\n",
        job__memory_dot_stat=f"anon 5\ninactive_file {GIB}\n", job__step__memory_dot_max="max\n",
        job__step__memory_dot_current="7\n",
    )  # fmt: skip
    assert free == 2 * GIB


def test_a_container_with_control_groups_of_version_1_sees_its_own_at_the_mount(tmp_path: Path) -> None:
    files = {"memory__memory.limit_in_bytes": f"{3 * GIB}", "memory__memory.usage_in_bytes": f"{2 * GIB}"}
    assert system(tmp_path, "5:cpu:/\n4:memory:/docker/3f\n0::/\n", **files) == GIB
