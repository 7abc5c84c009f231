"""Where a module runs: facts about its devices, and how much memory these and their host have left for it.

On the host the kernel says what is free, and control groups what is allowed: a container, or a job of a scheduler, may
have far less than its host. What goes beyond is killed, the training with it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from disco_hlo.backends import backend_of
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.xla.jaxlink import CompileRequest

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, usage, and what of that is a cache which the kernel gives back: control groups of version 2, and of 1."""
MAY_RISE = 0.1
"""Part of the most memory that a training had in use, by which what we run between its calls may exceed that.
The aim is 15 %; devices counted 3.8 % of it more than a module needs (2 x H200), and up to 656 MiB where others have
4 (2 x H100), as their allocator hands out blocks that are too large."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a module was compiled for, and with what."""

    backend: str
    """Its name."""
    device_kind: str
    device_count: int
    process_index: int
    process_count: int
    runtime_version: str
    """PJRT platform version; on GPU it names the CUDA version."""
    jax_version: str
    jaxlib_version: str


def device_facts(request: CompileRequest) -> DeviceFacts:
    """Facts about the devices of ``request``."""
    import jax

    return DeviceFacts(
        backend=backend_of(request.backend.platform).name,
        device_kind=str(request.devices[0].device_kind),
        device_count=len(request.devices),
        process_index=int(request.backend.process_index()),
        process_count=len(request.process_indices),
        runtime_version=str(request.backend.platform_version),
        jax_version=jax.__version__,
        jaxlib_version=version("jaxlib"),
    )


def free_device_bytes(request: CompileRequest) -> int | None:
    """Memory a further allocation may take on each local device; None where they have none of their own."""
    every = [device.memory_stats() or {} for device in request.local_devices]
    known = [int(one["bytes_limit"]) - int(one["bytes_in_use"]) for one in every if "bytes_limit" in one]
    return min(known, default=None)


def may_rise_bytes(request: CompileRequest) -> int | None:
    """By how much more the memory in use may grow on each local device until it is :data:`MAY_RISE` above the most that
    was ever in use, before a search began where one has; None where devices have none of their own."""
    peaks = request.training_peaks_bytes or peaks_bytes(request)
    known = [
        int((1 + MAY_RISE) * peak) - int((device.memory_stats() or {}).get("bytes_in_use", 0))
        for peak, device in zip(peaks, request.local_devices, strict=True)
        if peak
    ]
    return min(known, default=None)


def may_rise_at_peak_bytes(request: CompileRequest) -> int | None:
    """As :func:`may_rise_bytes`, while the training has the most in use, and no more than its devices have."""
    every = [device.memory_stats() or {} for device in request.local_devices]
    known = [
        min(int(MAY_RISE * peak), int(one.get("bytes_limit", 2 * peak)) - peak)
        for peak, one in zip(request.training_peaks_bytes, every, strict=True)
        if peak
    ]
    return min(known, default=None)


def peaks_bytes(request: CompileRequest) -> tuple[int, ...]:
    """The most memory that was ever in use on each local device; 0 where one has none of its own."""
    every = [device.memory_stats() or {} for device in request.local_devices]
    return tuple(int(one.get("peak_bytes_in_use", 0)) for one in every)


@contextlib.contextmanager
def peak_told(request: CompileRequest, what: str) -> Iterator[None]:
    """Say at the log's finest level, once the body has ended, what the most memory that was ever in use on each local
    device was before and after it; nothing where devices have none of their own. ``what`` the body is, in words."""
    before = peaks_bytes(request) if LOGGER.isEnabledFor(logging.DEBUG) else ()
    try:
        yield
    finally:
        if any(before):
            listed = [
                f"{old >> 20} to {new >> 20}" for old, new in zip(before, peaks_bytes(request), strict=True)
            ]
            LOGGER.debug("%s: peak memory of each device went from %s MiB", what, ", ".join(listed))


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """What this process may still allocate, by ``proc`` and ``sys`` in ``root``; None where the system does not say."""
    available = _in_table(root / "proc/meminfo", "MemAvailable:", 1024)
    return min([*([] if available is None else [available]), *_left_in_groups(root)], default=None)


def _left_in_groups(root: Path) -> Iterator[int]:
    """What is left in each control group that has a limit, from this process's own upwards."""
    for folder in _group_folders(root):
        for limit_name, used_name, cache_name in _FILES:
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                cache = _in_table(folder / "memory.stat", cache_name, 1) or 0
                yield max(0, limit - max(0, used - cache))


def _group_folders(root: Path) -> Iterator[Path]:
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            mounts = [root / "sys/fs/cgroup/memory"]
        else:
            continue
        # Inside a container the path may be the host's, and the container's own group is the mount itself.
        parts = [part for part in path.split("/") if part and part != ".."]
        for mount in mounts:
            yield from (mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def _in_table(path: Path, name: str, unit: int) -> int | None:
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1]) * unit
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
