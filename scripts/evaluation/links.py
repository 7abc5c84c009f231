"""The links that are compared, and what a process must have in its environment for each."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, MutableMapping

LINKS: Mapping[str, Mapping[str, str]] = {
    "nvlink": {},
    "staged": {"NCCL_P2P_DISABLE": "1"},
    "sockets": {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    },
}
GLOO = "gloo"
"""Between processes, over the CPU's sockets."""
_KERNELS_OFF = (
    ((0, 10), "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"),
    ((0, 11, 2), "--xla_gpu_experimental_use_collective_kernels="),
)
"""XLA's own all-reduce kernels (up to 4 MiB each, where nothing combines them) go over NVLink whatever NCCL is told.
Two GPUs that only reach each other through the host, or over a network, could not run them. With the jaxlib since which
each flag is known: an older one ends the process at the sight of it."""
_CHOOSING = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME")


def prepare(environment: MutableMapping[str, str], link: str, devices: int) -> None:
    """Set what chooses link and devices. Must precede the import of jax."""
    for name in _CHOOSING:
        environment.pop(name, None)
    environment.update(LINKS[link])
    if link != "nvlink" and environment.get("JAX_PLATFORMS") != "cpu":
        _kernels_off(environment)
    for name in ("ENABLE_SEARCH", "DISCO_CAPTURE"):  # the script calls the phases itself
        environment.pop(name, None)
    if environment.get("JAX_PLATFORMS") == "cpu":
        _add_flag(environment, f"--xla_force_host_platform_device_count={devices}")
    else:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        chosen = visible.split(",") if visible else [str(number) for number in range(devices)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(chosen[:devices])


def _kernels_off(environment: MutableMapping[str, str]) -> None:
    for since, flag in _KERNELS_OFF:
        if _jaxlib_version() >= since:
            _add_flag(environment, flag)


def _jaxlib_version() -> tuple[int, ...]:
    """Of the installed jaxlib, without importing it; nothing where there is none."""
    try:
        numbers = importlib.metadata.version("jaxlib").split(".")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(number) for number in numbers[:3] if number.isdigit())


def _add_flag(environment: MutableMapping[str, str], flag: str) -> None:
    flags = environment.get("XLA_FLAGS", "").split()
    environment["XLA_FLAGS"] = " ".join([*(one for one in flags if one != flag), flag])


def described(environment: Mapping[str, str]) -> dict[str, str]:
    """NCCL's and XLA's settings, for the record."""
    wanted = ("NCCL_", "XLA_", "JAX_", "CUDA_VISIBLE")
    return {name: value for name, value in sorted(environment.items()) if name.startswith(wanted)}
