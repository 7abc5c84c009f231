"""Handlers for real compiles, taken out again after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.jaxlink import Handler


@pytest.fixture
def install() -> Iterator[Callable[[Handler], None]]:
    """Installs a handler; JAX has its own compile function back after the test."""
    try:
        yield jaxlink.install
    finally:
        jaxlink.uninstall()
