"""How good predicted times are: the figures of DisCo's section 6.5 and of its figure 9, and a few more.

An error is ``|predicted - measured| / measured``, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from disco_hlo.estimator import feature_spec as spec

Floats = NDArray[np.float64]

_DECADES_NS = (1e3, 1e4, 1e5, 1e6, 1e7)
_BINS = 40
_LARGEST_ERROR = 1.0
"""Right end of the error distributions; what lies beyond counts into the last bin."""
_FEWEST = 20
MEMBERS = spec.KERNEL.index("members")
"""Column of a kernel's numbers that holds how many ops it has (as a logarithm)."""


def errors(predicted_log_ns: Floats, log_ns: Floats) -> Floats:
    """Relative errors of predicted times."""
    found: Floats = np.abs(np.expm1(predicted_log_ns - log_ns))
    return found


def summary(error: Floats) -> dict[str, float]:
    """Mean, quantiles, and shares within 5, 10, 14 (the paper's) and 25 per cent."""
    if not len(error):
        return {"samples": 0}
    shares = {f"within_{limit}": _rounded((error <= limit / 100).mean()) for limit in (5, 10, 14, 25)}
    return {
        "samples": len(error),
        "mean": _rounded(error.mean()),
        "median": _rounded(np.median(error)),
        "p90": _rounded(np.quantile(error, 0.9)),
        "p99": _rounded(np.quantile(error, 0.99)),
        **shares,
    }


def by_decade(error: Floats, log_ns: Floats) -> dict[str, dict[str, float]]:
    """Summaries by the measured time."""
    time_ns = np.exp(log_ns)
    found = {}
    for low, high in zip((0.0, *_DECADES_NS), (*_DECADES_NS, np.inf), strict=True):
        chosen = (time_ns >= low) & (time_ns < high)
        if chosen.any():
            found[f"{low / 1e3:g} us to {high / 1e3:g} us"] = summary(error[chosen])
    return found


def by_op_type(
    predicted_log_ns: Floats, log_ns: Floats, opcodes: Sequence[frozenset[str]]
) -> dict[str, dict[str, float]]:
    """Calibration: of all kernels that hold an op type, the error and the middle of predicted over measured."""
    error = errors(predicted_log_ns, log_ns)
    ratio = np.exp(predicted_log_ns - log_ns)
    found = {}
    for opcode in sorted(frozenset().union(*opcodes)):
        chosen = np.array([opcode in held for held in opcodes])
        if chosen.sum() >= _FEWEST:
            found[opcode] = {
                "samples": int(chosen.sum()),
                "mean": _rounded(error[chosen].mean()),
                "median": _rounded(np.median(error[chosen])),
                "ratio": _rounded(np.median(ratio[chosen])),
            }
    return found


def by_size(predicted_log_ns: Floats, log_ns: Floats, ops: NDArray[np.int64]) -> dict[str, dict[str, float]]:
    """The same by the number of ops in the kernel."""
    found = {}
    for low, high in ((2, 3), (4, 7), (8, 15), (16, 31), (32, 1 << 30)):
        chosen = (ops >= low) & (ops <= high)
        if chosen.sum() >= _FEWEST:
            name = f"{low} to {high}" if high < 1 << 30 else f"{low} and more"
            ratio = float(np.exp(np.median((predicted_log_ns - log_ns)[chosen])))
            found[name] = {**summary(errors(predicted_log_ns, log_ns)[chosen]), "ratio": _rounded(ratio)}
    return found


def distribution(error: Floats) -> dict[str, list[float]]:
    """PDF and CDF of the errors, as in the paper's figure 9: share of samples per bin, and up to its right end."""
    edges = np.linspace(0, _LARGEST_ERROR, _BINS + 1)
    counts, _ = np.histogram(np.minimum(error, _LARGEST_ERROR), edges)
    pdf = counts / max(len(error), 1)
    return {
        "right_end": [_rounded(edge) for edge in edges[1:]],
        "pdf": [_rounded(share) for share in pdf],
        "cdf": [_rounded(share) for share in np.cumsum(pdf)],
    }


def kendall_tau(a: Floats, b: Floats) -> float:
    """Kendall's tau-b: 1 where both order the samples alike, -1 where in reverse."""
    from_pairs = ties_a = ties_b = 0.0
    for i in range(len(a) - 1):
        left, right = np.sign(a[i] - a[i + 1 :]), np.sign(b[i] - b[i + 1 :])
        from_pairs += float(left @ right)
        ties_a += float(np.count_nonzero(left == 0))
        ties_b += float(np.count_nonzero(right == 0))
    pairs = len(a) * (len(a) - 1) / 2
    norm = np.sqrt((pairs - ties_a) * (pairs - ties_b))
    return _rounded(from_pairs / norm) if norm else 0.0


def _rounded(value: float) -> float:
    return round(float(value), 4)
