"""What XLA reads of a kernel beside its computation: the emitter, and the emitter's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping

from disco_hlo.plan.partitions import KernelWork, outer_partitions, task_count

FUSION_KINDS = {"loop": "kLoop", "input": "kInput", "output": "kOutput", "triton": "kCustom"}
"""How a module names the emitter that ``Group.kind`` names."""


def backend_config(config: Mapping[str, object]) -> bytes:
    """Settings as a module holds them."""
    return json.dumps(config, separators=(",", ":")).encode()


def triton_config(config: str) -> bytes:
    """The settings of a Triton kernel, from what a ``Group`` keeps of them."""
    return backend_config({"fusion_backend_config": json.loads(config)})


def task_config(work: KernelWork, parallelism: int) -> bytes:
    """Into how many tasks XLA:CPU splits a kernel on ``parallelism`` threads; empty where it stays whole."""
    counts = outer_partitions(work.result, task_count(work, parallelism))
    return backend_config({"outer_dimension_partitions": [str(count) for count in counts]}) if counts else b""
