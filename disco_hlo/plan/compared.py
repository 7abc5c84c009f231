"""Which modules of a plan directory were compared with XLA's default on their devices, and found to compute the same.

A plan that a search measured needs no record: it was compared there, by the software that the plan names. One that was
made offline, that lies under another jax by now, or that is applied to a step with other constants, is compared when it
is first enacted; ``compared.json`` beside the
plan remembers that, so that later runs need not do it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from disco_hlo.errors import PlanError
from disco_hlo.plan.plan import Plan, Text
from disco_hlo.plan.store import PlanSlot

FORMAT = "disco-hlo compared"
VERSION = 1
_KEPT = 64
"""Entries: a directory that is used under two versions in turn keeps both."""

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """One module, and what it was compared with."""

    module_sha256: Digest
    versions: dict[Text, Text]
    """jax, jaxlib, disco_hlo and, on GPU, the driver's runtime."""


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """What ``compared.json`` holds, the latest last."""

    format: str
    version: int
    entries: Annotated[tuple[Entry, ...], Meta(max_length=_KEPT)]


def encode(entries: tuple[Entry, ...]) -> bytes:
    """The record of these, the latest of them where they are too many, as readable JSON."""
    record = Record(FORMAT, VERSION, entries[-_KEPT:])
    return msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1) + b"\n"


def decode(data: bytes | None) -> tuple[Entry, ...]:
    """The entries of a record; none where it is missing, damaged or of another version: then is compared again."""
    try:
        record = msgspec.json.decode(data or b"", type=Record)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ()
    return record.entries if (record.format, record.version) == (FORMAT, VERSION) else ()


def was_measured(plan: Plan, module_sha256: str, versions: Mapping[str, str]) -> bool:
    """Whether the search that made the plan compared this module on its devices, under this very software."""
    if plan.measured is None or plan.module_sha256 != module_sha256 or dict(plan.versions) != dict(versions):
        return False
    return plan.chosen in plan.measured.results


def was_compared(slot: PlanSlot, module_sha256: str, versions: Mapping[str, str]) -> bool:
    """Whether a module was compared under this very software by an earlier run."""
    try:
        return Entry(module_sha256, dict(versions)) in decode(slot.read_compared())
    except PlanError:
        return False


def note_compared(slot: PlanSlot, module_sha256: str, versions: Mapping[str, str]) -> None:
    """Remember that a module was.

    Raises:
        PlanError: it cannot be written down, as in a directory that is read-only.
    """
    entry = Entry(module_sha256, dict(versions))
    others = tuple(one for one in decode(slot.read_compared()) if one != entry)
    slot.write_compared(encode((*others, entry)))
