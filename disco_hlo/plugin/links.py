"""What connects the devices of a step, and how long an all-reduce takes over it (DisCo, section 4.2).

Rewritten all-reduces are always the communication library's: XLA:GPU's own kernels for small ones
(one-shot, two-shot, up to 4 MiB) are made by passes that run before the hook. So they are switched
off while sweeping, or the line would tell of transfers that no plan contains.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median

from disco_hlo.plugin.jaxlink import CompileRequest
from disco_hlo.plugin.runner import all_reduce_runner

REPEATS = 7
_NOT_A_LINK = ("NCCL_DEBUG", "NCCL_VERSION")
_LONG_CHAIN_BYTES = 1 << 20
_CHAIN, _LONG_CHAIN = 3, 16
"""All-reduces in one run, each waiting for the one before: more of them where one is over in microseconds."""


def link_label() -> str:
    """What the environment says of the link between GPUs: NCCL's settings, which choose between NVLink,
    shared memory and sockets. Times measured under others are of another link."""
    settings = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("NCCL_") and not name.startswith(_NOT_A_LINK)
    )
    return ",".join(settings)


def all_reduce_times(
    request: CompileRequest, size_bytes: int, seed: int, *, without_call: bool
) -> Sequence[int]:
    """Repeated times in ns of an all-reduce of ``size_bytes`` a device, over the devices of ``request``.

    In a multi-process job every process calls this with the same arguments.

    Args:
        without_call: leave out what calling an executable costs, by subtracting runs with one all-reduce from
            runs with several. A GPU's link is done with a small one sooner than its host with the call.

    Raises:
        UnsupportedError: as :func:`~disco_hlo.plugin.runner.all_reduce_runner`.
    """
    length = _LONG_CHAIN if without_call and size_bytes <= _LONG_CHAIN_BYTES else _CHAIN
    chain = all_reduce_runner(request, size_bytes, repeats=length + without_call, seed=seed)
    chain.run()
    if not without_call:
        return [max(1, chain.run() // length) for _ in range(REPEATS)]
    single = all_reduce_runner(request, size_bytes, repeats=1, seed=seed, inputs_of=chain)
    single.run()
    pairs = [(single.run(), chain.run()) for _ in range(REPEATS)]
    call_ns = median(alone for alone, _ in pairs)
    return [max(1, round((whole - call_ns) / length)) for _, whole in pairs]
