"""Where measured times live: one SQLite file, shared by models, processes and runs.

What one model measured, the next one reuses: rows are keyed by the platform (device kind, backend,
driver and jaxlib version) and the cost key. Every measurement is a row of its own; reading merges
them by weighted medians, so a disturbed measurement is outvoted, not averaged in. Beside op times
the file keeps the points of sweeps of collectives and the times of whole unfused steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, TypeVar

import msgspec

from disco_hlo.errors import DiscoError, ProfileError
from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind
from disco_hlo.profiler.collectives import SweepPoint
from disco_hlo.profiler.profile import DeviceFacts, Link, LinkFacts, OpTime, Platform, StepFacts, merged
from disco_hlo.sqlite_file import SqliteFile

SCHEMA_VERSION = 4
_UNFUSED = "unfused"
KEPT_MEASUREMENTS = 16
"""Newest measurements of one key that are kept and merged."""

_TABLES = (
    "CREATE TABLE platform (id INTEGER PRIMARY KEY, device_kind TEXT NOT NULL, backend TEXT NOT NULL,"
    " driver TEXT NOT NULL, jax TEXT NOT NULL, jaxlib TEXT NOT NULL,"
    " UNIQUE (device_kind, backend, driver, jaxlib))",
    "CREATE TABLE op (id INTEGER PRIMARY KEY, platform INTEGER NOT NULL REFERENCES platform,"
    " key TEXT NOT NULL, median_ns INTEGER NOT NULL, spread_ns INTEGER NOT NULL, samples INTEGER NOT NULL)",
    "CREATE INDEX op_key ON op (platform, key)",
    "CREATE TABLE sweep (id INTEGER PRIMARY KEY, platform INTEGER NOT NULL REFERENCES platform,"
    " device_count INTEGER NOT NULL, process_count INTEGER NOT NULL, label TEXT NOT NULL, kind TEXT NOT NULL,"
    " size_bytes INTEGER NOT NULL,"
    " median_ns INTEGER NOT NULL, spread_ns INTEGER NOT NULL, samples INTEGER NOT NULL)",
    "CREATE INDEX sweep_link ON sweep (platform, device_count, process_count, label, kind, size_bytes)",
    "CREATE TABLE step (id INTEGER PRIMARY KEY, platform INTEGER NOT NULL REFERENCES platform,"
    " fingerprint TEXT NOT NULL, plan TEXT NOT NULL,"
    " median_ns INTEGER NOT NULL, spread_ns INTEGER NOT NULL, samples INTEGER NOT NULL)",
    "CREATE INDEX step_plan ON step (platform, fingerprint, plan)",
    "CREATE TABLE fact (platform INTEGER NOT NULL REFERENCES platform, kind TEXT NOT NULL, place TEXT NOT NULL,"
    " body BLOB NOT NULL, PRIMARY KEY (platform, kind, place))",
)
Facts = TypeVar("Facts", DeviceFacts, LinkFacts, StepFacts)
Row = TypeVar("Row", OpTime, SweepPoint)


class ProfileStore(SqliteFile):
    """The store in the file ``path``, which is created where it does not exist.

    Several processes may use one file at once. Where the file cannot be written it is opened for
    reading (``writable`` is then False). Raises :class:`ProfileError` when the file is not a
    profile store, is damaged, or was written by a newer version.
    """

    KIND = "profile store"
    APPLICATION_ID = 0x64697363  # "disc"
    VERSION = SCHEMA_VERSION
    TABLES = _TABLES
    WRITE_AHEAD = True

    def add_ops(self, platform: Platform, times: Mapping[str, OpTime]) -> None:
        """Add one measurement of each of these keys."""
        with self._writing():
            number = self._platform_for_writing(platform)
            for key, time in sorted(times.items()):
                self._insert("op", {"platform": number, "key": key}, time)

    def ops(self, platform: Platform) -> dict[str, OpTime]:
        """All op times of the platform, merged, by key."""
        rows = self._rows(
            "SELECT key, median_ns, spread_ns, samples FROM op WHERE platform = ?"
            " AND typeof(key) = 'text' ORDER BY key, id",
            (self._platform(platform),),
        )
        return dict(self._merged(rows))

    def add_sweep(
        self, platform: Platform, link: Link, points: Sequence[SweepPoint], kind: CollectiveKind = ALL_REDUCE
    ) -> None:
        """Add the points of one sweep of a kind of collectives over ``link``."""
        with self._writing():
            keys: dict[str, int | str] = {
                "platform": self._platform_for_writing(platform),
                **asdict(link),
                "kind": str(kind),
            }
            for point in points:
                time = OpTime(point.median_ns, point.spread_ns, point.samples)
                self._insert("sweep", {**keys, "size_bytes": point.size_bytes}, time)

    def sweep(
        self, platform: Platform, link: Link, kind: CollectiveKind = ALL_REDUCE
    ) -> tuple[SweepPoint, ...]:
        """The sweep points of a kind measured over ``link``, merged, by size."""
        rows = self._rows(
            "SELECT size_bytes, median_ns, spread_ns, samples FROM sweep WHERE platform = ?"
            " AND device_count = ? AND process_count = ? AND label = ? AND kind = ? ORDER BY size_bytes, id",
            (self._platform(platform), link.device_count, link.process_count, link.label, str(kind)),
        )
        return tuple(
            self._checked((size, max(time.median_ns, 1), time.spread_ns, time.samples), SweepPoint, "sweep")
            for size, time in self._merged(rows)
        )

    def add_step(self, platform: Platform, fingerprint: str, time: OpTime) -> None:
        """Add what the module with this fingerprint took as a whole, unfused."""
        with self._writing():
            number = self._platform_for_writing(platform)
            self._insert("step", {"platform": number, "fingerprint": fingerprint, "plan": _UNFUSED}, time)

    def step(self, platform: Platform, fingerprint: str) -> OpTime | None:
        """What the module took as a whole, unfused, merged; None where nobody measured that."""
        rows = self._rows(
            "SELECT plan, median_ns, spread_ns, samples FROM step WHERE platform = ? AND fingerprint = ?"
            " AND plan = ? ORDER BY id",
            (self._platform(platform), fingerprint, _UNFUSED),
        )
        return dict(self._merged(rows)).get(_UNFUSED)

    def facts(self, platform: Platform, kind: type[Facts], place: str = "") -> Facts:
        """What is known of the platform, or of a ``place`` on it (:func:`~disco_hlo.profiler.profile.place_of`)."""
        rows = self._rows(
            "SELECT body FROM fact WHERE platform = ? AND kind = ? AND place = ?",
            (self._platform(platform), kind.__name__, place),
        )
        return self._decoded(rows[0][0], kind) if rows else kind()

    def facts_under(self, platform: Platform, kind: type[Facts], place: str) -> list[Facts]:
        """Of all places that begin so."""
        rows = self._rows(
            "SELECT body FROM fact WHERE platform = ? AND kind = ? AND substr(place, 1, ?) = ? ORDER BY place",
            (self._platform(platform), kind.__name__, len(place), place),
        )
        return [self._decoded(row[0], kind) for row in rows]

    def change(
        self, platform: Platform, kind: type[Facts], place: str, change: Callable[[Facts], Facts]
    ) -> None:
        """Put what ``change`` makes of these facts in their place; nobody else changes them meanwhile."""
        with self._writing():
            number = self._platform_for_writing(platform)
            body = msgspec.json.encode(change(self.facts(platform, kind, place)), order="sorted")
            self._connection.execute(
                "INSERT OR REPLACE INTO fact (platform, kind, place, body) VALUES (?, ?, ?, ?)",
                (number, kind.__name__, place, body),
            )

    def _insert(self, table: str, keys: Mapping[str, int | str], time: OpTime) -> None:
        """Add a row and drop the oldest of the same keys. Table and column names are ours, never data."""
        self._checked(msgspec.to_builtins(time), OpTime, table)
        columns = ", ".join(keys)
        marks = ", ".join("?" * (len(keys) + 3))
        self._connection.execute(
            f"INSERT INTO {table} ({columns}, median_ns, spread_ns, samples) VALUES ({marks})",
            (*keys.values(), time.median_ns, time.spread_ns, time.samples),
        )
        same = " AND ".join(f"{column} = ?" for column in keys)
        self._connection.execute(
            f"DELETE FROM {table} WHERE {same} AND id NOT IN"
            f" (SELECT id FROM {table} WHERE {same} ORDER BY id DESC LIMIT {KEPT_MEASUREMENTS})",
            (*keys.values(), *keys.values()),
        )

    def _platform(self, platform: Platform) -> int:
        """Row number of the platform, -1 if nothing was measured on it."""
        rows = self._rows(
            "SELECT id FROM platform WHERE device_kind = ? AND backend = ? AND driver = ? AND jaxlib = ?",
            (platform.device_kind, platform.backend, platform.driver, platform.jaxlib),
        )
        return int(rows[0][0]) if rows else -1

    def _platform_for_writing(self, platform: Platform) -> int:
        self._connection.execute(
            "INSERT OR IGNORE INTO platform (device_kind, backend, driver, jax, jaxlib)"
            " VALUES (?, ?, ?, ?, ?)",
            (platform.device_kind, platform.backend, platform.driver, platform.jax, platform.jaxlib),
        )
        return self._platform(platform)

    def _merged(self, rows: list[tuple[Any, ...]]) -> Iterator[tuple[Any, OpTime]]:
        for key, group in groupby(rows, key=lambda row: row[0]):
            yield key, merged([self._checked(row[1:], OpTime, str(key)) for row in group])

    def _decoded(self, body: Any, kind: type[Facts]) -> Facts:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, TypeError, DiscoError) as error:
            raise self._wrong(kind.__name__, error) from None

    def _checked(self, values: Sequence[Any], kind: type[Row], where: str) -> Row:
        try:
            return msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            raise self._wrong(f"{where} {values!r:.80}", error) from None

    def _wrong(self, where: str, error: Exception) -> ProfileError:
        return ProfileError(f"{self.path}: {where}: {error}; measure again or name another file")
