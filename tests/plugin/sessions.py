"""A step in a session of its own, as a phase of the plugin has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plugin.session import Session, join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.steps import models
from tests.steps.intercept import intercept


def in_session(
    folder: Path,
    look: Callable[[Session, CanonicalModule], Any],
    make: Callable[[], models.Step] = models.mlp,
) -> Any:
    """What ``look`` returns of a step that is searched, its plans in ``folder``."""

    def body(request: CompileRequest) -> Any:
        session = join(request, Settings(search=True, directory=folder))
        return look(session, canonicalize(compiles.capture(request)))

    return intercept(*make(), body)
