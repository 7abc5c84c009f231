"""Plans that nobody searched."""

from __future__ import annotations

import hashlib
from typing import Any

from disco_hlo.plan.plan import (
    FORMAT,
    VERSION,
    Plan,
    Prediction,
    SearchRecord,
    Strategy,
    Target,
    by_region,
)


def made_plan(target: Target, strategy: Strategy, module: bytes, **more: Any) -> Plan:
    """A plan that rewrites to ``module``; ``more``: fields that are not the made-up ones."""
    made_up = {
        "versions": {"disco_hlo": "0.1.0", "jax": "0.11.2", "jaxlib": "0.11.2"},
        "chosen": "plan",
        "prediction": Prediction(80, 100, 120, 60, 70),
        "search": SearchRecord("joint", {"seed": 0}, 10, ((1, 90), (5, 80))),
    }
    return Plan(
        format=FORMAT, version=VERSION, target=target, strategies=by_region(strategy),
        module_sha256=hashlib.sha256(module).hexdigest(), **{**made_up, **more},
    )  # fmt: skip
