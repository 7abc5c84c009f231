"""Proves, in a process of its own, that the hook works here: compiles ``-x`` and has XLA run ``cos(x)``.

``disco doctor`` runs it as ``python -m disco_hlo.plugin.probe``; it prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from disco_hlo.errors import UnsupportedError
from disco_hlo.hlo import proto
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.xla import compiles, jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest


def probe() -> dict[str, object]:
    """Compile a tiny module on the default backend with one instruction exchanged, run it, check the result; returns
    facts about jax and its devices, and whether arguments stay donated in a module that the hook replaced.

    Raises:
        UnsupportedError: the compile was not intercepted, or XLA ran something else than it was given.
    """
    import jax
    import numpy as np

    asked: list[str] = []

    def handle(request: CompileRequest) -> LoadedExecutable | None:
        if request.module_name != "jit_disco_probe":
            return None
        asked.append(request.module_name)
        module = exchange_opcode(compiles.capture(request), "negate", "cosine")
        return compiles.compile_module(request, module)

    def disco_probe(x: jax.Array) -> jax.Array:
        return -x

    jaxlink.install(handle)
    found = np.asarray(jax.jit(disco_probe)(np.zeros(8, np.float32)))
    jaxlink.uninstall()
    if not asked:
        raise UnsupportedError("jax compiled a module without passing through compile_or_get_cached")
    if not np.array_equal(found, np.ones(8, np.float32)):
        raise UnsupportedError(
            f"XLA was given cos(x) in the place of -x; at x = 0 it computed {found[0]}, not 1"
        )
    device = jax.devices()[0]
    return {
        "platform": str(device.platform),
        "device_kind": str(device.device_kind),
        "device_count": jax.device_count(),
        "jax_version": jax.__version__,
        "jaxlib_version": version("jaxlib"),
        "keeps_donation": jaxlink.keeps_donation(),
    }


def exchange_opcode(module: bytes, old: str, new: str) -> bytes:
    """A serialized HloModuleProto with every ``old`` instruction made ``new``, of the same arity and type.

    Raises:
        UnsupportedError: the module holds no ``old``.
    """
    message = proto.parse(module)
    changed = 0
    for computation in message.computations:
        for instruction in computation.instructions:
            if instruction.opcode == old:
                instruction.opcode = new
                changed += 1
    if not changed:
        raise UnsupportedError(f"expected an instruction {old!r} in module {message.name}, found none")
    return proto.serialize(message)


def main() -> int:
    """Print what was found, or ``{"error": ...}`` and return 1."""
    try:
        report = probe()
    except Exception as error:  # whatever goes wrong is what the caller wants to know
        report = {"error": one_line(error)}
    sys.stdout.write(json.dumps(report) + "\n")
    return 1 if "error" in report else 0


if __name__ == "__main__":
    sys.exit(main())
