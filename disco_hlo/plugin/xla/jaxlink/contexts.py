"""What JAX keeps by thread, as the user's code may have set it for its own: meshes, guards, precision and the like.

Work of ours runs on that thread, too, and must not depend on them: under ``jax.set_mesh`` no eager op takes an array of
one device.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

_NEEDED = {"mesh_context_manager", "abstract_mesh_context_manager", "device_context", "trace_state"}
_OF_MESHES = ("thread_resources", "EMPTY_ENV")
_TRANSFERS = (
    "jax_transfer_guard_host_to_device", "jax_transfer_guard_device_to_device",
    "jax_transfer_guard_device_to_host",
)  # fmt: skip
"""Guards that are also set for all threads, where these have nothing of their own."""
_STAYS = {
    "trace_state", "trace_state_strong_ref", "axis_env_state", "jax_thread_guard",
    "jax_array_garbage_collection_guard", *_TRANSFERS,
}  # fmt: skip
"""What nobody enters again: what is being traced; and guards, which no compile asks, and arrays of ours might meet."""


class _Thread(threading.local):
    is_cleared = False
    """Work of ours asks for that again and again, which would take 40 us each time."""


_thread = _Thread()


@dataclass(frozen=True)
class ThreadContext:
    """What a thread has set in JAX for itself."""

    values: Mapping[Any, Any]
    """By the setting. What is not here is as the whole process has it."""
    meshes: tuple[Any, ...]
    """Of ``with mesh:``, the innermost last."""

    def to_enter(self) -> ThreadContext:
        """What of it may be entered, later and in any thread."""
        return replace(self, values=_chosen(self.values, stay=False))


def context_of_thread() -> ThreadContext:
    """What this thread has set."""
    config, mesh, unset = _modules()
    values = {one: own for one in _settings(config) if (own := one.get_local()) is not unset}
    return ThreadContext(values, tuple(mesh.thread_resources.stack))


def _chosen(values: Mapping[Any, Any], *, stay: bool) -> dict[Any, Any]:
    return {one: own for one, own in values.items() if (one.name in _STAYS) == stay}


@contextlib.contextmanager
def entered(context: ThreadContext) -> Iterator[None]:
    """For the body, have this thread what :meth:`ThreadContext.to_enter` gave, here or in another one."""
    before = context_of_thread()
    values = {**context.values, **_chosen(before.values, stay=True)}
    with _set(ThreadContext(values, context.meshes), before):
        yield


@contextlib.contextmanager
def cleared() -> Iterator[None]:
    """For the body, have this thread nothing of its own: neither in JAX nor in what numpy does with errors. The guards
    that the user may have set on all threads are off."""
    if _thread.is_cleared:
        yield
        return
    config, mesh, _ = _modules()
    guards = {config.config_states[name]: "allow" for name in _TRANSFERS}
    numpys = np.errstate(divide="warn", over="warn", under="ignore", invalid="warn")
    with _set(ThreadContext(guards, (mesh.EMPTY_ENV,)), context_of_thread(), is_cleared=True), numpys:
        yield


@contextlib.contextmanager
def _set(context: ThreadContext, before: ThreadContext, *, is_cleared: bool = False) -> Iterator[None]:
    was_cleared = _thread.is_cleared
    try:
        _change(before, context)
        _thread.is_cleared = is_cleared
        yield
    finally:
        _change(context_of_thread(), before)
        _thread.is_cleared = was_cleared


def _change(old: ThreadContext, new: ThreadContext) -> None:
    _, mesh, unset = _modules()
    for one in {**old.values, **new.values}:
        value = new.values.get(one, unset)
        if old.values.get(one, unset) is not value:
            one.set_local(value)
            told: Callable[[Any], None] | None = getattr(one, "_update_thread_local_hook", None)
            if told is not None:
                told(None if value is unset else value)
    mesh.thread_resources.stack = list(new.meshes)
    mesh.thread_resources.env = new.meshes[-1]


def lacking() -> list[str]:
    """What is known here and this jax does not have."""
    try:
        config, mesh, _ = _modules()
        needed = _NEEDED - {one.name for one in _without_options()}
        needed |= set(_TRANSFERS) - set(config.config_states)
    except (ImportError, AttributeError) as error:
        return [str(error)]
    return sorted(needed | {name for name in _OF_MESHES if not hasattr(mesh, name)})


def _modules() -> tuple[Any, Any, Any]:
    """JAX's own ones of settings and of meshes, and what stands for no value."""
    from jax._src import config, mesh

    return config, mesh, config.config_ext.unset


def _settings(config: Any) -> Iterator[Any]:
    return itertools.chain(config.config_states.values(), _without_options())


@functools.cache
def _without_options() -> tuple[Any, ...]:
    """Settings that only context managers change: meshes, where to compute, what is being traced."""
    from jax._src import config, core, layout, mesh

    everything = [one for module in (config, core, layout, mesh) for one in vars(module).values()]
    kind, option = config.config_ext.Config, config.State
    return tuple({one: None for one in everything if isinstance(one, kind) and not isinstance(one, option)})
