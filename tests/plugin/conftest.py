"""Handlers for real compiles, taken out again after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest, Handler


@pytest.fixture
def install() -> Iterator[Callable[[Handler], None]]:
    """Installs a handler; JAX has its own compile function back after the test."""
    try:
        yield jaxlink.install
    finally:
        jaxlink.uninstall()


@pytest.fixture
def compile_with(install: Callable[[Handler], None]) -> Callable[[str, Handler], list[CompileRequest]]:
    """``compile_with(name, handler)`` asks ``handler`` about modules called ``jit_<name>`` alone.

    Returns the requests it was asked about.
    """

    def compile_with(name: str, handler: Handler) -> list[CompileRequest]:
        asked: list[CompileRequest] = []

        def only(request: CompileRequest) -> LoadedExecutable | None:
            if request.module_name != f"jit_{name}":
                return None
            asked.append(request)
            return handler(request)

        install(only)
        return asked

    return compile_with
