"""Calls observed in one process, and given back after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from disco_hlo.activation.channel import LocalChannel
from disco_hlo.plugin.calls.observing import Observation
from disco_hlo.plugin.xla import jaxlink


@pytest.fixture
def observation() -> Iterator[Observation]:
    """Observes what JAX loads during the test."""
    jaxlink.install(lambda _: None)
    observing = Observation(lambda _: LocalChannel(), timeout_s=60)
    observing.start()
    try:
        yield observing
    finally:
        observing.stop()
        jaxlink.uninstall()
