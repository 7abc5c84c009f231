"""The directory's store of measured times: what one search, capture or calibration measured, the next reuses."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from disco_hlo.errors import DiscoError
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.session import Session
from disco_hlo.profiler.store import ProfileStore

STORE_NAME = "profile.sqlite"
_told: set[Path] = set()
"""Stores of which this process has said that they keep nothing: a search opens one several times."""


def say_not_kept(store: Path, why: str) -> None:
    """Say, once of each store, that what is measured now will not be known to the next search."""
    level = logging.DEBUG if store in _told else logging.WARNING
    _told.add(store)
    LOGGER.log(level, "measured times are not kept: %s", why)


@contextlib.contextmanager
def measured_times(session: Session) -> Iterator[ProfileStore | None]:
    """The store of ``session``'s directory, on rank 0; one that cannot be opened is done without."""
    if not session.leads:
        yield None
        return
    path = session.settings.directory / STORE_NAME
    try:
        session.settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        store = ProfileStore(path)
    except (DiscoError, OSError) as error:
        say_not_kept(path, one_line(error))
        yield None
        return
    with store:
        if not store.writable:
            say_not_kept(path, f"{path} cannot be written")
        yield store
