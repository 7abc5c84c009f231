"""What the benchmark commands share before jax is imported: options, exit statuses and the end of their time; links and
the environment that each needs; the forms of examples/llama.py by name.

A form is named ``llama-SHARD-LAYERS``, with ``-qkv`` behind it where query, key and value have one matrix, and ``-xN``
where gradients are accumulated over N microbatches: ``llama-fsdp-scan``, ``llama-dp-scan-qkv``, ``llama-fsdp-scan-x4``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path

from evaluation.record import CellName, Record

DONE, NOT_MEASURED, BAD_ARGUMENTS, OUT_OF_TIME = 0, 1, 2, 3
LINKS: Mapping[str, Mapping[str, str]] = {
    "nvlink": {},
    "staged": {"NCCL_P2P_DISABLE": "1"},
    "sockets": {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
    },
}
"""Over sockets with threads of their own, without which the link has a third of the rate, and twice the spread."""
GLOO = "gloo"
"""Between processes, over the CPU's sockets."""
_KERNELS_OFF = (
    ((0, 10), "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"),
    ((0, 11, 2), "--xla_gpu_experimental_use_collective_kernels="),
)
"""XLA's own all-reduce kernels (up to 4 MiB each, where nothing combines them) go over NVLink whatever NCCL is told.
Two GPUs that only reach each other through the host, or over a network, could not run them. With the jaxlib since which
each flag is known: an older one ends the process at the sight of it."""
FORM = re.compile(
    r"llama-(?P<shard>dp|fsdp)-(?P<layers>scan|unroll)(?P<qkv>-qkv)?(?:-x(?P<accumulate>[2-9]|[1-9]\d+))?"
)
FORM_EXPECTED = (
    "llama-{dp,fsdp}-{scan,unroll}, with -qkv behind it for one matrix of query, key and value, "
    "and -xN for N microbatches"
)
STRUCTURED = re.compile(r"tp-forward|tp-train|(attention|mlp)-(8|16)|adam-(replicated-)?([89]|1\d|2\d|30)")
STRUCTURED_EXPECTED = (
    "tp-forward, tp-train, attention-8, attention-16, mlp-8, mlp-16, adam-8 to adam-30, "
    "or adam-replicated-8 to adam-replicated-30"
)


def parser(description: str | None, *, size: str, seconds: float, of: str = "") -> argparse.ArgumentParser:
    """The options that every benchmark has, with its defaults; ``of`` says what the seconds are for, if not for all."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=description, formatter_class=raw)
    time = f"{of or 'time for everything'} (default {seconds:g})"
    made.add_argument("--size", default=size, choices=("full", "tiny"))
    made.add_argument("--seconds", type=float, default=seconds, help=time)
    made.add_argument("--rounds", type=int, default=9, help="runs of every row, in turn (default 9)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, required=True, help="folder of the records")
    return made


def check(made: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with 2 where a shared option has a value that cannot be used."""
    if not args.seconds > 0:
        made.error("expected --seconds above 0")
    if args.rounds < 2:
        made.error("expected --rounds of at least 2")
    if args.out.exists() and not args.out.is_dir():
        made.error(f"--out {args.out} is not a directory")


@contextlib.contextmanager
def ending_in(seconds: float, script: str, out: Path, cells: Sequence[CellName]) -> Iterator[None]:
    """End the process when the time is up, whatever it is doing: devices may be waiting for each other. The records of
    these cells, where there are any, then say so."""

    def end() -> None:
        try:
            for cell in cells:
                if (out / f"{cell.stem}.json").exists():
                    Record.open(out, cell).stop("the time was up")
        finally:
            print(f"{script}: the time is up; run again to go on", file=sys.stderr, flush=True)
            os._exit(OUT_OF_TIME)

    timer = threading.Timer(max(0.0, seconds), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def prepare(environment: MutableMapping[str, str], link: str, devices: int) -> None:
    """Set what chooses link and devices. Must precede the import of jax."""
    # The script calls the plugin's phases itself.
    for name in (*LINKS["sockets"], "ENABLE_SEARCH", "DISCO_CAPTURE"):
        environment.pop(name, None)
    environment.update(LINKS[link])
    if environment.get("JAX_PLATFORMS") == "cpu":
        _add_flag(environment, f"--xla_force_host_platform_device_count={devices}")
        return
    for since, flag in _KERNELS_OFF:
        if link != "nvlink" and _jaxlib_version() >= since:
            _add_flag(environment, flag)
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    chosen = visible.split(",") if visible else [str(number) for number in range(devices)]
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(chosen[:devices])


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


def is_form(model: str) -> bool:
    """Whether this names a form."""
    return FORM.fullmatch(model) is not None


def unrolled(model: str) -> str:
    """The same form without a loop over the layers."""
    return model.replace("-scan", "-unroll")
