"""The directory's store of measured times: what one search, capture or calibration measured, the next reuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from disco_hlo.errors import DiscoError
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.session import Session
from disco_hlo.profiler.store import ProfileStore

STORE_NAME = "profile.sqlite"


@contextlib.contextmanager
def measured_times(session: Session) -> Iterator[ProfileStore | None]:
    """The store of ``session``'s directory, on rank 0; one that cannot be opened is done without."""
    if not session.leads:
        yield None
        return
    try:
        session.settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        store = ProfileStore(session.settings.directory / STORE_NAME)
    except (DiscoError, OSError) as error:
        LOGGER.warning("measured times are not kept: %s", one_line(error))
        yield None
        return
    with store:
        if not store.writable:
            LOGGER.warning("measured times are not kept: %s cannot be written", store.path)
        yield store
