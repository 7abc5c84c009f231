"""Profile a small Llama-like step in command buffers, and say as JSON whether every kernel finds its name.

    python scripts/check_command_buffers.py                      layers scanned and unrolled, on one GPU, in a minute
    python scripts/check_command_buffers.py --form unrolled

The step: bf16 from f32 master weights, rotary positions, RMS norms, cuDNN attention, a gated feed-forward, saved matmul
results (``jax.checkpoint``), AdamW. As in a profile of the plugin's it is compiled with command buffers, for the times,
and without, for the names; both are traced. For each form the JSON has ``accepted``; ``why`` it was not; for kernels,
transfers, memsets and copies of each direction how long they take and what has no name; and how many of each lie in
either trace.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from checkout import find_package

find_package()

from disco_hlo.errors import ProfileError  # noqa: E402
from disco_hlo.profiler import trace as tracing  # noqa: E402
from disco_hlo.profiler.command_buffers import Lane, all_names, lane_of, refusal  # noqa: E402

FORMS = ("scan", "unrolled")
WITHOUT = {"xla_gpu_enable_command_buffer": ""}
RUNS, NAMED_RUNS = 5, 3
WIDTH, FEED_FORWARD, HEADS, LENGTH, BATCH, VOCABULARY = 1024, 2816, 8, 1024, 2, 8192


def llama_step(layers: int, *, scan: bool, attention: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step and the shapes of its arguments: weights, two moments of each, tokens."""
    import jax
    import jax.numpy as jnp

    half = WIDTH // HEADS // 2

    def normal(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        left, right = x[..., :half], x[..., half:]
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    def block(x: Any, p: dict[str, Any], cos: Any, sin: Any) -> Any:
        y = normal(x, p["norm1"])
        query, key, value = ((y @ p[n]).reshape(*y.shape[:2], HEADS, -1) for n in ("query", "key", "value"))
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        seen = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=attention)
        x = x + seen.reshape(x.shape) @ p["out"]
        y = normal(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    layer = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)

    def loss(weights: dict[str, Any], tokens: Any) -> Any:
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
        angle = jnp.arange(LENGTH)[:, None] / 10000.0 ** (jnp.arange(half) / half)
        cos, sin = (f(angle).astype(jnp.bfloat16)[None, :, None, :] for f in (jnp.cos, jnp.sin))
        x = p["embedding"][tokens]
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w, cos, sin), None), x, p["layers"])
        else:
            for i in range(layers):
                x = layer(x, jax.tree.map(lambda w: w[i], p["layers"]), cos, sin)  # noqa: B023 - called here
        logits = jax.nn.log_softmax((x @ p["head"]).astype(jnp.float32))
        return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()

    def step(weights: Any, first: Any, second: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, tokens)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, gradients)
        update = lambda w, m, v: w - 1e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * w)  # noqa: E731
        return jax.tree.map(update, weights, first, second), first, second, value

    matrices = {
        **dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH)),
        **dict.fromkeys(("gate", "up"), (WIDTH, FEED_FORWARD)),
        "down": (FEED_FORWARD, WIDTH), "norm1": (WIDTH,), "norm2": (WIDTH,),
    }  # fmt: skip
    weights = {
        "layers": {name: (layers, *shape) for name, shape in matrices.items()},
        "embedding": (VOCABULARY, WIDTH),
        "head": (WIDTH, VOCABULARY),
    }
    shaped = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        weights,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    return jax.jit(step, donate_argnums=(0, 1, 2)), (shaped, shaped, shaped, tokens)


def traced(step: Any, shapes: tuple[Any, ...], options: dict[str, str], runs: int) -> tracing.Trace:
    """A trace of the step, compiled with ``options``."""
    import jax
    import jax.numpy as jnp

    executable = step.lower(*shapes).compile(compiler_options=options)
    *arrays, tokens = jax.tree.map(lambda s: jnp.full(s.shape, 0.02, s.dtype), shapes)
    state = [tuple(arrays)]

    def run() -> None:
        *kept, value = executable(*state[0], tokens)
        state[0] = tuple(kept)
        jax.block_until_ready((kept, value))

    return tracing.read(tracing.collect(run, runs, warmup=5))


def judged(timed: tracing.Trace, named: tracing.Trace) -> dict[str, Any]:
    """Whether the trace in command buffers finds its names in the other one, and what does not."""
    modules = [_module(timed), _module(named)]
    found = all_names(timed, modules[0], named, modules[1])
    buffered = any(one.op.startswith("command_buffer") for one in timed.executions)
    why = refusal(found, *modules) if buffered else "no kernel of the step runs in a command buffer"
    return {
        "accepted": not why,
        "why": why,
        "unnamed_us_a_run": found.unnamed_ns / 1e3,
        "lanes": {name: _lane(lane) for name, lane in found.lanes.items()},
        "events_a_run": {"timed": _events(timed), "named": _events(named)},
    }


def _module(trace: tracing.Trace) -> str:
    """The module that ran longest: a few of one op run beside the step."""
    times: Counter[str] = Counter()
    for one in trace.executions:
        times[one.module] += one.end_ns - one.start_ns
    return times.most_common(1)[0][0]


def _lane(lane: Lane) -> dict[str, Any]:
    return {
        "total_ms": lane.total_ns / 1e6,
        "named_ms": lane.named_ns / 1e6,
        "unnamed_ms": {kernel[:80]: ns / 1e6 for kernel, ns in list(lane.unnamed.items())[:20]},
    }


def _events(trace: tracing.Trace) -> dict[str, float]:
    module = _module(trace)
    counts = Counter(lane_of(one) for one in trace.executions if one.module == module)
    runs = max(len({one.run for one in trace.executions if one.module == module}), 1)
    return {lane: count / runs for lane, count in sorted(counts.items())}


def main() -> int:
    """Run it; 0 where every form was accepted, 1 where one was not, 2 where it could not be tried."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--form", choices=(*FORMS, "both"), default="both")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--attention", choices=("cudnn", "xla"), default="cudnn")
    asked = parser.parse_args()
    import jax

    if jax.default_backend() != "gpu":
        print(f"check_command_buffers: needs a GPU, and jax has {jax.default_backend()}", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "forms": {}}
    for form in FORMS if asked.form == "both" else (asked.form,):
        begun = time.monotonic()
        step, shapes = llama_step(asked.layers, scan=form == "scan", attention=asked.attention)
        try:
            timed = traced(step, shapes, {}, RUNS)
            named = traced(step, shapes, WITHOUT, NAMED_RUNS)
            report["forms"][form] = judged(timed, named)
        except ProfileError as error:
            report["forms"][form] = {"accepted": False, "why": str(error)}
        report["forms"][form]["seconds"] = round(time.monotonic() - begun, 1)
    print(json.dumps(report, indent=1))
    return 0 if all(one["accepted"] for one in report["forms"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
