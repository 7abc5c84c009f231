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


def outdated() -> list[str]:
    """Files of the checkout's package that differ in the one that is imported: an installed one may be older."""
    import disco_hlo

    installed, here = Path(disco_hlo.__file__).parent, ROOT / "disco_hlo"
    files = [path.relative_to(here) for path in sorted(here.rglob("*.py"))]
    return [
        str(file)
        for file in files
        if not (installed / file).exists() or (installed / file).read_bytes() != (here / file).read_bytes()
    ]
