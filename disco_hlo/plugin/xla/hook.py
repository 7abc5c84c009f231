"""The HLO hook's callbacks: what XLA calls with every module it is about to turn into code.

There are two stages: a module comes once early, before XLA fuses, combines and orders (on GPU; on CPU that
is over by then unless the passes are off), and once scheduled, just before code generation.

It acts on the modules of our own compiles and leaves every other module alone. XLA may call it on another
thread than the one that compiles, so the module's name decides. Where several compiles of one name are under
way at once, all but one of ours go by a name of their own, which the executable then keeps.

This module knows no jax: bytes in, bytes or None out. ``jaxlink`` registers it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from disco_hlo.hlo.proto import NamedModule, NumberedModule
from disco_hlo.plugin.logs import LOGGER


class CapturedError(Exception):
    """Raised inside the hook to end a compile whose module has been recorded."""


Decide = Callable[[bytes], bytes | None]
"""From XLA's module to what takes its place: that one itself leaves it, None ends the compile."""


def leave(module: bytes) -> bytes:
    """Leave XLA's module."""
    return module


def end(_: bytes) -> None:
    """End the compile once the module has been seen."""


@dataclass(eq=False, slots=True)
class OwnCompile:
    """What the hook shall do with the module of one compile of ours, and what it saw."""

    late: Decide = leave
    """Asked of the scheduled module."""
    early: Decide | None = None
    """Asked of the early module; None: the compile has no early stage."""
    is_ours: bool = False
    """Whether a module of ours takes the place of XLA's, at either stage."""
    seen: bytes | None = None
    """The scheduled module as XLA had it."""
    seen_early: bytes | None = None
    """The early module as XLA had it."""
    interrupt: BaseException | None = None
    """What interrupted the hook (Ctrl-C, say), kept because XLA reports only an internal error."""


_NOT_KEPT = re.compile(r"[^A-Za-z0-9_.-]")
"""What XLA replaces in a module's name."""
_LONGEST_S = 600.0
"""A compile of ours is not waited for longer."""
_gate = threading.Condition()
_own_compiles: dict[str, OwnCompile] = {}
_ordinary_compiles: Counter[str] = Counter()
_numbers = itertools.count(1)


def on_module(module: bytes) -> bytes | None:
    """The callback of the late stage: a serialized, scheduled HloModuleProto in; the module to run instead, or
    None for the one that came.

    Raises:
        CapturedError: the compile was made only to see the module.
    """
    own = _own_compile(module)
    if own is None:
        return None
    own.seen = module
    return _decided(own, own.late, module)


def on_early_module(module: bytes) -> bytes | None:
    """The callback of the early stage, as :func:`on_module`; the modules have no schedule."""
    own = _own_compile(module)
    if own is None:
        return None
    own.seen_early = module
    structure = None if own.early is None else _decided(own, own.early, module)
    return None if structure is None else named(structure, module_name(module))


def _own_compile(module: bytes) -> OwnCompile | None:
    return _own_compiles.get(module_name(module)) if _own_compiles else None


def _decided(own: OwnCompile, decide: Decide, module: bytes) -> bytes | None:
    try:
        replacement = decide(module)
    except BaseException as error:
        own.interrupt = error
        raise
    if replacement is None:
        raise CapturedError("module recorded, nothing more to compile")
    return None if replacement is module else replacement


def module_name(module: bytes) -> str:
    """The name in a serialized HloModuleProto; "" where it has none."""
    return str(NamedModule.FromString(module).name.decode("utf-8", "replace"))


def named(module: bytes, name: str) -> bytes:
    """The same HloModuleProto under another name."""
    head = NamedModule.FromString(module)
    head.name = name.encode()
    return bytes(head.SerializeToString())


def without_id(module: bytes) -> bytes:
    """The same HloModuleProto without its id, a number XLA counts up with every compile of the process."""
    head = NumberedModule.FromString(module)
    head.ClearField("id")
    return bytes(head.SerializeToString())


@contextlib.contextmanager
def own_compile(name: str, own: OwnCompile, *, apart: bool = False) -> Iterator[str]:
    """Let the hook act on one compile of the module ``name``; yields the name it must be compiled under: another
    one, too, where XLA would not keep this one, as that of a function whose name is not in ASCII, and where no ordinary
    compile shall wait for ours (``apart``): that of a training which goes on."""
    kept = _NOT_KEPT.sub("_", name)
    with _gate:
        taken = apart or name in _own_compiles or _ordinary_compiles[name] > 0
        mine = f"{kept}__disco_{next(_numbers)}" if taken or kept != name else name
        _own_compiles[mine] = own
    try:
        yield mine
    finally:
        with _gate:
            if _own_compiles.get(mine) is own:
                del _own_compiles[mine]
            _gate.notify_all()


@contextlib.contextmanager
def ordinary_compile(name: str) -> Iterator[None]:
    """Compile a module called ``name`` as XLA would: not while a compile of ours has that name. One that does not come
    back is given up: should it reach the hook later, it finds nothing there."""
    with _gate:
        _ordinary_compiles[name] += 1  # ours that come later go by other names, and do not overtake it
    try:
        with _gate:
            if not _gate.wait_for(lambda: name not in _own_compiles, _LONGEST_S):
                LOGGER.warning(
                    "a compile of ours has not ended after %.0f s: %s is compiled beside it", _LONGEST_S, name
                )
                del _own_compiles[name]
        yield
    finally:
        with _gate:
            _ordinary_compiles[name] -= 1
