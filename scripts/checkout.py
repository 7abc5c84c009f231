"""The checkout that a script lies in. Where nothing is installed, the package is the checkout's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def find_package() -> None:
    """Make the package importable; estimator/, profiler/ and search/ lie beside it in a checkout."""
    if importlib.util.find_spec("disco_hlo") is None:
        sys.path.insert(0, str(ROOT))
    import disco_hlo

    if importlib.util.find_spec("disco_hlo.profiler") is None:
        disco_hlo.__path__.append(str(ROOT))
