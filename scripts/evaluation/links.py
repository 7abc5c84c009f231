"""The three links between two GPUs that are compared, and what a process must have in its environment."""

from __future__ import annotations

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
_CHOOSING = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME")


def prepare(environment: MutableMapping[str, str], link: str, devices: int) -> None:
    """Set what chooses link and devices. Must precede the import of jax."""
    for name in _CHOOSING:
        environment.pop(name, None)
    environment.update(LINKS[link])
    for name in ("ENABLE_SEARCH", "DISCO_CAPTURE"):  # the script calls the phases itself
        environment.pop(name, None)
    if environment.get("JAX_PLATFORMS") == "cpu":
        flags = environment.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
    else:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        chosen = visible.split(",") if visible else [str(number) for number in range(devices)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(chosen[:devices])


def described(environment: Mapping[str, str]) -> dict[str, str]:
    """NCCL's and XLA's settings, for the record."""
    wanted = ("NCCL_", "XLA_", "JAX_", "CUDA_VISIBLE")
    return {name: value for name, value in sorted(environment.items()) if name.startswith(wanted)}
