"""Run a step with its compile in our hands: what a test sees of one training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plugin.xla import compiles, jaxlink
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.steps import models
from tests.steps.models import DEVICES


def intercept(
    step: Callable[..., Any],
    arguments: tuple[Any, ...],
    body: Callable[[CompileRequest], Any],
    devices: int = DEVICES,
) -> Any:
    """Call ``body`` with the compile request of ``step``, while JAX waits; returns what ``body`` returns.

    The step itself is not run. What ``body`` raises is raised here.
    """
    return intercepted(step.lower(*arguments), lambda request: len(request.devices) == devices, body)


def intercepted(
    lowered: Any,
    wanted: Callable[[CompileRequest], bool],
    body: Callable[[CompileRequest], Any],
    options: Mapping[str, Any] | None = None,
) -> Any:
    """As :func:`intercept`, of a step that was lowered, at the first compile that is ``wanted``."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    class Stop(BaseException):
        pass

    def handler(request: CompileRequest) -> Any:
        if not wanted(request):
            return None
        try:
            outcome.append(body(request))
        except BaseException as error:  # noqa: BLE001 - raised again outside of JAX's compile
            failure.append(error)
        raise Stop

    jaxlink.install(handler)
    try:
        lowered.compile(options)
    except Stop:
        if failure:
            raise failure[0] from None
        return outcome[0]
    finally:
        jaxlink.uninstall()
    raise AssertionError("the step was never compiled")


@cache
def captured_step(name: str) -> CanonicalModule:
    """XLA's module of a step of ``models``; not to be changed."""
    return canonicalize(intercept(*getattr(models, name)(), compiles.capture))
