"""Handlers for real compiles, taken out again after each test; and the search's compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from disco_hlo.plugin.phases import enact_phase
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.jaxlink import Handler


@pytest.fixture(scope="module")
def compiled_search() -> None:
    """Searches beside a training have less time than compiling their code takes."""
    from tests.compiled_search import compile_search

    compile_search()


@pytest.fixture(autouse=True)
def nothing_enacted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test runs what another has compiled."""
    monkeypatch.setattr(enact_phase, "_enacted", {})


@pytest.fixture
def install() -> Iterator[Callable[[Handler], None]]:
    """Installs a handler; JAX has its own compile function back after the test."""
    try:
        yield jaxlink.install
    finally:
        jaxlink.uninstall()
