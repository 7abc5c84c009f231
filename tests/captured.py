"""XLA's modules in ``tests/data``, each unpacked and brought into canonical form once for all tests of a process."""

from __future__ import annotations

import gzip
from functools import cache, lru_cache
from pathlib import Path

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize

DATA = Path(__file__).parent / "data"
CASES = DATA / "cases"
CPU_MODULE = CASES / "search_never_returns.hlo.pb"
"""85 instructions."""


@cache
def stored(name: str) -> bytes:
    """The module in ``tests/data/NAME.hlo.pb.gz``."""
    return gzip.decompress((DATA / f"{name}.hlo.pb.gz").read_bytes())


@lru_cache(maxsize=6)
def captured(name: str) -> CanonicalModule:
    """The same in canonical form; not to be changed. The largest take 100 MB, so not all are kept."""
    return canonicalize(stored(name))
