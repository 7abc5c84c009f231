"""Dump what XLA is given and what it executes, of a small step, for a diff away from the GPU.

    python scripts/gpu_dump.py --out DIR                      on the GPUs of this machine, in seconds
    JAX_PLATFORMS=cpu python scripts/gpu_dump.py --out DIR    on two CPU devices

For XLA's own plan, for the same plan written by us, and for the unfused step: DIR/<name>.given.pb.gz
and DIR/<name>.executed.pb.gz. DIR/report.json says for each how the executed module differs. The step
has what usually makes trouble: a softmax, layer norms, an embedding, a checkpointed block.
"""

# A dump writes down every error, whatever it is, and goes on.
# ruff: noqa: BLE001

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

from checkout import find_package

find_package()


def compile_small_step(width: int) -> None:
    """Compile one data-parallel training step of a transformer block over all devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    def norm(x: Any, scale: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale

    @jax.checkpoint
    def block(weights: dict[str, Any], x: Any) -> Any:
        q, k, v = jnp.split(norm(x, weights["scale"]) @ weights["qkv"], 3, axis=-1)
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / width**0.5)
        x = x + jnp.einsum("bqk,bkd->bqd", scores, v)
        return x + jax.nn.gelu(norm(x, weights["scale"]) @ weights["up"]) @ weights["down"]

    def loss(weights: dict[str, Any], tokens: Any) -> Any:
        x = weights["embedding"][tokens]
        for _ in range(2):
            x = block(weights, x)
        logits = x @ weights["embedding"].T
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()

    def dump_step(weights: dict[str, Any], moments: dict[str, Any], tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, tokens)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda w, m: w - 1e-3 * m, weights, moments), moments, value

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    shapes = {
        "embedding": (4 * width, width), "qkv": (width, 3 * width), "up": (width, 4 * width),
        "down": (4 * width, width), "scale": (width,),
    }  # fmt: skip
    weights = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=everywhere) for name, shape in shapes.items()
    }
    tokens = jax.ShapeDtypeStruct((8 * jax.device_count(), 128), jnp.int32, sharding=split)
    jax.jit(dump_step, donate_argnums=(0, 1)).lower(weights, weights, tokens).compile()


def dump(request: Any, out: Path) -> dict[str, Any]:
    """Compile the three variants of the request and write their modules; returns the report."""
    from disco_hlo.hlo.canonical import canonicalize
    from disco_hlo.plan.apply import apply
    from disco_hlo.plan.baselines import unfused
    from disco_hlo.plan.read import read
    from disco_hlo.plugin.xla import compiles

    captured = compiles.capture(request)
    source = canonicalize(captured)
    report: dict[str, Any] = {"fingerprint": source.graph.fingerprint, "nodes": len(source.graph)}
    for name, given in (
        ("default", lambda: captured),
        ("same", lambda: apply(read(source), source)),
        ("unfused", lambda: apply(unfused(source.graph), source)),
    ):
        started = time.perf_counter()
        try:
            report[name] = variant(request, name, given(), out)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            report[name] = {"error": why[:2000], "where": traceback.format_exc()[-2000:]}
        report[name]["seconds"] = round(time.perf_counter() - started, 2)
    return report


def variant(request: Any, name: str, given: bytes, out: Path) -> dict[str, Any]:
    """Compile one module; write it and what became of it."""
    from disco_hlo.plan.executed import executed_difference
    from disco_hlo.plugin.xla import compiles, executables

    (out / f"{name}.given.pb.gz").write_bytes(gzip.compress(given))
    executable = compiles.compile_module(request, None if name == "default" else given)
    executed = executables.read_executable(executable)
    (out / f"{name}.executed.pb.gz").write_bytes(gzip.compress(executed))
    return {"difference": executed_difference(given, executed)}


def main() -> None:
    """Parse the command line and dump."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--out", type=Path, required=True, help="folder for the modules and the report")
    parser.add_argument("--width", type=int, default=256, help="width of the transformer block")
    args = parser.parse_args()
    if args.width < 1:
        parser.error("expected --width of at least 1")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is not a directory")
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.pop("ENABLE_SEARCH", None)
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=2"
    from disco_hlo.plugin.xla import jaxlink

    def handler(request: Any) -> None:
        if "dump_step" not in request.module_name:
            return
        text = json.dumps(dump(request, args.out), indent=1)
        (args.out / "report.json").write_text(text)
        print(text, flush=True)
        os._exit(0)  # nothing of the training itself is wanted

    jaxlink.install(handler)
    compile_small_step(args.width)


if __name__ == "__main__":
    main()
