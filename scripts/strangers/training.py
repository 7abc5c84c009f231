"""What a training of others is to the loop that runs it, and stand-ins for libraries that its step does not use."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAND_INS = (
    "clu", "flaxformer", "flaxformer.architectures", "flaxformer.architectures.bert", "grain", "grain.experimental",
    "grain.python", "packaging", "pandas", "tensorflow", "tensorflow.errors", "tensorflow.io", "tensorflow_datasets",
    "tensorflow_text", "tqdm",
)  # fmt: skip
"""Modules that some training's files import and its step does not use."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a training's files come from."""

    repository: str
    """Of GitHub, owner and name."""
    commit: str
    folder: str
    """Of the checkout, that goes on Python's path."""

    def checkout(self, sources: Path) -> Path:
        """Where it lies among others."""
        return sources / self.repository.partition("/")[2]


@dataclass(frozen=True, slots=True)
class Training:
    """A training, ready for its first step."""

    batch: Callable[[int], Any]
    """Of a step, as its own loop hands it over."""
    step: Callable[[Any], Any]
    """The next step, on a batch; the loss, as it comes back, to be waited for."""
    loss: Callable[[Any], float]
    """Of what a step came back with."""
    weights: Callable[[], Any]
    """As they are now."""


class _StandIn(types.ModuleType):
    """A module of which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Exception,) if name.endswith("Error") else (), {})
        return sys.modules.get(f"{self.__name__}.{name}", made)


def put_on_path(source: Source, sources: Path, stand_ins: Sequence[str] = STAND_INS) -> None:
    """Make a training's files importable, with ``stand_ins`` for those of them that are not installed.

    Raises:
        FileNotFoundError: the checkout is not there; says how to get it.
    """
    checkout = source.checkout(sources)
    if not (checkout / source.folder).is_dir():
        url = f"https://github.com/{source.repository}"
        raise FileNotFoundError(
            f"expected {source.repository} in {checkout}: "
            f"git clone {url} {checkout} && git -C {checkout} checkout {source.commit}"
        )
    sys.path.insert(0, str(checkout / source.folder))
    for name in stand_ins:
        whole = name.partition(".")[0]
        if isinstance(sys.modules.get(whole), _StandIn) or importlib.util.find_spec(whole) is None:
            sys.modules[name] = _StandIn(name)
