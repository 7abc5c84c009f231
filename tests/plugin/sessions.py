"""A session of no step, for what only needs its settings and its ranks; and what stands for one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from disco_hlo.activation.channel import Channel, LocalChannel
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings


def session_of(folder: Path, channel: Channel | None = None, **settings: Any) -> Session:
    """One that searches, with its plans in ``folder``: of one rank unless a channel joins several."""
    asked = Settings(search=True, directory=folder, **settings)
    return Session(None, asked, None, channel or LocalChannel())  # type: ignore[arg-type]


def fake_session(**instead: Any) -> Any:
    """Of one rank with GPUs that searches before the first step, whose stages are empty; ``said`` has what it said.

    Args:
        instead: attributes that are others than these.
    """
    said: list[str] = []

    def say(message: str, *values: object) -> None:
        said.append(message % values)

    def stage(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    own = {
        "settings": Settings(search=True, directory=Path()), "said": said, "say": say, "say_failed": say, "leads": True,
        "request": SimpleNamespace(tuner_results=None), "channel": SimpleNamespace(rank=0, size=1), "on_calls": None,
        "facts": SimpleNamespace(backend="gpu", device_kind="H200", process_count=1), "stage": stage,
        "compiling": stage, "between_steps": None, "compiles_between_steps": False,
        "tell": lambda value, _tag: value, "gathered": lambda mine, _tag: [mine],
    }  # fmt: skip
    return SimpleNamespace(**own | instead)
