"""Whether one executable may be called in the place of another: JAX's arguments and results must not notice."""

from __future__ import annotations

from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin.xla.executables import LoadedExecutable, call_signature


def check_same_signature(default: LoadedExecutable, candidate: LoadedExecutable) -> None:
    """Refuse a candidate that takes or returns anything else than ``default``, or otherwise.

    Raises:
        UnsupportedError: shapes, shardings, layouts, memories, devices or donated storage differ; says which and how.
    """
    expected, found = call_signature(default), call_signature(candidate)
    for what in expected:
        if expected[what] != found[what]:
            raise UnsupportedError(
                f"the candidate cannot be called as the default is: expected {what} {expected[what]}, "
                f"got {found[what]}"
            )
