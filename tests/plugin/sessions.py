"""A session of no step, for what only needs its settings and its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disco_hlo.activation.channel import Channel, LocalChannel
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings


def session_of(folder: Path, channel: Channel | None = None, **settings: Any) -> Session:
    """One that searches, with its plans in ``folder``: of one rank unless a channel joins several."""
    asked = Settings(search=True, directory=folder, **settings)
    return Session(None, asked, None, channel or LocalChannel())  # type: ignore[arg-type]
