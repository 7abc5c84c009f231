"""What the user may set: ``ENABLE_SEARCH`` and ``DISCO_*``, or the same keys in a TOML file.

A key of the file is the variable's name without ``DISCO_`` in lower case: ``budget_s = 60`` is
``DISCO_BUDGET_S=60``. The environment wins.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from disco_hlo.errors import DiscoError, why_unreadable
from disco_hlo.plugin.logs import LEVELS
from disco_hlo.regular_file import read_regular

_MOST_BYTES = 1 << 20
"""Of a file of settings."""


class SettingsError(DiscoError):
    """A setting has a value that cannot be used."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The plugin's settings, checked."""

    search: bool
    """``ENABLE_SEARCH``: True to search (1), False to enact (0)."""
    directory: Path
    """``DISCO_DIR``: where plans, modules and measurements are kept, from the root on."""
    log_level: str = "info"
    """``DISCO_LOG``: debug, info, warning or error."""
    module: str | None = None
    """``DISCO_MODULE``: the step's module, with or without ``jit_``, or the start of its key; None
    chooses by rule."""
    budget_s: float = 120.0
    """``DISCO_BUDGET_S``: wall time of the search with what prepares and follows it, but profiling and measuring."""
    seed: int = 0
    """``DISCO_SEED``: of the search and of the synthetic inputs."""
    finalists: int = 5
    """``DISCO_FINALISTS``: plans measured on the device beside XLA's default."""
    patience: int = 1000
    """``DISCO_PATIENCE``: unchanged candidates after which the search stops."""
    timeout_s: float = 600.0
    """``DISCO_TIMEOUT_S``: longest a rank waits for another."""
    channel: str = "auto"
    """``DISCO_CHANNEL``: mpi, kv (``jax.distributed``), or auto."""
    memory_mib: int | None = None
    """``DISCO_MEMORY_MIB``: most memory that a plan may need on each device: arguments, results and temporaries, as XLA
    counts them. None: as much as is free."""
    structure: str = "auto"
    """``DISCO_STRUCTURE``: auto tries schedules where communication inside the layer stays exposed; off never
    does; the name of a schedule takes that one, whatever the clock says."""
    when: str = "auto"
    """``DISCO_WHEN``: search while the step's ``compile`` waits, or while its ``training`` goes on; auto is decided as
    the plugin is installed (:func:`disco_hlo.plugin.install.when_to_search`)."""

    explain: bool = False
    """``DISCO_EXPLAIN``: whether parts of the plan are measured that cannot win, and a step of it is traced, for people
    who ask what gains how much."""

    share: float = 0.05
    """``DISCO_SHARE``: part of a training's time that a search beside it may have the devices for itself."""

    @property
    def memory_bytes(self) -> int | None:
        """What ``DISCO_MEMORY_MIB`` says."""
        return None if self.memory_mib is None else self.memory_mib << 20

    @property
    def forced_structure(self) -> str | None:
        """The schedule that ``DISCO_STRUCTURE`` names, if it names one."""
        return None if self.structure in ("auto", "off") else self.structure

    def names(self, module_name: str) -> bool:
        """Whether ``DISCO_MODULE`` names this module."""
        wanted = self.module
        return wanted is not None and module_name in (wanted, f"jit_{wanted}", f"pmap_{wanted}")

    @property
    def may_be_key(self) -> bool:
        """Whether ``DISCO_MODULE`` could be the start of a key: 8 or more hex digits."""
        return self.module is not None and re.fullmatch(r"[0-9a-f]{8,64}", self.module) is not None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings that ``environment`` (by default the process's) asks for.

        Raises:
            SettingsError: a value cannot be used; names the variable or the key, and what was expected.
        """
        env = os.environ if environment is None else environment
        raw: dict[str, tuple[str, object]] = _from_file(env.get("DISCO_CONFIG", "").strip())
        known = [f"DISCO_{name.upper()}" for name in (*_KINDS, "config")]
        for misspelled in sorted(one for one in env if one.startswith("DISCO_") and one not in known):
            if meant := difflib.get_close_matches(misspelled, known, 1, _ALIKE):
                raise SettingsError(f"{misspelled} is no setting; did you mean {meant[0]}?")
        for name, variable in zip(_KINDS, known, strict=False):
            if env.get(variable, "").strip():
                raw[name] = (variable, env[variable].strip())
        values: dict[str, Any] = {
            _FIELDS.get(name, name): _read(name, *origin) for name, origin in raw.items()
        }
        values.setdefault("directory", _default_directory(env))
        return cls(search=_switch(env.get("ENABLE_SEARCH", "")), **values)


def before_first_step(module_name: str, device_count: int) -> str:
    """What to set, as a part of a sentence, for a search before the first call of a step: one on one device is found by
    its name alone."""
    return "DISCO_WHEN=compile" + (f" with DISCO_MODULE={module_name}" if device_count == 1 else "")


def _switch(value: str) -> bool:
    if value.strip() not in ("0", "1"):
        raise SettingsError(f"ENABLE_SEARCH is {value!r}; expected 1 (search) or 0 (enact)")
    return value.strip() == "1"


def _default_directory(env: Mapping[str, str]) -> Path:
    try:
        return _directory(env.get("XDG_CACHE_HOME", "").strip() or "~/.cache") / "disco-hlo"
    except ValueError:
        raise SettingsError("nobody says where this user's home folder is; set DISCO_DIR") from None


def _directory(text: str) -> Path:
    """Whole, as the script may change its folder."""
    try:
        return Path(text).expanduser().absolute()
    except (OSError, RuntimeError):  # no such user, no current folder
        raise ValueError from None


def _from_file(path: str) -> dict[str, tuple[str, object]]:
    if not path:
        return {}
    try:
        table = tomllib.loads(read_regular(Path(path), _MOST_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"DISCO_CONFIG: cannot read {path}: {getattr(error, 'strerror', None) or why_unreadable(error)}"
        ) from error
    unknown = sorted(set(table) - set(_KINDS))
    if unknown:
        raise SettingsError(
            f"{path}: unknown key {unknown[0]!r}; expected one of {', '.join(sorted(_KINDS))}"
        )
    return {name: (f"{path}: {name}", value) for name, value in table.items()}


def _read(name: str, origin: str, value: object) -> object:
    kind, expected = _KINDS[name]
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        text = str(value)
        if kind is Path:
            return _directory(text)
        if get_args(kind)[:1] == (float,):
            return msgspec.convert(float(text), kind)
        return msgspec.convert(text.lower() if get_origin(kind) is Literal else text, kind, strict=False)
    except ValueError:
        raise SettingsError(f"{origin} is {value!r}; expected {expected}") from None


_FIELDS = {"dir": "directory", "log": "log_level"}
"""Fields of :class:`Settings` that are called otherwise than their key."""
_ALIKE = 0.9
"""What is as like a variable's name as difflib says is taken for a misspelling of it; other programs' names are not."""
_SECONDS = "a number of seconds above 0"
_Seconds = Annotated[float, Meta(gt=0, le=1e300)]
_KINDS: dict[str, tuple[Any, str]] = {
    "dir": (Path, "a directory"),
    "log": (Literal["debug", "info", "warning", "error"], f"one of {', '.join(LEVELS)}"),
    "module": (str, "a module name, or 8 or more digits of a key"),
    "budget_s": (_Seconds, _SECONDS),
    "seed": (Annotated[int, Meta(ge=0, le=2**63 - 1)], "a whole number, 0 or more"),
    "finalists": (Annotated[int, Meta(ge=1, le=100)], "a whole number from 1 to 100"),
    "patience": (Annotated[int, Meta(ge=1, le=1_000_000_000)], "a whole number, 1 or more"),
    "timeout_s": (_Seconds, _SECONDS),
    "channel": (Literal["auto", "mpi", "kv"], "one of auto, mpi, kv"),
    "memory_mib": (Annotated[int, Meta(ge=1, le=1 << 40)], "a whole number of MiB, 1 or more"),
    "structure": (
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9, -]{0,63}$")],
        "auto, off, or the name of a schedule",
    ),
    "when": (Literal["auto", "compile", "training"], "one of auto, compile, training"),
    "explain": (bool, "0 or 1"),
    "share": (Annotated[float, Meta(gt=0, le=1)], "a number above 0, up to 1"),
}
"""By key: what a value is, and what to say was expected."""
