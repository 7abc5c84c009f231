"""The forms of examples/llama.py as steps to measure, and the cells that ``scripts/benchmark_forms.py`` measures.

A form is named ``llama-SHARD-LAYERS``, with ``-xN`` behind it where gradients are accumulated over N microbatches:
``llama-fsdp-scan``, ``llama-dp-unroll``, ``llama-fsdp-scan-x4``.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

NAME = re.compile(r"llama-(?P<shard>dp|fsdp)-(?P<layers>scan|unroll)(?:-x(?P<accumulate>[2-9]|[1-9]\d+))?")
EXPECTED = "llama-{dp,fsdp}-{scan,unroll}, with -xN behind it for N microbatches"
CELLS = (
    "fsdp-scan@staged", "dp-scan@staged", "fsdp-scan@nvlink", "fsdp-unroll@staged", "dp-unroll@staged",
    "fsdp-scan-x4@staged", "dp-scan@nvlink", "fsdp-unroll@nvlink", "dp-unroll@nvlink", "fsdp-scan-x4@nvlink",
    "fsdp-scan@sockets", "dp-scan@sockets", "fsdp-unroll@sockets", "dp-unroll@sockets", "fsdp-scan-x4@sockets",
)  # fmt: skip
"""What is worth most comes first."""


def is_form(model: str) -> bool:
    """Whether this names a form."""
    return NAME.fullmatch(model) is not None


def unrolled(model: str) -> str:
    """The same form without a loop over the layers."""
    return model.replace("-scan", "-unroll")


def by_link(cells: list[str]) -> list[tuple[str, list[str]]]:
    """Link and forms of neighbouring cells that share a link, and so a process: ``fsdp-scan@staged`` and
    ``dp-scan@staged`` become ``("staged", ["llama-fsdp-scan", "llama-dp-scan"])``."""
    pairs = [cell.split("@") for cell in cells]
    return [
        (link, [f"llama-{form}" for form, _ in some])
        for link, some in groupby(pairs, key=lambda pair: pair[1])
    ]


def lowered(model: str, size: str) -> Any:
    """The step of that form over all devices, lowered; examples/ must be on the path.

    Raises:
        ValueError: no form has this name.
    """
    import llama

    found = NAME.fullmatch(model)
    if found is None:
        raise ValueError(f"{model!r} is no form: expected {EXPECTED}")
    form = llama.Form(found["shard"], found["layers"], accumulate=int(found["accumulate"] or 1))
    config, where = llama.load(size), llama.layout(form)
    return llama.compile_step(config, where).lower(*llama.abstract_arguments(config, where))
