"""What ``disco capture`` leaves in a folder beside the step's modules: a record of where it runs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from disco_hlo.errors import DiscoError, PlanError
from disco_hlo.plan.files import read_bounded
from disco_hlo.plan.plan import Target

RECORD_NAME = "capture.json"
UNFUSED_NAME = "unfused.hlo.pb.gz"
FORMAT = "disco-hlo capture"
VERSION = 2
VARIABLE = "DISCO_CAPTURE"
"""Environment variable that names the folder and turns capturing on."""


class CaptureRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the step beside it runs."""

    format: str
    version: int
    target: Target
    versions: dict[str, str]


def encode(record: CaptureRecord) -> bytes:
    """The record as readable JSON."""
    return msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1) + b"\n"


def load(path: Path) -> CaptureRecord | None:
    """The record in a file; None where there is none.

    Raises:
        DiscoError: it cannot be read.
    """
    try:
        data = read_bounded(path, 1 << 20)
        if data is None:
            return None
        record = msgspec.json.decode(data, type=CaptureRecord)
    except (PlanError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DiscoError(f"{path}: {error}; capture again") from None
    if (record.format, record.version) != (FORMAT, VERSION):
        found = f"{record.format!r} version {record.version}"
        raise DiscoError(f"{path}: {found}; this program reads {FORMAT!r} version {VERSION}; capture again")
    return record
