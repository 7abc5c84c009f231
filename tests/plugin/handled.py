"""A jitted function whose one compile a test has in its hands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest, Handler


def handled(handler: Handler, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What ``function`` returns where ``handler`` answers its compile; ``options`` are those of ``jax.jit``.

    What ``handler`` raises is raised here.
    """
    failure: list[BaseException] = []

    def noting(request: CompileRequest) -> LoadedExecutable | None:
        try:
            return handler(request)
        except BaseException as error:
            failure.append(error)
            raise

    @functools.wraps(function)
    def anew(*given: Any) -> Any:  # jax compiles a function that it knows no second time
        return function(*given)

    lowered = jax.jit(anew, **options).lower(*arguments)
    jaxlink.install(noting)
    try:
        compiled = lowered.compile()
    finally:
        jaxlink.uninstall()
    if failure:
        raise failure[0]
    return compiled(*arguments)


def seen(
    look: Callable[[CompileRequest], Any], function: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """What ``look`` returns of the compile request of ``function``, which then runs as XLA compiles it."""
    found: list[Any] = []
    handled(lambda request: found.append(look(request)), function, *arguments, **options)
    [one] = found
    return one
